"""Rows unlike the training rows, made from the data themselves: held out before a fit, or shifted.

What is held out goes before a table is split, so that no statistic can come from it. What is
shifted moves in the scales that a `Preprocessor` took from its training rows, so that nothing can
come from the rows that are moved, or from other test rows.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from pbnn.data.arrays import ArrayEncoder
from pbnn.data.columns import numbers_of
from pbnn.data.preprocessor import Preprocessor
from pbnn.data.rows import Rows, listed
from pbnn.data.tables import Table
from pbnn.data.targets import class_labels
from pbnn.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

    Features = pd.DataFrame | NDArray[Any]

__all__ = ["SEVERITIES", "Shift", "hold_out_classes", "hold_out_gap", "shift", "shift_series"]

Shift = Literal["noise", "columns", "rotation"]
SEVERITIES = range(6)

# What one step of severity does; at 5, noise and columns are 2.5 training scales away.
SCALES = 0.5
DEGREES = 15.0


def hold_out_classes(table: Table, classes: Sequence[Any]) -> tuple[Table, Table]:
    """Split a table into the rows of all other classes, and those of some classes.

    Args:
        table: A table with a class target.
        classes: The labels that a fit shall never see, as numbers or as text.

    Returns:
        The rows inside, for fit and test, and the rows outside.

    Raises:
        DataError: A class is unknown, or fewer than two are left.
    """
    labels = np.asarray([str(label) for label in class_labels(table.target, table.rows)])
    chosen, known = [str(label) for label in classes], sorted(set(labels.tolist()))
    unknown = [label for label in chosen if label not in known]
    if unknown or not chosen:
        raise DataError(
            f"held-out class {listed(unknown) or 'none'}; expected some of {listed(known)}"
        )
    if len(known) - len(set(chosen)) < 2:
        raise DataError(
            f"holding out {listed(chosen)} of {listed(known)} leaves fewer than two classes"
        )
    return _parted(table, np.isin(labels, chosen))


def hold_out_gap(
    table: Table, column: str | int, between: tuple[float, float] = (1 / 3, 2 / 3)
) -> tuple[Table, Table]:
    """Split a table into the rows around a gap in one feature, and those in the gap.

    By default the gap is the middle third (Foong et al. 2019, "In-between uncertainty in Bayesian
    neural networks", section 4).

    Args:
        table: A table of features, or of an array `(n, d)`.
        column: A numeric feature, by name, or by position in an array.
        between: The quantiles between which the gap lies; 0 or 1 as an end puts the rows outside
            beyond all others.

    Returns:
        The rows inside, for fit and test, and the rows outside (in the gap).

    Raises:
        DataError: The column is unknown or not numeric, or nothing or all is in the gap.
    """
    low, high = between
    if not 0 <= low < high <= 1:
        raise DataError(f"between={between}; expected two rising quantiles from 0 to 1")
    values = _numbers(table, column)
    ends = np.nanquantile(values, between)
    outside = (values >= ends[0]) & (values <= ends[1])
    if outside.all() or not outside.any():
        raise DataError(
            f"column {column!r}: the gap from {ends[0]:g} to {ends[1]:g} holds "
            f"{'all' if outside.all() else 'no'} rows; choose another column or other quantiles"
        )
    return _parted(table, outside)


def shift(
    features: "Features",
    preprocessor: Preprocessor,
    kind: Shift,
    severity: float,
    *,
    image: tuple[int, int] | None = None,
    seed: int = 0,
) -> "Features":
    """Move rows away from the training rows, in the user's own units.

    "noise" adds Normal noise of half a training scale for each step of severity. "columns" moves
    every second numeric column (feature of a sequence, channel of an image), chosen by the seed, by
    half a training scale for each step, up or down. "rotation" turns images by 15 degrees for each
    step; what comes in from outside is 0. Columns that are not numeric stay as they are, and so
    do those that are constant in training.

    Args:
        features: Rows as they were read: a data frame, or an array `(n, …)`.
        preprocessor: What the training rows were encoded by; all scales are its own.
        kind: How to move them.
        severity: How far, 0 (not at all) and up; 5 is the usual end.
        image: Height and width, where the columns are the pixels of an image, row by row.
        seed: Seed of the noise and of the choice of columns: the same at every severity.

    Raises:
        DataError: The kind is unknown, does not suit the rows, or the severity is negative.
    """
    if kind not in get_args(Shift):
        raise DataError(f"shift {kind!r}; expected one of {listed(get_args(Shift))}")
    if not 0 <= severity < np.inf:
        raise DataError(f"severity {severity}; expected 0 or more")
    if kind == "rotation":
        return _over_values(features, preprocessor, lambda v: _rotated(v, severity, image))
    scale, rng = _scales(preprocessor), np.random.default_rng(seed)
    size = SCALES * severity
    if kind == "noise":
        return _over_values(
            features, preprocessor, lambda v: v + size * scale * rng.normal(size=v.shape)
        )
    moves = np.flatnonzero(scale)
    half = rng.choice(moves, -(-len(moves) // 2), replace=False)
    step = np.zeros(scale.size)
    step[half] = rng.choice([-size, size], len(half)) * scale.ravel()[half]
    return _over_values(features, preprocessor, lambda v: v + step.reshape(scale.shape))


def shift_series(
    features: "Features",
    preprocessor: Preprocessor,
    kind: Shift,
    *,
    severities: Sequence[float] = SEVERITIES,
    image: tuple[int, int] | None = None,
    seed: int = 0,
) -> dict[float, NDArray[np.float64]]:
    """Return the same rows, encoded, at growing severities of one shift; see `shift`.

    Severity 0 is the rows as they are; noise and choice of columns are the same at all of them.
    """
    rows = Rows.counted(len(features))

    def encoded(severity: float) -> NDArray[np.float64]:
        moved = shift(features, preprocessor, kind, severity, image=image, seed=seed)
        return preprocessor.encode(moved, rows)[0]

    return {severity: encoded(severity) for severity in severities}


def _parted(table: Table, outside: NDArray[np.bool_]) -> tuple[Table, Table]:
    def part(mask: NDArray[np.bool_]) -> Table:
        features: Any = table.features[mask]
        if not isinstance(features, np.ndarray):
            features = features.reset_index(drop=True)
        target = table.target[mask].reset_index(drop=True)
        return replace(table, features=features, target=target, rows=table.rows.take(mask))

    return part(~outside), part(outside)


def _numbers(table: Table, column: str | int) -> NDArray[np.float64]:
    """Return one numeric feature of a table, `(n,)`."""
    features = table.features
    if isinstance(features, np.ndarray):
        place = int(column) if str(column).removeprefix("x").isdigit() else -1
        if features.ndim != 2 or not 0 <= place < features.shape[1]:
            raise DataError(
                f"column {column!r} of an array of shape {features.shape}; expected the position "
                "of a column of an array (n, d)"
            )
        return features[:, place].astype(np.float64)
    if column not in features.columns:
        raise DataError(f"{table.name} has no column {column!r}; it has {listed(features.columns)}")
    return numbers_of(features[column], table.rows, "choose a numeric column for the gap")


def _scales(preprocessor: Preprocessor) -> NDArray[np.float64]:
    """Return training scales, of a shape that broadcasts against rows; 0 for what does not move."""
    encoder = preprocessor.features
    if isinstance(encoder, ArrayEncoder):
        scale = encoder.scale.copy()
        scale.reshape(-1)[list(encoder.constant)] = 0.0
        return scale
    moves = (column for column in encoder if column.kind == "numeric")
    return np.asarray([0.0 if column.constant else column.scale for column in moves])


def _over_values(features: "Features", preprocessor: Preprocessor, move: Any) -> "Features":
    """Move the numbers of rows: the numeric columns `(n, columns)` of a frame, or an array."""
    if isinstance(features, np.ndarray):
        return np.asarray(move(features.astype(np.float64)))
    encoder = preprocessor.features
    if isinstance(encoder, ArrayEncoder):
        raise DataError("the fit was on an array and a table came; pass the array")
    names = [column.name for column in encoder if column.kind == "numeric"]
    if not names:
        raise DataError("no feature column is numeric, so that none can be shifted")
    absent = [name for name in names if name not in features.columns]
    if absent:
        raise DataError(f"column {listed(absent)} is missing; it is one of those to shift")
    rows = Rows.counted(len(features))
    values = np.stack([numbers_of(features[name], rows) for name in names], axis=1)
    moved = features.copy()
    moved[names] = move(values)
    return moved


def _rotated(
    values: NDArray[np.float64], severity: float, image: tuple[int, int] | None
) -> NDArray[np.float64]:
    """Turn images `(n, channels, height, width)`, or `(n, height · width)` with `image`."""
    from scipy.ndimage import rotate  # type: ignore[import-untyped]

    shape = values.shape
    if image is not None and values.ndim == 2 and int(np.prod(image)) == shape[1]:
        values = values.reshape(-1, 1, *image)
    if values.ndim != 4:
        raise DataError(
            f"rows of shape {shape[1:]} are no images; expected (n, channels, height, width), or "
            "image=(height, width) for a column for each pixel"
        )
    turned = rotate(values, DEGREES * severity, axes=(2, 3), reshape=False, order=1)
    return np.asarray(turned.reshape(shape))
