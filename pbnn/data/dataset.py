"""From a source to training and test arrays in one call, and new rows for prediction."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pbnn.data.arrays import ArrayEncoder
from pbnn.data.columns import is_categorical
from pbnn.data.preprocessor import Preprocessor
from pbnn.data.tables import Table, read_rows, read_table
from pbnn.data.targets import Label, TargetKind, class_labels
from pbnn.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Dataset", "guess_target_kind", "prepare", "read_features", "split_rows"]


@dataclass(frozen=True)
class Dataset:
    """Training and test arrays, and the way back to the user's table.

    Attributes:
        x_train: float64, shape `(n_train, in_features)`, or an array's own shape.
        y_train: float64 `(n_train,)` or `(n_train, outputs)`, standardised where the target is
            real; int64 codes `(n_train,)` where it is a class.
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


def prepare(
    source: "str | Path | pd.DataFrame | Table",
    target: str | Sequence[str] | None = None,
    *,
    target_kind: TargetKind,
    test_fraction: float = 0.2,
    seed: int = 0,
    impute: bool = False,
    drop: Sequence[str] = (),
    categorical: Sequence[str] = (),
) -> Dataset:
    """Read, check, split and encode a table.

    Args:
        source: A path, the name of a shipped set or a data frame, as in `read_table`; or what it
            returned, which has its target and categories already.
        target: The target's column or columns, as in `read_table`.
        target_kind: What the model's y is: "real", "class", "count" or "positive". The split of a
            class target keeps the shares of the classes, where each class has two rows.
        test_fraction: Share of test rows; 0 keeps all for training.
        seed: Fixes the split.
        impute: Fill missing features from the training rows; missing targets are always an error.
        drop: Feature columns to leave out.
        categorical: Columns whose values are categories, whatever they look like.

    Raises:
        DataError: The table cannot be used as it is; one line names the column or the row.
    """
    drop, categorical = ([c] if isinstance(c, str) else list(c) for c in (drop, categorical))
    if not isinstance(source, Table):
        source = read_table(source, target, categorical=categorical)
    elif target or categorical:
        raise DataError(
            f"{source.name} was read already; give read_table its target and categories"
        )
    table = source.without(drop)
    strata = None
    if target_kind == "class":
        strata = _strata(class_labels(table.target, table.rows), test_fraction)
    train, test = split_rows(len(table), test_fraction=test_fraction, seed=seed, stratify=strata)
    fitted = Preprocessor.fit(table, train, target_kind=target_kind, impute=impute)
    x, remarks = fitted.encode(table.features, table.rows)
    if strata is not None:
        remarks.append("the training and test rows have the same shares of the classes")
    y_train, y_test = (
        fitted.encode_target(table.target.iloc[part], table.rows.take(part))
        for part in (train, test)
    )
    fitted = replace(fitted, notes=[*fitted.notes, *remarks])
    return Dataset(x[train], y_train, x[test], y_test, fitted, train, test, table.name)


def read_features(
    path: str | Path, preprocessor: Preprocessor
) -> "tuple[NDArray[np.float64], pd.DataFrame]":
    """Read new rows for prediction: columns in any order, the target's needless.

    Returns:
        x, encoded as in training, `(n, in_features)` or the array's own shape, where n may be 0;
        and the rows as they were read, which for an `.npz` are a frame of n rows without columns.

    Raises:
        DataError: The file cannot be read, or its rows are not like those of training.
    """
    import pandas as pd

    encoder = preprocessor.features
    columns = () if isinstance(encoder, ArrayEncoder) else encoder
    levels = {column.name: column.levels for column in columns if column.kind == "category"}
    features, rows = read_rows(path, levels)
    x = preprocessor.transform(features, rows)
    frame = pd.DataFrame(index=range(len(x))) if isinstance(features, np.ndarray) else features
    return x, frame


def split_rows(
    n: int, *, test_fraction: float = 0.2, seed: int = 0, stratify: ArrayLike | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split row positions 0 … n − 1 at random into training and test rows, each ascending.

    Args:
        n: Number of rows.
        test_fraction: Share of test rows, rounded up to a row; 0 keeps all rows for training.
        seed: The same seed gives the same split.
        stratify: Classes, shape `(n,)`, whose shares both parts keep.

    Raises:
        DataError: There are too few rows for both parts, or an option is out of range.
    """
    if not 0 <= test_fraction < 1:
        raise DataError(f"the test fraction is {test_fraction}; expected 0 or more and below 1")
    if not 0 <= seed < 2**32:
        raise DataError(f"the seed is {seed}; expected 0 to 2**32 - 1")
    positions = np.arange(n)
    if test_fraction == 0:
        return positions, positions[:0]
    n_test = math.ceil(test_fraction * n)
    if n_test == 0 or n_test >= n:
        raise DataError(
            f"{n} rows are too few for a test fraction of {test_fraction}; expected at least one "
            "training row and one test row"
        )
    from sklearn.model_selection import train_test_split

    try:
        train, test = train_test_split(
            positions, test_size=n_test, random_state=seed, stratify=stratify
        )
    except ValueError as error:
        raise DataError(f"the rows cannot be split by class: {error}") from error
    return np.sort(train), np.sort(test)


def guess_target_kind(table: Table) -> Literal["class", "real"]:
    """What the target looks like, as a hint: text, true or false and categories are classes."""
    from pandas.api import types

    series = table.target.iloc[:, 0]
    number = types.is_numeric_dtype(series.dtype) and not types.is_bool_dtype(series.dtype)
    return "real" if number and not is_categorical(series) else "class"


def _strata(labels: Sequence[Label], test_fraction: float) -> NDArray[np.int64] | None:
    """Class codes to split by; None where a class, or a part of the split, is too small for it."""
    _, codes, counts = np.unique(
        [str(label) for label in labels], return_inverse=True, return_counts=True
    )
    n_test = math.ceil(test_fraction * len(labels))
    room = min(n_test, len(labels) - n_test)
    return codes if counts.min() >= 2 and room >= len(counts) else None
