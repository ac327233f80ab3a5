"""Does probability mean frequency: log densities, Brier, ECE, intervals and their coverage.

Functions that return `(n,)` score each row, and the score of a data set is their mean: resample it
by `pbnn.evaluate.bootstrap.Mean`. Lower is better for all of these but the log predictive density.
"""

import math
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pbnn.errors import DataError
from pbnn.evaluate.arrays import Array, column, probabilities_and_classes, same_rows

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "CalibrationError",
    "CoverageCurve",
    "brier_score",
    "confidence_bins",
    "coverage_curve",
    "expected_calibration_error",
    "interval_coverage",
    "interval_score",
    "log_predictive_density",
    "negative_log_likelihood",
    "sharpness",
]


def log_predictive_density(log_likelihood: "Tensor") -> "Tensor":
    """Return the log of the mean over draws of each row's likelihood.

    Never the likelihood of the mean: log p(y | D) = log 1/S Σ_s p(y | θ_s) (Gelman et al. 2014,
    "Understanding predictive information criteria", eq. 5).

    Args:
        log_likelihood: `(chain, draw, n)`.

    Returns:
        `(n,)`, in float64.

    Raises:
        DataError: The shape is another.
    """
    import torch  # here, so that plots do without it

    if log_likelihood.ndim != 3:
        raise DataError(
            f"log_likelihood has shape {tuple(log_likelihood.shape)}; expected (chain, draw, n)"
        )
    flat = log_likelihood.double().flatten(0, 1)
    return torch.logsumexp(flat, 0) - math.log(len(flat))


def negative_log_likelihood(probabilities: ArrayLike, y: ArrayLike) -> Array:
    """Return −log of the probability of each row's class, `(n,)`, in nats.

    Args:
        probabilities: Class probabilities `(n, classes)`, averaged over draws.
        y: Classes `(n,)`, counted from 0.

    Raises:
        DataError: Shapes do not agree, or the values are no probabilities and classes.
    """
    p, classes = probabilities_and_classes(probabilities, y)
    with np.errstate(divide="ignore"):
        return -np.log(p[np.arange(len(p)), classes])


def brier_score(probabilities: ArrayLike, y: ArrayLike) -> Array:
    """Return Σ_k (p_k − [y = k])² of each row, `(n,)`, from 0 to 2 (Brier 1950, eq. 2).

    For two classes it is twice the score of class 1 alone.

    Args:
        probabilities: Class probabilities `(n, classes)`, averaged over draws.
        y: Classes `(n,)`, counted from 0.

    Raises:
        DataError: Shapes do not agree, or the values are no probabilities and classes.
    """
    p, classes = probabilities_and_classes(probabilities, y)
    score: Array = np.square(p - np.eye(p.shape[1])[classes]).sum(1)
    return score


class CalibrationError:
    """Expected calibration error as a function of counts, for `pbnn.evaluate.bootstrap`.

    The mean over bins of |accuracy − confidence|, weighted by the rows in each bin (Guo et al.
    2017, eq. 3); with `classwise`, of |frequency of a class − its probability|, averaged over all
    classes (Kull et al. 2019, section 2). Bins are half-open, [a, b); the last one is closed, so
    that a row of confidence exactly 1 counts. It is biased upwards for few rows.

    Args:
        probabilities: Class probabilities `(n, classes)`.
        y: Classes `(n,)`, counted from 0.
        bins: Number of bins.
        binning: "width" for bins of equal width; "mass" for bins between the quantiles of the
            confidences of all rows (Nixon et al. 2019), where equal confidences share a bin.
        classwise: Whether all classes are looked at, not the most probable one alone.

    Raises:
        DataError: Shapes do not agree, the values are no probabilities and classes, or the bins are
            none.
    """

    def __init__(
        self,
        probabilities: ArrayLike,
        y: ArrayLike,
        *,
        bins: int = 10,
        binning: Literal["width", "mass"] = "width",
        classwise: bool = False,
    ) -> None:
        p, classes = probabilities_and_classes(probabilities, y)
        if bins < 1 or binning not in ("width", "mass"):
            raise DataError(
                f"bins {bins} and binning {binning!r}; expected at least 1, and 'width' or 'mass'"
            )
        if classwise:
            confidence, right = p.T, np.eye(p.shape[1])[classes].T
        else:
            confidence, right = p.max(1)[None], (p.argmax(1) == classes)[None]
        self._gap = right - confidence
        self._bin = np.stack([confidence_bins(column, bins, binning) for column in confidence])
        self._bins = bins

    def __call__(self, counts: Array | None = None) -> Array:
        """Return the error in each resample of rows, `(replicates,)`."""
        rows = self._gap.shape[1]
        counts = np.ones((1, rows)) if counts is None else counts
        total = np.zeros(len(counts))
        for gap, place in zip(self._gap, self._bin, strict=True):
            by_bin = np.zeros((rows, self._bins))
            by_bin[np.arange(rows), place] = gap
            total += np.abs(counts @ by_bin).sum(1)
        error: Array = total / counts.sum(1) / len(self._gap)
        return error


def confidence_bins(confidence: Array, bins: int, binning: str = "width") -> NDArray[np.int64]:
    """Return the bin of each confidence; all but the last are half-open, [a, b).

    Args:
        confidence: Probabilities `(n,)`.
        bins: Number of bins.
        binning: "width" or "mass", as for `CalibrationError`.
    """
    if binning == "width":
        inner = np.arange(1, bins) / bins
    else:
        inner = np.quantile(confidence, np.arange(1, bins) / bins)
    return np.searchsorted(inner, confidence, side="right")


def expected_calibration_error(
    probabilities: ArrayLike,
    y: ArrayLike,
    *,
    bins: int = 10,
    binning: Literal["width", "mass"] = "width",
    classwise: bool = False,
) -> float:
    """Return the expected calibration error; see `CalibrationError`."""
    error = CalibrationError(probabilities, y, bins=bins, binning=binning, classwise=classwise)
    return float(error()[0])


def interval_coverage(lower: ArrayLike, upper: ArrayLike, y: ArrayLike) -> float:
    """Return the share of observations inside their intervals, ends included.

    Args:
        lower: Lower ends, shaped like y.
        upper: Upper ends, shaped like y.
        y: Observations; NaN is left out.

    Raises:
        DataError: Shapes differ, there is no observation, or an end of one is NaN.
    """
    low, high, seen = (np.asarray(value, dtype=np.float64) for value in (lower, upper, y))
    if not low.shape == high.shape == seen.shape:
        raise DataError(
            f"intervals have shapes {low.shape} and {high.shape} for y of shape {seen.shape}; "
            "expected one shape"
        )
    there = ~np.isnan(seen)
    if not there.any():
        raise DataError("coverage of no observations; expected at least one row with y")
    for name, end in (("lower", low), ("upper", high)):
        column(np.where(there, end, 0.0).max(tuple(range(1, end.ndim))), name)  # refuses NaN
    return float(((low <= seen) & (seen <= high))[there].mean())


def interval_score(lower: ArrayLike, upper: ArrayLike, y: ArrayLike, *, level: float) -> Array:
    """Return the width of each interval and 2 / α times what y lies outside of it, `(n,)`.

    α = 1 − level; proper for central intervals (Gneiting & Raftery 2007, eq. 43).

    Args:
        lower: Lower ends `(n,)`.
        upper: Upper ends `(n,)`.
        y: Observations `(n,)`.
        level: Probability of the intervals.

    Raises:
        DataError: Shapes differ, a value is NaN, or level is none.
    """
    low, high, seen = column(lower, "lower"), column(upper, "upper"), column(y, "y")
    same_rows(lower=low, upper=high, y=seen)
    if not 0 < level < 1:
        raise DataError(f"level {level}; expected a probability between 0 and 1")
    outside = np.maximum(low - seen, 0) + np.maximum(seen - high, 0)
    return (high - low) + 2 / (1 - level) * outside


def sharpness(lower: ArrayLike, upper: ArrayLike) -> Array:
    """Return the width of each interval, `(n,)`: a property of the predictions, whatever y is.

    Sharper is better among the calibrated (Gneiting, Balabdaoui & Raftery 2007, section 3).

    Args:
        lower: Lower ends `(n,)`.
        upper: Upper ends `(n,)`.

    Raises:
        DataError: Shapes differ, or a value is NaN.
    """
    low, high = column(lower, "lower"), column(upper, "upper")
    same_rows(lower=low, upper=high)
    return high - low


class CoverageCurve:
    """How far central intervals of all probabilities cover what they say, from PIT values.

    The central interval of probability p holds y where |2 PIT − 1| <= p. Outputs of a row share its
    count.

    Args:
        pit: PIT values `(n,)` or `(n, outputs)`, NaN where y is missing; see `pbnn.evaluate.crps`.

    Raises:
        DataError: The shape is another, a row has no value, or one lies outside 0 to 1.
    """

    def __init__(self, pit: ArrayLike) -> None:
        values = np.asarray(pit, dtype=np.float64)
        if values.ndim not in (1, 2) or not values.size:
            raise DataError(f"pit has shape {values.shape}; expected (n,) or (n, outputs)")
        values = values.reshape(len(values), -1)
        missing = np.isnan(values)
        if missing.all(1).any() or not ((values >= 0) & (values <= 1) | missing).all():
            raise DataError("pit has a row without a value, or values outside 0 to 1")
        self._reach = np.abs(2 * values - 1)

    def coverage(self, level: float) -> Array:
        """Return the share of each row's outputs in their central interval, `(n,)`."""
        seen = ~np.isnan(self._reach)
        share: Array = ((self._reach <= level) & seen).sum(1) / seen.sum(1)
        return share

    def error(self, counts: Array | None = None) -> Array:
        """Return the mean over levels 0.05, 0.1, …, 0.95 of |coverage − level|."""
        counts = np.ones((1, len(self._reach))) if counts is None else counts
        levels = np.arange(1, 20) / 20
        inside = np.stack([self.coverage(level) for level in levels], 1)
        covered = counts @ inside / counts.sum(1, keepdims=True)
        error: Array = np.abs(covered - levels).mean(1)
        return error


def coverage_curve(pit: ArrayLike, levels: ArrayLike | None = None) -> tuple[Array, Array]:
    """Return probabilities of central intervals, and the share of rows inside each.

    Args:
        pit: PIT values `(n,)` or `(n, outputs)`.
        levels: Probabilities; by default 0, 0.01, …, 1.

    Raises:
        DataError: The shape is another, or a value lies outside 0 to 1.
    """
    curve = CoverageCurve(pit)
    at = np.linspace(0, 1, 101) if levels is None else column(levels, "levels")
    return at, np.array([curve.coverage(level).mean() for level in at])
