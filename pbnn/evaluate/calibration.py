"""Does probability mean frequency: log predictive density, interval coverage, calibration error."""

import math

import torch
from torch import Tensor

from pbnn.errors import DataError

__all__ = ["expected_calibration_error", "interval_coverage", "log_predictive_density"]


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


def interval_coverage(lower: Tensor, upper: Tensor, y: Tensor) -> float:
    """Return the share of observations inside their intervals, ends included.

    Args:
        lower: Lower ends, shaped like y.
        upper: Upper ends, shaped like y.
        y: Observations; NaN is left out.

    Raises:
        DataError: Shapes differ, or there is no observation.
    """
    if not lower.shape == upper.shape == y.shape:
        raise DataError(
            f"intervals have shapes {tuple(lower.shape)} and {tuple(upper.shape)} for y of shape "
            f"{tuple(y.shape)}; expected one shape"
        )
    seen = ~y.isnan()
    if not seen.any():
        raise DataError("coverage of no observations; expected at least one row with y")
    return float(((lower <= y) & (y <= upper))[seen].double().mean())


def expected_calibration_error(probabilities: Tensor, y: Tensor, *, bins: int = 10) -> float:
    """Return the expected calibration error of the most probable class.

    The mean over equal-width bins of |accuracy − confidence|, weighted by the rows in each bin
    (Guo et al. 2017, eq. 3). Bins are half-open, [a, b); the last one is closed, so that a row of
    confidence exactly 1 counts.

    Args:
        probabilities: Class probabilities `(n, classes)`.
        y: Classes `(n,)`.
        bins: Number of bins.

    Raises:
        DataError: Shapes do not agree, or there are no rows.
    """
    if probabilities.ndim != 2 or y.shape != probabilities.shape[:1] or len(y) == 0:
        raise DataError(
            f"probabilities have shape {tuple(probabilities.shape)} and y {tuple(y.shape)}; "
            "expected (n, classes) and (n,) with at least one row"
        )
    confidence, best = probabilities.double().max(1)
    index = (confidence * bins).long().clamp(max=bins - 1)
    gap = (best == y).double() - confidence
    sums = torch.zeros(bins, dtype=torch.float64).index_add_(0, index, gap)
    return float(sums.abs().sum() / len(y))
