"""Chains that do not mix, weighted by what each predicts of rows that it was not shown."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from pbnn.errors import ModelError
from pbnn.evaluate.loo import leave_one_out
from pbnn.evaluate.psis import TRUSTED_K
from pbnn.infer.posterior import Posterior
from pbnn.model import Data, Model

__all__ = ["Stacked", "stack_chains", "stacking_weights"]

_GAP = 1e-6
_ITERATIONS = 10_000


@dataclass(frozen=True, kw_only=True)
class Stacked:
    """Chains and their weights.

    Attributes:
        posterior: Draws of the chains in proportion to their weights, evenly thinned, as one chain.
        weights: Weight of each chain, `(chains,)`; they add up to 1.
        density: Mean over rows of each chain's own leave-one-out log density, `(chains,)`.
    """

    posterior: Posterior
    weights: Tensor
    density: Tensor


def stack_chains(
    model: Model,
    posterior: Posterior,
    x: Data,
    y: Data,
    *,
    device: str | torch.device | None = None,
    progress: bool = False,
) -> Stacked:
    """Weight chains that do not mix by stacking their predictive distributions.

    The weights maximise the mean over rows of log Σ_k w_k p_k(y_i | y_−i), with each chain's
    leave-one-out density by importance sampling (Yao, Vehtari & Gelman 2022, "Stacking for
    non-mixing Bayesian computations"). They say which mixture of the chains predicts best,
    not how much of the posterior each mode holds, and the provenance of what is returned says so:
    it is no reference for posterior probabilities.

    Args:
        model: The model that was fitted.
        posterior: Its Markov chains.
        x: The rows of the fit, all of them.
        y: Their observations, as the fit took them.
        device: Where to run.
        progress: Whether to show a progress bar on stderr.

    Raises:
        DataError: x and y are not the rows of the fit.
        ModelError: The draws are no Markov chains, there is one chain only, or the draws are too
            few for a leave-one-out density.
    """
    if not posterior.markov or posterior.chains < 2:
        raise ModelError(
            f"{posterior.chains} chain(s) of {posterior.method!r} to stack; expected two Markov "
            "chains or more"
        )
    options = {"device": device, "progress": progress}
    parts = [
        leave_one_out(model, posterior.select(chains=[k]), x, y, **options)  # type: ignore[arg-type]
        for k in range(posterior.chains)
    ]
    density = torch.stack([part.density for part in parts])
    if density.isnan().any():
        raise ModelError(
            f"{posterior.draws_per_chain} draws a chain give no leave-one-out density; draw more"
        )
    weights = stacking_weights(density)
    untrusted = int((torch.stack([part.khat for part in parts]) > TRUSTED_K).any(0).sum())
    notes = [
        "the chains are stacked: weighted to "
        f"{', '.join(f'{w:.2f}' for w in weights.tolist())} by what each predicts of left-out "
        "rows, not by the mass of its mode"
    ]
    impossible = int(density.isneginf().all(0).sum())
    if impossible:
        notes.append(
            f"{impossible} of {density.shape[1]} rows have density 0 under all chains: they are "
            "left out of the weights"
        )
    if untrusted:
        notes.append(
            f"Pareto k is above {TRUSTED_K} for {untrusted} of {density.shape[1]} rows: the "
            "weights are not to be trusted"
        )
    record = {**posterior.provenance, "stacking_weights": weights.tolist()}
    record["notes"] = [*posterior.provenance.get("notes", []), *notes]
    return Stacked(
        posterior=dataclasses.replace(_in_proportion(posterior, weights), provenance=record),
        weights=weights,
        density=density.mean(1),
    )


def stacking_weights(density: Tensor) -> Tensor:
    """Return the weights w of a mixture that maximise the mean over rows of log Σ_k w_k p_k.

    By the EM algorithm for the proportions of a mixture, until the largest possible gain, which is
    max_k mean_i p_k / Σ_j w_j p_j − 1 for a concave function, is below 1e-6.

    Args:
        density: Log densities `(chains, rows)`. A row that has −inf under all chains weighs them
            alike, and is left out.

    Returns:
        `(chains,)`, in float64.

    Raises:
        ModelError: A density is NaN or +inf, or no row has a density above 0 under any chain.
    """
    if (density.isnan() | density.isposinf()).any():
        raise ModelError("a log density to stack is NaN or +inf; expected numbers, or -inf")
    density = density.double()[:, ~density.isneginf().all(0)]
    if not density.shape[1]:
        raise ModelError("no row has a density above 0 under any chain: nothing to weight them by")
    ratio = (density - density.max(0).values).exp()
    weights = torch.full((len(ratio),), 1 / len(ratio), dtype=torch.float64)
    for _ in range(_ITERATIONS):
        gain = (ratio / (weights @ ratio)).mean(1)
        if gain.max() - 1 < _GAP:
            break
        weights = weights * gain
    return weights / weights.sum()


def _in_proportion(posterior: Posterior, weights: Tensor) -> Posterior:
    """Return as many draws as the weights allow without one draw taken twice."""
    available = posterior.draws_per_chain
    total = min(int(available / float(weights.max())), available * posterior.chains)
    counts = [min(available, round(float(w) * total)) for w in weights]
    parts = [
        posterior.select(chains=[k], draws=torch.linspace(0, available - 1, n).round().long())
        for k, n in enumerate(counts)
    ]

    def joined(field: str) -> dict[str, Tensor]:
        held = [getattr(part, field) for part in parts]
        own = held[0] if field in ("draws", "deterministic", "stats") else posterior.per_draw
        return {
            name: torch.cat([part[name] for part in held], 1) if name in own else value
            for name, value in held[0].items()
        }

    fields = ("draws", "deterministic", "stats", "constants", "buffers")
    together = {field: joined(field) for field in fields}
    return dataclasses.replace(posterior, **together, markov=False, warmup=None)  # type: ignore[arg-type]
