"""The step of some lanes as one compiled function that updates their state in place.

Lanes are taken in groups of one size: a group's tensors stay in the cache over a block of
leapfrogs, one compiled function serves all groups, and groups run on as many threads as torch
has. The size follows from the density alone, so that no thread count changes a draw, but of a
single chain of a very large network.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

from pbnn.infer.engine import Engine, Ring, Stepper, record
from pbnn.infer.graph import FlatGraph, compile_graph, disk_cache
from pbnn.infer.lanes import UNIFORMS, Lanes
from pbnn.infer.noise import both
from pbnn.infer.transition import next_momentum, step

__all__ = ["compile_step", "group_size", "is_wide", "worth_compiling_step"]

# Seconds, rounded from runs of six models on one core: an eager call; a value of the density that
# fusion saves to write; inductor's start, each call, and each call that it does not fuse.
_CALL, _VALUE, _START, _LOWER, _PART = 5e-6, 1e-9, 5.0, 0.03, 0.8
_EAGER_CALLS, _TRACED_CALLS = 300, 450
"""Calls of the tree and the adaptation in an eager step, and in a traced one."""
_CACHED, _THREAD, _WIDE = 2**19, 2**14, 2**22
"""Values of the density that a group may write (2 MB in float32), and those of a lane from which it
is worth a thread to itself, or several."""


def worth_compiling_step(graph: FlatGraph, dim: int, draws: int) -> tuple[bool, str]:
    """Decide whether compiling the step saves more time than it takes, by counts alone.

    Args:
        graph: The graph of the log density and gradient of all chains.
        dim: Number of unconstrained values; the rule counts on half as many leapfrogs for a draw,
            from 8 to 64.
        draws: Draws of a chain, warm-up among them.

    Returns:
        The decision, and why, in words.
    """
    leapfrogs = min(max(dim // 2, 8), 64) * draws
    saved = leapfrogs * (_CALL * (graph.calls + _EAGER_CALLS) + _VALUE * graph.values)
    cost = _START + _LOWER * (graph.calls + _TRACED_CALLS) + _PART * graph.parts
    word, sign = ("compiled", ">") if saved > cost else ("not compiled", "<=")
    return saved > cost, (
        f"{word}: {leapfrogs} leapfrogs of {graph.calls} calls and {graph.values} values count "
        f"{saved:.1f} {sign} {cost:.1f}"
    )


def group_size(graph: FlatGraph, chains: int) -> int:
    """Return how many lanes a compiled step takes together, by counts alone.

    Args:
        graph: The graph of the log density and gradient of all chains.
        chains: Number of chains.

    Returns:
        A divisor of `chains`: as many lanes as the cache holds, and no more than half of them
        where the work of a lane is worth a thread.
    """
    values = graph.values // chains
    most = max(1, _CACHED // max(1, values))
    if values >= _THREAD:
        most = min(most, (chains + 1) // 2)
    divisors = [size for size in range(1, chains + 1) if chains % size == 0]
    fitting = max(size for size in divisors if size <= most or size == 1)
    # A number without good divisors, such as 7, stays whole sooner than it falls into ones.
    return fitting if 2 * fitting >= min(most, chains) else chains


def is_wide(graph: FlatGraph, chains: int) -> bool:
    """Return whether threads should share a lane's kernels: one lane, and a large one."""
    return chains == 1 and graph.values >= _WIDE


def compile_step(
    graph: Callable[..., tuple[Tensor, Tensor]],
    data: Sequence[Tensor],
    engine: Engine,
    group: int | None = None,
    *,
    wide: bool = False,
) -> Stepper:
    """Compile the density together with the tree, for the shapes of an engine's state.

    Args:
        graph: Pure function of positions and data; returns log density and gradient.
        data: Its further arguments.
        engine: The engine, whose tensors the compiled function then writes in place.
        group: Number of lanes that go together, a divisor of the number of lanes; `graph` must
            then take so many. By default all.
        wide: Whether one lane is worth several threads, which then share each of its kernels.

    Returns:
        A stepper that returns the tensors of the engine, updated.

    Raises:
        FitError: Inductor cannot compile here.
    """
    rule, (state, places) = engine.options.rule, _pack(engine)

    def update(*inputs: Tensor) -> tuple[()]:
        packed, inputs = inputs[: len(state)], inputs[len(state) :]
        ring, held = Ring(*inputs[: len(Ring._fields)]), inputs[len(Ring._fields) :]
        lanes = _unpack(packed, places)
        momentum, noise = both(
            lanes.keys,
            next_momentum(lanes),
            lanes.leapfrogs,
            lanes.z.shape[1],
            UNIFORMS,
            lanes.z.dtype,
        )
        new, outcome = step(lanes, noise, lambda z: graph(z, *held), rule, momentum)
        assert outcome is not None
        for before, names in zip(packed, places, strict=True):
            values = [getattr(new, name) for name in names]
            if any(getattr(new, name) is not getattr(lanes, name) for name in names):
                before.copy_(torch.stack(values, 1) if len(values) > 1 else values[0])
        for before, value in zip(ring, record(ring, outcome), strict=True):
            before.copy_(value)
        return ()

    chains = len(engine.ring.used)
    group = group or chains
    groups = [
        (*(value[first : first + group] for value in (*state, *engine.ring)), *data)
        for first in range(0, chains, group)
    ]
    graph(engine.lanes.z[:group], *data)  # what it keeps for lanes of this number it makes now
    with disk_cache():
        run = compile_graph(update, groups[0], None if wide else {"cpp.threads": 1})
    if state[0].is_cuda:
        return _recorded(run, groups[0])
    return _in_groups(run, groups, wide)


def _pack(engine: Engine) -> tuple[tuple[Tensor, ...], tuple[tuple[str, ...], ...]]:
    """Put the scalars of an engine's lanes side by side, those of one type in one tensor.

    A compiled call takes a quarter of a microsecond for each of its inputs.

    Returns:
        The tensors that hold the state from now on, and for each the names of its columns.
    """
    lanes = engine.lanes
    kinds: dict[torch.dtype, list[str]] = {}
    for name, value in lanes._asdict().items():
        if value.ndim == 1:
            kinds.setdefault(value.dtype, []).append(name)
    state, places = [], []
    for names in kinds.values():
        state.append(torch.stack([getattr(lanes, name) for name in names], 1))
        places.append(tuple(names))
    whole = [name for name, value in lanes._asdict().items() if value.ndim > 1]
    state += [getattr(lanes, name) for name in whole]
    places += [(name,) for name in whole]
    engine.lanes = _unpack(state, places)
    return tuple(state), tuple(places)


def _unpack(state: Sequence[Tensor], places: Sequence[Sequence[str]]) -> Lanes:
    """Return lanes whose scalars are columns of the tensors that hold them."""
    fields: dict[str, Tensor] = {}
    for value, names in zip(state, places, strict=True):
        fields |= zip(names, value.unbind(1) if len(names) > 1 else (value,), strict=True)
    return Lanes(**fields)


def _in_groups(
    run: Callable[..., Any], groups: Sequence[tuple[Tensor, ...]], wide: bool
) -> Stepper:
    """Take a block of leapfrogs group by group, on as many threads as torch has."""
    threads = min(torch.get_num_threads(), len(groups))
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

    def block(group: tuple[Tensor, ...], steps: int) -> None:
        for _ in range(steps):
            run(*group)

    def take(lanes: Lanes, ring: Ring, steps: int) -> tuple[Lanes, Ring]:
        before = torch.get_num_threads()
        blocks = []
        try:
            if threads > 1:
                blocks = [pool.submit(block, group, steps) for group in groups]
                for each in blocks:
                    each.result()
            else:
                torch.set_num_threads(before if wide else 1)
                for group in groups:
                    block(group, steps)
        finally:
            wait(blocks)
            # What a worker sets for itself is also what threads to come begin with.
            torch.set_num_threads(before)
        return lanes, ring

    return take


def _recorded(run: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Stepper:
    """Record the launches of a block as one CUDA graph; its tensors stay where they are."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        # Kernels are loaded at their first calls, which no recording may see; on copies here.
        copies = tuple(value.clone() for value in inputs)
        for _ in range(3):
            run(*copies)
    torch.cuda.current_stream().wait_stream(side)
    graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def take(lanes: Lanes, ring: Ring, steps: int) -> tuple[Lanes, Ring]:
        if steps not in graphs:
            graphs[steps] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[steps]):
                for _ in range(steps):
                    run(*inputs)
        graphs[steps].replay()
        return lanes, ring

    return take
