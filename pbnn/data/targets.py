"""The target's columns to a model's y: checked by kind, standardised or coded, kept as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from pbnn.data.columns import cells_of, is_categorical, missing_values, numbers_of
from pbnn.data.delimited import parse_number
from pbnn.data.rows import Rows, listed
from pbnn.data.units import Units, location_and_scale
from pbnn.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Label", "Target", "TargetKind", "class_labels", "require_target"]

TargetKind = Literal["real", "class", "count", "positive"]
Label = bool | int | str


@dataclass(frozen=True)
class Target:
    """How the target's columns become y.

    Attributes:
        kind: "real" (standardised), "class" (codes 0, 1, …), "count" or "positive" (as they are).
        names: The columns' names.
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
        as_they_are = Units(np.zeros(shape), np.ones(shape))
        if kind == "class":
            return cls(kind, names, as_they_are, _classes(frame, rows))
        values = _numbers(frame, rows, kind)
        loc, scale, constant = location_and_scale(values)
        for i in np.flatnonzero(constant):
            raise DataError(
                f"target {names[i]!r} is constant ({values[0, i]:g}) in all {len(values)} training "
                "rows: there is nothing to learn; choose another column"
            )
        if kind != "real":
            return cls(kind, names, as_they_are)
        if not (np.isfinite(loc).all() and np.isfinite(scale).all()):
            raise DataError(f"target {listed(names)} ranges too widely to be standardised")
        return cls(kind, names, Units(loc.reshape(shape), scale.reshape(shape)))

    def encode(self, frame: "pd.DataFrame", rows: Rows) -> NDArray[Any]:
        """Encode target columns as int64 codes `(n,)`, or as float64 `(n,)` or `(n, outputs)`.

        Raises:
            DataError: A value is missing, of the wrong kind, or a class that training did not have.
        """
        if self.kind == "class":
            return self._codes([str(label) for label in class_labels(frame, rows)], rows)
        values = _numbers(frame, rows, self.kind)
        values = values[:, 0] if len(self.names) == 1 else values
        encoded: NDArray[np.float64] = (values - self.units.loc) / self.units.scale
        return encoded

    def _codes(self, labels: Sequence[str], rows: Rows) -> NDArray[np.int64]:
        code = {str(label): i for i, label in enumerate(self.classes)}
        unseen = next((label for label in labels if label not in code), None)
        if unseen is not None:
            where = rows.say([i for i, label in enumerate(labels) if label == unseen])
            raise DataError(
                f"class {unseen!r} of target {self.names[0]!r} is in {where}, but in no training "
                "row; use another seed or a smaller test fraction, or take those rows out"
            )
        return np.asarray([code[label] for label in labels], dtype=np.int64)

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return {
            "kind": self.kind,
            "names": list(self.names),
            "loc": self.units.loc.tolist(),
            "scale": self.units.scale.tolist(),
            "classes": list(self.classes),
        }

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "Target":
        """The target that `to_json` gave."""
        loc, scale = (np.asarray(saved[key], dtype=np.float64) for key in ("loc", "scale"))
        return cls(saved["kind"], tuple(saved["names"]), Units(loc, scale), tuple(saved["classes"]))


def require_target(frame: "pd.DataFrame", rows: Rows) -> None:
    """Refuse missing targets.

    Raises:
        DataError: A target is missing; the message names its column and rows.
    """
    missing = missing_values(frame, rows)
    if missing:
        raise DataError(
            f"the target misses values in {missing}; targets are never filled in: take those rows "
            "out"
        )


def class_labels(frame: "pd.DataFrame", rows: Rows) -> list[Label]:
    """The labels of a class target: all text, all whole numbers, or all true or false.

    Blanks around text do not count.

    Raises:
        DataError: There are several columns, or a cell is not such a label.
    """
    if frame.shape[1] != 1:
        raise DataError(f"a class target is one column; got {listed(frame.columns)}: choose one")
    require_target(frame, rows)
    series = frame.iloc[:, 0]
    labels: list[Label] = []
    for i, cell in enumerate(cells_of(series)):
        if isinstance(cell, bool | np.bool_):
            labels.append(bool(cell))
        elif isinstance(cell, str):
            labels.append(cell.strip())
        elif (number := _whole(cell)) is not None:
            labels.append(number)
        else:
            raise DataError(
                f"target {series.name!r} is {cell!r} in {rows.say(i)}; a class is text, a whole "
                "number, or true or false (models/regression.py models real numbers)"
            )
        if type(labels[i]) is not type(labels[0]):
            raise DataError(
                f"target {series.name!r} mixes types: {labels[0]!r} in {rows.say(0)} and "
                f"{labels[i]!r} in {rows.say(i)}; write all classes as text"
            )
    return labels


def _whole(cell: object) -> int | None:
    """A whole number, unless it is a float so large that others were rounded to it."""
    if isinstance(cell, int | np.integer):
        return int(cell)
    if (
        isinstance(cell, float | np.floating)
        and float(cell).is_integer()
        and abs(float(cell)) <= 2**53
    ):
        return int(cell)
    return None


def _classes(frame: "pd.DataFrame", rows: Rows) -> tuple[Label, ...]:
    labels = class_labels(frame, rows)
    classes = tuple(sorted(set(labels)))
    if len(classes) == 1:
        raise DataError(
            f"target {frame.columns[0]!r} is constant ({classes[0]!r}) in all {len(labels)} "
            "training rows; expected two or more classes"
        )
    return classes


def _numbers(frame: "pd.DataFrame", rows: Rows, kind: TargetKind) -> NDArray[np.float64]:
    """Target columns as `(n, outputs)`: present, finite, and of the range that `kind` needs."""
    require_target(frame, rows)
    values = np.stack([_column(series, rows) for _, series in frame.items()], axis=1)
    wrong = np.isnan(values)
    need = "a number"
    if kind == "count":
        wrong, need = (values < 0) | (values != np.floor(values)), "a whole number, 0 or more"
    elif kind == "positive":
        wrong, need = values <= 0, "above 0"
    for row, column in np.argwhere(wrong):
        raise DataError(
            f"target {frame.columns[column]!r} is {values[row, column]:g} in {rows.say(row)}; "
            f"this model's y has to be {need}"
        )
    return values


def _column(series: "pd.Series[Any]", rows: Rows) -> NDArray[np.float64]:
    from pandas.api import types

    cells = cells_of(series)
    labels = [
        i for i, cell in enumerate(cells) if isinstance(cell, str) and parse_number(cell) is None
    ]
    declared = types.is_bool_dtype(series.dtype) or is_categorical(series)
    if declared or len(labels) > len(cells) / 2:
        first = labels[0] if labels else 0
        raise DataError(
            f"target {series.name!r} holds classes ({cells[first]!r} in {rows.say(first)}) where "
            "numbers are needed; models/classification.py models classes"
        )
    return numbers_of(series, rows)
