"""The step of all lanes as one compiled function that updates their state in place."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pbnn.infer.engine import Engine, Ring, Stepper, record
from pbnn.infer.graph import compile_graph
from pbnn.infer.lanes import UNIFORMS, Lanes
from pbnn.infer.noise import uniforms
from pbnn.infer.transition import step

__all__ = ["compile_step"]

_FIELDS = len(Lanes._fields)
_STATE = _FIELDS + len(Ring._fields)


def compile_step(
    graph: Callable[..., tuple[Tensor, Tensor]], data: Sequence[Tensor], engine: Engine
) -> Stepper:
    """Compile the density together with the tree, for the shapes of an engine's state.

    Args:
        graph: Pure function of positions and data; returns log density and gradient.
        data: Its further arguments.
        engine: The engine, whose tensors the compiled function then writes in place.

    Returns:
        A stepper that returns the tensors of the engine, updated.

    Raises:
        FitError: Inductor cannot compile here.
    """
    rule = engine.options.rule

    def update(*inputs: Tensor) -> tuple[()]:
        state, held = inputs[:_STATE], inputs[_STATE:]
        lanes, ring = Lanes(*state[:_FIELDS]), Ring(*state[_FIELDS:])
        noise = uniforms(lanes.keys, lanes.leapfrogs, UNIFORMS, lanes.z.dtype)
        new, outcome = step(lanes, noise, lambda z: graph(z, *held), rule)
        assert outcome is not None
        for old, value in zip(state, (*new, *record(ring, outcome)), strict=True):
            if value is not old:
                old.copy_(value)
        return ()

    inputs = (*engine.lanes, *engine.ring, *data)
    run = compile_graph(update, inputs)
    if inputs[0].is_cuda:
        return _recorded(run, inputs)

    def take(lanes: Lanes, ring: Ring, steps: int) -> tuple[Lanes, Ring]:
        for _ in range(steps):
            run(*inputs)
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
