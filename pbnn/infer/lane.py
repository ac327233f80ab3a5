"""What one lane computes: a bound model as pure functions of tensors."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor
from torch.func import vmap

from pbnn.errors import ModelError
from pbnn.infer.graph import FlatGraph, LaneSafe, trace
from pbnn.infer.unconstrained import (
    Latents,
    Place,
    from_flat,
    from_prior,
    from_values,
    layout,
)
from pbnn.model import BoundModel, Data, isolated, run

__all__ = ["NUMERICAL", "TRIES", "Lane", "flat"]

TRIES = 100
"""Draws from the prior before giving up on a finite one."""

_BLOCK = 256  # draws mapped at once where any number may come; fixed, so that memory is bounded

NUMERICAL = (
    torch.linalg.LinAlgError,  # type: ignore[attr-defined]
    ArithmeticError,
    ValueError,
)
"""What a model may raise at an unlucky point."""

_Name = tuple[str, str]


class Lane:
    """A bound model as pure functions of an unconstrained vector and of its data.

    Args:
        bound: The model and its data.

    Attributes:
        names: For each tensor of the data, its part ("x", "y", "state") and its key there.
        data: The tensors: x, y, parameters without a prior, buffers.
        sites: Where each latent site lies in the vector.
        deterministic: Names of the `pyro.deterministic` sites.
        start: A vector with finite log density `(dim,)`.

    Raises:
        ModelError: The model has no finite log density at draws from its prior.
    """

    def __init__(self, bound: BoundModel) -> None:
        self.bound = bound
        named = flat(bound.x, bound.y, bound.constants() | bound.buffers())
        self.names = tuple(named)
        self.data = tuple(named.values())
        self._graphs: dict[str, FlatGraph] = {}
        self.start, latents, first = self._first_run()
        self.sites = layout(latents)
        self.deterministic = tuple(
            name
            for name, node in first.nodes.items()
            if node["type"] == "sample" and node["infer"].get("_deterministic")
        )

    def run(
        self, place: Place, data: tuple[Tensor, ...], *, checks: bool = False
    ) -> tuple[poutine.Trace, Latents]:
        """Run the model once.

        Args:
            place: Decides the values of the latent sites.
            data: In the order of `names`.
            checks: Whether distributions check their arguments.
        """
        x, y, state = _nested(dict(zip(self.names, data, strict=True)))
        model, fill = self.bound.model, self.bound.fill
        latents = Latents(place)
        try:
            with pyro.validation_enabled(checks), latents:
                return run(model, {}, x, y, fill=fill, checks=checks, state=state), latents
        except ModelError as error:  # Pyro has appended the shapes of all sites
            raise ModelError(str(error).splitlines()[0]) from error.__cause__

    def log_density(self, z: Tensor, *data: Tensor) -> Tensor:
        """Return the log joint density with log |det J| at z `(dim,)`."""
        with pyro.validation_enabled(False), LaneSafe():
            tracer, latents = self.run(from_flat(self.sites, z), data)
            total = tracer.log_prob_sum(site_filter=_counts)
            density: Tensor = total + sum(latents.log_jacobian.values())
            return density.to(z.dtype)

    def log_density_alone(self, z: Tensor, *data: Tensor) -> tuple[Tensor]:
        """Return `log_density` as a tuple of one."""
        return (self.log_density(z, *data),)

    def values(self, z: Tensor, *data: Tensor) -> tuple[Tensor, ...]:
        """Return the values of the latent sites, in the order of `sites`."""
        with LaneSafe():
            return tuple(self.run(from_flat(self.sites, z), data)[1].values.values())

    def deterministic_values(self, z: Tensor, *data: Tensor) -> tuple[Tensor, ...]:
        """Return the values of the deterministic sites, in the order of `deterministic`."""
        with LaneSafe():
            nodes = self.run(from_flat(self.sites, z), data)[0].nodes
        return tuple(nodes[name]["value"] for name in self.deterministic)

    def unconstrained(self, *inputs: Tensor) -> tuple[Tensor]:
        """Return the vector of values on each site's support: the values, then the data."""
        values = {site.name: value for site, value in zip(self.sites, inputs, strict=False)}
        with LaneSafe():
            return (self.run(from_values(values), inputs[len(self.sites) :])[1].flat(),)

    def prior(self, data: tuple[Tensor, ...]) -> Tensor:
        """Draw a vector `(dim,)` from the prior, with the generator as it stands."""
        place = from_prior(self.bound.device, self.bound.dtype)
        with torch.no_grad(), LaneSafe():
            return self.run(place, data)[1].flat()

    def by_site(self, z: Tensor, data: tuple[Tensor, ...]) -> dict[str, float]:
        """Return the log density by site; a latent site's has its log |det J|."""
        with torch.no_grad(), pyro.validation_enabled(False), LaneSafe():
            tracer, latents = self.run(from_flat(self.sites, z), data)
            tracer.compute_log_prob(site_filter=_counts)
        return {
            name: float(node["log_prob_sum"] + latents.log_jacobian.get(name, 0.0))
            for name, node in tracer.nodes.items()
            if node["type"] == "sample" and "log_prob_sum" in node
        }

    def over_draws(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Tensor],
        data: tuple[Tensor, ...],
        *,
        traced: bool,
    ) -> tuple[Tensor, ...]:
        """Apply one of the functions above to draws.

        Args:
            function: Takes one draw's inputs and then the data.
            inputs: Each `(draws, *event)`.
            data: In the order of `names`.
            traced: Whether the model can be traced; if not, draws run through Python one by one.

        Returns:
            Each `(draws, *event)`.
        """
        if not traced:
            draws = [function(*draw, *data) for draw in zip(*inputs, strict=True)]
            return tuple(torch.stack(outputs) for outputs in zip(*draws, strict=True))
        dims = (*(0 for _ in inputs), *(None for _ in data))
        graph = self._graphs.get(function.__name__)
        if graph is None:
            # A model that reads a draw's value would leave the way of the first draw in the graph;
            # mapped over draws, it raises.
            vmap(function, dims)(*(value[:1] for value in inputs), *data)
            graph = trace(function, [*(value[0] for value in inputs), *data])
            self._graphs[function.__name__] = graph
        outputs: tuple[Tensor, ...] = vmap(graph, dims, chunk_size=_BLOCK)(*inputs, *data)
        return outputs

    def _first_run(self) -> tuple[Tensor, Latents, poutine.Trace]:
        """Run with all argument checks on, at draws from the prior until one has finite density."""
        place = from_prior(self.bound.device, self.bound.dtype)
        error: Exception | None = None
        with isolated(0, self.bound.device), torch.no_grad(), LaneSafe():
            for _ in range(TRIES):
                try:
                    tracer, latents = self.run(place, self.data, checks=True)
                    value = tracer.log_prob_sum()
                except ModelError:
                    raise
                except NUMERICAL as found:
                    error = found
                    continue
                z = latents.flat()
                if value.isfinite() and z.isfinite().all():
                    return z, latents, tracer
        reason = f"{type(error).__name__}: {error}" if error else "its log density is not finite"
        raise ModelError(f"the model fails at {TRIES} draws from its prior ({reason})") from error


def flat(x: Data, y: Data, state: Mapping[str, Tensor]) -> dict[_Name, Tensor]:
    """Name each tensor of the data by its part ("x", "y", "state") and its key there."""
    named: dict[_Name, Tensor] = {}
    for part, value in (("x", x), ("y", y), ("state", state)):
        leaves = value.items() if isinstance(value, Mapping) else [("", value)]
        named.update({(part, key): leaf for key, leaf in leaves if leaf is not None})
    return named


def _nested(named: Mapping[_Name, Tensor]) -> tuple[Data, Data, dict[str, Tensor]]:
    parts: dict[str, dict[str, Tensor]] = {"x": {}, "y": {}, "state": {}}
    for (part, key), value in named.items():
        parts[part][key] = value

    def data(part: dict[str, Tensor]) -> Data:
        return part.get("", part or None)

    return data(parts["x"]), data(parts["y"]), parts["state"]


def _counts(_: str, node: Any) -> bool:
    return not (node["infer"].get("_deterministic") or isinstance(node["fn"], _Subsample))
