"""Did the chains converge, where it matters: on f(x) at probe inputs, lp and scalar sites.

Weights are not looked at: hidden units permute and change sign between chains, so R-hat on them
says nothing about the function.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pbnn.errors import ModelError
from pbnn.infer.posterior import Posterior
from pbnn.model import Data, Model
from pbnn.prediction import function_draws

__all__ = ["Convergence", "check_convergence", "probe_rows"]

# The rule: this share of probe inputs must have R-hat and bulk ESS beyond these bounds.
SHARE = 0.95
RHAT = 1.01
RHAT_USABLE = 1.05
ESS = 400
PROBES = 100


@dataclass(frozen=True, kw_only=True)
class Convergence:
    """What the chains of one posterior say about their own convergence.

    Attributes:
        rhat: Rank-normalised split R-hat of f(x) by probe input, `(probes,)`; worst output.
        ess: Bulk effective sample size of f(x) by probe input, `(probes,)`; worst output.
        rhat_scalars: R-hat of `lp` and of the scalar sites, by name.
        divergences: Number of draws that ended in a divergence.
        saturated: Number of draws that reached the maximum tree depth.
        chains: Number of chains.
        draws: Number of draws of each chain.
        verdict: "converged", "usable" or "not converged".
    """

    rhat: NDArray[np.float64]
    ess: NDArray[np.float64]
    rhat_scalars: dict[str, float]
    divergences: int
    saturated: int
    chains: int
    draws: int
    verdict: str

    def __str__(self) -> str:
        good = (self.rhat < RHAT) & (self.ess > ESS)
        worst = int(np.nanargmax(np.nan_to_num(self.rhat, nan=np.inf)))
        verdict = "not converged, but usable" if self.verdict == "usable" else self.verdict
        scalars = ", ".join(f"{name} {value:.3f}" for name, value in self.rhat_scalars.items())
        return (
            f"{verdict}: {self.chains} chains of {self.draws} draws; {good.mean():.0%} of "
            f"{len(good)} probe inputs have R-hat < {RHAT} and bulk ESS > {ESS} "
            f"({SHARE:.0%} needed); worst input {worst}: R-hat {self.rhat[worst]:.3f}, "
            f"ESS {self.ess[worst]:.0f}; R-hat of {scalars}; {self.divergences} divergences, "
            f"{self.saturated} saturated trees"
        )


def check_convergence(
    model: Model, posterior: Posterior, x: Data, *, device: str | None = None
) -> Convergence:
    """Judge Markov chains by the function they draw (rank-normalised split R-hat, bulk ESS).

    Converged: 95% of probe inputs have R-hat < 1.01 and bulk ESS > 400. Usable: 95% have
    R-hat < 1.05. R-hat of 1.05 or more on `lp` or a scalar site means not converged, and so does
    NaN: a single chain, fewer than 4 draws, a value that never changes.
    (Vehtari et al. 2021, "Rank-normalization, folding, and localization", eqs. 4, 10 and 14.)

    Args:
        model: The model that was fitted.
        posterior: Markov chains.
        x: Inputs to probe, at most 100 of them used, evenly spaced; see `probe_rows`.
        device: Where to run.

    Raises:
        ModelError: The posterior's draws are no Markov chains.
    """
    if not posterior.markov:
        raise ModelError(
            f"the draws of {posterior.method!r} are independent, not Markov chains; R-hat does not "
            "apply to them"
        )
    f = _numpy(function_draws(model, posterior, probe_rows(x), device=device))
    rhat, ess = (_over_inputs(f, kind) for kind in ("rhat", "ess"))
    scalars = {"lp": posterior.stats["lp"]} | {
        name: value for name, value in posterior.draws.items() if value.ndim == 2
    }
    rhats = {name: _diagnose(_numpy(value), "rhat") for name, value in scalars.items()}
    stats = posterior.stats
    return Convergence(
        rhat=rhat,
        ess=ess,
        rhat_scalars=rhats,
        divergences=int(stats["diverging"].sum()) if "diverging" in stats else 0,
        saturated=int(stats["reached_max_treedepth"].sum())
        if "reached_max_treedepth" in stats
        else 0,
        chains=posterior.chains,
        draws=posterior.draws_per_chain,
        verdict=_verdict(rhat, ess, list(rhats.values())),
    )


def probe_rows(x: Data, count: int = PROBES) -> Data:
    """Return at most `count` rows of x, evenly spaced."""
    if isinstance(x, dict):
        return {name: probe_rows(value, count) for name, value in x.items()}
    rows = len(x)
    return x[np.unique(np.linspace(0, rows - 1, min(rows, count)).round().astype(int))]


def _verdict(rhat: NDArray[np.float64], ess: NDArray[np.float64], scalars: list[float]) -> str:
    if not all(value < RHAT_USABLE for value in scalars):
        return "not converged"
    if np.mean((rhat < RHAT) & (ess > ESS)) >= SHARE:
        return "converged"
    return "usable" if np.mean(rhat < RHAT_USABLE) >= SHARE else "not converged"


def _over_inputs(f: NDArray[np.float64], kind: str) -> NDArray[np.float64]:
    """Diagnose each input and output of f `(chain, draw, n, outputs)`; keep the worst output."""
    values = np.array(
        [[_diagnose(f[:, :, i, k], kind) for k in range(f.shape[3])] for i in range(f.shape[2])]
    )
    # NaN (too few draws or chains, a constant) must not pass for good.
    worst: NDArray[np.float64] = values.max(1) if kind == "rhat" else values.min(1)
    return worst


def _diagnose(values: NDArray[np.float64], kind: str) -> float:
    import arviz as az

    if values.shape[0] < 2 or values.shape[1] < 4 or not np.isfinite(values).all():
        return float("nan")
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(az.rhat(values) if kind == "rhat" else az.ess(values, method="bulk"))


def _numpy(value: Tensor) -> NDArray[np.float64]:
    return np.asarray(value.double().cpu().numpy(), dtype=np.float64)
