"""The field of uncertainty over the inputs: on a grid, along rays, and against the training set."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from pbnn.errors import DataError
from pbnn.evaluate.arrays import Array, column, same_rows
from pbnn.model import Data, indexable, leaves

__all__ = ["Slope", "distance_to_training", "grid_rows", "input_columns", "ray_rows"]


def grid_rows(
    training: ArrayLike,
    *,
    features: Sequence[int] = (0,),
    reach: float = 2.0,
    points: int = 41,
) -> Array:
    """Return rows on a grid over one or two features, the others at their training means.

    Args:
        training: Training rows `(n, features)`.
        features: Columns that vary, one or two.
        reach: Half width of the grid, in half ranges of the training rows: 1 just covers them.
        points: Points along each column.

    Returns:
        `(points ** len(features), features)`; of two columns the second one varies fastest.

    Raises:
        DataError: The training rows are no table, or lack a column.
    """
    rows = _table(training)
    if not 1 <= len(features) <= 2 or any(not 0 <= k < rows.shape[1] for k in features):
        raise DataError(
            f"features {list(features)}; expected one or two columns from 0 to {rows.shape[1] - 1}"
        )
    low, high = rows.min(0), rows.max(0)
    middle, half = (low + high) / 2, reach * (high - low) / 2
    lines = [np.linspace(middle[k] - half[k], middle[k] + half[k], points) for k in features]
    grid = np.stack([line.ravel() for line in np.meshgrid(*lines, indexing="ij")], 1)
    out = np.tile(rows.mean(0), (len(grid), 1))
    out[:, list(features)] = grid
    return out


def ray_rows(
    training: ArrayLike, *, rays: int = 8, reach: float = 5.0, points: int = 26, seed: int = 0
) -> tuple[Array, Array]:
    """Return rows along rays that leave the data: from the training mean, in random directions.

    Args:
        training: Training rows `(n, features)`.
        rays: Number of rays.
        reach: Where they end, in training scales (root mean square over features).
        points: Points along each ray.
        seed: Seed of the directions.

    Returns:
        Rows `(rays, points, features)`, and how far from the mean they are, `(points,)`, in
        training scales.

    Raises:
        DataError: The training rows are no table.
    """
    rows = _table(training)
    steps = np.random.default_rng(seed).normal(size=(rays, 1, rows.shape[1]))
    # A direction of unit root mean square, so that a step does not depend on the dimension.
    steps /= np.sqrt(np.square(steps).mean(-1, keepdims=True))
    away = np.linspace(0.0, reach, points)
    return rows.mean(0) + away[:, None] * steps * rows.std(0), away


def _table(training: ArrayLike) -> Array:
    rows = np.asarray(training, dtype=np.float64)
    if rows.ndim != 2 or not len(rows):
        raise DataError(
            f"training rows have shape {rows.shape}; expected (n, features) with at least one row"
        )
    return rows


def distance_to_training(x: Data, training: Data) -> Array:
    """Return the distance of each row to its nearest training row, `(n,)`.

    Features are divided by their training scales, and the distance is the root mean square over
    them: 1 is one training scale away in every feature. Features that are constant in training keep
    their own unit.

    Args:
        x: Rows `(n, …)`, or a dict of inputs, of which the floating ones count.
        training: Training rows, likewise.

    Raises:
        DataError: No input is floating-point, or the rows differ in shape.
    """
    from sklearn.neighbors import NearestNeighbors  # a tree, or products where features are many

    rows, data = input_columns(x), input_columns(training)
    if rows.shape[1] != data.shape[1]:
        raise DataError(
            f"rows have {rows.shape[1]} values and training rows {data.shape[1]}; expected the "
            "same inputs"
        )
    scale = data.std(0)
    # The mean of equal numbers may differ from them: the scale of a constant is rounding error.
    scale[scale <= 1e-12 * np.abs(data).max(0)] = 1.0
    nearest = NearestNeighbors(n_neighbors=1).fit(data / scale).kneighbors(rows / scale)[0][:, 0]
    return np.asarray(nearest / rows.shape[1] ** 0.5, dtype=np.float64)


def input_columns(x: Data) -> Array:
    """Return the floating inputs of rows side by side, `(n, values)`.

    Args:
        x: Rows `(n, …)`, or a dict of inputs.

    Raises:
        DataError: No input is floating-point.
    """
    parts = []
    for _, value in leaves(indexable(x)):
        array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
        if np.issubdtype(array.dtype, np.floating):
            parts.append(array.reshape(len(array), -1).astype(np.float64))
    if not parts:
        raise DataError("no input is floating-point; expected numbers to measure distances by")
    return np.concatenate(parts, 1)


class Slope:
    """The slope of the least-squares line of y on x as a function of counts.

    Args:
        x: One number a row, `(n,)`.
        y: Another, `(n,)`.

    Raises:
        DataError: Shapes differ, or a value is NaN.
    """

    def __init__(self, x: ArrayLike, y: ArrayLike) -> None:
        self._x, self._y = column(x, "x"), column(y, "y")
        same_rows(x=self._x, y=self._y)

    def __call__(self, counts: Array) -> Array:
        """Return the slope in each resample, `(replicates,)`; NaN where x is constant."""
        total = counts.sum(1)
        # Deviations from the mean of all rows lose nothing when rows are far from 0.
        x, y = self._x - self._x.mean(), self._y - self._y.mean()
        products = (counts @ (x * y)) - (counts @ x) * (counts @ y) / total
        squares = (counts @ x**2) - (counts @ x) ** 2 / total
        varies = squares > 1e-12 * total * np.square(x).max()
        slope: Array = np.where(varies, products / np.where(varies, squares, 1.0), np.nan)
        return slope
