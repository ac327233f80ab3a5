"""Pareto-smoothed importance sampling, through whichever ArviZ is there; no torch."""

from importlib import import_module

import numpy as np
from numpy.typing import NDArray

__all__ = ["TRUSTED_K", "pareto_k", "smoothed"]

TRUSTED_K = 0.7
"""Above it, estimates from the weights are not to be trusted (Vehtari et al. 2024, section 3)."""
_FEWEST = 25
"""With fewer weights the tail is too short for a fit."""


def pareto_k(log_weights: NDArray[np.float64]) -> float:
    """Return the shape k of the Pareto tail of importance weights.

    Below 0.5 the weights have a finite variance, above 0.7 estimates from them are not to be
    trusted, and an approximation with such weights misses a part of its target (Vehtari et al.
    2024, "Pareto smoothed importance sampling", section 3; Yao et al. 2018, "Yes, but did it
    work?", section 2).

    Args:
        log_weights: Logarithms of the weights, up to a constant, `(draws,)`.

    Returns:
        k; NaN for weights that are not finite or do not vary, and for fewer than 25 draws, whose
        tail is too short.
    """
    return float(smoothed(log_weights[None])[1][0])


def smoothed(
    log_weights: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Replace the largest weights by quantiles of the Pareto distribution fitted to them.

    Args:
        log_weights: Logarithms of the weights, up to a constant of each row, `(rows, draws)`.

    Returns:
        Smoothed log weights `(rows, draws)` whose exponentials add up to 1, and the shape k of each
        row's tail `(rows,)`. Both are NaN for rows that are not finite, do not vary, or have
        fewer than 25 draws.
    """
    out, shape = np.full(log_weights.shape, np.nan), np.full(len(log_weights), np.nan)
    usable = np.isfinite(log_weights).all(1) & (log_weights != log_weights[:, :1]).any(1)
    if usable.any() and log_weights.shape[1] >= _FEWEST:
        out[usable], shape[usable] = _psislw(log_weights[usable])
    return out, shape


def _psislw(
    log_weights: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    import arviz as az

    if hasattr(az, "psislw"):
        found = az.psislw(log_weights)
    else:
        # ArviZ 1.x; its function takes log-likelihoods, the negative of these log weights.
        found = import_module("arviz_stats.base").array_stats.psislw(-log_weights)
    return np.asarray(found[0]), np.asarray(found[1])
