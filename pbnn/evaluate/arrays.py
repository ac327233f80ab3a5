"""Arrays at the door of the metrics: shapes, missing values, class probabilities checked.

No torch: plots read scores, too.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pbnn.errors import DataError

__all__ = ["Array", "column", "probabilities_and_classes", "same_rows"]

Array = NDArray[np.float64]

# Class probabilities of float32 lie between 0 and 1, and sum to 1, up to this.
_SUM = 1e-3


def column(values: ArrayLike, name: str) -> Array:
    """Return values as float64 `(n,)`.

    Args:
        values: Numbers or truth values, one a row.
        name: What they are called in messages.

    Raises:
        DataError: The shape is another, there are no rows, or a value is NaN.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array):
        raise DataError(f"{name} has shape {array.shape}; expected (n,) with at least one row")
    missing = np.flatnonzero(np.isnan(array))
    if len(missing):
        raise DataError(
            f"{name} is NaN in row {missing[0]} ({len(missing)} of {len(array)} rows); leave those "
            "rows out"
        )
    return array


def same_rows(**columns: NDArray[Any]) -> None:
    """Refuse columns of different shapes.

    Raises:
        DataError: The shapes differ.
    """
    shapes = {name: value.shape for name, value in columns.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise DataError(f"shapes differ: {listed}; expected one shape")


def probabilities_and_classes(
    probabilities: ArrayLike, y: ArrayLike
) -> tuple[Array, NDArray[np.int64]]:
    """Return class probabilities `(n, classes)` in float64, and classes `(n,)`.

    Raises:
        DataError: Shapes do not agree, there are no rows, the probabilities are none, or y names a
            class that they lack.
    """
    p, classes = np.asarray(probabilities, dtype=np.float64), np.asarray(y)
    if p.ndim != 2 or classes.shape != p.shape[:1] or not len(p):
        raise DataError(
            f"probabilities have shape {p.shape} and y {classes.shape}; "
            "expected (n, classes) and (n,) with at least one row"
        )
    # Not "outside": NaN is refused, too.
    wrong = ~((p >= -_SUM).all(1) & (np.abs(p.sum(1) - 1) <= _SUM))
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(
            f"probabilities of row {row} are {p[row].round(4).tolist()}; expected numbers from 0 "
            "that sum to 1: pass probabilities, not logits"
        )
    whole = np.asarray(classes, dtype=np.int64) if np.isfinite(classes).all() else None
    if whole is None or (whole != classes).any() or whole.min() < 0 or whole.max() >= p.shape[1]:
        raise DataError(
            f"y has values {np.unique(classes)[:10].tolist()}; expected classes from 0 to "
            f"{p.shape[1] - 1}"
        )
    return p.clip(0.0, 1.0), whole
