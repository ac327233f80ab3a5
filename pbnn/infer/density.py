"""The log joint density of a bound model on the unconstrained space, one lane for each chain."""

import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import torch
from pyro import poutine
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from pbnn.errors import FitError, ModelError, PbnnWarning
from pbnn.infer.graph import FlatGraph, LaneSafe, trace
from pbnn.infer.unconstrained import (
    Latent,
    Latents,
    Place,
    from_flat,
    from_prior,
    from_values,
    layout,
)
from pbnn.model import BoundModel, Data, isolated, run

__all__ = ["Density"]

_TRIES = 100  # draws from the prior before giving up on a finite one
_BLOCK = 256  # draws mapped at once where any number may come; fixed, so that memory is bounded
_NUMERICAL = (torch.linalg.LinAlgError, ArithmeticError, ValueError)


class Density:
    """Log joint density of a bound model and its gradient, one lane for each chain.

    The density is that of the unconstrained values: each latent site's value passes through the
    bijection onto its support, and log |det J| is added. The model runs through Python once for each
    number of chains; what is kept is a flat graph of ATen calls over all chains.

    Args:
        bound: The model and its data.
        chains: Number of chains to get ready for now; others get ready when they first come.
        compile: Whether inductor compiles the graph; None decides by the rule that `rule` states.
        draws: Number of draws a chain, warm-up among them, that the rule counts on.
        lanes: Data that differ between chains: "x", "y" (as the model takes them), "constants" or
            "buffers" (by name), each tensor with one leading axis more than in `bound`. Chain i then
            has the data of lane i, and there are as many chains as lanes.

    Attributes:
        bound: The model and its data.
        sites: Where each latent site lies in the flat vector, in the order in which the model runs.
        dim: Length of the flat vector.
        slow_because: Why the model runs through Python chain by chain; None where it does not.
        rule: Whether the graph is compiled and why, in words.
        compiled: Whether inductor compiles the graph.

    Raises:
        ModelError: The model has no finite density at draws from its prior, or is random beyond its
            sites.
    """

    def __init__(
        self,
        bound: BoundModel,
        *,
        chains: int = 1,
        compile: bool | None = None,
        draws: int | None = None,
        lanes: Mapping[str, Data] | None = None,
    ) -> None:
        self.bound = bound
        state = bound.constants() | bound.buffers()
        data = _flat(bound.x, bound.y, state)
        self._names = tuple(data)
        self._data = tuple(data.values())
        self._dims: tuple[int | None, ...] = (None,) * len(data)
        self._state = bool(state)
        self._graphs: dict[int, FlatGraph] = {}
        self._draw_graphs: dict[str, FlatGraph] = {}
        self.slow_because: str | None = None
        self._start, self.sites, self._deterministic = self._discover()
        self.dim = int(self._start.numel())
        self.lanes: int | None = None
        if lanes is not None:
            chains = self._set_lanes(lanes)
        self._prepare(chains)
        self.compiled = False
        self.rule = "eager"

    @property
    def dtype(self) -> torch.dtype:
        """Floating type of the density."""
        return self.bound.dtype

    @property
    def device(self) -> torch.device:
        """Device of the density."""
        return self.bound.device

    @property
    def data_tensors(self) -> tuple[Tensor, ...]:
        """What the graph takes after z: x, y, parameters without a prior and buffers."""
        return self._data

    def graph(self, z: Tensor, *data: Tensor) -> tuple[Tensor, Tensor]:
        """Return log density `(chains,)` and gradient `(chains, dim)`; pure, for use in a graph.

        Args:
            z: Unconstrained values `(chains, dim)`.
            *data: `data_tensors`.
        """
        value, grad = self._prepare(z.shape[0])(z, *data)
        return value, grad

    def value_and_grad(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log density and its gradient.

        Args:
            z: Unconstrained values `(chains, dim)`.

        Returns:
            Log density `(chains,)` and gradient `(chains, dim)`. A chain whose evaluation fails
            (a matrix that is not positive definite, say) has NaN; the others are not touched.
        """
        self._check(z)
        if self.slow_because is not None:
            return self._chain_by_chain(z)
        return self.graph(z, *self.data_tensors)

    def log_density(self, z: Tensor) -> Tensor:
        """Return the log density `(chains,)` at unconstrained values `(chains, dim)`."""
        self._check(z)
        return self._over_draws(self._log_density_of_draw, (z,), (1,))[0]

    def constrain(self, z: Tensor) -> dict[str, Tensor]:
        """Return the values of the latent sites on their own support.

        Args:
            z: Unconstrained values `(..., dim)`; with lanes of data, `(lanes, ..., dim)`.

        Returns:
            By site, `(..., *shape)`.
        """
        self._check(z)
        values = self._over_draws(self._values, (z,), (1,))
        return {site.name: value for site, value in zip(self.sites, values, strict=True)}

    def deterministic(self, z: Tensor) -> dict[str, Tensor]:
        """Return the values of `pyro.deterministic` sites, by name, as `constrain` does."""
        self._check(z)
        values = self._over_draws(self._deterministic_values, (z,), (1,))
        return dict(zip(self._deterministic, values, strict=True))

    def unconstrain(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the flat vector of values on each site's own support: the inverse of `constrain`.

        Args:
            values: By site, `(..., *shape)`.

        Raises:
            ModelError: A site is missing or has another shape.
        """
        inputs = []
        for site in self.sites:
            value = values.get(site.name)
            event = len(site.shape)
            if value is None or tuple(value.shape[value.ndim - event :]) != site.shape:
                found = "none" if value is None else tuple(value.shape)
                raise ModelError(
                    f"site {site.name!r}: expected values of shape (…, {site.shape}), got {found}"
                )
            inputs.append(value.to(device=self.device, dtype=self.dtype).contiguous())
        events = tuple(len(site.shape) for site in self.sites)
        return self._over_draws(self._unconstrained, tuple(inputs), events)[0]

    def site_log_densities(self, z: Tensor, lane: int = 0) -> dict[str, float]:
        """Return the log density by site at one point; a latent site's has its log |det J|.

        Args:
            z: Unconstrained values `(dim,)`.
            lane: Which lane's data, where lanes differ.
        """
        with isolated(), torch.no_grad():
            tracer, latents = self._run(from_flat(self.sites, z), self._lane_data(lane))
            tracer.compute_log_prob(site_filter=_counts)
        return {
            name: float(node["log_prob_sum"] + latents.log_jacobian.get(name, 0.0))
            for name, node in tracer.nodes.items()
            if node["type"] == "sample" and "log_prob_sum" in node
        }

    def initial_prior(self, chains: int, seed: int) -> Tensor:
        """Draw starts from the prior, again where the density or its gradient is not finite.

        A flat prior is drawn as U(-2, 2) on the unconstrained space. The start of one chain depends
        on the seed and its index only, not on how many chains there are.

        Args:
            chains: Number of chains.
            seed: Seed.

        Returns:
            Unconstrained values `(chains, dim)`.

        Raises:
            FitError: No finite start was found; the message has the log density by site.
        """
        z = self._start.repeat(chains, 1)
        todo = list(range(chains))
        for attempt in range(_TRIES):
            for chain in todo:
                z[chain] = self._prior_draw(chain, seed, attempt)
            value, grad = self.value_and_grad(z)
            finite = value.isfinite() & grad.isfinite().all(-1)
            todo = [chain for chain in todo if not finite[chain]]
            if not todo:
                return z
        terms = self.site_log_densities(z[todo[0]], todo[0] if self.lanes else 0)
        listed = ", ".join(f"{name} {term:.6g}" for name, term in terms.items())
        raise FitError(
            f"no finite start in {_TRIES} draws from the prior; log density by site at the last one: "
            f"{listed}; pass init= with values"
        )

    def _prior_draw(self, chain: int, seed: int, attempt: int) -> Tensor:
        entropy = np.random.SeedSequence((seed, chain, attempt)).generate_state(1)[0]
        place = from_prior(self.device, self.dtype)
        with isolated(int(entropy), self.device), torch.no_grad():
            _, latents = self._run(place, self._lane_data(chain if self.lanes else 0))
        return latents.flat()

    # What one lane computes, as pure functions of tensors.

    def _run(
        self, place: Place, data: tuple[Tensor, ...], *, checks: bool = False
    ) -> tuple[poutine.Trace, Latents]:
        x, y, state = _nested(dict(zip(self._names, data, strict=False)))
        model = self.bound.model
        if state:
            module = model

            def model(*args: Any) -> Any:
                return functional_call(module, state, args)

        latents = Latents(place)
        with pyro.validation_enabled(checks), LaneSafe(), latents:
            return run(model, {}, x, y, fill=self.bound.fill, checks=checks), latents

    def _log_density(self, z: Tensor, *data: Tensor) -> Tensor:
        with pyro.validation_enabled(False), LaneSafe():
            tracer, latents = self._run(from_flat(self.sites, z), data)
            total = tracer.log_prob_sum(site_filter=_counts)
            return (total + sum(latents.log_jacobian.values())).to(z.dtype)

    def _values(self, z: Tensor, *data: Tensor) -> tuple[Tensor, ...]:
        return tuple(self._run(from_flat(self.sites, z), data)[1].values.values())

    def _deterministic_values(self, z: Tensor, *data: Tensor) -> tuple[Tensor, ...]:
        nodes = self._run(from_flat(self.sites, z), data)[0].nodes
        return tuple(nodes[name]["value"] for name in self._deterministic)

    def _log_density_of_draw(self, z: Tensor, *data: Tensor) -> tuple[Tensor]:
        return (self._log_density(z, *data),)

    def _unconstrained(self, *inputs: Tensor) -> tuple[Tensor]:
        values = {site.name: v for site, v in zip(self.sites, inputs, strict=False)}
        latents = self._run(from_values(values), inputs[len(self.sites) :])[1]
        return (latents.flat(),)

    # Getting ready.

    def _discover(self) -> tuple[Tensor, tuple[Latent, ...], tuple[str, ...]]:
        """Run the model once with all argument checks on; return a point, the layout, and names."""
        place = from_prior(self.device, self.dtype)
        error: Exception | None = None
        with isolated(0, self.device), torch.no_grad():
            for _ in range(_TRIES):
                try:
                    tracer, latents = self._run(place, self._data, checks=True)
                    value = tracer.log_prob_sum()
                except _NUMERICAL as found:
                    error = found  # an unlucky draw, or a fault of the model that stays
                    continue
                z = latents.flat()
                if value.isfinite() and z.isfinite().all():
                    nodes = tracer.nodes.items()
                    names = [n for n, node in nodes if node.get("infer", {}).get("_deterministic")]
                    return z, layout(latents), tuple(names)
        reason = f"{type(error).__name__}: {error}" if error else "its log density is not finite"
        raise ModelError(f"the model fails at {_TRIES} draws from its prior ({reason})") from error

    def _set_lanes(self, lanes: Mapping[str, Data]) -> int:
        state = {**lanes.get("constants", {}), **lanes.get("buffers", {})}
        given = _flat(lanes.get("x"), lanes.get("y"), state)
        held = dict(zip(self._names, self._data, strict=True))
        for name, value in given.items():
            if name not in held or value.shape[1:] != held[name].shape:
                expected = tuple(held[name].shape) if name in held else "no such tensor"
                raise ModelError(
                    f"lanes: {'.'.join(name).rstrip('.')} has shape {tuple(value.shape)}; expected "
                    f"(lanes, …) with {expected} for each lane"
                )
            held[name] = value.to(device=self.device, dtype=held[name].dtype)
        counts = {len(value) for value in given.values()}
        if len(counts) != 1:
            raise ModelError(f"lanes: expected one number of lanes, got {sorted(counts)}")
        self._data = tuple(held.values())
        self._dims = tuple(0 if name in given else None for name in self._names)
        self.lanes = counts.pop()
        return self.lanes

    def _lane_data(self, lane: int) -> tuple[Tensor, ...]:
        pairs = zip(self._data, self._dims, strict=True)
        return tuple(value if dim is None else value[lane] for value, dim in pairs)

    def _prepare(self, chains: int) -> FlatGraph:
        """Trace the density and its gradient for a number of chains."""
        if chains in self._graphs:
            return self._graphs[chains]

        def batched(z: Tensor, *data: Tensor) -> tuple[Tensor, Tensor]:
            grad, value = vmap(grad_and_value(self._log_density), (0, *self._dims))(z, *data)
            return value, grad

        with isolated(0, self.device):
            graph = trace(batched, (self._start.repeat(chains, 1), *self._data))
        self._graphs[chains] = graph
        return graph

    def _check(self, z: Tensor) -> None:
        if z.shape[-1] != self.dim:
            raise ModelError(f"z has shape {tuple(z.shape)}; expected (…, {self.dim})")
        if self.lanes is not None and z.shape[0] != self.lanes:
            raise ModelError(
                f"z has shape {tuple(z.shape)}; expected a first axis of {self.lanes} lanes"
            )

    def _chain_by_chain(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Evaluate through Python, one chain after another."""
        values, grads = torch.full_like(z[:, 0], torch.nan), torch.full_like(z, torch.nan)
        with isolated(0, self.device):
            for chain, point in enumerate(z):
                leaf = point.detach().clone().requires_grad_()
                try:
                    value = self._log_density(leaf, *self._lane_data(chain))
                    (grad,) = torch.autograd.grad(value, leaf, materialize_grads=True)
                except _NUMERICAL:
                    continue
                values[chain], grads[chain] = value.detach(), grad
        return values, grads

    def _over_draws(
        self, function: Callable[..., Any], inputs: tuple[Tensor, ...], events: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        """Apply a function of one lane to draws.

        Args:
            function: Method that takes one draw's inputs and then the data of a lane.
            inputs: Each `(..., *event)`; with lanes of data, the first axis is that of the lanes.
            events: Number of event dimensions of each input.

        Returns:
            Each `(..., *event)`.
        """
        lead = inputs[0].shape[: inputs[0].ndim - events[0]]
        rows = self.lanes or 1
        flat = [v.reshape(rows, -1, *v.shape[len(lead) :]) for v in inputs]
        parts = [
            self._over_lane(function, [v[lane] for v in flat], self._lane_data(lane))
            for lane in range(rows)
        ]
        return tuple(
            torch.cat(outputs).reshape(*lead, *outputs[0].shape[1:])
            for outputs in zip(*parts, strict=True)
        )

    def _over_lane(
        self, function: Callable[..., Any], inputs: list[Tensor], data: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        with isolated(0, self.device), torch.no_grad():
            if self.slow_because is not None:
                draws = [function(*draw, *data) for draw in zip(*inputs, strict=True)]
                return tuple(torch.stack(outputs) for outputs in zip(*draws, strict=True))
            graph = self._draw_graphs.get(function.__name__)
            if graph is None:
                graph = trace(function, [v[0] for v in inputs] + list(data))
                self._draw_graphs[function.__name__] = graph
            dims = (*(0 for _ in inputs), *(None for _ in data))
            return vmap(graph, dims, chunk_size=_BLOCK)(*inputs, *data)


def _counts(_: str, node: Any) -> bool:
    return not node["infer"].get("_deterministic")


_Name = tuple[str, str]


def _flat(x: Data, y: Data, state: Mapping[str, Tensor]) -> dict[_Name, Tensor]:
    """Name each tensor of the data by its part and its key there."""
    named: dict[_Name, Tensor] = {}
    for part, value in (("x", x), ("y", y), ("state", state)):
        leaves = value.items() if isinstance(value, Mapping) else [("", value)]
        named.update({(part, key): leaf for key, leaf in leaves if leaf is not None})
    return named


def _nested(named: Mapping[_Name, Tensor]) -> tuple[Data, Data, dict[str, Tensor]]:
    """Undo `_flat`."""
    parts: dict[str, dict[str, Tensor]] = {"x": {}, "y": {}, "state": {}}
    for (part, key), value in named.items():
        parts[part][key] = value

    def data(part: dict[str, Tensor]) -> Data:
        return part.get("", part or None)

    return data(parts["x"]), data(parts["y"]), parts["state"]
