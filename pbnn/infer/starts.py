"""Where chains start: draws from the prior, short MAP runs, draws of a fitted guide, or values."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pbnn.errors import ConvergenceWarning, FitError
from pbnn.infer.density import Density
from pbnn.infer.svi import fit_svi
from pbnn.infer.uphill import climb
from pbnn.model import Model

__all__ = ["INITS", "find_starts"]

INITS = ("prior", "map", "svi")

_MAP_STEPS = 50
"""Steps of the MAP run: short, since the optimum of a hierarchical scale is degenerate. After 200 a
chain in four was so deep in the neck of a centred hierarchy that it stayed there (CONTRIBUTING.md,
"Starts")."""
_MAP_RATE = 0.03
_SVI_STEPS = 2000


def find_starts(
    density: Density,
    init: str | Mapping[str, Tensor] | Tensor,
    model: Model,
    chains: int,
    seed: int,
) -> Tensor:
    """Return a start for each chain, with finite log density.

    Args:
        density: The log density.
        init: "prior" (draws from it, again where the density is not finite), "map" (from there a
            short run of Adam uphill, all chains in one batch), "svi" (draws of a normal guide that
            is fitted first), values by site `(chains, *site_shape)` or `(*site_shape)`, or
            unconstrained values `(chains, dim)`.
        model: The user's model, for "svi".
        chains: Number of chains.
        seed: Seed; the start of a chain depends on it and on the chain's index.

    Returns:
        Unconstrained values `(chains, dim)`.

    Raises:
        FitError: `init` is none of these, or has another shape; or no finite start was found.
    """
    if isinstance(init, Tensor):
        if init.shape != (chains, density.dim):
            raise FitError(
                f"init has shape {tuple(init.shape)}; expected ({chains}, {density.dim}) "
                "unconstrained values, or a dict of values by site"
            )
        return init.detach().to(device=density.device, dtype=density.dtype)
    if isinstance(init, Mapping):
        return density.unconstrain(_by_chain(density, init, chains)).reshape(chains, density.dim)
    if init not in INITS:
        raise FitError(f"init={init!r}; expected one of {', '.join(INITS)}, or values by site")
    if init == "svi":
        return _from_guide(density, model, chains, seed)
    starts = density.initial_prior(chains, seed)
    return starts if init == "prior" else climb(density, starts, steps=_MAP_STEPS, rate=_MAP_RATE)


def _by_chain(density: Density, init: Mapping[str, Any], chains: int) -> dict[str, Tensor]:
    values = {}
    for site in density.sites:
        if site.name not in init:
            raise FitError(
                f"init has no values for site {site.name!r}; it has {', '.join(init) or 'none'}"
            )
        value = torch.as_tensor(init[site.name])
        if tuple(value.shape) == tuple(site.shape):
            value = value.expand(chains, *site.shape)
        if tuple(value.shape) != (chains, *site.shape):
            raise FitError(
                f"init[{site.name!r}] has shape {tuple(value.shape)}; expected {tuple(site.shape)} "
                f"or {(chains, *site.shape)}"
            )
        values[site.name] = value
    return values


def _from_guide(density: Density, model: Model, chains: int, seed: int) -> Tensor:
    bound = density.bound
    with warnings.catch_warnings():
        # A start need not have converged.
        warnings.simplefilter("ignore", ConvergenceWarning)
        guide = fit_svi(
            model,
            bound.x,
            bound.y,
            steps=_SVI_STEPS,
            draws=chains,
            seed=seed,
            device=bound.device,
            dtype=bound.dtype,
            progress=False,
        )
    if guide.provenance.get("ended") == "interrupted":
        raise KeyboardInterrupt("interrupted while the guide was fitted")
    return density.unconstrain({name: value[0] for name, value in guide.draws.items()})
