"""One column of a table to numbers: fitted on training rows, kept as plain JSON."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date, time, timedelta
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pbnn.data.delimited import parse_number
from pbnn.data.rows import IMPUTE, Rows, leave_out, listed, option
from pbnn.data.units import location_and_scale
from pbnn.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

    Series = pd.Series[Any]

__all__ = ["Column", "cells_of", "is_categorical", "missing_values", "numbers_of"]

_DATE = re.compile(r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{4})([T ].*)?")
_TRUTH = {"true": 1.0, "false": 0.0}
_COMMA_NUMBER = re.compile(r"[+-]?[\d.,]*,\d+")

MAX_LEVELS = 1000
"""A column of more categories than this would become more columns than any row could inform."""


@dataclass(frozen=True)
class Column:
    """One column: standardised, kept as 0 and 1, or made a column of 0 and 1 for each level.

    Attributes:
        name: The column's name in the user's table.
        kind: "numeric" (becomes (value − loc) / scale), "boolean" or "category".
        loc: Training mean of a numeric column.
        scale: Training standard deviation of a numeric column; 1 for a constant one.
        levels: The categories seen in training, sorted as text.
        fill: What a missing value becomes; None where missing values are refused.
        constant: Whether all training values are equal.
    """

    name: str
    kind: Literal["numeric", "boolean", "category"]
    loc: float = 0.0
    scale: float = 1.0
    levels: tuple[str, ...] = ()
    fill: float | str | None = None
    constant: bool = False

    @classmethod
    def fit(cls, series: "Series", rows: Rows, train: NDArray[np.int64], impute: bool) -> "Column":
        """Take the kind from all cells of a column, and every statistic from its training rows.

        Raises:
            DataError: The column cannot serve as a feature; the message names it and the row.
        """
        name, kind = str(series.name), _kind(series)
        if kind == "category":
            counts = Counter(level for level in _levels(series.iloc[train]) if level is not None)
            levels = tuple(sorted(counts))
            if len(levels) > MAX_LEVELS:
                raise DataError(
                    f"column {name!r} has {len(levels)} categories; expected {MAX_LEVELS} or "
                    f"fewer: merge rare ones, or {leave_out(name)}"
                )
            fill = max(levels, key=lambda level: counts[level]) if impute else None
            return cls(name, kind, levels=levels, fill=fill, constant=len(levels) == 1)
        if kind == "boolean":
            truths = _truths(series, rows)[train]
            majority = float(np.nanmean(truths) > 0.5)
            constant = bool(np.nanmin(truths) == np.nanmax(truths))
            return cls(name, kind, fill=majority if impute else None, constant=constant)
        repair = f"correct it, or take the column as categories with {option('categorical', name)}"
        values = numbers_of(series, rows, repair)[train]
        means, scales, constants = location_and_scale(values)
        loc, scale, constant = float(means), float(scales), bool(constants)
        if not (math.isfinite(loc) and math.isfinite(scale)):
            raise DataError(f"column {name!r} ranges too widely to be standardised; rescale it")
        return cls(name, kind, loc, scale, fill=loc if impute else None, constant=constant)

    @property
    def feature_names(self) -> list[str]:
        """Names of the columns that this one becomes."""
        return [f"{self.name}={level}" for level in self.levels] or [self.name]

    def encode(self, series: "Series", rows: Rows) -> NDArray[np.float64]:
        """Encode rows of the column, shape `(n,)`, as `(n, len(feature_names))`.

        Raises:
            DataError: A value is missing and there is no `fill`, or is of another kind than in
                training, or is a category that training did not have.
        """
        if self.kind == "category":
            return self._indicators(series, rows)
        values = (_truths if self.kind == "boolean" else numbers_of)(series, rows)
        values = np.where(np.isnan(values), np.nan if self.fill is None else self.fill, values)
        self._require_present(np.isnan(values), rows)
        encoded: NDArray[np.float64] = (values[:, None] - self.loc) / self.scale
        return encoded

    def _indicators(self, series: "Series", rows: Rows) -> NDArray[np.float64]:
        position = {level: i for i, level in enumerate(self.levels)}
        found = [self.fill if level is None else level for level in _levels(series)]
        self._require_present([level is None for level in found], rows)
        unseen = [i for i, level in enumerate(found) if level not in position]
        if unseen:
            raise DataError(
                f"column {self.name!r} has the category "
                f"{_first(found[unseen[0]], unseen, rows)}, which no training row has: they have "
                f"{listed(self.levels)}; correct it, merge rare categories, or fit again and "
                f"{leave_out(self.name)}"
            )
        codes = [position[str(level)] for level in found]
        return np.eye(len(self.levels))[np.asarray(codes, dtype=np.int64)]

    def _require_present(self, missing: ArrayLike, rows: Rows) -> None:
        if np.any(missing):
            where = rows.say(np.asarray(missing))
            raise DataError(f"column {self.name!r} misses values in {where}; {IMPUTE}")

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return {**asdict(self), "levels": list(self.levels)}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "Column":
        """The column that `to_json` gave."""
        return cls(**{**saved, "levels": tuple(saved["levels"])})


def missing_values(frame: "pd.DataFrame", rows: Rows) -> str:
    """Which columns miss how many values, in which rows; empty where none does."""
    missing = frame.isna()
    return ", ".join(
        f"{name!r} ({int(missing[name].sum())}: {rows.say(missing[name].to_numpy())})"
        for name in frame.columns[missing.any().to_numpy()]
    )


def cells_of(series: "Series") -> list[Any]:
    """The cells as Python objects, None where a value is missing."""
    cells: list[Any] = series.astype(object).where(series.notna(), None).tolist()
    return cells


def is_categorical(series: "Series") -> bool:
    """Whether the column was declared to hold categories."""
    import pandas as pd

    return isinstance(series.dtype, pd.CategoricalDtype)


def numbers_of(
    series: "Series", rows: Rows, repair: str = "correct it, or take the row out"
) -> NDArray[np.float64]:
    """The column as float64, shape `(n,)`, NaN where a value is missing.

    Raises:
        DataError: A cell is not a finite number.
    """
    from pandas.api import types

    if types.is_complex_dtype(series.dtype) or _is_time(series):
        raise DataError(f"column {series.name!r} holds {series.dtype}; expected real numbers")
    if types.is_numeric_dtype(series.dtype):
        values = series.to_numpy(dtype=np.float64, na_value=np.nan)
    else:
        cells = cells_of(series)
        parsed = [_number(cell) for cell in cells]
        wrong = [i for i, value in enumerate(parsed) if value is None]
        if wrong:
            first = cells[wrong[0]]
            if isinstance(first, str) and _COMMA_NUMBER.fullmatch(first):
                repair = "write a point before decimals, and nothing between thousands"
            raise DataError(
                f"column {series.name!r} has {_first(first, wrong, rows)}, where a number is "
                f"expected; {repair}"
            )
        values = np.asarray(parsed, dtype=np.float64)
    infinite = np.isinf(values)
    if infinite.any():
        raise DataError(
            f"column {series.name!r} is infinite in {rows.say(infinite)}; "
            "correct it, or take the row out"
        )
    return values


def _truths(series: "Series", rows: Rows) -> NDArray[np.float64]:
    """The column as 0 for false, 1 for true and NaN where a value is missing, shape `(n,)`."""
    cells = cells_of(series)
    values = [
        _TRUTH.get(c.lower(), _number(c)) if isinstance(c, str) else _number(c) for c in cells
    ]
    wrong = [i for i, value in enumerate(values) if value not in (0, 1) and value == value]
    if wrong:
        raise DataError(
            f"column {series.name!r} has {_first(cells[wrong[0]], wrong, rows)}, where true or "
            "false is expected; correct it, or take the row out"
        )
    return np.asarray(values, dtype=np.float64)


def _first(cell: object, where: Sequence[int], rows: Rows) -> str:
    """A cell that is at fault, where it is, and how many rows have such cells."""
    others = f" (and others in {rows.say(where[1:])})" if len(where) > 1 else ""
    return f"{str(cell)[:40]!r} in {rows.say(where[0])}{others}"


def _number(cell: Any) -> float | None:
    if cell is None:
        return math.nan
    if isinstance(cell, str):
        # Words for a missing value are the reader's business; here "NA" is text like any other.
        number = parse_number(cell)
        return number if number == number else None
    try:
        return float(cell)
    except (TypeError, ValueError, OverflowError):
        return None


def _levels(series: "Series") -> list[str | None]:
    """Categories as text, the same for 2 and 2.0; None where one is missing."""

    def level(cell: Any) -> str | None:
        if cell is None or isinstance(cell, str):
            return cell and cell.strip()
        if isinstance(cell, float | np.floating) and float(cell).is_integer():
            return str(int(cell))
        return str(cell)

    return [level(cell) for cell in cells_of(series)]


def _kind(series: "Series") -> Literal["numeric", "boolean", "category"]:
    """What kind of feature a column is, judged by all its present cells."""
    from pandas.api import types

    name = str(series.name)
    if name.startswith("Unnamed: "):
        raise DataError(f"column {name!r} is an index that pandas wrote; {leave_out(name)}")
    if is_categorical(series):
        return "category"
    if types.is_bool_dtype(series.dtype):
        return "boolean"
    if types.is_numeric_dtype(series.dtype):
        return "numeric"
    cells = cells_of(series.dropna())
    if _is_time(series) or any(isinstance(cell, date | time | timedelta) for cell in cells):
        raise DataError(f"column {name!r} holds dates or times; {leave_out(name)}, or code it")
    if all(isinstance(cell, bool | np.bool_) for cell in cells):
        return "boolean"
    if not all(isinstance(cell, str) for cell in cells):
        return "numeric"
    return _text_kind(name, cells)


def _text_kind(name: str, cells: Sequence[str]) -> Literal["numeric", "category"]:
    if all(_DATE.fullmatch(cell) for cell in cells):
        raise DataError(
            f"column {name!r} holds dates ({cells[0]!r}); {leave_out(name)}, or code it"
        )
    plain = sum(_number(cell) is not None for cell in cells)
    with_comma = sum(_COMMA_NUMBER.fullmatch(cell) is not None for cell in cells)
    if plain < len(cells) and plain + with_comma > len(cells) / 2:
        # The cells that are not numbers are refused, and named, where the numbers are taken.
        return "numeric"
    distinct = len(set(cells))
    if len(cells) > 1 and (distinct == len(cells) or distinct > max(20, len(cells) / 2)):
        raise DataError(
            f"column {name!r} has {distinct} different texts in {len(cells)} rows "
            f"({listed(cells, 2)}), as names or identifiers do; {leave_out(name)}"
        )
    return "category"


def _is_time(series: "Series") -> bool:
    return series.dtype.kind in "mM" or str(series.dtype).startswith(("period", "date", "time"))
