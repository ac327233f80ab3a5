"""Draws from the prior, as a `Posterior` that no data have touched."""

from typing import Any

import torch
from pyro import poutine
from pyro.distributions.transforms import biject_to
from torch import Tensor

from pbnn.checks import PLATE
from pbnn.errors import DataError, ModelError
from pbnn.front_door import prepare
from pbnn.infer.posterior import Posterior
from pbnn.model import Data, Model, isolated, leaves, run, sample_nodes, take
from pbnn.prediction.mapping import DrawMap, MappableSamples

__all__ = ["sample_prior"]

_BLOCK = 256  # draws mapped at once; fixed, so that memory is bounded and results repeat


def sample_prior(
    model: Model,
    x: Data,
    *,
    draws: int = 1000,
    seed: int = 0,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> Posterior:
    """Draw a model's latent sites from their priors.

    The result goes wherever a posterior does: `predictive` makes the prior predictive of it, and
    `to_inference_data(…, prior=…)` the groups prior and prior_predictive.

    Args:
        model: A Pyro model `(x, y=None)`.
        x: Rows of input; two of them are used.
        draws: Number of draws.
        seed: Seed.
        device: Where to run; by default where the model's parameters or x are.
        dtype: Floating type; by default that of the model's parameters or of x.

    Returns:
        One chain of independent draws; their `lp` is the log density of the prior on the
        unconstrained space, with its Jacobian.

    Raises:
        DataError: x cannot be used as it is, or the number of draws is below 1.
        ModelError: A prior cannot be sampled, or the model fails.
    """
    if draws < 1:
        raise DataError(f"draws is {draws}; expected 1 or more")
    model, x, _ = prepare(model, x, device=device, dtype=dtype)
    x = take(x, slice(0, 2))
    held = (
        leaves(x)[0][1]
        if x is not None
        else next(model.parameters(), torch.empty(0, device=device))
    )
    where = held.device
    with isolated(seed, where), torch.no_grad():
        try:
            trace = run(model, {}, x, checks=True)
        except Exception as error:
            line = str(error).strip().splitlines()[0] if str(error) else ""
            raise ModelError(
                f"the prior cannot be sampled: {type(error).__name__}: {line}"
            ) from error
        observed = [name for name, node in sample_nodes(trace) if _in_rows(node)]
        constant = _without_rows(model, x, trace)

        def one(_: dict[str, Tensor], x: Data) -> dict[str, Tensor]:
            with MappableSamples():
                nodes = dict(sample_nodes(run(model, {}, x)))
            latent = {k: v for k, v in nodes.items() if not v["is_observed"] and k not in observed}
            values = {f"latent {k}": v["value"] for k, v in latent.items()}
            values |= {f"deterministic {k}": nodes[k]["value"] for k in constant}
            return {
                **values,
                "lp": sum((_log_density(v) for v in latent.values()), torch.zeros(())),
            }

        numbers = torch.zeros(draws, device=where)
        blocks = list(DrawMap(one).blocks(lambda a, b: {"draw": numbers[a:b]}, draws, _BLOCK, x))
    found = {name: torch.cat([b[name] for b in blocks]).cpu()[None] for name in blocks[0]}

    def named(kind: str) -> dict[str, Tensor]:
        return {k.removeprefix(kind): v for k, v in found.items() if k.startswith(kind)}

    return Posterior(
        draws=named("latent "),
        deterministic=named("deterministic "),
        stats={"lp": found["lp"]},
        method="prior",
        markov=False,
        seconds=0.0,
        constants={name: p.detach().cpu().clone() for name, p in model.named_parameters()},
        buffers={name: b.detach().cpu().clone() for name, b in model.named_buffers()},
        provenance={"seed": seed, "observed": observed, "draws": draws},
    )


def _in_rows(node: Any) -> bool:
    """Whether a site is one that data would be observed at: it lies in plate `data`."""
    plated = any(frame.name == PLATE for frame in node["cond_indep_stack"])
    return plated and not node["infer"].get("_deterministic")


def _without_rows(model: Model, x: Data, trace: poutine.Trace) -> list[str]:
    """Return the deterministic sites whose shape does not follow the rows of x."""
    one = run(model, {}, take(x, slice(0, 1)))
    return [
        name
        for name, node in sample_nodes(trace)
        if node["infer"].get("_deterministic")
        and (x is None or node["value"].shape == one.nodes[name]["value"].shape)
    ]


def _log_density(node: Any) -> Tensor:
    """Return a site's log density at its value, on the unconstrained space."""
    fn, value = node["fn"], node["value"]
    transform = biject_to(fn.support)
    free = transform.inv(value)
    jacobian = transform.log_abs_det_jacobian(free, value)
    density: Tensor = fn.log_prob(value).sum() + jacobian.sum()
    return density
