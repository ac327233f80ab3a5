"""Tables in: CSV, Parquet, `.npz`, data frames and scikit-learn's shipped sets, read and checked as they come.

What is checked here holds for a file whatever is fitted to it: that it can be read, that each
column has one name and each row has all its fields. What depends on the role of a column is
checked in `pbnn.encoders`.
"""

import csv
import difflib
import io
import math
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pbnn.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["SHIPPED", "Rows", "Table", "listed", "parse_number", "read_features_file", "read_table"]

SHIPPED = ("diabetes", "breast_cancer", "wine", "iris", "digits")

_DELIMITED = (".csv", ".tsv", ".txt", ".data")
_PARQUET = (".parquet", ".pq")
_MISSING = frozenset({"", "na", "n/a", "#n/a", "<na>", "nan", "null", "none", "?"})
_BOOLEAN = {"true": True, "false": False}


@dataclass(frozen=True)
class Rows:
    """What messages call the rows of a table.

    Attributes:
        numbers: The number of each row, shape `(n,)`: its line in a CSV file, whose header is
            line 1; elsewhere its place in the table, counted from 1.
        word: "line" or "row".
    """

    numbers: NDArray[np.int64]
    word: str = "row"

    @classmethod
    def counted(cls, n: int) -> "Rows":
        """Rows 1 to n."""
        return cls(np.arange(1, n + 1))

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, which: ArrayLike) -> "Rows":
        """The rows at these positions, or where this mask is true."""
        return replace(self, numbers=self.numbers[np.asarray(which)])

    def say(self, which: ArrayLike) -> str:
        """Name the rows at these positions, or where this mask is true: "lines 4, 9 and 17"."""
        numbers = self.numbers[np.atleast_1d(np.asarray(which))].tolist()
        return f"{self.word}{'s' if len(numbers) > 1 else ''} {listed(numbers, 3)}"


@dataclass(frozen=True)
class Table:
    """Rows of features and targets as the user gave them, before any statistic is taken.

    Attributes:
        name: The file's name, or that of the shipped set.
        features: A data frame of n rows, or from an `.npz` an array of shape `(n, d)`,
            `(n, steps, d)` or `(n, channels, height, width)`.
        target: A data frame of n rows and one column for each output.
        rows: What messages call the rows.
        dropped: Names of columns that the user took out of `features`.
    """

    name: str
    features: "pd.DataFrame | NDArray[Any]"
    target: "pd.DataFrame"
    rows: Rows
    dropped: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.target)

    @property
    def feature_columns(self) -> list[str]:
        """Names of the feature columns before encoding; empty for arrays, whose columns have none."""
        return [] if isinstance(self.features, np.ndarray) else list(self.features.columns)

    def without(self, columns: Sequence[str]) -> "Table":
        """The table without these feature columns.

        Raises:
            DataError: A column is unknown, or is the target, or none would be left.
        """
        if not columns:
            return self
        if isinstance(self.features, np.ndarray):
            raise DataError(
                f"{self.name} holds an array, whose columns have no names to drop; "
                f"write the .npz without {listed(columns)}"
            )
        for column in columns:
            if column in self.target.columns:
                raise DataError(
                    f"column {column!r} is the target of {self.name} and cannot be dropped"
                )
            if column not in self.features.columns:
                raise _unknown(column, self.feature_columns, self.name)
        kept = self.features.drop(columns=list(columns))
        _need_features(kept, self.name)
        return replace(self, features=kept, dropped=(*self.dropped, *columns))


def listed(items: Iterable[object], limit: int = 20) -> str:
    """Join items for a message, text in quotes, the first `limit` of them and a count of the rest."""
    shown = [repr(item) if isinstance(item, str) else str(item) for item in items]
    if len(shown) > limit:
        return f"{', '.join(shown[:limit])} and {len(shown) - limit} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def parse_number(cell: str) -> float | None:
    """The number in a cell, NaN where a value is missing, None where it holds other text."""
    try:
        # float() takes 1_000 for a number; no table means that.
        return None if "_" in cell else float(cell)
    except ValueError:
        return math.nan if cell.strip().lower() in _MISSING else None


def read_table(
    source: "str | Path | pd.DataFrame", target: str | Sequence[str] | None = None
) -> Table:
    """Read a table of features and targets.

    Text cells lose the blanks around them. In CSV files an empty cell, `NA`, `N/A`, `NaN`, `null`,
    `none` and `?` are missing values; fields are separated by commas, semicolons or tabs,
    whichever gives the first line the most fields.

    Args:
        source: A path to a CSV, Parquet or `.npz` file; the name of a set that scikit-learn ships
            ("diabetes", "breast_cancer", "wine", "iris", "digits"); or a data frame.
        target: The target's column, or several as a list or separated by commas. Shipped sets
            have one already ("target"); in an `.npz` it is the key of the array, by default "y",
            beside the features under "x".

    Raises:
        DataError: The file cannot be read as a table, or the target is not a column of it.
    """
    import pandas as pd

    if isinstance(source, pd.DataFrame):
        return _split_off_target(_plain(source, "the table"), target, "the table", None)
    if isinstance(source, str) and source in SHIPPED:
        return _split_off_target(_shipped(source), target or "target", source, None)
    path = _existing(source)
    if path.suffix.lower() == ".npz":
        return _read_npz_table(path, target)
    frame, rows = _read_frame(path, {})
    return _split_off_target(frame, target, path.name, rows)


def read_features_file(
    path: str | Path, levels: Mapping[str, Sequence[str]]
) -> "tuple[pd.DataFrame | NDArray[Any], Rows]":
    """Read rows without need of a target; a header alone is a table of no rows.

    Args:
        path: A CSV, Parquet or `.npz` file.
        levels: The known categories of text columns by name. Such a column stays text, even where
            all its cells in this file look like numbers or like missing values.

    Raises:
        DataError: The file cannot be read as a table.
    """
    path = _existing(path)
    if path.suffix.lower() == ".npz":
        with _open_npz(path) as arrays:
            x = _npz_features(arrays, path.name)
        return x, Rows.counted(len(x))
    return _read_frame(path, levels)


def _existing(source: str | Path) -> Path:
    path = Path(source)
    known = f"one of {listed(SHIPPED)}"
    suffixes = (*_DELIMITED, *_PARQUET, ".npz")
    if path.is_dir():
        raise DataError(f"'{source}' is a folder; expected a file, or {known}")
    if not path.exists():
        raise DataError(f"file not found: '{source}'; expected a path to a table, or {known}")
    if path.suffix.lower() not in suffixes:
        raise DataError(
            f"'{source}' ends in {path.suffix!r}; tables are read from {listed(suffixes)}"
        )
    return path


def _read_frame(path: Path, levels: Mapping[str, Sequence[str]]) -> "tuple[pd.DataFrame, Rows]":
    import pandas as pd

    try:
        if path.suffix.lower() in _DELIMITED:
            return _read_delimited(path, levels)
        frame = _plain(pd.read_parquet(path), path.name)
    except ImportError as error:
        raise DataError(
            f"reading {path.name} needs pyarrow, which is not installed: pip install 'pbnn[parquet]'"
        ) from error
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path.name} cannot be read: {reason}") from error
    return frame, Rows.counted(len(frame))


def _plain(frame: "pd.DataFrame", name: str) -> "pd.DataFrame":
    """The frame with text column names, a named index as columns, and rows counted from 0."""
    named = [level for level in frame.index.names if level is not None]
    unnamed = [i for i, level in enumerate(frame.index.names) if level is None]
    frame = frame.reset_index(unnamed, drop=True) if len(unnamed) < frame.index.nlevels else frame
    frame = frame.reset_index(drop=not named)
    frame.columns = [str(column) for column in frame.columns]
    _check_header(list(frame.columns), name)
    return frame


def _shipped(name: str) -> "pd.DataFrame":
    import pandas as pd
    from sklearn import datasets

    bunch = getattr(datasets, f"load_{name}")(as_frame=True)
    frame: pd.DataFrame = bunch.frame
    if name != "diabetes":
        labels = np.asarray(bunch.target_names)[frame["target"].to_numpy()]
        frame = frame.assign(target=pd.Categorical(labels.tolist()))
    return frame


def _split_off_target(
    frame: "pd.DataFrame", target: str | Sequence[str] | None, name: str, rows: Rows | None
) -> Table:
    columns = list(frame.columns)
    if not target:
        raise DataError(
            f"{name} needs a target: pass target=… (--target COLUMN), one or more of its columns "
            f"{listed(columns)}"
        )
    if not isinstance(target, str):
        chosen = list(target)
    elif target in columns:
        chosen = [target]
    else:
        chosen = [part.strip() for part in target.split(",")]
    for column in chosen:
        if column not in columns:
            raise _unknown(column, columns, name)
    if len(set(chosen)) < len(chosen):
        raise DataError(f"target {listed(chosen)} names a column twice")
    if len(frame) == 0:
        raise DataError(f"{name} has column names but no rows")
    features = frame.drop(columns=chosen)
    _need_features(features, name)
    return Table(name, features, frame[chosen], rows or Rows.counted(len(frame)))


def _unknown(column: str, columns: Sequence[str], name: str) -> DataError:
    close = difflib.get_close_matches(column, columns, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return DataError(f"{name} has no column {column!r}; its columns are {listed(columns)}{hint}")


def _need_features(features: "pd.DataFrame", name: str) -> None:
    if features.shape[1] == 0:
        raise DataError(
            f"no feature column is left in {name}; keep at least one beside the target"
            " (fields are separated by commas, semicolons or tabs)"
        )


def _check_header(header: Sequence[str], name: str) -> None:
    if not header:
        raise DataError(f"{name} has no columns")
    unnamed = [i for i, column in enumerate(header, 1) if not column]
    if unnamed:
        raise DataError(
            f"column {listed(unnamed)} of {name} has no name; name it, or leave it out when the "
            "file is written (pandas: to_csv(…, index=False))"
        )
    twice = [column for column, count in Counter(header).items() if count > 1]
    if twice:
        raise DataError(f"{name} has more than one column named {listed(twice)}; rename them")


# ---- delimited text -----------------------------------------------------------------------------


def _read_delimited(path: Path, levels: Mapping[str, Sequence[str]]) -> "tuple[pd.DataFrame, Rows]":
    import pandas as pd

    header, records, lines = _records(_text(path), path.name)
    _check_header(header, path.name)
    if all(parse_number(column) is not None for column in header):
        raise DataError(
            f"line 1 of {path.name} holds numbers ({listed(header, 3)}) where column names are "
            "expected; add a line of names at its top"
        )
    cells = zip(*records, strict=True) if records else ([] for _ in header)
    columns = {
        name: _typed([cell.strip() for cell in column], levels.get(name))
        for name, column in zip(header, cells, strict=True)
    }
    return pd.DataFrame(columns), Rows(np.asarray(lines, dtype=np.int64), "line")


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
    """Header, rows and the line on which each row starts; every row as long as the header."""
    first = text.lstrip("\r\n").splitlines()[0]
    delimiter = max(",;\t", key=lambda mark: len(next(csv.reader([first], delimiter=mark))))
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True, strict=True
    )
    header: list[str] = []
    records: list[list[str]] = []
    lines: list[int] = []
    blank, start = 0, 1
    try:
        for record in reader:
            line, start = start, reader.line_num + 1
            if not any(record) and len(record) <= 1:
                blank = blank or line
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
        raise DataError(f"line {start} of {name} cannot be read: {error}") from error
    return header, records, lines


def _typed(cells: list[str], levels: Sequence[str] | None) -> NDArray[Any]:
    """The cells of a column as numbers or booleans where all of them are, else as text."""
    if levels is None:
        values = [parse_number(cell) for cell in cells]
        if None not in values:
            numbers = np.asarray(values, dtype=np.float64)
            whole = all(cell.lstrip("+-").isdecimal() for cell in cells)
            return numbers.astype(np.int64) if whole and (abs(numbers) < 2**53).all() else numbers
    known = frozenset(levels or ())
    present = [cell if cell in known or cell.lower() not in _MISSING else None for cell in cells]
    if levels is None and all(cell is None or cell.lower() in _BOOLEAN for cell in present):
        present = [cell if cell is None else _BOOLEAN[cell.lower()] for cell in present]  # type: ignore[misc]
        return np.asarray(present, dtype=object if None in present else bool)
    return np.asarray(present, dtype=object)


# ---- arrays -------------------------------------------------------------------------------------


def _open_npz(path: Path) -> Any:  # noqa: ANN401 (numpy keeps the type of an open archive private)
    try:
        arrays = np.load(path, allow_pickle=False)
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise DataError(f"{path.name} cannot be read as an .npz file of arrays") from error
    if not isinstance(arrays, np.lib.npyio.NpzFile):
        raise DataError(f"{path.name} holds a single array; write it with numpy.savez(…, x=…, y=…)")
    return arrays


def _npz_array(arrays: Any, key: str, name: str) -> NDArray[Any]:  # noqa: ANN401
    if key not in arrays:
        raise DataError(f"{name} has no array {key!r}; its arrays are {listed(arrays.files)}")
    try:
        array: NDArray[Any] = arrays[key]
    except (ValueError, OSError, zipfile.BadZipFile, EOFError) as error:
        raise DataError(
            f"array {key!r} of {name} cannot be read: it is damaged, or holds Python objects, "
            "which are never loaded; save numbers or text"
        ) from error
    return array


def _npz_features(arrays: Any, name: str) -> NDArray[Any]:  # noqa: ANN401
    x = _npz_array(arrays, "x", name)
    if x.dtype.kind not in "biuf":
        raise DataError(f"array 'x' of {name} has dtype {x.dtype}; expected real numbers")
    if x.ndim not in (2, 3, 4) or 0 in x.shape[1:]:
        raise DataError(
            f"array 'x' of {name} has shape {x.shape}; expected (n, d), (n, steps, d) or "
            "(n, channels, height, width)"
        )
    return x


def _read_npz_table(path: Path, target: str | Sequence[str] | None) -> Table:
    import pandas as pd

    keys = [target] if isinstance(target, str) else list(target or ["y"])
    if len(keys) != 1:
        raise DataError(
            f"{path.name} takes one array as target, with a column for each output; "
            f"got {listed(keys)}"
        )
    with _open_npz(path) as arrays:
        x, y = _npz_features(arrays, path.name), _npz_array(arrays, keys[0], path.name)
    if y.ndim not in (1, 2) or 0 in y.shape[1:]:
        raise DataError(
            f"array {keys[0]!r} of {path.name} has shape {y.shape}; expected (n,) or (n, outputs)"
        )
    if len(x) != len(y):
        raise DataError(f"{path.name} has {len(x)} rows in 'x' and {len(y)} in {keys[0]!r}")
    if len(x) == 0:
        raise DataError(f"{path.name} has no rows")
    outputs = y.reshape(len(y), -1)
    names = keys if outputs.shape[1] == 1 else [f"{keys[0]}{i}" for i in range(outputs.shape[1])]
    return Table(path.name, x, pd.DataFrame(outputs, columns=names), Rows.counted(len(x)))
