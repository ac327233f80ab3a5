"""Delimited text (CSV) to a data frame, with the line that each row came from."""

import csv
import io
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pbnn.data.rows import Rows, listed
from pbnn.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["parse_number", "read_delimited"]

_MISSING = frozenset({"", "na", "n/a", "#n/a", "<na>", "nan", "null", "none", "?"})
_BOOLEAN = {"true": True, "false": False}


def parse_number(cell: str) -> float | None:
    """The number in a cell, NaN where a value is missing, None where it holds other text."""
    try:
        # float() takes 1_000 for a number; no table means that.
        return None if "_" in cell else float(cell)
    except ValueError:
        return math.nan if cell.strip().lower() in _MISSING else None


def read_delimited(path: Path, texts: Mapping[str, Collection[str]]) -> "tuple[pd.DataFrame, Rows]":
    """Read fields separated by commas, semicolons or tabs, with column names in the first line.

    A column of which each cell is a number, or true or false, is one of numbers or booleans; any
    other is text. Empty cells, NA, N/A, NaN, null, none and ? are missing.

    Args:
        path: The file, in UTF-8.
        texts: Columns that stay text, each with the words that are not missing values there.

    Raises:
        DataError: The file is not a table of text; the message names the line.
    """
    import pandas as pd

    header, records, lines = _records(_text(path), path.name)
    # pandas names the columns of an array 0, 1, 2, …; other numbers are a row of data.
    plain = header == [str(i) for i in range(len(header))]
    if not plain and any(header) and None not in map(parse_number, header):
        raise DataError(
            f"the first line of {path.name} holds numbers ({listed(header, 3)}) where column "
            "names are expected; put a line of names on top"
        )
    cells = zip(*records, strict=True) if records else [()] * len(header)
    columns = [
        _typed([cell.strip() for cell in column], texts.get(name))
        for name, column in zip(header, cells, strict=True)
    ]
    # By position, because names may occur twice, which is for the reader of any format to refuse.
    frame = pd.DataFrame(dict(enumerate(columns))).set_axis(header, axis=1)
    return frame, Rows(np.asarray(lines, dtype=np.int64), "line")


def _text(path: Path) -> str:
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path.name} is not UTF-8 text: byte 0x{raw[error.start]:02x} in line {line}; "
            "save it as UTF-8"
        ) from error
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise DataError(f"{path.name} is not text: a NUL byte in line {line}; save it as UTF-8")
    if not text.strip():
        raise DataError(f"{path.name} is empty; expected a line of column names, then rows")
    return text


def _records(text: str, name: str) -> tuple[list[str], list[list[str]], list[int]]:
    """Header, rows, and the line on which each row starts; each row as long as the header."""
    first = re.split(r"[\r\n]", text.lstrip("\r\n"), maxsplit=1)[0]
    delimiter = max(",;\t", key=lambda mark: len(next(csv.reader([first], delimiter=mark))))
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True, strict=True
    )
    header: list[str] = []
    records: list[list[str]] = []
    lines: list[int] = []
    blank, next_line = 0, 1
    try:
        for record in reader:
            line, next_line = next_line, reader.line_num + 1
            if not any(record) and len(record) <= 1:
                blank = line
            elif not header:
                header, blank = [column.strip() for column in record], 0
            elif len(record) != len(header):
                raise DataError(
                    f"line {line} of {name} has {len(record)} fields where the header has "
                    f"{len(header)} (separated by {delimiter!r}); complete it, or put text that "
                    "holds the separator in quotes"
                )
            elif blank and len(header) == 1:
                # In a table of one column a blank line might be a missing value.
                raise DataError(f"line {blank} of {name} is blank; write NA, or take the line out")
            else:
                records.append(record)
                lines.append(line)
    except csv.Error as error:
        raise DataError(f"line {next_line} of {name} cannot be read: {error}") from error
    return header, records, lines


def _typed(cells: list[str], words: Collection[str] | None) -> NDArray[Any]:
    """The cells of a column as numbers or booleans where all of them are, else as text or None."""
    if words is not None:
        return np.asarray([_present(cell, words) for cell in cells], dtype=object)
    values = [parse_number(cell) for cell in cells]
    if None not in values:
        numbers = np.asarray(values, dtype=np.float64)
        # 18 digits always fit into 64 bits; a float would merge whole numbers above 2**53.
        whole = all(cell.lstrip("+-").isdecimal() and len(cell) <= 18 for cell in cells)
        return np.asarray([int(cell) for cell in cells], dtype=np.int64) if whole else numbers
    texts = [_present(cell) for cell in cells]
    if all(text is None or text.lower() in _BOOLEAN for text in texts):
        truths = [text and _BOOLEAN[text.lower()] for text in texts]
        return np.asarray(truths, dtype=object if None in truths else bool)
    return np.asarray(texts, dtype=object)


def _present(cell: str, words: Collection[str] = ()) -> str | None:
    return cell if cell in words or cell.lower() not in _MISSING else None
