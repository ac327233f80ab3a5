"""Leave-one-out predictive density of any road's draws, where importance sampling can give it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pbnn.errors import DataError
from pbnn.evaluate.psis import TRUSTED_K, smoothed
from pbnn.infer.posterior import Posterior
from pbnn.model import Data, Model
from pbnn.prediction import log_likelihood

if TYPE_CHECKING:
    from pbnn.data import Units

__all__ = ["Loo", "leave_one_out"]


@dataclass(frozen=True, kw_only=True)
class Loo:
    """The log density of each training row under the posterior of all others.

    Attributes:
        density: log p(y_i | y_−i), `(n,)`, in float64; rows without observation are left out.
        khat: Pareto k of each row's importance weights, `(n,)`.
        unavailable: Why the numbers are not to be used; empty where they are.
    """

    density: Tensor
    khat: Tensor
    unavailable: str = ""

    @property
    def mean(self) -> float:
        """Mean over rows; NaN where it is not available."""
        return float("nan") if self.unavailable else float(self.density.mean())

    @property
    def error(self) -> float:
        """Standard error over rows of the mean; NaN where it is not available."""
        if self.unavailable or len(self.density) < 2:
            return float("nan")
        return float(self.density.std() / len(self.density) ** 0.5)


def leave_one_out(
    model: Model,
    posterior: Posterior,
    x: Data,
    y: Data,
    *,
    units: "Units | None" = None,
    device: str | torch.device | None = None,
    progress: bool = False,
) -> Loo:
    """Estimate leave-one-out predictive densities by Pareto-smoothed importance sampling.

    Each draw θ of Markov chains weighs 1 / p(y_i | θ) for row i (Vehtari, Gelman & Gabry 2017,
    "Practical Bayesian model evaluation using leave-one-out cross-validation and WAIC"). Draws of a
    guide q are no draws from the posterior: each weighs p(θ, D) / (q(θ) p(y_i | θ)), by its `lp`
    and `log_q` (Magnusson et al. 2019, "Bayesian leave-one-out cross-validation for large data").
    Where the largest k is above 0.7 the estimate is not available: rank by held-out rows instead.

    Args:
        model: The model that was fitted.
        posterior: Its posterior, from any road.
        x: The rows of the fit, all of them.
        y: Their observations, as the fit took them.
        units: How y was standardised; densities are then in the user's units.
        device: Where to run.
        progress: Whether to show a progress bar on stderr.

    Raises:
        DataError: x and y cannot be used, or are not as many rows as the fit had.
        ModelError: The posterior is not one of this model.
    """
    scores = log_likelihood(model, posterior, x, y, units=units, device=device, progress=progress)
    scores = scores.flatten(0, 1).T.double()
    fitted = posterior.provenance.get("rows", len(scores))
    if fitted != len(scores):
        raise DataError(
            f"{len(scores)} rows to leave out, and the fit had {fitted}; expected the rows that "
            "were fitted, all of them"
        )
    scores = scores[~scores.isnan().all(1)]
    if posterior.markov:
        weights = -scores
    elif "log_q" in posterior.stats:
        ratio = (posterior.stats["lp"] - posterior.stats["log_q"]).flatten().double()
        weights = ratio - scores
    else:
        nan = scores.new_full((len(scores),), torch.nan)
        return Loo(density=nan, khat=nan, unavailable="its draws have neither chains nor log_q")
    found, shape = (torch.from_numpy(value) for value in smoothed(weights.numpy()))
    khat = float(np.max(shape.numpy(), initial=-np.inf))
    return Loo(
        density=torch.logsumexp(found + scores, 1),
        khat=shape,
        # Not "above": NaN is no trusted k.
        unavailable="" if khat <= TRUSTED_K else f"Pareto k is {khat:.2f} in the worst row",
    )
