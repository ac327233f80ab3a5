"""Flat graphs of ATen calls: trace a function of tensors once, rewrite it, run or compile it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.overrides import TorchFunctionMode

from pbnn.infer.rewrite import Rewriter, share

__all__ = ["FlatGraph", "LaneSafe", "trace"]

_READS = (
    Tensor.__bool__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.__int__,
    Tensor.item,
    Tensor.tolist,
)


class LaneSafe(TorchFunctionMode):
    """Keeps the failure of one lane in that lane, and lets Python read values that all lanes share.

    A factorisation that fails gives NaN for its matrix instead of an error for all of them.
    Attribute `reads` says whether Python read a value: the graph then holds for these data only.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace the calls that would raise or read; run all others as they are."""
        kwargs = kwargs or {}
        if func in _READS:
            self.reads = True
            # A value that depends on the lane still raises, in vmap.
            with disable_proxy_modes_tracing():
                return func(*args, **kwargs)
        if func in (torch.linalg.cholesky, torch.cholesky, Tensor.cholesky):
            upper = {"upper": args[1]} if len(args) > 1 else {}
            return _checked(*torch.linalg.cholesky_ex(args[0], **upper, **kwargs))
        if func in (torch.linalg.inv, torch.inverse, Tensor.inverse):
            return _checked(*torch.linalg.inv_ex(*args, **kwargs))
        if func is torch.linalg.solve:
            result, info = torch.linalg.solve_ex(*args, **kwargs)
            vector = args[1].ndim == 1 or args[0].shape[:-1] == args[1].shape
            return _checked(result.unsqueeze(-1), info).squeeze(-1) if vector else _checked(result, info)
        return func(*args, **kwargs)


def _checked(result: Tensor, info: Tensor) -> Tensor:
    return torch.where((info == 0)[..., None, None], result, torch.nan)


@dataclass(frozen=True)
class FlatGraph:
    """A traced function of tensors.

    Attributes:
        module: The graph; it takes the traced inputs and then `constants`, and returns a tuple.
        constants: Tensors that the function held, now inputs.
    """

    module: fx.GraphModule
    constants: tuple[Tensor, ...]

    def __call__(self, *inputs: Tensor) -> Any:
        """Run the graph as it is."""
        return self.module(*inputs, *self.constants)

    @property
    def nodes(self) -> int:
        """Number of ATen calls."""
        return sum(node.op == "call_function" for node in self.module.graph.nodes)


def trace(function: Callable[..., Any], inputs: Sequence[Tensor]) -> FlatGraph:
    """Trace a function of tensors to a flat, functional graph of ATen calls.

    Writes into inputs (a counter in a buffer, running statistics) are left out: what a density
    reads, it never changes. Tensors that the function holds become further inputs.

    The graph is rewritten as `pbnn.infer.rewrite` says.

    Args:
        function: Function of tensors that returns a tuple of tensors.
        inputs: Example inputs; the graph holds for their shapes.

    Returns:
        The graph.
    """
    # Tracing runs the function, so writes into inputs must not reach the caller's tensors.
    module = make_fx(functionalize(function))(*(value.clone() for value in inputs))
    graph = module.graph
    for node in reversed(graph.nodes):
        if node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder":
            graph.erase_node(node)
    constants = _lift(module)
    graph.eliminate_dead_code()
    module = make_fx(Rewriter(module, constants).run)(*inputs)
    constants = _lift(module)
    share(module.graph)
    module.graph.eliminate_dead_code()
    module.recompile()
    return FlatGraph(module, constants)


def _lift(module: fx.GraphModule) -> tuple[Tensor, ...]:
    """Turn tensors that the graph holds into placeholders after the others; return them."""
    held: dict[str, list[fx.Node]] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            held.setdefault(str(node.target), []).append(node)
    last = [node for node in module.graph.nodes if node.op == "placeholder"][-1]
    constants = []
    for name, nodes in held.items():
        constants.append(getattr(module, name).detach())
        with module.graph.inserting_after(last):
            last = module.graph.placeholder(f"constant_{len(constants)}")
        last.meta["val"] = constants[-1]
        for node in nodes:
            node.replace_all_uses_with(last)
            module.graph.erase_node(node)
    return tuple(constants)
