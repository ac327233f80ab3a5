"""Bootstrap intervals: rows are resampled as counts, so that what is sorted is sorted once.

A statistic is a function of counts, how often each row was drawn; unit counts give the number
itself. `ranking` and `calibration` offer their numbers in this form.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from pbnn.errors import DataError
from pbnn.evaluate.arrays import Array, column

__all__ = ["Interval", "Mean", "Median", "Statistic", "bootstrap", "bootstrap_all"]

Statistic = Callable[[Array], Array]
"""Takes counts `(replicates, n)`, whole numbers, and returns one number for each replicate."""

# Counts held at once: 32 MB.
_BLOCK_VALUES = 2**22


@dataclass(frozen=True)
class Interval:
    """A number with its bootstrap interval.

    Attributes:
        value: The number on the rows as they are.
        low: Lower end of the interval.
        high: Upper end.
    """

    value: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether a value lies in the interval, ends included."""
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def bootstrap(
    statistic: Statistic,
    rows: int | Sequence[int],
    *,
    replicates: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Return a number and its percentile interval over resampled rows.

    See `bootstrap_all`, which does the same for several numbers.
    """
    options = {"replicates": replicates, "level": level, "seed": seed}
    return bootstrap_all({"": statistic}, rows, **options)[""]  # type: ignore[arg-type]


def bootstrap_all(
    statistics: Mapping[str, Statistic],
    rows: int | Sequence[int],
    *,
    replicates: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> dict[str, Interval]:
    """Return several numbers and their percentile intervals over the same resampled rows.

    (Efron & Tibshirani 1993, "An introduction to the bootstrap", section 13.3.) The interval says
    what other rows of the kind would have given. Replicates in which a number does not exist (a
    resample of one class) are left out of its interval.

    Args:
        statistics: Functions of counts, by name.
        rows: Number of rows; or those of several samples of fixed size, one after another, each
            resampled by itself.
        replicates: Number of resamples.
        level: Probability of the interval.
        seed: Seed of the resampling.

    Raises:
        DataError: A sample has no rows, or replicates or level are out of range.
    """
    sizes = [rows] if isinstance(rows, int) else list(rows)
    if not sizes or min(sizes) < 1:
        raise DataError(f"samples of {sizes} rows; expected at least one row in each")
    if replicates < 1 or not 0 < level < 1:
        raise DataError(
            f"replicates {replicates} and level {level}; expected at least 1, and between 0 and 1"
        )
    once = np.ones((1, sum(sizes)))
    values = {name: float(statistic(once)[0]) for name, statistic in statistics.items()}
    parts: dict[str, list[Array]] = {name: [] for name in statistics}
    for counts in _counts(sizes, replicates, np.random.default_rng(seed)):
        for name, statistic in statistics.items():
            parts[name].append(statistic(counts))
    tail = (1 - level) / 2
    found = {}
    for name, value in values.items():
        found[name] = Interval(value, *_ends(np.concatenate(parts[name]), tail))
    return found


def _ends(values: Array, tail: float) -> tuple[float, float]:
    """Return the order statistics that leave a tail on both sides; they may be infinite."""
    seen = values[~np.isnan(values)]
    if not len(seen):
        return np.nan, np.nan
    low, high = np.quantile(seen, [tail, 1 - tail], method="nearest")
    return float(low), float(high)


def _counts(
    sizes: Sequence[int], replicates: int, generator: np.random.Generator
) -> Iterator[Array]:
    """Yield blocks of counts `(block, sum of sizes)`, the same whatever the size of the block."""
    total = sum(sizes)
    size = max(1, _BLOCK_VALUES // total)
    for start in range(0, replicates, size):
        block = np.empty((min(size, replicates - start), total))
        for counts in block:
            first = 0
            for rows in sizes:
                drawn = generator.integers(rows, size=rows)
                counts[first : first + rows] = np.bincount(drawn, minlength=rows)
                first += rows
        yield block


class Mean:
    """The mean of values as a statistic.

    Args:
        values: One a row, `(n,)`.
    """

    def __init__(self, values: ArrayLike) -> None:
        found = column(values, "values")
        self._finite = np.where(np.isfinite(found), found, 0.0)
        self._infinite = {sign: found == sign for sign in (np.inf, -np.inf)}

    def __call__(self, counts: Array) -> Array:
        """Return the mean of each resample, `(replicates,)`."""
        total: Array = counts @ self._finite
        for sign, rows in self._infinite.items():
            # By hand: 0 · inf would be NaN where such a row was not drawn.
            if rows.any():
                total = np.where(counts[:, rows].any(1), sign, total)
        mean: Array = total / counts.sum(1)
        return mean


class Median:
    """The median of values as a statistic; of an even number, the mean of the middle two.

    Args:
        values: One a row, `(n,)`.
    """

    def __init__(self, values: ArrayLike) -> None:
        found = column(values, "values")
        self._order = np.argsort(found, kind="stable")
        self._sorted = found[self._order]

    def __call__(self, counts: Array) -> Array:
        """Return the median of each resample, `(replicates,)`."""
        reached = counts[:, self._order].cumsum(1)
        last = reached[:, -1:] - 1
        low, high = (
            self._sorted[(reached > np.floor(half)).argmax(1)]
            for half in (last / 2, (last + 1) / 2)
        )
        middle: Array = low / 2 + high / 2  # halves of infinities may be added
        return middle
