"""The log joint density of a bound model on the unconstrained space, one lane for each chain."""

import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from pbnn.errors import FitError, ModelError, PbnnWarning
from pbnn.infer.graph import (
    CudaGraph,
    FlatGraph,
    agree,
    compile_graph,
    trace,
    worth_compiling,
)
from pbnn.infer.lane import NUMERICAL, TRIES, Lane, flat
from pbnn.infer.unconstrained import Latent
from pbnn.model import BoundModel, Data, isolated

__all__ = ["Density"]


class Density:
    """Log joint density of a bound model and its gradient, one lane for each chain.

    The density is that of the unconstrained values: each latent site's value passes through the
    bijection onto its support, and log |det J| is added. The model runs through Python once for
    each number of chains; what is kept is a flat graph of ATen calls over all chains.

    Args:
        bound: The model and its data.
        chains: Number of chains to get ready for now; others get ready when they first come, and
            with 0 all do.
        compile: Whether inductor compiles the graph; None decides by a rule of the graph's size,
            the values in it (rows times units times chains) and the draws, never by a timing.
        draws: Number of draws a chain, warm-up among them, that the rule counts on.
        lanes: Data that differ between chains: "x", "y" (as the model takes them), "constants" or
            "buffers" (by name), each tensor with one leading axis more than in `bound`. Chain i
            then has the data of lane i, and there are as many chains as lanes.

    Attributes:
        bound: The model and its data.
        sites: Where each latent site lies in the flat vector, in the order in which the model runs.
        dim: Length of the flat vector.
        lanes: Number of lanes of data; None where all chains share them.
        slow_because: Why the model runs through Python chain by chain; None where it does not.
        compiled: Whether inductor compiles the graph.
        rule: Why the graph is compiled, or not, in words.

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
        self._lane = Lane(bound)
        self.sites: tuple[Latent, ...] = self._lane.sites
        self.dim = int(self._lane.start.numel())
        self._data = self._lane.data
        self._dims: tuple[int | None, ...] = (None,) * len(self._data)
        self.lanes: int | None = None
        if lanes is not None:
            chains = self._set_lanes(lanes)
        self._graphs: dict[int, FlatGraph] = {}
        self._functions: dict[int, Callable[..., Any]] = {}
        self.slow_because: str | None = None
        self._asked, self._draws, self._decided = compile, draws, False
        self.compiled: bool = bool(compile)
        self.rule: str = "as asked"
        if chains:
            self._decide(chains)

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
        """What `graph` takes after z: x, y, parameters without a prior and buffers."""
        return self._data

    def graph(self, z: Tensor, *data: Tensor) -> tuple[Tensor, Tensor]:
        """Return log density `(chains,)` and gradient `(chains, dim)`, never compiled.

        Pure, so that it can become a part of a larger graph that is compiled as a whole.

        Args:
            z: Unconstrained values `(chains, dim)`.
            *data: `data_tensors`.
        """
        self._decide(z.shape[0])
        if self.slow_because is not None:
            return self._chain_by_chain(z)
        value, grad = self._prepare(z.shape[0])(z, *data)
        return value, grad

    def value_and_grad(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log density and its gradient, compiled where `compiled` says so.

        Args:
            z: Unconstrained values `(chains, dim)`.

        Returns:
            Log density `(chains,)` and gradient `(chains, dim)`. A chain whose evaluation fails
            (a matrix that is not positive definite, say) has NaN; the others are not touched.
        """
        function = self._functions.get(z.shape[0])
        if function is None or z.shape[-1] != self.dim:
            self._check(z)
            function = self._functions[z.shape[0]] = self._function(z)
        value, grad = function(z.contiguous(), *self._data)
        return value, grad

    def log_density(self, z: Tensor) -> Tensor:
        """Return the log density `(...)` at unconstrained values `(..., dim)`."""
        self._check(z)
        return self._over_draws(self._lane.log_density_alone, (z,), (1,))[0]

    def constrain(self, z: Tensor) -> dict[str, Tensor]:
        """Return the values of the latent sites on their own support.

        Args:
            z: Unconstrained values `(..., dim)`; with lanes of data, `(lanes, ..., dim)`.

        Returns:
            By site, `(..., *shape)`.
        """
        self._check(z)
        values = self._over_draws(self._lane.values, (z,), (1,))
        return {site.name: value for site, value in zip(self.sites, values, strict=True)}

    def deterministic(self, z: Tensor) -> dict[str, Tensor]:
        """Return the values of `pyro.deterministic` sites, by name, as `constrain` does."""
        self._check(z)
        if not self._lane.deterministic:
            return {}
        values = self._over_draws(self._lane.deterministic_values, (z,), (1,))
        return dict(zip(self._lane.deterministic, values, strict=True))

    def unconstrain(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the flat vectors `(..., dim)` of values: the inverse of `constrain`.

        Args:
            values: By site, on its own support, `(..., *shape)`.

        Raises:
            ModelError: A site is missing or has another shape.
        """
        inputs = []
        for site in self.sites:
            value = values.get(site.name)
            if value is None or tuple(value.shape[value.ndim - len(site.shape) :]) != site.shape:
                found = "none" if value is None else f"shape {tuple(value.shape)}"
                expected = ", ".join(map(str, ("…", *site.shape)))
                raise ModelError(
                    f"site {site.name!r}: expected values of shape ({expected}), got {found}"
                )
            inputs.append(value.to(device=self.device, dtype=self.dtype))
        events = tuple(len(site.shape) for site in self.sites)
        return self._over_draws(self._lane.unconstrained, tuple(inputs), events)[0]

    def site_log_densities(self, z: Tensor, lane: int = 0) -> dict[str, float]:
        """Return the log density by site at one point; a latent site's has its log |det J|.

        Args:
            z: Unconstrained values `(dim,)`.
            lane: Which lane's data, where lanes differ.
        """
        with isolated(0, self.device):
            return self._lane.by_site(z, self._lane_data(lane))

    def fingerprint(self) -> dict[str, str]:
        """Return the log density by site at one draw of the prior, in words.

        Two models with the same sites but other prior scales, noise or functions differ in it.
        """
        terms = self.site_log_densities(self._lane.start)
        return {name: f"{term:.5g}" for name, term in terms.items()}

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
        z = self._lane.start.repeat(chains, 1)
        self._check(z)
        todo = list(range(chains))
        for attempt in range(TRIES):
            for chain in todo:
                entropy = np.random.SeedSequence((seed, chain, attempt)).generate_state(1)[0]
                with isolated(int(entropy), self.device):
                    z[chain] = self._lane.prior(self._lane_data(chain))
            value, grad = self.graph(z, *self._data)
            finite = value.isfinite() & grad.isfinite().all(-1)
            todo = [chain for chain in todo if not finite[chain]]
            if not todo:
                return z
        terms = self.site_log_densities(z[todo[0]], todo[0])
        listed = ", ".join(f"{name} {term:.6g}" for name, term in terms.items())
        raise FitError(
            f"no finite start in {TRIES} draws from the prior; log density by site at the last "
            f"one: {listed}; pass init= with values"
        )

    def _check(self, z: Tensor) -> None:
        if z.ndim == 0 or z.shape[-1] != self.dim:
            raise ModelError(f"z has shape {tuple(z.shape)}; expected (…, {self.dim})")
        if self.lanes is not None and z.shape[0] != self.lanes:
            raise ModelError(
                f"z has shape {tuple(z.shape)}; expected a first axis of {self.lanes} lanes"
            )

    def _set_lanes(self, lanes: Mapping[str, Data]) -> int:
        state = {**lanes.get("constants", {}), **lanes.get("buffers", {})}
        given = flat(lanes.get("x"), lanes.get("y"), state)
        held = dict(zip(self._lane.names, self._data, strict=True))
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
        self._dims = tuple(0 if name in given else None for name in held)
        self.lanes = counts.pop()
        return self.lanes

    def _lane_data(self, lane: int) -> tuple[Tensor, ...]:
        pairs = zip(self._data, self._dims, strict=True)
        return tuple(value if dim is None else value[lane] for value, dim in pairs)

    def _decide(self, chains: int) -> None:
        """Find out, once, whether the model can be traced, and whether to compile its graph."""
        if self._decided:
            return
        self._decided = True
        try:
            graph = self._prepare(chains)
        except Exception as error:
            self._fall_back(error)
        else:
            if self._asked is None:
                self.compiled, self.rule = worth_compiling(graph, self._draws)

    def _prepare(self, chains: int) -> FlatGraph:
        """Return the graph for a number of chains; traced once, and held against the model."""
        if chains in self._graphs:
            return self._graphs[chains]

        def batched(z: Tensor, *data: Tensor) -> tuple[Tensor, Tensor]:
            grad, value = vmap(grad_and_value(self._lane.log_density), (0, *self._dims))(z, *data)
            return value, grad

        # Lanes at different points, so that a value that crosses lanes would show.
        steps = torch.linspace(0, 0.1, chains, dtype=self.dtype, device=self.device)
        z = self._lane.start + steps[:, None]
        with isolated(0, self.device), torch.no_grad():
            graph = trace(batched, (z, *self._data))
            found = graph(z, *self._data)
        for chain in sorted({0, chains - 1}):
            one = tuple(output[chain : chain + 1] for output in found)
            if not agree(one, self._chain_by_chain(z[chain : chain + 1], chain)):
                raise ModelError("its graph gives other numbers than the model itself")
        self._graphs[chains] = graph
        return graph

    def _function(self, z: Tensor) -> Callable[..., Any]:
        """Return what `value_and_grad` calls for a number of chains."""
        self._decide(z.shape[0])
        if self.slow_because is not None:
            return lambda z, *_: self._chain_by_chain(z)
        function: Callable[..., Any] = self._prepare(z.shape[0])
        inputs = (z.contiguous(), *self._data)
        if self.compiled:
            try:
                compiled = compile_graph(function, inputs)
                if not agree(compiled(*inputs), function(*inputs)):
                    raise FitError("the compiled graph gives other numbers; pass compile=False")
                function = compiled
            except FitError as error:
                if self._asked:
                    raise
                self.compiled, self.rule = False, f"not compiled: {error}"
                warnings.warn(f"{error}; going on uncompiled", PbnnWarning, stacklevel=3)
        return CudaGraph.of(function, inputs) if z.is_cuda else function

    def _fall_back(self, error: Exception) -> None:
        """Choose the slower path, and say what in the model asks for it."""
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            raise error
        where, reason = _where(error), str(error).strip().splitlines()[0]
        z = self._lane.start[None]
        same = agree(self._chain_by_chain(z), self._chain_by_chain(z), exact=True)
        if "random operation" in reason or not same:
            raise ModelError(
                f"the model is random beyond its sites{where}; declare it with `pyro.sample`, or "
                "switch it off in eval mode"
            ) from error
        self.slow_because = f"the model cannot be mapped over chains{where}"
        self.compiled, self.rule = False, f"not compiled: {self.slow_because}"
        warnings.warn(
            f"{self.slow_because}: {reason[:200]}; the chains run through Python one by one, with "
            "the same numbers but slower; in place of Python control flow and in-place writes, use "
            "torch.where and torch.cat",
            PbnnWarning,
            stacklevel=3,
        )

    def _chain_by_chain(self, z: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        """Evaluate through Python, one chain after another."""
        values, grads = torch.full_like(z[:, 0], torch.nan), torch.full_like(z, torch.nan)
        with isolated(0, self.device):
            for chain, point in enumerate(z):
                leaf = point.detach().clone().requires_grad_()
                try:
                    with torch.enable_grad():
                        value = self._lane.log_density(leaf, *self._lane_data(first + chain))
                    (grad,) = torch.autograd.grad(value, leaf, materialize_grads=True)
                except ModelError:
                    raise
                except NUMERICAL:
                    continue
                values[chain], grads[chain] = value.detach(), grad
        return values, grads

    def _over_draws(
        self, function: Callable[..., Any], inputs: tuple[Tensor, ...], events: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        """Apply a function of one lane to draws.

        Args:
            function: Method of the lane that takes one draw's inputs and then the data.
            inputs: Each `(..., *event)`; with lanes of data, the first axis is that of the lanes.
            events: Number of event dimensions of each input.

        Returns:
            Each `(..., *event)`.
        """
        lead = inputs[0].shape[: inputs[0].ndim - events[0]]
        lanes = self.lanes or 1
        rows = [value.reshape(lanes, -1, *value.shape[len(lead) :]) for value in inputs]

        def part(lane: int) -> tuple[Tensor, ...]:
            return self._lane.over_draws(
                function,
                [value[lane] for value in rows],
                self._lane_data(lane),
                traced=self.slow_because is None,
            )

        with isolated(0, self.device), torch.no_grad():
            try:
                parts = [part(lane) for lane in range(lanes)]
            except Exception as error:
                if self._decided:
                    raise
                self._decided = True
                self._fall_back(error)
                parts = [part(lane) for lane in range(lanes)]
        return tuple(
            torch.cat(outputs).reshape((*lead, *outputs[0].shape[1:]))
            for outputs in zip(*parts, strict=True)
        )


def _where(error: Exception) -> str:
    """Return the line of the user's code in which an error arose, or the site, in words."""
    ours = (*torch.__path__, *pyro.__path__, str(Path(__file__).parents[1]), "<")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(ours):
            return f" ({Path(frame.filename).name}:{frame.lineno}: `{frame.line}`)"
    for place, _ in traceback.walk_tb(error.__traceback__):
        if place.f_code.co_name == "log_prob_sum":
            return f" (the log density of site {place.f_locals.get('name')!r})"
    return ""
