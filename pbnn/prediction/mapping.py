"""A function of one draw, over many draws: mapped by vmap, traced where it pays, looped over else.

Functions run a Pyro model, and may sample; what they sample differs from draw to draw.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.func import vmap
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from pbnn.checks import unwrapped

__all__ = ["BLOCK_VALUES", "DrawMap", "MappableSamples", "sampled"]

# Values of the widest layer over the draws of a block: 8 MB of float32. Larger blocks take up to
# twice as long, as the allocator gives their pages back; smaller ones wait for Python.
BLOCK_VALUES = 2**21
# Tracing takes as long as it saves on some 40 blocks: Pyro's handlers, and products that are one
# for all draws.
TRACED_BLOCKS = 40

Values: TypeAlias = dict[str, Tensor]
Leaves: TypeAlias = tuple[Tensor, ...]
Function: TypeAlias = Callable[[Values, Leaves], Leaves]
Data: TypeAlias = Any


class DrawMap:
    """A function of one draw and of data, evaluated for blocks of draws.

    Which way it runs (traced to a flat graph, mapped by vmap, or in a loop) and how large the
    blocks are follows from shapes alone; the numbers are the same up to rounding.

    Args:
        function: Takes one draw's values by name, then trees of tensors; returns tensors by name.
            It is pure, apart from what it samples.
    """

    def __init__(self, function: Callable[..., Values]) -> None:
        self._function = function
        self._graphs: dict[Any, _Graph | None] = {}
        self._mappable = True

    def blocks(
        self, draws: Callable[[int, int], Values], count: int, size: int, *data: Data
    ) -> Iterator[Values]:
        """Yield results for one block of draws after another, each `(draws, …)`.

        Args:
            draws: Returns draws from one number up to another, each `(draws, …)`.
            count: Number of draws.
            size: Draws of a block.
            *data: Trees of tensors that all draws share.
        """
        held, spec = tree_flatten(data)
        leaves = tuple(leaf for leaf in held if leaf is not None)
        names: list[str] = []

        def function(block: Values, shared: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            given = iter(shared)
            whole = [None if leaf is None else next(given) for leaf in held]
            out = self._function(block, *tree_unflatten(whole, spec))
            names[:] = out
            return tuple(out.values())

        for start in range(0, count, size):
            block = draws(start, min(start + size, count))
            graph = None
            # The first block runs through Python: a model that reads a draw's value then raises.
            if start and start + size <= count and count // size >= TRACED_BLOCKS:
                graph = self._graph(function, block, leaves)
            outputs = graph(block, leaves) if graph else self._untraced(function, block, leaves)
            yield dict(zip(names, outputs, strict=True))

    def _untraced(self, function: Function, block: Values, leaves: Leaves) -> Leaves:
        if self._mappable:
            try:
                return _over_draws(function, block, leaves, _FreshNoise())
            except (RuntimeError, NotImplementedError, ValueError):
                # Some operations cannot be mapped; a loop gives the same numbers, slower.
                self._mappable = False
        size = next(iter(block.values())).shape[0]
        parts = [
            function({name: value[k] for name, value in block.items()}, leaves) for k in range(size)
        ]
        return tuple(torch.stack(outputs) for outputs in zip(*parts, strict=True))

    def _graph(self, function: Function, block: Values, leaves: Leaves) -> "_Graph | None":
        """Return the graph for these shapes, or None where the function cannot be traced."""
        key = tuple(value.shape for value in (*block.values(), *leaves))
        if key not in self._graphs:
            try:
                self._graphs[key] = _Graph(function, block, leaves) if self._mappable else None
            except Exception:
                # A model that reads values of x would leave the way of this x in the graph.
                self._graphs[key] = None
        return self._graphs[key]


class _Graph:
    """A function over a block of draws as a flat graph, with the noise that it draws as an input.

    Args:
        function: The function of one draw.
        block: Draws, of the shapes that the graph is for.
        leaves: Data, likewise.

    Raises:
        RuntimeError: The function draws noise of a kind that cannot be given to it.
    """

    def __init__(self, function: Function, block: Values, leaves: Leaves) -> None:
        # Imported where it is needed: what traces takes a second to load.
        from pbnn.infer.graph import trace

        noise = _FreshNoise()
        _over_draws(function, block, leaves, noise)
        self._size = next(iter(block.values())).shape[0]
        self._noise = tuple(noise.drawn)
        names, inputs, drawn = list(block), tuple(block.values()), self._draw()

        def flat(*values: Tensor) -> tuple[Tensor, ...]:
            block = dict(zip(names, values, strict=False))
            rest = values[len(names) :]
            shared, given = rest[: len(leaves)], rest[len(leaves) :]
            return _over_draws(function, block, shared, _FreshNoise(), given)

        device = inputs[0].device
        before = _generator_state(device)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*(batching rule|resized).*", UserWarning)
            self._run = trace(flat, (*inputs, *leaves, *drawn))
        if not torch.equal(before, _generator_state(device)):
            raise RuntimeError("the function draws noise that would be frozen in the graph")

    def __call__(self, block: Values, leaves: Leaves) -> Leaves:
        outputs: Leaves = self._run(*block.values(), *leaves, *self._draw())
        return outputs

    def _draw(self) -> Leaves:
        return tuple(
            draw(like.new_empty(()).expand(self._size, *like.shape)) for draw, like in self._noise
        )


def _generator_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _over_draws(
    function: Function,
    block: Values,
    leaves: Leaves,
    noise: "_FreshNoise",
    given: Leaves = (),
) -> Leaves:
    def one(block: Values, leaves: Leaves, given: Leaves) -> Leaves:
        noise.given = iter(given) if given else None
        return function(block, leaves)

    with warnings.catch_warnings(), noise:
        # torch tells of operations that it maps one by one, or resizes for: not wrong.
        warnings.filterwarnings("ignore", ".*(batching rule|resized).*", UserWarning)
        mapped: Callable[..., Leaves] = vmap(one, in_dims=(0, None, 0), randomness="different")
        return mapped(block, leaves, given)


class _FreshNoise(TorchFunctionMode):
    """Draws noise into new tensors: vmap cannot fill one tensor differently for each draw.

    Attributes:
        given: Noise to take, in the order in which it is asked for; drawn where there is none.
        drawn: How each piece of noise was drawn, and its shape for one draw.
    """

    def __init__(self) -> None:
        super().__init__()
        self.given: Iterator[Tensor] | None = None
        self.drawn: list[tuple[Callable[[Tensor], Tensor], Tensor]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _NOISE:
            return func(*args, **(kwargs or {}))
        draw, shape = _NOISE[func]
        like = args[0]
        if self.given is None:
            self.drawn.append((draw, torch.empty(like.shape, dtype=like.dtype, device=like.device)))
        noise = draw(like) if self.given is None else next(self.given)
        return shape(noise, *args, **(kwargs or {}))


def _choice(uniform: Tensor, weights: Tensor, count: int, replacement: bool = False) -> Tensor:
    """Choose one column of each row by its weight: the first of exponential clocks to ring."""
    if count != 1:
        raise NotImplementedError("several choices cannot be mapped over draws")
    clocks = -torch.log1p(-uniform)
    smallest = torch.finfo(clocks.dtype).tiny
    return (weights / clocks.clamp(min=smallest)).argmax(-1, keepdim=True)


# By torch's function: which noise of the shape of its first argument it takes, and what it makes.
_NOISE: Mapping[Any, tuple[Callable[[Tensor], Tensor], Callable[..., Tensor]]] = {
    Tensor.normal_: (torch.randn_like, lambda z, t, mean=0.0, std=1.0: mean + std * z),
    Tensor.uniform_: (torch.rand_like, lambda u, t, low=0.0, high=1.0: low + (high - low) * u),
    Tensor.exponential_: (torch.rand_like, lambda u, t, lambd=1.0: -torch.log1p(-u) / lambd),
    torch.bernoulli: (torch.rand_like, lambda u, p: (u < p).to(p.dtype)),
    torch.multinomial: (torch.rand_like, _choice),
}


class MappableSamples(Messenger):  # type: ignore[misc]
    """Samples Beta and Dirichlet sites in a way that torch can map over draws."""

    def _pyro_sample(self, msg: Any) -> None:
        if not msg["done"] and not msg["is_observed"] and _is_dirichlet(msg["fn"]):
            msg["value"], msg["done"] = sampled(msg["fn"]), True


def sampled(fn: Any) -> Tensor:
    """Return one sample of a distribution, in a way that torch can map over draws.

    A Dirichlet sample is a vector of Gamma variables over their sum; a Gamma(a) variable is one of
    Gamma(a + 1) times U^(1/a) (Marsaglia & Tsang 2000, section 6), in logarithms, so that a small a
    does not underflow.
    """
    if not _is_dirichlet(fn):
        value: Tensor = fn()
        return value
    base, shape = unwrapped(fn), fn.shape()
    if isinstance(base, torch.distributions.Beta):
        a = torch.stack([base.concentration1, base.concentration0], -1).expand(*shape, 2)
    else:
        a = base.concentration.expand(shape)
    uniform = torch.rand_like(a).clamp(min=torch.finfo(a.dtype).tiny)
    logs = torch._standard_gamma(a + 1).log() + uniform.log() / a
    weights = logs.softmax(-1)
    return weights[..., 0] if isinstance(base, torch.distributions.Beta) else weights


def _is_dirichlet(fn: Any) -> bool:
    return isinstance(unwrapped(fn), torch.distributions.Beta | torch.distributions.Dirichlet)
