"""From a table to training and test arrays and back: split, standardise with training statistics, keep the units.

`prepare` is the whole road. `Preprocessor` is what a saved run keeps of it, as plain JSON, so that
new rows are encoded to the same bits.
"""

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pbnn.encoders import (
    IMPUTE,
    ArrayEncoder,
    Column,
    Label,
    Target,
    TargetKind,
    Units,
    class_labels,
    missing_values,
)
from pbnn.errors import DataError, FileError, PbnnWarning
from pbnn.tables import Rows, Table, listed, read_features_file, read_table

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "Dataset",
    "Preprocessor",
    "Table",
    "TargetKind",
    "Units",
    "guess_target_kind",
    "prepare",
    "read_features",
    "read_table",
    "split_rows",
]

FORMAT = 1


@dataclass(frozen=True)
class Preprocessor:
    """What turns a user's table into numbers, fitted on training rows only.

    Numeric columns are standardised with the training mean and scale (a constant one is only
    centred: its scale is 1); booleans become one column of 0 and 1; text columns one column of 0 and
    1 for each category, sorted. Columns of 0 and 1 are not standardised. Arrays are standardised by
    column `(n, d)`, by feature over all rows and steps `(n, steps, d)`, or by channel over all rows
    and pixels `(n, channels, height, width)`.

    Attributes:
        features: The encoders of the columns, or that of an array.
        target: The encoder of the target.
        dropped: Columns that the user left out, and that new rows may hold.
        notes: What was done that the user did not ask for by name, one sentence each.
    """

    features: tuple[Column, ...] | ArrayEncoder
    target: Target
    dropped: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)

    @classmethod
    def fit(
        cls, table: Table, rows: ArrayLike, *, target_kind: TargetKind, impute: bool = False
    ) -> "Preprocessor":
        """Take every statistic, category and class from the rows at these positions.

        Args:
            table: The whole table; what kind a column is, is judged by all its rows.
            rows: Positions of the training rows, shape `(n_train,)`.
            target_kind: "real", "class", "count" or "positive".
            impute: Fill missing features with the training mean, or the most frequent category.

        Raises:
            DataError: A column cannot serve in its role; the message names it and the row.
        """
        train = np.asarray(rows, dtype=np.int64)
        if len(train) < 2:
            raise DataError(f"{table.name} has {len(train)} training rows; expected at least 2")
        where = table.rows.take(train)
        features: tuple[Column, ...] | ArrayEncoder
        if isinstance(table.features, np.ndarray):
            features = ArrayEncoder.fit(table.features[train], where, impute)
        else:
            if not impute:
                _require_complete(table.features.iloc[train], where)
            features = tuple(
                Column.fit(series, table.rows, train, impute)
                for _, series in table.features.items()
            )
        target = Target.fit(table.target.iloc[train], where, target_kind)
        fitted = cls(features, target, table.dropped)
        twice = {name for name in fitted.feature_names if fitted.feature_names.count(name) > 1}
        if twice:
            raise DataError(f"two columns would both be named {listed(sorted(twice))}; rename one")
        return replace(fitted, notes=_notes(fitted, len(train)))

    @property
    def impute(self) -> bool:
        """Whether missing features are filled."""
        if isinstance(self.features, ArrayEncoder):
            return self.features.impute
        return all(column.fill is not None for column in self.features)

    @property
    def columns(self) -> list[str]:
        """Names of the feature columns in the user's table; empty for arrays."""
        if isinstance(self.features, ArrayEncoder):
            return []
        return [column.name for column in self.features]

    @property
    def feature_names(self) -> list[str]:
        """Names after encoding: "age", "city=Oslo"; "x0", "x1" … for an array's features or channels."""
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

    def transform(
        self, features: "pd.DataFrame | NDArray[Any]", rows: Rows | None = None
    ) -> NDArray[np.float64]:
        """Encode rows, each by itself.

        Args:
            features: A data frame with the training columns in any order, or an array `(n, …)` where
                it was fitted on one. Dropped columns may be there; the target's may, with a warning.
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

    def encode(
        self, features: "pd.DataFrame | NDArray[Any]", rows: Rows
    ) -> tuple[NDArray[np.float64], list[str]]:
        """Encode rows as `transform` does; return x and what is to be said about it."""
        if isinstance(self.features, ArrayEncoder) or isinstance(features, np.ndarray):
            return self._encode_array(features, rows)
        frame, remarks = self._select(features)
        missing = missing_values(frame, rows)
        if missing:
            if not self.impute:
                _require_complete(frame, rows)
            remarks.append(
                f"missing values were filled with the training mean or most frequent value: {missing}"
            )
        blocks = [column.encode(frame[column.name], rows) for column in self.features]
        return np.concatenate(blocks, axis=1), remarks

    def _encode_array(
        self, features: "pd.DataFrame | NDArray[Any]", rows: Rows
    ) -> tuple[NDArray[np.float64], list[str]]:
        if not isinstance(self.features, ArrayEncoder):
            raise DataError(
                f"the fit was on a table with columns {listed(self.columns)}; an array came"
            )
        if not isinstance(features, np.ndarray):
            raise DataError(
                f"the fit was on an array with rows of shape {self.features.shape}; a table came: "
                "pass an .npz file with the array under the key 'x'"
            )
        x = self.features.encode(features, rows)
        missing = np.isnan(features).any(tuple(range(1, features.ndim)))
        if missing.any():
            return x, [f"missing values in {rows.say(missing)} were filled with training means"]
        return x, []

    def _select(self, frame: "pd.DataFrame") -> "tuple[pd.DataFrame, list[str]]":
        given = [str(column) for column in frame.columns]
        absent = [column for column in self.columns if column not in given]
        if absent:
            raise DataError(f"column {listed(absent)} is missing; the rows have {listed(given)}")
        ignored = {*self.dropped, *self.target.names}
        unknown = [
            column for column in given if column not in self.columns and column not in ignored
        ]
        if unknown:
            raise DataError(
                f"column {listed(unknown)} was not there in training, whose features are "
                f"{listed(self.columns)}; take it out"
            )
        twice = sorted({column for column in given if given.count(column) > 1})
        if twice:
            raise DataError(f"more than one column is named {listed(twice)}; rename them")
        targets = [column for column in self.target.names if column in given]
        remarks = [f"the target {listed(targets)} in the rows is not used"] if targets else []
        return frame.set_axis(given, axis=1)[self.columns], remarks

    def encode_target(
        self, target: "pd.DataFrame | pd.Series[Any] | ArrayLike", rows: Rows | None = None
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

        names = self.target_names
        if isinstance(target, pd.DataFrame) and all(name in target.columns for name in names):
            frame = target[names]
        else:
            frame = pd.DataFrame(np.asarray(target).reshape(len(target), -1))  # type: ignore[arg-type]
            if frame.shape[1] != len(names):
                raise DataError(f"got {frame.shape[1]} target columns; expected {listed(names)}")
            frame = frame.set_axis(names, axis=1)
        return self.target.encode(frame, rows or Rows.counted(len(frame)))

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON values; floats keep every bit (Python writes the shortest exact form)."""
        if isinstance(self.features, ArrayEncoder):
            features: dict[str, Any] = {"array": _to_plain(asdict(self.features))}
        else:
            features = {"columns": [_to_plain(asdict(column)) for column in self.features]}
        return {
            "format": FORMAT,
            **features,
            "target": _to_plain(asdict(self.target)),
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
            target = dict(saved["target"])
            units = Units(**{k: np.asarray(v, np.float64) for k, v in target.pop("units").items()})
            target = {k: tuple(v) if isinstance(v, list) else v for k, v in target.items()}
            features: tuple[Column, ...] | ArrayEncoder
            if "array" in saved:
                array = saved["array"]
                features = ArrayEncoder(
                    tuple(array["shape"]),
                    np.asarray(array["loc"], np.float64),
                    np.asarray(array["scale"], np.float64),
                    tuple(array["constant"]),
                    array["impute"],
                )
            else:
                features = tuple(
                    Column(**{**column, "levels": tuple(column["levels"])})
                    for column in saved["columns"]
                )
            return cls(
                features, Target(units=units, **target), tuple(saved["dropped"]), saved["notes"]
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise FileError(f"the saved preprocessor lacks or misnames a field: {error}") from error


@dataclass(frozen=True)
class Dataset:
    """Training and test arrays, and the way back to the user's table.

    Attributes:
        x_train: float64, shape `(n_train, in_features)`, or an array's own shape.
        y_train: float64 `(n_train,)` or `(n_train, outputs)`, standardised where the target is real;
            int64 codes `(n_train,)` where it is a class.
        x_test: As `x_train`, with `n_test` rows.
        y_test: As `y_train`, with `n_test` rows.
        preprocessor: What encoded them.
        train_rows: Positions of the training rows in the table, counted from 0, ascending.
        test_rows: Positions of the test rows.
        name: The table's name.
    """

    x_train: NDArray[np.float64]
    y_train: NDArray[Any]
    x_test: NDArray[np.float64]
    y_test: NDArray[Any]
    preprocessor: Preprocessor
    train_rows: NDArray[np.int64]
    test_rows: NDArray[np.int64]
    name: str


def split_rows(
    n: int, *, test_fraction: float = 0.2, seed: int = 0, stratify: ArrayLike | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split row positions 0 … n − 1 at random into training and test rows, each ascending.

    Args:
        n: Number of rows.
        test_fraction: Share of test rows, rounded up to a row; 0 keeps all rows for training.
        seed: The same seed gives the same split.
        stratify: Classes, shape `(n,)`, whose shares both parts should keep.

    Raises:
        DataError: There are too few rows for a training and a test part, or an option is out of range.
    """
    if not 0 <= test_fraction < 1:
        raise DataError(f"test_fraction is {test_fraction}; expected at least 0 and below 1")
    if not 0 <= seed < 2**32:
        raise DataError(f"seed is {seed}; expected 0 to 2**32 - 1")
    positions = np.arange(n)
    if test_fraction == 0:
        return positions, positions[:0]
    n_test = int(np.ceil(test_fraction * n))
    if n_test == 0 or n_test >= n:
        raise DataError(
            f"{n} rows are too few for a test fraction of {test_fraction}; "
            "expected at least one training row and one test row"
        )
    from sklearn.model_selection import train_test_split

    train, test = train_test_split(
        positions, test_size=n_test, random_state=seed, stratify=stratify
    )
    return np.sort(train), np.sort(test)


def guess_target_kind(table: Table) -> Literal["class", "real"]:
    """What the target looks like, for hints in messages: text, true/false and categories are classes."""
    from pandas.api import types

    dtype = table.target.dtypes.iloc[0]
    number = types.is_numeric_dtype(dtype) and not types.is_bool_dtype(dtype)
    return "real" if number else "class"


def prepare(
    source: "str | Path | pd.DataFrame",
    target: str | Sequence[str] | None = None,
    *,
    target_kind: TargetKind,
    test_fraction: float = 0.2,
    seed: int = 0,
    impute: bool = False,
    drop: Sequence[str] = (),
) -> Dataset:
    """Read, check, split and encode a table.

    Args:
        source: A path, the name of a shipped set or a data frame, as in `read_table`.
        target: The target's column or columns, as in `read_table`.
        target_kind: "real", "class", "count" or "positive": what the model's y is. A class target
            is split so that both parts keep the shares of the classes, where each class has two rows.
        test_fraction: Share of test rows; 0 keeps all for training.
        seed: Fixes the split.
        impute: Fill missing features from the training rows; missing targets are always an error.
        drop: Feature columns to leave out.

    Raises:
        DataError: The table cannot be used as it is; one line names the column or the row.
    """
    table = read_table(source, target).without([drop] if isinstance(drop, str) else drop)
    if not impute and not isinstance(table.features, np.ndarray):
        # Before the split, so that the message has all rows; the statistics see the training rows only.
        _require_complete(table.features, table.rows)
    n, labels = len(table), None
    if target_kind == "class":
        labels = _strata(class_labels(table.target, table.rows), test_fraction)
    train, test = split_rows(n, test_fraction=test_fraction, seed=seed, stratify=labels)
    fitted = Preprocessor.fit(table, train, target_kind=target_kind, impute=impute)
    x, remarks = fitted.encode(table.features, table.rows)
    if labels is not None:
        remarks.append("the split keeps the shares of the classes in both parts")
    y_train, y_test = (
        fitted.encode_target(table.target.iloc[part], table.rows.take(part))
        for part in (train, test)
    )
    fitted = replace(fitted, notes=[*fitted.notes, *remarks])
    return Dataset(x[train], y_train, x[test], y_test, fitted, train, test, table.name)


def read_features(
    path: str | Path, preprocessor: Preprocessor
) -> "tuple[NDArray[np.float64], pd.DataFrame]":
    """Read new rows for prediction: columns in any order, with or without the target's.

    Returns:
        x, encoded as in training, `(n, in_features)` or the array's own shape, where n may be 0; and
        the rows as they were read, which for an `.npz` is a frame of n rows without columns.

    Raises:
        DataError: The file cannot be read, or its rows are not like those of training.
    """
    import pandas as pd

    encoder = preprocessor.features
    columns = () if isinstance(encoder, ArrayEncoder) else encoder
    levels = {column.name: column.levels for column in columns if column.kind == "category"}
    features, rows = read_features_file(path, levels)
    x = preprocessor.transform(features, rows)
    if isinstance(features, np.ndarray):
        return x, pd.DataFrame(index=range(len(features)))
    return x, features


def _strata(labels: Sequence[Label], test_fraction: float) -> NDArray[np.int64] | None:
    """Class codes to stratify a split by, None where a class or a part is too small for it."""
    _, codes, counts = np.unique(
        [str(label) for label in labels], return_inverse=True, return_counts=True
    )
    n_test = int(np.ceil(test_fraction * len(labels)))
    room = min(n_test, len(labels) - n_test)
    return codes if counts.min() >= 2 and room >= len(counts) else None


def _require_complete(features: "pd.DataFrame", rows: Rows) -> None:
    missing = missing_values(features, rows)
    if missing:
        raise DataError(f"there are missing values in {missing}; {IMPUTE}")


def _notes(fitted: Preprocessor, n_train: int) -> list[str]:
    """What the encoders did, one sentence for each thing."""
    encoder, notes = fitted.features, []
    if isinstance(encoder, ArrayEncoder):
        part = {1: "column", 2: "feature of a step", 3: "channel"}[len(encoder.shape)]
        notes.append(f"each {part} was standardised by {n_train} training rows")
        constant = [encoder.feature_names[i] for i in encoder.constant]
    else:
        numeric = [column.name for column in encoder if column.kind == "numeric"]
        if numeric:
            notes.append(f"{listed(numeric)} were standardised by {n_train} training rows")
        for column in encoder:
            if column.kind == "boolean":
                notes.append(f"{column.name!r} is 0 for false and 1 for true")
            if column.kind == "category":
                notes.append(f"{column.name!r} was one-hot encoded: {listed(column.feature_names)}")
        constant = [column.name for column in encoder if column.constant]
    if constant:
        notes.append(
            f"{listed(constant)} is constant in the training rows and tells nothing; "
            "it is kept, with scale 1"
        )
    if fitted.target_kind == "real":
        notes.append(f"the target {listed(fitted.target_names)} was standardised")
    return notes


def _to_plain(value: Any) -> Any:  # noqa: ANN401 (any JSON value)
    """Arrays and tuples as lists, throughout."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_to_plain(item) for item in value]
    return value
