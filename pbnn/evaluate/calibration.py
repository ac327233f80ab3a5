"""Does probability mean frequency: log densities, Brier, ECE, CRPS, intervals and PIT.

Functions that return `(n,)` score each row, and the score of a data set is their mean: resample it
by `pbnn.evaluate.bootstrap.Mean`. Lower is better for all of these but the log predictive density.
"""

import math
from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from pbnn.errors import DataError
from pbnn.evaluate.arrays import Array, column, probabilities_and_classes, same_rows

__all__ = [
    "CalibrationError",
    "CoverageCurve",
    "brier_score",
    "coverage_curve",
    "crps_normal_mixture",
    "crps_samples",
    "expected_calibration_error",
    "interval_coverage",
    "interval_score",
    "log_predictive_density",
    "negative_log_likelihood",
    "pit_normal_mixture",
    "pit_samples",
    "sharpness",
]

# Pairs of draws held at once: 32 MB.
_BLOCK_VALUES = 2**22


def log_predictive_density(log_likelihood: Tensor) -> Tensor:
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
        self._bin = np.stack([_bins(column, bins, binning) for column in confidence])
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


def _bins(confidence: Array, bins: int, binning: str) -> NDArray[np.int64]:
    """Return the bin of each confidence; all but the last are half-open, [a, b)."""
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
        DataError: Shapes differ, or there is no observation.
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


def crps_normal_mixture(locations: ArrayLike, scales: ArrayLike, y: ArrayLike) -> Array:
    """Return the continuous ranked probability score of equal mixtures of Normals, `(n,)`.

    mean_s A(y − μ_s, σ_s²) − ½ mean_st A(μ_s − μ_t, σ_s² + σ_t²), with
    A(μ, σ²) = 2σφ(μ/σ) + μ(2Φ(μ/σ) − 1): exact (Grimit et al. 2006, eq. 5). It takes draws² steps
    a row; `crps_samples` takes draws · log draws.

    Args:
        locations: Means of the components `(draws, n)`.
        scales: Their standard deviations, likewise, or `(draws, 1)`; 0 is a point mass.
        y: Observations `(n,)`.

    Raises:
        DataError: Shapes do not agree, or a value is NaN.
    """
    mean, scale, seen = _components(locations, scales, y)
    out = np.empty(len(seen))
    for row, (m, s) in enumerate(zip(mean.T, scale.T, strict=True)):
        out[row] = _folded(seen[row] - m, s).mean()
        block = max(1, _BLOCK_VALUES // len(m))
        pairs = sum(
            _folded(m[k : k + block, None] - m, np.hypot(s[k : k + block, None], s)).sum()
            for k in range(0, len(m), block)
        )
        out[row] -= pairs / (2 * len(m) ** 2)
    return out


def _folded(mean: Array, scale: Array) -> Array:
    """Return E|z| of z ~ Normal(mean, scale)."""
    from scipy.special import ndtr  # type: ignore[import-untyped]

    safe = np.where(scale > 0, scale, 1.0)
    z = mean / safe
    smooth = 2 * safe * np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi) + mean * (2 * ndtr(z) - 1)
    return np.where(scale > 0, smooth, np.abs(mean))


def _components(
    locations: ArrayLike, scales: ArrayLike, y: ArrayLike
) -> tuple[Array, Array, Array]:
    mean, seen = _draws(locations, y)
    scale = np.asarray(scales, dtype=np.float64)
    if scale.shape not in (mean.shape, (len(mean), 1)) or not (scale >= 0).all():
        raise DataError(
            f"scales have shape {scale.shape} and a least value of {scale.min(initial=np.inf):g}; "
            f"expected {mean.shape}, as the locations, and no value below 0"
        )
    return mean, np.broadcast_to(scale, mean.shape), seen


def _draws(draws: ArrayLike, y: ArrayLike) -> tuple[Array, Array]:
    values, seen = np.asarray(draws, dtype=np.float64), column(y, "y")
    if values.ndim != 2 or values.shape[1] != len(seen) or not len(values):
        raise DataError(
            f"draws have shape {values.shape} and y {seen.shape}; expected (draws, n) and (n,)"
        )
    if np.isnan(values).any():
        raise DataError(f"draws are NaN in row {int(np.isnan(values).any(0).argmax())}")
    return values, seen


def crps_samples(samples: ArrayLike, y: ArrayLike, *, fair: bool = False) -> Array:
    """Return the continuous ranked probability score of predictive samples, `(n,)`.

    mean_s |x_s − y| − ½ mean_st |x_s − x_t|, the score of their empirical distribution (Gneiting &
    Raftery 2007, eq. 21).

    Args:
        samples: Predictive samples `(draws, n)`.
        y: Observations `(n,)`.
        fair: Whether the pairs are averaged over s ≠ t alone: then samples of any number estimate
            the score of the distribution that they come from without bias (Ferro 2014).

    Raises:
        DataError: Shapes do not agree, a value is NaN, or a fair score of one draw.
    """
    x, seen = _draws(samples, y)
    count = len(x)
    if fair and count < 2:
        raise DataError("a fair score of 1 draw; expected at least 2 draws")
    # Of sorted values the k-th is above k and below count − 1 − k others.
    weights = 2 * np.arange(count) - count + 1
    spread = weights @ np.sort(x, 0) / (count * (count - 1 if fair else count))
    score: Array = np.abs(x - seen).mean(0) - spread
    return score


def pit_normal_mixture(locations: ArrayLike, scales: ArrayLike, y: ArrayLike) -> Array:
    """Return the predictive probability of less than y under mixtures of Normals, `(n,)`.

    Uniform on [0, 1] where the predictive distribution is right (Dawid 1984).

    Args:
        locations: Means of the components `(draws, n)`.
        scales: Their standard deviations, likewise, or `(draws, 1)`; 0 is a point mass.
        y: Observations `(n,)`.

    Raises:
        DataError: Shapes do not agree, or a value is NaN.
    """
    from scipy.special import ndtr

    mean, scale, seen = _components(locations, scales, y)
    gap = seen - mean
    safe = np.where(scale > 0, scale, 1.0)
    below: Array = np.where(scale > 0, ndtr(gap / safe), 0.5 + 0.5 * np.sign(gap)).mean(0)
    return below


def pit_samples(samples: ArrayLike, y: ArrayLike) -> Array:
    """Return the share of predictive samples below y, ties half, `(n,)`.

    Args:
        samples: Predictive samples `(draws, n)`.
        y: Observations `(n,)`.

    Raises:
        DataError: Shapes do not agree, or a value is NaN.
    """
    x, seen = _draws(samples, y)
    share: Array = (x < seen).mean(0) + 0.5 * (x == seen).mean(0)
    return share


class CoverageCurve:
    """How far central intervals of all probabilities cover what they say, from PIT values.

    The central interval of probability p holds y where |2 PIT − 1| <= p. Outputs of a row share its
    count.

    Args:
        pit: PIT values `(n,)` or `(n, outputs)`, NaN where y is missing; see `pit_samples`.

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
