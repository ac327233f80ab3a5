"""How one column, one array or one target becomes numbers: fitted on training rows, kept as plain JSON.

Each encoder is a frozen value with `fit`, `encode`, and fields of plain Python types, so that a
saved one gives the same bits. Every `scale` is a standard deviation, with divisor n.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, time, timedelta
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pbnn.errors import DataError
from pbnn.tables import Rows, listed, parse_number

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "ArrayEncoder",
    "Column",
    "Label",
    "Target",
    "TargetKind",
    "Units",
    "location_and_scale",
    "missing_values",
]

TargetKind = Literal["real", "class", "count", "positive"]
IMPUTE = (
    "complete them, take those rows out, or fill them from the training rows with impute=True "
    "(--impute)"
)

ColumnKind = Literal["numeric", "boolean", "category"]
Label = bool | int | str

_DATE = re.compile(r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}([T ].*)?|\d{1,2}[-/.]\d{1,2}[-/.]\d{4}([T ].*)?")
_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+")


@dataclass(frozen=True)
class Units:
    """What takes model units to the user's: `value = loc + scale * standardised`.

    Attributes:
        loc: Shape `()`, or `(outputs,)` where there are several outputs; 0 where the target is not
            standardised.
        scale: The same shape; a standard deviation; 1 where the target is not standardised.
    """

    loc: NDArray[np.float64]
    scale: NDArray[np.float64]


def location_and_scale(
    values: NDArray[np.float64], axes: tuple[int, ...] = (0,)
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """Mean and population scale over `axes`, missing values left out.

    The deviations are divided by the range before they are squared, so that neither 1e-200 nor 1e200
    leaves the range of a float. What is constant up to rounding has scale 1.

    Args:
        values: Shape `(n, ...)`, with n > 0, and at least one present value along `axes`.
        axes: Axes to take the statistics over; the first one among them.

    Returns:
        loc, scale and which are constant; each of `values`' shape with `axes` of length 1, less the
        first axis.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        low, high = np.nanmin(values, axes, keepdims=True), np.nanmax(values, axes, keepdims=True)
        spread = high - low
        constant = spread <= 8 * np.finfo(np.float64).eps * np.maximum(abs(low), abs(high))
        unit = np.where(constant, 1.0, spread)
        loc = np.where(low == high, low, np.nanmean(values, axes, keepdims=True))
        square = np.nanmean(((values - loc) / unit) ** 2, axes, keepdims=True)
        scale = np.where(constant, 1.0, unit * np.sqrt(square))
    return loc[0], scale[0], constant[0]


def missing_values(frame: "pd.DataFrame", rows: Rows) -> str:
    """Say which columns miss values in which rows; empty where none does."""
    missing = frame.isna()
    return ", ".join(
        f"{name!r} ({int(missing[name].sum())}: {rows.say(missing[name].to_numpy())})"
        for name in frame.columns[missing.any().to_numpy()]
    )


# ---- cells to numbers, booleans and levels --------------------------------------------------------


def _numbers(series: "pd.Series[Any]", rows: Rows) -> NDArray[np.float64]:
    """The column as float64, NaN where a value is missing, anything else but a number refused."""
    from pandas.api import types

    if types.is_complex_dtype(series.dtype) or _is_time(series):
        raise DataError(f"column {series.name!r} holds {series.dtype}; expected real numbers")
    if types.is_numeric_dtype(series.dtype):
        values = series.to_numpy(dtype=np.float64, na_value=np.nan)
    else:
        cells = _cells(series)
        parsed = [_cell_number(cell) for cell in cells]
        wrong = [i for i, value in enumerate(parsed) if value is None]
        if wrong:
            raise _not_a_number(series, cells[wrong[0]], wrong, rows)
        values = np.asarray(parsed, dtype=np.float64)
    infinite = np.isinf(values)
    if infinite.any():
        raise DataError(
            f"column {series.name!r} is infinite in {rows.say(infinite)}; "
            "correct it, or mark it as missing"
        )
    return values


def _cells(series: "pd.Series[Any]") -> list[Any]:
    """The cells as Python objects, None where a value is missing."""
    return series.astype(object).where(series.notna(), None).tolist()


def _cell_number(cell: Any) -> float | None:  # noqa: ANN401 (a cell may hold anything)
    if cell is None:
        return math.nan
    if isinstance(cell, str):
        return parse_number(cell)
    try:
        return float(cell)
    except (TypeError, ValueError):
        return None


def _not_a_number(
    series: "pd.Series[Any]", cell: object, wrong: Sequence[int], rows: Rows
) -> DataError:
    comma = isinstance(cell, str) and _DECIMAL_COMMA.fullmatch(cell)
    repair = "write decimals with a point" if comma else "correct it, or mark it as missing (NA)"
    return DataError(
        f"column {series.name!r} has {cell!r} in {rows.say(wrong)}, where a number is expected; "
        f"{repair}"
    )


def _is_time(series: "pd.Series[Any]") -> bool:
    return series.dtype.kind in "mM" or str(series.dtype).startswith(("period", "date", "time"))


def _level(cell: object) -> str | None:
    """A category as text, the same for 2 and 2.0; None where it is missing."""
    if cell is None or isinstance(cell, str):
        return cell and cell.strip()
    if isinstance(cell, float | np.floating) and float(cell).is_integer():
        return str(int(cell))
    return str(cell)


def _levels(series: "pd.Series[Any]") -> list[str | None]:
    return [_level(cell) for cell in _cells(series)]


# ---- feature columns ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """One column of a table: standardised, kept as 0 and 1, or one column of 0 and 1 for each level.

    Attributes:
        name: The column's name in the user's table.
        kind: "numeric" (becomes (value − loc) / scale), "boolean" or "category".
        loc: Training mean of a numeric column.
        scale: Training standard deviation of a numeric column; 1 for a constant one.
        levels: The categories seen in training, sorted.
        fill: What a missing value becomes; None where missing values are refused.
        constant: Whether all training values are equal.
    """

    name: str
    kind: ColumnKind
    loc: float = 0.0
    scale: float = 1.0
    levels: tuple[str, ...] = ()
    fill: float | str | None = None
    constant: bool = False

    @classmethod
    def fit(
        cls, series: "pd.Series[Any]", rows: Rows, train: NDArray[Any], impute: bool
    ) -> "Column":
        """Take the kind from all rows of a column, and every statistic from its training rows.

        Raises:
            DataError: The column cannot serve as a feature; the message names it and the row.
        """
        name = str(series.name)
        kind = _kind(series, rows)
        part = series.iloc[train]
        if part.isna().all():
            raise DataError(
                f"column {name!r} has no value in the training rows; "
                f"leave it out with drop=[{name!r}] (--drop {name})"
            )
        if kind == "category":
            counts = Counter(level for level in _levels(part) if level is not None)
            levels = tuple(sorted(counts))
            fill = max(levels, key=lambda level: counts[level]) if impute else None
            return cls(name, kind, levels=levels, fill=fill, constant=len(levels) == 1)
        values = _numbers(part, rows.take(train))
        if kind == "boolean":
            present = values[~np.isnan(values)]
            majority = float(present.mean() > 0.5) if impute else None
            return cls(name, kind, fill=majority, constant=bool((present == present[0]).all()))
        loc, scale, constant = location_and_scale(values)
        if not (np.isfinite(loc) and np.isfinite(scale)):
            raise DataError(f"column {name!r} ranges too widely to be standardised; rescale it")
        mean = float(loc)
        return cls(name, kind, mean, float(scale), (), mean if impute else None, bool(constant))

    @property
    def feature_names(self) -> list[str]:
        """Names of the columns that this one becomes."""
        return [f"{self.name}={level}" for level in self.levels] or [self.name]

    def encode(self, series: "pd.Series[Any]", rows: Rows) -> NDArray[np.float64]:
        """Encode rows of the column, shape `(n,)`, as `(n, len(feature_names))`.

        Raises:
            DataError: A value is missing and there is no `fill`, is of another kind than in
                training, or is a category that training did not have.
        """
        if self.kind == "category":
            return self._indicators(series, rows)
        values = _numbers(series, rows)
        values = np.where(np.isnan(values), np.nan if self.fill is None else self.fill, values)
        self._require_present(np.isnan(values), rows)
        if self.kind == "boolean":
            wrong = ~np.isin(values, (0.0, 1.0))
            if wrong.any():
                raise DataError(
                    f"column {self.name!r} is neither true nor false in {rows.say(wrong)}"
                )
        encoded: NDArray[np.float64] = (values[:, None] - self.loc) / self.scale
        return encoded

    def _indicators(self, series: "pd.Series[Any]", rows: Rows) -> NDArray[np.float64]:
        position = {level: i for i, level in enumerate(self.levels)}
        found = [self.fill if level is None else level for level in _levels(series)]
        self._require_present([level is None for level in found], rows)
        unseen = [i for i, level in enumerate(found) if level not in position]
        if unseen:
            raise DataError(
                f"column {self.name!r} has the category {found[unseen[0]]!r} in "
                f"{rows.say(unseen)}, which no training row has; training has "
                f"{listed(self.levels)}: correct it, merge rare categories, or fit without the "
                f"column (--drop {self.name})"
            )
        codes = [position[str(level)] for level in found]
        return np.eye(len(self.levels))[np.asarray(codes, dtype=np.int64)]

    def _require_present(self, missing: ArrayLike, rows: Rows) -> None:
        if np.any(missing):
            raise DataError(
                f"column {self.name!r} misses values in {rows.say(np.asarray(missing))}; {IMPUTE}"
            )


def _kind(series: "pd.Series[Any]", rows: Rows) -> ColumnKind:
    """What kind of feature a column is, judged by all its present cells."""
    from pandas.api import types

    name = series.name
    leave_out = f"leave it out with drop=[{name!r}] (--drop {name})"
    if _is_time(series):
        raise DataError(f"column {name!r} holds dates or times; {leave_out}, or write numbers")
    if types.is_bool_dtype(series.dtype):
        return "boolean"
    if types.is_numeric_dtype(series.dtype):
        return "numeric"
    if isinstance(series.dtype, _categorical()):
        return "category"
    cells = _cells(series.dropna())
    if any(isinstance(cell, date | time | timedelta) for cell in cells):
        raise DataError(f"column {name!r} holds dates or times; {leave_out}, or write numbers")
    if all(isinstance(cell, bool | np.bool_) for cell in cells):
        return "boolean"
    if not all(isinstance(cell, str) for cell in cells):
        # Text among numbers is found, and named, where the numbers are read.
        return "numeric"
    if all(_DATE.fullmatch(cell) for cell in cells):
        raise DataError(
            f"column {name!r} holds dates ({cells[0]!r}); {leave_out}, or write numbers"
        )
    numeric = sum(parse_number(cell) is not None for cell in cells)
    if len(cells) / 2 < numeric < len(cells) or all(map(_DECIMAL_COMMA.fullmatch, cells)):
        return "numeric"
    distinct = len(set(cells))
    if len(cells) > 1 and (distinct == len(cells) or distinct > max(20, len(cells) / 2)):
        raise DataError(
            f"column {name!r} has {distinct} different texts in {len(cells)} rows "
            f"({listed(cells, 2)}), as names or identifiers do; {leave_out}"
        )
    return "category"


def _categorical() -> type:
    import pandas as pd

    return pd.CategoricalDtype


# ---- arrays ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ArrayEncoder:
    """An array of features, standardised by column, by feature of a sequence, or by image channel.

    Attributes:
        shape: Shape of one row: `(d,)`, `(steps, d)` or `(channels, height, width)`.
        loc: Training means; of a shape that broadcasts against one row, with one value for each
            column, feature (over rows and steps) or channel (over rows and pixels).
        scale: Training standard deviations, of the same shape; 1 for what is constant.
        constant: Which of them are constant, in order.
        impute: Whether a missing value (NaN) becomes `loc`; otherwise it is refused.
    """

    shape: tuple[int, ...]
    loc: NDArray[np.float64]
    scale: NDArray[np.float64]
    constant: tuple[int, ...]
    impute: bool

    @classmethod
    def fit(cls, x: NDArray[Any], rows: Rows, impute: bool) -> "ArrayEncoder":
        """Take the statistics of training rows x, shape `(n, …)`."""
        axes = {2: (0,), 3: (0, 1), 4: (0, 2, 3)}[x.ndim]
        values = _finite(x, rows, impute)
        if np.isnan(values).all(axes).any():
            raise DataError("array 'x' has a feature without any value in the training rows")
        loc, scale, constant = location_and_scale(values, axes)
        if not (np.isfinite(loc).all() and np.isfinite(scale).all()):
            raise DataError("array 'x' ranges too widely to be standardised; rescale it")
        which = tuple(np.flatnonzero(constant).tolist())
        return cls(x.shape[1:], loc, scale, which, impute)

    @property
    def features(self) -> int:
        """Columns, features of one step, or channels."""
        return self.loc.size

    @property
    def feature_names(self) -> list[str]:
        """One name for each column, feature or channel."""
        return [f"x{i}" for i in range(self.features)]

    def encode(self, x: NDArray[Any], rows: Rows) -> NDArray[np.float64]:
        """Standardise rows of the shape of the training rows."""
        if x.shape[1:] != self.shape:
            raise DataError(f"array 'x' has rows of shape {x.shape[1:]}; training had {self.shape}")
        values = _finite(x, rows, self.impute)
        encoded: NDArray[np.float64] = (
            np.where(np.isnan(values), self.loc, values) - self.loc
        ) / self.scale
        return encoded


def _finite(x: NDArray[Any], rows: Rows, impute: bool) -> NDArray[np.float64]:
    if x.dtype.kind not in "biuf":
        raise DataError(f"array 'x' has dtype {x.dtype}; expected real numbers")
    values = x.astype(np.float64)
    rest = tuple(range(1, x.ndim))
    infinite = np.isinf(values).any(rest)
    if infinite.any():
        raise DataError(f"array 'x' is infinite in {rows.say(infinite)}; correct it")
    missing = np.isnan(values).any(rest)
    if missing.any() and not impute:
        raise DataError(f"array 'x' misses values in {rows.say(missing)}; {IMPUTE}")
    return values


# ---- targets --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """The target's columns as a model sees them.

    Attributes:
        kind: "real" (standardised), "class" (codes 0, 1, …), "count" or "positive" (as they are).
        names: One name for each column.
        units: What takes the model's units to the user's.
        classes: The labels in the order of their codes; empty unless `kind` is "class".
    """

    kind: TargetKind
    names: tuple[str, ...]
    units: Units
    classes: tuple[Label, ...] = ()

    @classmethod
    def fit(cls, frame: "pd.DataFrame", rows: Rows, kind: TargetKind) -> "Target":
        """Take classes, or means and scales, from training rows.

        Raises:
            DataError: A value is missing or of the wrong kind, or a column is constant.
        """
        if kind not in get_args(TargetKind):
            raise DataError(f"target_kind is {kind!r}; expected {listed(get_args(TargetKind))}")
        names = tuple(str(name) for name in frame.columns)
        shape = () if len(names) == 1 else (len(names),)
        none = Units(np.zeros(shape), np.ones(shape))
        if kind == "class":
            if len(names) > 1:
                raise DataError(
                    f"a class target is one column; got {listed(names)}: choose one of them"
                )
            labels = class_labels(frame, rows)
            classes = sorted(set(labels))
            if len(classes) == 1:
                raise DataError(
                    f"target {names[0]!r} is {classes[0]!r} in all {len(labels)} training rows; "
                    "expected two or more classes"
                )
            return cls(kind, names, none, tuple(classes))
        values = _target_numbers(frame, rows, kind)
        loc, scale, constant = location_and_scale(values)
        for name, value in zip(np.asarray(names)[constant], values[0, constant], strict=True):
            raise DataError(
                f"target {str(name)!r} is constant ({value:g}) in all {len(values)} training rows; "
                "there is nothing to learn: choose another column"
            )
        if kind != "real":
            return cls(kind, names, none)
        if not (np.isfinite(loc).all() and np.isfinite(scale).all()):
            raise DataError(f"target {listed(names)} ranges too widely to be standardised")
        return cls(kind, names, Units(loc.reshape(shape), scale.reshape(shape)))

    def encode(self, frame: "pd.DataFrame", rows: Rows) -> NDArray[Any]:
        """Encode target columns as int64 codes `(n,)`, or float64 `(n,)` or `(n, outputs)`.

        Raises:
            DataError: A value is missing, of the wrong kind, or a class that training did not have.
        """
        if self.kind == "class":
            code = {str(label): i for i, label in enumerate(self.classes)}
            labels = [str(label) for label in class_labels(frame, rows)]
            for label in labels:
                if label not in code:
                    where = [i for i, other in enumerate(labels) if other == label]
                    raise DataError(
                        f"class {label!r} of target {self.names[0]!r} is in {rows.say(where)}, but "
                        "in no training row; use another seed or a smaller test fraction, or take "
                        "its rows out"
                    )
            return np.asarray([code[label] for label in labels], dtype=np.int64)
        values = _target_numbers(frame, rows, self.kind)
        values = values[:, 0] if len(self.names) == 1 else values
        encoded: NDArray[np.float64] = (values - self.units.loc) / self.units.scale
        return encoded


def _require_target(frame: "pd.DataFrame", rows: Rows) -> None:
    missing = missing_values(frame, rows)
    if missing:
        raise DataError(
            f"the target misses values: {missing}; targets are never filled in: take those rows out"
        )


def class_labels(frame: "pd.DataFrame", rows: Rows) -> list[Label]:
    """The labels of a class target's one column: all text, all whole numbers or all true/false."""
    _require_target(frame, rows)
    series = frame.iloc[:, 0]
    labels: list[Label] = []
    for i, cell in enumerate(_cells(series)):
        if isinstance(cell, bool | np.bool_):
            labels.append(bool(cell))
        elif isinstance(cell, str):
            labels.append(cell.strip())
        elif isinstance(cell, float | int | np.number) and float(cell).is_integer():
            labels.append(int(cell))
        else:
            raise DataError(
                f"target {series.name!r} is {cell!r} in {rows.say(i)}; a class is text, a whole "
                "number, or true or false (models/regression.py models real numbers)"
            )
        if type(labels[-1]) is not type(labels[0]):
            raise DataError(
                f"target {series.name!r} mixes labels of different types: {labels[0]!r} in "
                f"{rows.say(0)} and {cell!r} in {rows.say(i)}; write them all as text"
            )
    return labels


def _target_numbers(frame: "pd.DataFrame", rows: Rows, kind: TargetKind) -> NDArray[np.float64]:
    """Target columns as `(n, outputs)`: present, finite, and of the sign and type that `kind` needs."""
    _require_target(frame, rows)
    values = np.stack([_number_target(series, rows) for _, series in frame.items()], axis=1)
    if kind in ("count", "positive"):
        whole = values == np.floor(values)
        wrong = (values < 0) | ~whole if kind == "count" else values <= 0
        for row, column in np.argwhere(wrong):
            need = "a whole number of 0 or more" if kind == "count" else "above 0"
            raise DataError(
                f"target {str(frame.columns[column])!r} is {values[row, column]:g} in "
                f"{rows.say(row)}; this model's y has to be {need}"
            )
    return values


def _number_target(series: "pd.Series[Any]", rows: Rows) -> NDArray[np.float64]:
    from pandas.api import types

    cells = _cells(series)
    labels = [i for i, cell in enumerate(cells) if _cell_number(cell) is None]
    known = types.is_bool_dtype(series.dtype) or isinstance(series.dtype, _categorical())
    if known or len(labels) > len(cells) / 2:
        first = labels[0] if labels else 0
        raise DataError(
            f"target {series.name!r} holds classes ({cells[first]!r} in {rows.say(first)}) where "
            "numbers are needed; models/classification.py models classes"
        )
    return _numbers(series, rows)
