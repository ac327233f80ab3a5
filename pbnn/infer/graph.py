"""Flat graphs of ATen calls: trace a function of tensors once, then run or compile it."""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from pbnn.errors import FitError
from pbnn.infer.rewrite import Rewriter, share

__all__ = [
    "CudaGraph",
    "FlatGraph",
    "LaneSafe",
    "agree",
    "compile_graph",
    "disk_cache",
    "trace",
    "worth_compiling",
]

_READS = (
    Tensor.__bool__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.__int__,
    Tensor.item,
    Tensor.tolist,
)

_INDUCTOR = {
    "compile_threads": 1,  # kernels are few: a pool of worker processes costs more than it saves
    "cpp.enable_floating_point_contract_flag": "fast",
    "size_asserts": False,  # shapes are fixed, and were looked at on the way in
}

# Leapfrogs of a draw that the rule on compiling counts on: a tree of depth 4.
_LEAPFROGS = 16
# Seconds, rounded from runs of 12 models of 90 to 4,600 calls on one core: a call of an eager
# graph; a value that fusion saves to write; what inductor takes for its start, for each call, and
# for each of those that it does not fuse, which part the others into more kernels.
_CALL, _VALUE = 5e-6, 1e-9
_START, _LOWER, _PART = 5.0, 0.03, 0.8
_PARTS = ("mm", "conv", "pool", "linalg", "cholesky", "cdist")


class LaneSafe(TorchFunctionMode):
    """Keeps the failure of one lane in that lane, and lets Python read what all lanes share.

    A factorisation that fails gives NaN for its own matrix instead of an error for all. A value
    that comes from the data alone can be read (`int(y.max())`); the graph then holds for those
    data.

    Args:
        reads: Whether values may be read at all.
    """

    def __init__(self, *, reads: bool = True) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace the calls that would raise or read; run all others as they are."""
        kwargs = kwargs or {}
        if func in _READS and self.reads:
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
            if vector:
                return _checked(result.unsqueeze(-1), info).squeeze(-1)
            return _checked(result, info)
        return func(*args, **kwargs)


def _checked(result: Tensor, info: Tensor) -> Tensor:
    return torch.where((info == 0)[..., None, None], result, torch.nan)


@dataclass(frozen=True)
class FlatGraph:
    """A traced function of tensors; call it with them.

    Attributes:
        module: The graph; it takes the traced inputs and then `constants`, and returns a tuple.
        constants: Tensors that the function held, now inputs.
    """

    module: fx.GraphModule
    constants: tuple[Tensor, ...]

    def __call__(self, *inputs: Tensor) -> Any:
        """Run the graph as it is."""
        return self.module.forward(*inputs, *self.constants)

    @property
    def calls(self) -> int:
        """Number of ATen calls."""
        return sum(node.op == "call_function" for node in self.module.graph.nodes)

    @property
    def parts(self) -> int:
        """Number of calls that a compiler does not fuse with others: products, factorisations."""
        calls = (node for node in self.module.graph.nodes if node.op == "call_function")
        return sum(any(part in node.target.__name__ for part in _PARTS) for node in calls)

    @property
    def values(self) -> int:
        """Number of values that the calls write; views write none."""
        calls = (node for node in self.module.graph.nodes if node.op == "call_function")
        made = (node.meta.get("tensor_meta") for node in calls if not _is_view(node.target))
        return sum(meta.shape.numel() for meta in made if hasattr(meta, "shape"))


def _is_view(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is None or any(result.alias_info is not None for result in schema.returns)


def trace(function: Callable[..., Any], inputs: Sequence[Tensor]) -> FlatGraph:
    """Trace a function of tensors to a flat, functional graph of ATen calls.

    Writes into inputs (a counter in a buffer, running statistics) are left out: what a density
    reads, it never changes. Tensors that the function holds become further inputs. The graph is
    rewritten as `pbnn.infer.rewrite` says.

    Args:
        function: Function of tensors that returns a tuple of tensors.
        inputs: Example inputs; the graph holds for their shapes.

    Returns:
        The graph.
    """
    # One mode for what is noted of each call: otherwise each makes its own, a third of the time.
    with tracing(TracingContext(FakeTensorMode())):
        return _trace(function, inputs)


def _trace(function: Callable[..., Any], inputs: Sequence[Tensor]) -> FlatGraph:
    # Tracing runs the function, so writes into inputs must not reach the caller's tensors.
    with _plain_kernels():
        module = make_fx(functionalize(function))(*(value.clone() for value in inputs))
    for node in reversed(module.graph.nodes):
        if node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder":
            module.graph.erase_node(node)
    constants = _lift(module)
    module.graph.eliminate_dead_code()
    module = make_fx(Rewriter(module, constants).rewrite)(*inputs)
    constants = _lift(module)
    share(module.graph)
    module.graph.eliminate_dead_code()
    module.recompile()
    return FlatGraph(module, constants)


@contextmanager
def _plain_kernels() -> Iterator[None]:
    """Take attention and recurrent layers apart into calls that vmap maps and inductor fuses."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings():
            for message in ("There is a performance drop", "TF32 acceleration"):
                warnings.filterwarnings("ignore", message=message)
            with sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=False):
                yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def compile_graph(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a pure function of tensors by inductor, without guards.

    The result must be called with tensors of the same shapes, strides and device. Writes into the
    inputs are done to those it is called with.

    Args:
        function: Function of tensors that returns a tuple of tensors.
        inputs: Example inputs; they are not written.
        options: Further settings of inductor.

    Returns:
        A function of the same inputs.

    Raises:
        FitError: Inductor cannot compile here.
    """
    on_cpu = all(value.device.type == "cpu" for value in inputs)
    try:
        with torch.no_grad(), _quiet():
            module = make_fx(function, _decompositions())(*(value.clone() for value in inputs))
            constants = _lift(module)
            module.recompile()
            examples = [*inputs, *constants]
            call = _inductor(module, examples, options or {}, native=on_cpu)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise FitError(
            f"inductor could not compile the graph ({reason[:200]}); install a C++ compiler, or "
            "pass compile=False"
        ) from error

    def run(*values: Tensor) -> Any:
        return call([*values, *constants])

    return run


def _inductor(
    module: fx.GraphModule, examples: list[Tensor], options: Mapping[str, Any], *, native: bool
) -> Callable[[list[Tensor]], Any]:
    """Compile a graph; `native` also compiles the code that calls its kernels one by one."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    # One source file compiles in half the time of one for each kernel, and calls them faster.
    settings = {**_INDUCTOR, "cpp_wrapper": native, **options}
    with config.patch(settings):
        compiled: Any = compile_fx_inner(module, examples, cpp_wrapper=settings["cpp_wrapper"])
    # Past the wrapper that only GPUs need, which costs as much as a small kernel.
    call: Callable[[list[Tensor]], Any] = compiled
    return getattr(compiled, "current_callable", None) or call if native else call


@contextmanager
def disk_cache() -> Iterator[None]:
    """Let inductor look into its cache on disk: it does so where there is a shape environment."""
    fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with tracing(TracingContext(fake)):
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence inductor's own deprecations, and its notes on which calls go through a detour."""
    log = logging.getLogger("torch._inductor.ir")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for category in (DeprecationWarning, FutureWarning):
                warnings.simplefilter("ignore", category)
            yield
    finally:
        log.setLevel(level)


def agree(found: Sequence[Tensor], expected: Sequence[Tensor], *, exact: bool = False) -> bool:
    """Whether two results are the same up to rounding; what is not floating is not looked at."""
    for a, b in zip(found, expected, strict=True):
        if not a.is_floating_point():
            continue
        # Terms of either sign may cancel, so rounding is measured against the largest of them.
        digits = 10 * torch.finfo(a.dtype).eps ** 0.5
        largest = float(b.nan_to_num(0, 0, 0).abs().max()) if b.numel() else 0.0
        scale = 0.0 if exact else digits * (1 + largest)
        if not torch.allclose(a, b, rtol=0.0, atol=scale, equal_nan=True):
            return False
    return True


def worth_compiling(graph: FlatGraph, draws: int | None) -> tuple[bool, str]:
    """Decide whether compiling saves more time than it takes, by counts alone.

    Args:
        graph: The graph of the log density and gradient of all chains.
        draws: Draws of a chain, warm-up among them; None counts as none.

    Returns:
        The decision, and why, in words.
    """
    calls, values = graph.calls, graph.values
    saved = (draws or 0) * _LEAPFROGS * (_CALL * calls + _VALUE * values)
    cost = _START + _LOWER * calls + _PART * graph.parts
    worth = saved > cost
    word, sign = ("compiled", ">") if worth else ("not compiled", "<=")
    return worth, (
        f"{word}: {draws or 0} draws of a graph of {calls} calls and {values} values count "
        f"{saved:.1f} {sign} {cost:.1f}"
    )


class CudaGraph:
    """A function of tensors of fixed shapes on a GPU, recorded once and replayed.

    Args:
        function: Pure function of tensors that returns a tuple.
        inputs: Its inputs; the first one changes from call to call, the others stay where they are.
    """

    def __init__(self, function: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
        self._first = inputs[0].clone()
        held = (self._first, *inputs[1:])
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # workspaces of the libraries are allocated before the recording
                function(*held)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = tuple(function(*held))

    @classmethod
    def of(cls, function: Callable[..., Any], inputs: Sequence[Tensor]) -> Callable[..., Any]:
        """Record a function, or return it as it is where a call in it cannot be recorded."""
        try:
            return cls(function, inputs)
        except RuntimeError:
            torch.cuda.synchronize()
            return function

    def __call__(self, first: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        """Replay; the results are copies that the next call leaves alone."""
        self._first.copy_(first)
        self._graph.replay()
        return tuple(output.clone() for output in self._outputs)


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


def _decompositions() -> dict[Any, Callable[..., Any]]:
    """What is broken up before compiling: inductor's own list, less products, and tanh."""
    from torch._inductor.decomposition import select_decomp_table

    aten = torch.ops.aten
    table = dict(select_decomp_table())
    for product in (aten.mm.default, aten.bmm.default):
        table.pop(product, None)
    table[aten.tanh.default] = _tanh
    return table


# tanh(x)/x as a rational function of x² on |x| <= 9: least relative error (6e-8), found by
# iteratively reweighted least squares. It vectorises; the library's tanh takes three times as long.
_NUMERATOR = (
    1.82552128e-11,
    -1.27804161e-08,
    9.26740851e-06,
    2.92076009e-03,
    1.29192266e-01,
    9.99999941e-01,
)
_DENOMINATOR = (2.28099983e-04, 2.37631610e-02, 4.62525105e-01, 1.0)


def _tanh(x: Tensor) -> Tensor:
    """Return tanh to three units in the last place of a float32; other types are left alone."""
    if x.dtype is not torch.float32 or x.device.type != "cpu":
        return NotImplemented  # type: ignore[no-any-return]
    x = x.clamp(-9.0, 9.0)
    square = x * x
    numerator: Any = _NUMERATOR[0]
    for coefficient in _NUMERATOR[1:]:
        numerator = square * numerator + coefficient
    denominator: Any = _DENOMINATOR[0]
    for coefficient in _DENOMINATOR[1:]:
        denominator = square * denominator + coefficient
    result: Tensor = (x * numerator / denominator).clamp(-1.0, 1.0)
    return result
