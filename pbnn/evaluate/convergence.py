"""Did the chains converge, where it matters: on f(x) at probe inputs, lp and scalar sites.

Weights are named as not comparable and not looked at: hidden units permute and change sign between
chains, so R-hat on them says nothing about the function.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pbnn.errors import ModelError
from pbnn.infer.posterior import Posterior
from pbnn.model import Data, Model, indexable
from pbnn.prediction import function_draws

__all__ = ["Convergence", "check_convergence", "probe_rows"]

# The rule: this share of probe inputs must have R-hat and bulk ESS beyond these bounds.
SHARE = 0.95
RHAT = 1.01
RHAT_USABLE = 1.05
ESS = 400
PROBES = 100
# Below it, energy changes too little from draw to draw to cross the posterior (Betancourt 2016).
BFMI = 0.3
# Trees that may reach the maximum depth before it is worth a word: `fit_nuts` warns beyond, too.
SATURATED = 0.01


@dataclass(frozen=True, kw_only=True)
class Convergence:
    """What the chains of one posterior say about their own convergence.

    Attributes:
        rhat: Rank-normalised split R-hat of f(x) by probe input, `(probes,)`; worst output.
        ess: Bulk effective sample size of f(x) by probe input, `(probes,)`; worst output.
        rhat_scalars: R-hat of `lp` and of the scalar sites, by name.
        ess_scalars: Bulk effective sample size of the same.
        not_comparable: Names of the other sites, such as weights: between chains they are not the
            same quantity, so nothing was computed on them.
        bfmi: Estimated Bayesian fraction of missing information of each chain, `(chains,)`; empty
            where the draws have no energy.
        divergences: Number of draws that ended in a divergence.
        saturated: Number of draws that reached the maximum tree depth.
        chains: Number of chains.
        draws: Number of draws of each chain.
        verdict: "converged", "usable" or "not converged".
    """

    rhat: NDArray[np.float64]
    ess: NDArray[np.float64]
    rhat_scalars: dict[str, float]
    ess_scalars: dict[str, float]
    not_comparable: tuple[str, ...]
    bfmi: NDArray[np.float64]
    divergences: int
    saturated: int
    chains: int
    draws: int
    verdict: str

    @property
    def cautions(self) -> tuple[str, ...]:
        """What R-hat cannot see: parts of the posterior that all chains alike may have missed."""
        found = []
        total = self.chains * self.draws
        if self.divergences:
            found.append(f"{self.divergences} of {total} draws diverged")
        if self.saturated > SATURATED * total:
            found.append(f"{self.saturated} of {total} trees reached the maximum depth")
        # Not "below": NaN, of a chain that never moves, is a caution too.
        if self.bfmi.size and not self.bfmi.min() >= BFMI:
            found.append(
                f"E-BFMI is {self.bfmi.min():.2f} in the worst chain (0.3 and more is good)"
            )
        return tuple(found)

    def __str__(self) -> str:
        good = (self.rhat < RHAT) & (self.ess > ESS)
        worst = int(np.nanargmax(np.nan_to_num(self.rhat, nan=np.inf)))
        verdict = "not converged, but usable" if self.verdict == "usable" else self.verdict
        scalars = ", ".join(
            f"{name} {value:.3f} (ESS {self.ess_scalars[name]:.0f})"
            for name, value in self.rhat_scalars.items()
        )
        parts = [
            f"{verdict}: {self.chains} chains of {self.draws} draws",
            f"{good.mean():.0%} of {len(good)} probe inputs have R-hat < {RHAT} and bulk ESS > "
            f"{ESS} ({SHARE:.0%} needed)",
            f"worst input {worst}: R-hat {self.rhat[worst]:.3f}, ESS {self.ess[worst]:.0f}",
            f"R-hat of {scalars}",
            f"{self.divergences} divergences, {self.saturated} saturated trees",
        ]
        if self.bfmi.size:
            parts.append(f"E-BFMI {self.bfmi.min():.2f} to {self.bfmi.max():.2f}")
        if self.not_comparable:
            parts.append(f"not comparable between chains: {', '.join(self.not_comparable)}")
        if self.cautions:
            parts.append(f"caution: {', '.join(self.cautions)}")
        return "; ".join(parts)


def check_convergence(
    model: Model, posterior: Posterior, x: Data, *, device: str | None = None
) -> Convergence:
    """Judge Markov chains by the function they draw (rank-normalised split R-hat, bulk ESS).

    Converged: 95% of probe inputs have R-hat < 1.01 and bulk ESS > 400. Usable: 95% have
    R-hat < 1.05. R-hat of 1.05 or more on `lp` or a scalar site means not converged, and so does
    NaN: a single chain, fewer than 4 draws, a value that never changes. Divergences, saturated
    trees and E-BFMI (Betancourt 2016, "Diagnosing suboptimal cotangent disintegrations in
    Hamiltonian Monte Carlo", eq. 15) are cautions beside the verdict.
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
    probes = probe_rows(indexable(x))
    f = _numpy(function_draws(model, posterior, probes, device=device))
    rhat, ess = (_over_inputs(f, kind) for kind in ("rhat", "ess"))
    scalars = {"lp": posterior.stats["lp"]} | {
        name: value for name, value in posterior.draws.items() if value.ndim == 2
    }
    rhats, sizes = (
        {name: _diagnose(_numpy(value), kind) for name, value in scalars.items()}
        for kind in ("rhat", "ess")
    )
    stats = posterior.stats

    def count(name: str) -> int:
        return int(stats[name].sum()) if name in stats else 0

    return Convergence(
        rhat=rhat,
        ess=ess,
        rhat_scalars=rhats,
        ess_scalars=sizes,
        not_comparable=tuple(name for name in posterior.draws if name not in scalars),
        bfmi=_bfmi(_numpy(stats["energy"])) if "energy" in stats else np.empty(0),
        divergences=count("diverging"),
        saturated=count("reached_max_treedepth"),
        chains=posterior.chains,
        draws=posterior.draws_per_chain,
        verdict=_verdict(rhat, ess, list(rhats.values())),
    )


def _bfmi(energy: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the E-BFMI of each chain of energies `(chain, draw)`; NaN for fewer than 2 draws."""
    if energy.shape[1] < 2:
        return np.full(len(energy), np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio: NDArray[np.float64] = np.square(np.diff(energy)).mean(1) / energy.var(1)
    return ratio


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
