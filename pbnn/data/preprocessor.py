"""What a run keeps of its table, so that new rows are encoded to the same bits."""

import warnings
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pbnn.data.arrays import ArrayEncoder
from pbnn.data.columns import Column, missing_values
from pbnn.data.rows import IMPUTE, Rows, leave_out, listed
from pbnn.data.tables import Table
from pbnn.data.targets import Label, Target, TargetKind, require_target
from pbnn.data.units import Units
from pbnn.errors import DataError, FileError, PbnnWarning

if TYPE_CHECKING:
    import pandas as pd

    Features = pd.DataFrame | NDArray[Any]

__all__ = ["Preprocessor"]

FORMAT = 1


@dataclass(frozen=True)
class Preprocessor:
    """What turns a user's table into numbers; every statistic is one of the training rows.

    Numeric columns are standardised by the training mean and scale (a constant one has scale 1).
    A column of booleans becomes one of 0 and 1; a column of text one of 0 and 1 for each category,
    sorted; these are not standardised. Arrays are standardised by column `(n, d)`, by feature over
    all rows and steps `(n, steps, d)`, or by channel over all rows and pixels
    `(n, channels, height, width)`.

    Attributes:
        features: The encoders of the columns, or that of an array.
        target: The encoder of the target.
        impute: Whether missing features become the training mean, or the most frequent category.
        dropped: Columns that the user left out, and that new rows may hold.
        notes: What was done to the table, one sentence each.
    """

    features: tuple[Column, ...] | ArrayEncoder
    target: Target
    impute: bool = False
    dropped: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)

    @classmethod
    def fit(
        cls, table: Table, rows: ArrayLike, *, target_kind: TargetKind, impute: bool = False
    ) -> "Preprocessor":
        """Take every statistic, category and class from the rows at these positions.

        Args:
            table: The whole table, so that messages name all its missing values, and the kind of a
                column is judged by all its cells.
            rows: Positions of the training rows, shape `(n_train,)`.
            target_kind: "real", "class", "count" or "positive".
            impute: Fill missing features; missing targets are always an error.

        Raises:
            DataError: A column cannot serve in its role; the message names it and the row.
        """
        train = np.asarray(rows, dtype=np.int64)
        where = table.rows.take(train)
        if len(train) < 2:
            raise DataError(f"{table.name} has {len(train)} row for training; expected 2 or more")
        require_target(table.target, table.rows)
        features: tuple[Column, ...] | ArrayEncoder
        if isinstance(table.features, np.ndarray):
            features = ArrayEncoder.fit(table.features[train], where, impute)
        else:
            _require_values(table.features, table.rows, train, impute)
            features = tuple(
                Column.fit(series, table.rows, train, impute)
                for _, series in table.features.items()
            )
        target = Target.fit(table.target.iloc[train], where, target_kind)
        fitted = cls(features, target, impute, table.dropped)
        twice = [name for name, count in Counter(fitted.feature_names).items() if count > 1]
        if twice:
            raise DataError(f"two columns would both become {listed(twice)}; rename one of them")
        return replace(fitted, notes=_notes(fitted, len(train)))

    @property
    def columns(self) -> list[str]:
        """Names of the feature columns in the user's table; empty for an array."""
        if isinstance(self.features, ArrayEncoder):
            return []
        return [column.name for column in self.features]

    @property
    def feature_names(self) -> list[str]:
        """Names after encoding: "age", "city=Oslo"; "x0", … for an array's columns or channels."""
        if isinstance(self.features, ArrayEncoder):
            return self.features.feature_names
        return [name for column in self.features for name in column.feature_names]

    @property
    def in_features(self) -> int:
        """Columns of x; for sequences the features of a step, for images the channels."""
        return len(self.feature_names)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one row of x."""
        if isinstance(self.features, ArrayEncoder):
            return self.features.shape
        return (self.in_features,)

    @property
    def out_features(self) -> int:
        """Number of classes, or of target columns."""
        return len(self.target.classes or self.target.names)

    @property
    def target_kind(self) -> TargetKind:
        """The kind of target it was fitted for."""
        return self.target.kind

    @property
    def target_names(self) -> list[str]:
        """Names of the target's columns."""
        return list(self.target.names)

    @property
    def target_units(self) -> Units:
        """What takes the model's y to the user's units."""
        return self.target.units

    @property
    def classes(self) -> list[Label]:
        """Labels in the order of their codes; empty unless the target is a class."""
        return list(self.target.classes)

    def transform(self, features: "Features", rows: Rows | None = None) -> NDArray[np.float64]:
        """Encode rows, each by itself, with a warning for what is filled or not used.

        Args:
            features: A data frame with the training columns in any order, beside which there may
                be dropped columns and the target's; or an array `(n, …)` where the fit was on one.
            rows: What messages call the rows; row 1, 2, … when left out.

        Returns:
            float64, shape `(n, in_features)`, or the array's own shape.

        Raises:
            DataError: A column is missing or unknown, or holds what training did not.
        """
        x, remarks = self.encode(features, rows or Rows.counted(len(features)))
        for remark in remarks:
            warnings.warn(remark, PbnnWarning, stacklevel=2)
        return x

    def encode(self, features: "Features", rows: Rows) -> tuple[NDArray[np.float64], list[str]]:
        """Encode rows as `transform` does; return x, and what there is to say about it."""
        filled = "missing values became the training mean or most frequent value"
        if isinstance(self.features, ArrayEncoder):
            if not isinstance(features, np.ndarray):
                raise DataError(
                    f"the fit was on an array with rows of shape {self.features.shape} and a table "
                    "came; pass an .npz file with the array under the key 'x'"
                )
            x, where = self.features.encode(features, rows)
            return x, [f"{filled} in {where}"] if where else []
        if isinstance(features, np.ndarray):
            raise DataError(
                f"the fit was on a table and an array came; pass a table with the columns "
                f"{listed(self.columns)}"
            )
        frame, remarks = self._select(features)
        missing = missing_values(frame, rows)
        if missing and not self.impute:
            raise DataError(f"there are missing values in {missing}; {IMPUTE}")
        if missing:
            remarks.append(f"{filled} in {missing}")
        blocks = [column.encode(frame[column.name], rows) for column in self.features]
        return np.concatenate(blocks, axis=1), remarks

    def _select(self, frame: "pd.DataFrame") -> "tuple[pd.DataFrame, list[str]]":
        """The training columns in their order, and what there is to say about others."""
        given = [str(column) for column in frame.columns]
        absent = [column for column in self.columns if column not in set(given)]
        if absent:
            raise DataError(f"column {listed(absent)} is missing; the rows have {listed(given)}")
        known = {*self.columns, *self.dropped, *self.target.names}
        unknown = [column for column in given if column not in known]
        if unknown:
            raise DataError(
                f"column {listed(unknown)} was not there in training, whose features are "
                f"{listed(self.columns)}; take it out"
            )
        twice = [column for column, count in Counter(given).items() if count > 1]
        if twice:
            raise DataError(f"there is more than one column named {listed(twice)}; rename them")
        targets = [column for column in self.target.names if column in given]
        remarks = [f"the target {listed(targets)} in the rows is not used"] if targets else []
        return frame.set_axis(given, axis=1)[self.columns], remarks

    def encode_target(
        self, target: "pd.DataFrame | ArrayLike", rows: Rows | None = None
    ) -> NDArray[Any]:
        """Encode targets in the user's units for the model.

        Args:
            target: One value for each row, `(n,)`, or `(n, outputs)`.
            rows: What messages call the rows; row 1, 2, … when left out.

        Returns:
            float64, `(n,)` or `(n, outputs)`, standardised where the kind is "real"; int64 codes
            `(n,)` where it is "class".

        Raises:
            DataError: A value is missing, of the wrong kind, or a class that training did not have.
        """
        import pandas as pd

        frame = target if isinstance(target, pd.DataFrame) else pd.DataFrame(np.asarray(target))
        if frame.shape[1] != len(self.target.names):
            raise DataError(
                f"the target has {frame.shape[1]} columns; expected {listed(self.target.names)}"
            )
        frame = frame.set_axis(self.target_names, axis=1)
        return self.target.encode(frame, rows or Rows.counted(len(frame)))

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON values; Python writes floats so that they keep every bit."""
        if isinstance(self.features, ArrayEncoder):
            features: dict[str, Any] = {"array": self.features.to_json()}
        else:
            features = {"columns": [column.to_json() for column in self.features]}
        return {
            "format": FORMAT,
            **features,
            "target": self.target.to_json(),
            "impute": self.impute,
            "dropped": list(self.dropped),
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "Preprocessor":
        """The preprocessor that `to_json` gave.

        Raises:
            FileError: The value is not of this format.
        """
        if saved.get("format") != FORMAT:
            raise FileError(
                f"the saved preprocessor has format {saved.get('format')!r}; expected {FORMAT}"
            )
        try:
            return cls(
                ArrayEncoder.from_json(saved["array"])
                if "array" in saved
                else tuple(Column.from_json(column) for column in saved["columns"]),
                Target.from_json(saved["target"]),
                saved["impute"],
                tuple(saved["dropped"]),
                list(saved["notes"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FileError(
                f"the saved preprocessor has a wrong or absent field: {error}"
            ) from error


def _require_values(
    features: "pd.DataFrame", rows: Rows, train: NDArray[np.int64], impute: bool
) -> None:
    """Refuse columns without any training value, and all missing values unless they are filled."""
    empty = features.iloc[train].isna().all().to_numpy()
    for column in features.columns[empty]:
        raise DataError(f"column {column!r} has no value in any training row; {leave_out(column)}")
    missing = missing_values(features, rows)
    if missing and not impute:
        raise DataError(f"there are missing values in {missing}; {IMPUTE}")


def _notes(fitted: Preprocessor, n_train: int) -> list[str]:
    """What the encoders do, one sentence for each thing."""
    encoder, notes = fitted.features, []
    by = f"standardised by the mean and scale of the {n_train} training rows"
    if isinstance(encoder, ArrayEncoder):
        part = {1: "column", 2: "feature over all steps", 3: "channel"}[len(encoder.shape)]
        notes.append(f"features: each {part} is {by}")
        constant = [encoder.feature_names[i] for i in encoder.constant]
    else:
        numeric = sum(column.kind == "numeric" for column in encoder)
        if numeric:
            notes.append(f"features: {numeric} of {len(encoder)} columns {by}")
        for column in encoder:
            if column.kind == "boolean":
                notes.append(f"column {column.name!r}: 0 for false, 1 for true")
            elif column.kind == "category":
                notes.append(
                    f"column {column.name!r}: one-hot encoded as {listed(column.feature_names)}"
                )
        constant = [column.name for column in encoder if column.constant]
    if constant:
        notes.append(f"constant in the training rows, kept with scale 1: {listed(constant)}")
    if fitted.target_kind == "real":
        notes.append(f"target {listed(fitted.target_names)}: {by}")
    return notes
