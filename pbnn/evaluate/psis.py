"""Pareto-smoothed importance sampling, through whichever ArviZ is there; no torch."""

from importlib import import_module

import numpy as np
from numpy.typing import NDArray

__all__ = ["pareto_k"]


def pareto_k(log_weights: NDArray[np.float64]) -> float:
    """Return the shape k of the Pareto tail of importance weights.

    Below 0.5 the weights have a finite variance, above 0.7 estimates from them are not to be
    trusted, and an approximation with such weights misses a part of its target (Vehtari et al.
    2024, "Pareto smoothed importance sampling", section 3; Yao et al. 2018, "Yes, but did it
    work?", section 2).

    Args:
        log_weights: Logarithms of the weights, up to a constant, `(draws,)`.

    Returns:
        k; NaN for weights that are not finite, or for fewer than 25 draws, whose tail is too short.
    """
    if len(log_weights) < 25 or not np.isfinite(log_weights).all():
        return float("nan")
    import arviz as az

    weights = np.array(log_weights, dtype=np.float64)  # ArviZ 0.x works in place
    if hasattr(az, "psislw"):
        return float(az.psislw(weights)[1])
    # ArviZ 1.x; its function takes log-likelihoods, the negative of these log weights.
    array_stats = import_module("arviz_stats.base").array_stats
    return float(array_stats.psislw(-weights)[1])
