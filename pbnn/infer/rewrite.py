"""Rewrites of a flat graph that keep its value in exact arithmetic and take less time.

What vmap leaves behind is repaired here: work on broadcast values, products that repeat the data
for each chain, constants that are computed anew at each call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["Rewriter", "share"]

_aten = torch.ops.aten
_FILLS = {
    _aten.zeros_like.default: 0.0,
    _aten.ones_like.default: 1.0,
    _aten.new_zeros.default: 0.0,
    _aten.new_ones.default: 1.0,
    _aten.full_like.default: None,
    _aten.new_full.default: None,
}
_VIEWS = {
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.reshape.default,
    _aten.unsqueeze.default,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
}
_SAME = {_aten.detach.default, _aten.alias.default, _aten.clone.default, _aten.lift_fresh.default}
_LARGEST = 1_000_000  # values above which a constant is not looked at


@dataclass
class _Facts:
    """What is known of a value."""

    constant: bool = False
    small: Tensor | None = None  # what was broadcast to it
    origin: Tensor | None = None  # what it is a view of, in the same order
    transposed: tuple[Tensor, frozenset[int]] | None = None  # what it is a transpose of, and how


class Rewriter(fx.Interpreter):
    """Runs a flat graph, doing the same in another way; `run` is traced for the new graph.

    - What depends on constants only is computed now; a constant with one value becomes a number.
    - Pointwise work and sums happen before a value is broadcast, and a division by a broadcast
      value is a product with its reciprocal.
    - A batched product with an operand that all lanes share is one product for all lanes.
    - Products put the longer of their two sides last in memory, where loops over it vectorise.

    Args:
        module: The graph.
        constants: Values of its last placeholders.
    """

    def __init__(self, module: fx.GraphModule, constants: Sequence[Tensor]) -> None:
        super().__init__(module)
        places = [node for node in module.graph.nodes if node.op == "placeholder"]
        self._inputs = len(places) - len(constants)
        self._constants = dict(zip(places[self._inputs :], constants, strict=True))
        self._facts: Any = WeakTensorKeyDictionary()
        self._rules: dict[Any, Callable[..., Any]] = {
            _aten.bmm.default: self._bmm,
            _aten.div.Tensor: self._div,
            _aten.expand.default: self._expand,
            _aten.index.Tensor: self._index,
            _aten.mm.default: self._product,
            _aten.sum.dim_IntList: self._sum,
            _aten._to_copy.default: self._to_copy,
        }

    def rewrite(self, *inputs: Tensor) -> Any:
        """Run on the inputs without the constants."""
        return self.run(*inputs, *self._constants.values(), enable_io_processing=False)

    def run_node(self, n: fx.Node) -> Any:
        """Run one node, and remember which."""
        self._node = n
        return super().run_node(n)

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Take an input, and remember which are constants."""
        value = super().placeholder(target, args, kwargs)
        if any(value is constant for constant in self._constants.values()):
            self._of(value).constant = True
        return value

    def _of(self, value: Tensor) -> _Facts:
        facts: _Facts | None = self._facts.get(value)
        if facts is None:
            facts = self._facts[value] = _Facts()
        return facts

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Do one call in its new way."""
        tensors = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if target in _FILLS or all(self._of(tensor).constant for tensor in tensors):
            return self._constant(target, args, kwargs)
        if target in _SAME:
            return args[0]
        if target in _VIEWS:
            return self._view(args[0], self._node.meta["tensor_meta"].shape)
        if target in self._rules:
            return self._rules[target](*args, **kwargs)
        if target is _aten.t.default:
            return self._transpose(args[0], 0, 1)
        if target is _aten.transpose.int:
            return self._transpose(*args)
        if torch.Tag.pointwise in getattr(target, "tags", ()):
            return self._pointwise(target, *args, **kwargs)
        if target is _aten.as_strided.default:
            # It reads memory as it lay when the graph was traced.
            strides = self._node.all_input_nodes[0].meta["tensor_meta"].stride
            held = torch.empty_strided(args[0].shape, strides, dtype=args[0].dtype)
            return target(held.to(args[0].device).copy_(args[0]), *args[1:], **kwargs)
        return target(*args, **kwargs)

    def _constant(self, target: Any, args: Any, kwargs: Any) -> Any:
        with disable_proxy_modes_tracing():
            if target in _FILLS:
                like = args[0]
                known = _FILLS[target]
                fill: Any = args[-1] if known is None else known
                shape = args[1] if "new_" in str(target) else like.shape
                dtype = kwargs.get("dtype") or like.dtype
                result = torch.full((), fill, dtype=dtype, device=like.device).expand(shape)
            else:
                result = target(*args, **kwargs)
        for leaf in _leaves(result):
            self._of(leaf).constant = True
        return result

    def _number(self, value: Any) -> float | None:
        """Return the one value of a constant that has only one; None for anything else."""
        if not isinstance(value, Tensor):
            return value if isinstance(value, int | float) else None
        if not self._of(value).constant or not 0 < value.numel() <= _LARGEST:
            return None
        with disable_proxy_modes_tracing():
            first = value.reshape(-1)[0]
            return first.item() if bool((value == first).all()) else None

    def _spread(self, small: Tensor, shape: Sequence[int]) -> Tensor:
        """Broadcast to a shape, and remember what was broadcast."""
        if tuple(small.shape) == tuple(shape):
            return small
        result = small.expand(shape)
        missing = (1,) * (len(shape) - small.ndim)
        self._of(result).small = self._view(small, torch.Size([*missing, *small.shape]))
        return result

    def _pointwise(self, target: Any, *args: Any, **kwargs: Any) -> Tensor:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
        small = [self._smallest(arg) for arg in args]
        turned = self._turned(small)
        if turned is not None and not kwargs:
            swapped = self._pointwise(target, *(self._turn(arg, turned) for arg in small))
            return self._spread(self._transpose(swapped, *turned), shape)
        result = self._binary(target, *args, small) if not kwargs and len(args) == 2 else None
        if result is None:
            result = target(*small, **kwargs)
        return self._spread(result, shape)

    def _turned(self, args: Sequence[Any]) -> tuple[int, int] | None:
        """Return the two axes by whose exchange the largest argument lies in memory in order."""
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        largest = max(tensors, key=Tensor.numel)
        before = self._of(largest).transposed
        if before is None or largest.ndim < max(tensor.ndim for tensor in tensors):
            return None
        first, second = sorted(before[1])
        return first - largest.ndim, second - largest.ndim

    def _turn(self, value: Any, axes: tuple[int, int]) -> Any:
        if not isinstance(value, Tensor):
            return value
        missing = (1,) * max(0, -axes[0] - value.ndim)
        return self._transpose(self._view(value, torch.Size([*missing, *value.shape])), *axes)

    def _before(self, value: Any) -> Any:
        """Return what was broadcast to a value, or the value."""
        small = self._of(value).small if isinstance(value, Tensor) else None
        return value if small is None else small

    def _smallest(self, value: Any) -> Any:
        """Return what broadcasts to a value: a constant with one value is filled in there."""
        number = self._number(value)
        if number is None or not isinstance(value, Tensor):
            return self._before(value)
        return torch.full((1,) * value.ndim, number, dtype=value.dtype, device=value.device)

    def _binary(self, target: Any, a: Any, b: Any, small: list[Any]) -> Tensor | None:
        """Do arithmetic with a number; None where it is something else."""
        packet = getattr(target, "overloadpacket", None)
        right, left = self._number(b), self._number(a)
        number = left if right is None else right
        value = small[0] if left is None else small[1]
        if number is None or not isinstance(value, Tensor) or not value.is_floating_point():
            return None
        if packet is _aten.mul:
            return value if number == 1 else value * number
        if packet is _aten.add:
            return value if number == 0 else value + number
        if packet is _aten.sub and left is None:
            return value if number == 0 else value - number
        if packet is _aten.sub:
            return number - value
        if packet is _aten.pow and left is None and number == 1:
            return value
        return None

    def _div(self, a: Any, b: Any) -> Tensor:
        number = self._number(b)
        if number:
            return self._pointwise(_aten.mul.Tensor, a, 1 / number)
        small = self._before(b)
        shape = torch.broadcast_shapes(*(t.shape for t in (a, b) if isinstance(t, Tensor)))
        if isinstance(small, Tensor) and small.is_floating_point() and small.numel() < prod(shape):
            return self._pointwise(_aten.mul.Tensor, a, self._spread(small.reciprocal(), b.shape))
        return self._pointwise(_aten.div.Tensor, a, b)

    def _view(self, value: Tensor, shape: Sequence[int]) -> Tensor:
        origin = self._of(value).origin
        origin = value if origin is None else origin
        if origin.shape == shape:
            return origin
        result = origin.reshape(shape)
        self._of(result).origin = origin
        small = self._of(origin).small
        if small is not None:
            kept = [1 if s == 0 else n for n, s in zip(shape, result.stride(), strict=True)]
            if prod(kept) == small.numel():
                self._of(result).small = self._view(small, torch.Size(kept))
        return result

    def _transpose(self, value: Tensor, first: int, second: int) -> Tensor:
        axes = frozenset((first % value.ndim, second % value.ndim))
        if value.ndim == 0 or len(axes) == 1:
            return value
        before = self._of(value).transposed
        if before is not None and before[1] == axes:
            return before[0]
        if max(axes) - min(axes) == 1 and 1 in (value.shape[first], value.shape[second]):
            shape = list(value.shape)
            shape[first], shape[second] = shape[second], shape[first]
            return self._view(value, torch.Size(shape))
        result = value.transpose(first, second)
        self._of(result).transposed = (value, axes)
        small = self._of(value).small
        if small is not None:
            self._of(result).small = self._transpose(small, first, second)
        return result

    def _expand(self, value: Tensor, shape: Sequence[int], **_: Any) -> Tensor:
        missing = len(shape) - value.ndim
        full = [value.shape[i - missing] if size == -1 else size for i, size in enumerate(shape)]
        return self._spread(self._before(value), full)

    def _to_copy(self, value: Tensor, **kwargs: Any) -> Tensor:
        same = kwargs.get("dtype", value.dtype) == value.dtype
        if same and set(kwargs) <= {"dtype"}:
            return value
        copied: Tensor = _aten._to_copy.default(value, **kwargs)
        return copied

    def _index(self, value: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
        """Look a constant mask's places up now: how many there are is unknown to a compiler."""
        places: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype == torch.bool and self._of(index).constant:
                with disable_proxy_modes_tracing():
                    places.extend(index.nonzero(as_tuple=True))
            else:
                places.append(index)
        found: Tensor = _aten.index.Tensor(value, places)
        return found

    def _sum(self, value: Tensor, dims: Any, keepdim: bool = False, **kwargs: Any) -> Tensor:
        dims = [dim % value.ndim for dim in dims] if dims else list(range(value.ndim))
        small = self._before(value)
        shape = [
            1 if i in dims else n for i, n in enumerate(value.shape) if keepdim or i not in dims
        ]
        kept = [
            1 if i in dims else n for i, n in enumerate(small.shape) if keepdim or i not in dims
        ]
        repeats = prod(value.shape[dim] // small.shape[dim] for dim in dims if small.shape[dim])
        if kwargs or not value.is_floating_point() or value.numel() == 0:
            plain: Tensor = _aten.sum.dim_IntList(value, dims, keepdim, **kwargs)
            return plain
        turned = self._turned([small])
        if all(small.shape[dim] == 1 for dim in dims):
            total = self._view(small, torch.Size(kept))
        elif turned is not None:
            first, second = (axis % small.ndim for axis in turned)
            over = [{first: second, second: first}.get(dim, dim) for dim in dims]
            total = _aten.sum.dim_IntList(self._transpose(small, first, second), over, True)
            total = self._view(self._transpose(total, first, second), torch.Size(kept))
        else:
            total = _aten.sum.dim_IntList(small, dims, keepdim)
        return self._spread(total if repeats == 1 else total * repeats, shape)

    def _bmm(self, a: Tensor, b: Tensor) -> Tensor:
        lanes, rows, inner = a.shape
        columns = b.shape[2]
        if inner == 1 and rows > columns:
            a, b = self._transpose(b, 1, 2), self._transpose(a, 1, 2)
            return self._transpose(self._pointwise(_aten.mul.Tensor, a, b), 1, 2)
        if inner == 1:
            return self._pointwise(_aten.mul.Tensor, a, b)
        shared_a, shared_b = self._shared(a), self._shared(b)
        if shared_a is not None and shared_b is not None:
            return self._spread(self._one_product(shared_a, shared_b), (lanes, rows, columns))
        if shared_b is not None:
            product = self._product(self._rows(a), shared_b)
            return self._view(product, torch.Size((lanes, rows, columns)))
        if shared_a is not None and rows >= columns:
            turned = self._rows(self._transpose(b, 1, 2))
            product = self._product(turned, self._transpose(shared_a, 0, 1))
            return self._transpose(self._view(product, torch.Size((lanes, columns, rows))), 1, 2)
        if shared_a is not None:
            product = shared_a @ self._transpose(b, 0, 1).reshape(inner, lanes * columns)
            return self._transpose(self._view(product, torch.Size((rows, lanes, columns))), 0, 1)
        if rows > columns:
            a, b = self._transpose(b, 1, 2), self._transpose(a, 1, 2)
            return self._transpose(self._product(a, b), 1, 2)
        return self._product(a, b)

    def _one_product(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the product of two matrices, `(1, rows, columns)`, its longer side last."""
        if a.shape[0] > b.shape[1]:
            turned = self._product(self._transpose(b, 0, 1), self._transpose(a, 0, 1))
            return self._transpose(self._view(turned, torch.Size((1, *turned.shape))), 1, 2)
        product = self._product(a, b)
        return self._view(product, torch.Size((1, *product.shape)))

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a product; two exchanged operands, on which libraries are slow, are put right."""
        axes = frozenset((a.ndim - 2, a.ndim - 1))
        held = self._of(a).transposed, self._of(b).transposed
        if all(before is not None and before[1] == axes for before in held):
            a, b = self._transpose(b, -2, -1), self._transpose(a, -2, -1)
            return self._transpose(a @ b, -2, -1)
        return a @ b

    def _rows(self, value: Tensor) -> Tensor:
        """Put the rows of all lanes one below another."""
        return self._view(value, torch.Size((value.shape[0] * value.shape[1], value.shape[2])))

    def _shared(self, value: Tensor) -> Tensor | None:
        """Return the matrix that all lanes share, if they do."""
        small = self._before(value)
        if small.shape[0] != 1 or small.shape[1:] != value.shape[1:]:
            return None
        before = self._of(small).transposed
        if before is not None and before[1] == frozenset((1, 2)):
            return self._transpose(self._view(before[0], before[0].shape[1:]), 0, 1)
        return self._view(small, value.shape[1:])


def share(graph: fx.Graph) -> None:
    """Let equal calls of a functional graph share one result."""
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        key = (node.target, _hashable(node.args), _hashable(node.kwargs))
        if key in seen:
            node.replace_all_uses_with(seen[key])
            graph.erase_node(node)
        else:
            seen[key] = node


def _hashable(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_hashable(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _hashable(item)) for key, item in sorted(value.items()))
    # 1, 1.0 and True are equal to a dictionary, but not to a call.
    return (type(value), value)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    return [value]
