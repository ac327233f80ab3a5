"""Where y falls in its predictive distribution: CRPS and PIT, of Normal mixtures and of samples."""

import math

import numpy as np
from numpy.typing import ArrayLike

from pbnn.errors import DataError
from pbnn.evaluate.arrays import Array, column

__all__ = ["crps_normal_mixture", "crps_samples", "pit_normal_mixture", "pit_samples"]

# Pairs of draws held at once: 32 MB.
_BLOCK_VALUES = 2**22


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
