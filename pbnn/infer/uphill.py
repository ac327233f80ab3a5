"""A short way up a log density, many points at once: where chains and guides start."""

import torch
from torch import Tensor

from pbnn.infer.density import Density

__all__ = ["climb"]


def climb(density: Density, starts: Tensor, *, steps: int, rate: float) -> Tensor:
    """Go uphill by Adam (Kingma & Ba 2015), each point for itself.

    Args:
        density: The log density.
        starts: Unconstrained values `(points, dim)`.
        steps: Number of steps; keep them few, since the optimum of a hierarchical scale is
            degenerate.
        rate: Length of the first steps.

    Returns:
        Of each point the best that it came by, `(points, dim)`; the start where none was finite.
    """
    z, mean, square = starts.clone(), torch.zeros_like(starts), torch.zeros_like(starts)
    best, best_lp = starts, torch.full_like(starts[:, 0], -torch.inf)
    for k in range(1, steps + 1):
        lp, grad = density.value_and_grad(z)
        usable = lp.isfinite() & grad.isfinite().all(1)
        better = usable & (lp > best_lp)
        best = torch.where(better[:, None], z, best)
        best_lp = torch.where(better, lp, best_lp)
        grad = torch.where(usable[:, None], grad, torch.zeros_like(grad))
        mean = 0.9 * mean + 0.1 * grad
        square = 0.999 * square + 0.001 * grad**2
        step = mean / (1 - 0.9**k) / ((square / (1 - 0.999**k)).sqrt() + 1e-8)
        z = torch.where(usable[:, None], z + rate * step, best)
    return best
