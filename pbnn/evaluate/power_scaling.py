"""Prior or likelihood to a power: the model, log priors of draws, a distance of distributions."""

import copy
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

from pbnn.errors import ModelError
from pbnn.evaluate.arrays import Array
from pbnn.infer.posterior import Posterior
from pbnn.model import Data, Model, indexable, isolated, take
from pbnn.prediction.runner import Runner

__all__ = ["cumulative_js", "log_prior", "matching_sites", "power_scaled"]


class _Powers(Messenger):  # type: ignore[misc]
    """Raises the densities of sites to powers."""

    def __init__(self, priors: Sequence[str], prior: float, likelihood: float) -> None:
        super().__init__()
        self.priors, self.prior, self.likelihood = priors, prior, likelihood

    def _pyro_sample(self, msg: Any) -> None:
        # Nobody knows whether a factor is of the prior or of the data; `log_prior` and
        # `pbnn.log_likelihood` leave it out, too.
        infer, observed = msg["infer"], msg["is_observed"]
        if infer.get("_deterministic") or (infer.get("is_auxiliary") and observed):
            return
        if observed:
            msg["scale"] = msg["scale"] * self.likelihood
        elif any(fnmatchcase(msg["name"], pattern) for pattern in self.priors):
            msg["scale"] = msg["scale"] * self.prior


def power_scaled(
    model: Model, *, prior: float = 1.0, likelihood: float = 1.0, priors: Sequence[str] = ("*",)
) -> Model:
    """Return a model whose posterior is p(y | θ)^likelihood · p(θ)^prior, up to a constant.

    The densities are those of the sites' own values, not of unconstrained ones. A `pyro.factor`
    counts as neither, inside plate `data` or outside: its power stays 1. For fits only: samples
    from the result are those of the model as it was.

    Args:
        model: A Pyro model; a module is copied.
        prior: Power of the priors.
        likelihood: Power of the likelihood.
        priors: Patterns of the latent sites whose priors are raised.
    """
    powers = {"priors": tuple(priors), "prior": prior, "likelihood": likelihood}
    if not isinstance(model, nn.Module):

        def scaled(*args: Any, **kwargs: Any) -> Any:
            with _Powers(**powers):  # type: ignore[arg-type]
                return model(*args, **kwargs)

        return scaled
    kind: Any = type(model)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _Powers(**powers):  # type: ignore[arg-type]
            return kind.forward(self, *args, **kwargs)

    # A subclass, so that the names of sites, constants and buffers stay as they are.
    out = copy.deepcopy(model)
    out.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    return out


def matching_sites(posterior: Posterior, patterns: Sequence[str]) -> list[str]:
    """Return the latent sites that patterns name.

    Raises:
        ModelError: A pattern names none.
    """
    names = list(posterior.draws)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ModelError(f"no latent site matches {pattern!r}; the posterior has {names}")
    return [n for n in names if any(fnmatchcase(n, pattern) for pattern in patterns)]


def log_prior(
    model: Model,
    posterior: Posterior,
    x: Data,
    sites: Sequence[str],
    *,
    device: str | torch.device | None = None,
) -> Array:
    """Return the log prior density of some sites by draw, `(draws,)`, on their own support.

    Args:
        model: The model that was fitted.
        posterior: Its posterior.
        x: Input rows, of which one is used.
        sites: Latent sites.
        device: Where to run.
    """
    runner = Runner(model, posterior, take(indexable(x), slice(0, 1)), device)

    def read(trace: poutine.Trace) -> dict[str, Tensor]:
        trace.compute_log_prob(site_filter=lambda name, _: name in sites)
        terms = [trace.nodes[name]["log_prob_sum"] for name in sites]
        return {"log_prior": torch.stack([torch.as_tensor(term) for term in terms]).sum()}

    with isolated(0, runner.device), torch.no_grad():
        found = runner.gather(read, slice(0, 1))["log_prior"]
    return np.asarray(found.double())


def cumulative_js(values: Array, first: Array, second: Array) -> float:
    """Return the cumulative Jensen-Shannon distance of two weightings of the same values.

    The square root of CJS(P ‖ Q) + CJS(Q ‖ P) over its bound ∫ P + Q, where CJS(P ‖ Q) is
    ∫ P log₂(2 P / (P + Q)) + ∫ (Q − P) / (2 ln 2); the larger of that and of the same for −values.
    (Nguyen & Vreeken 2015, "Non-parametric Jensen-Shannon divergence"; with this bound Kallioinen
    et al. 2024, "Detecting and diagnosing prior and likelihood sensitivity with power-scaling".)

    Args:
        values: Values `(draws,)`.
        first: Weights of the distribution P, which add up to 1.
        second: Weights of Q, likewise.
    """
    order = np.argsort(values)
    widths = np.diff(values[order])
    p, q = (np.cumsum(weights[order])[:-1].clip(0.0, 1.0) for weights in (first, second))
    # The distribution function of −values, from above.
    return max(_one_sided(widths, p, q), _one_sided(widths, 1 - p, 1 - q))


def _one_sided(widths: Array, p: Array, q: Array) -> float:
    bound = float(widths @ (p + q))
    if not bound > 0:
        return 0.0
    both = np.where(p + q > 0, p + q, 1.0)
    terms = (a * np.log2(np.where(a > 0, 2 * a / both, 1.0)) for a in (p, q))
    # The two corrections ± ∫ (Q − P) / (2 ln 2) cancel in the sum; each part alone is not negative.
    correction = float(widths @ (q - p)) / (2 * np.log(2))
    parts = [float(widths @ term) for term in terms]
    total = max(parts[0] + correction, 0.0) + max(parts[1] - correction, 0.0)
    return float(np.sqrt(total / bound))
