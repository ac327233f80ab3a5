"""Model files and models: load one, copy one, run one at given values, list what it holds.

`pbnn.front_door.bind` is where a model meets its data.
"""

import contextlib
import copy
import hashlib
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyro
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor, nn
from torch.distributions import constraints, transform_to
from torch.func import functional_call

from pbnn.errors import ModelError

__all__ = [
    "BoundModel",
    "Data",
    "FunctionModel",
    "Model",
    "Site",
    "copied",
    "indexable",
    "isolated",
    "leaves",
    "load_model",
    "run",
    "sample_nodes",
    "take",
]

Model = Callable[..., Any]
Data = Any  # a tensor, array or frame, or a dict of them


def leaves(data: Data) -> list[tuple[str, Any]]:
    """Return the tensors of data with their keys: the key is empty where data is no dict."""
    if data is None:
        return []
    return list(data.items()) if isinstance(data, Mapping) else [("", data)]


def indexable(data: Data) -> Data:
    """Return data whose rows can be indexed: frames and lists as arrays, tensors as they are."""
    if isinstance(data, Mapping):
        return {name: indexable(value) for name, value in data.items()}
    return data if data is None or isinstance(data, Tensor | np.ndarray) else np.array(data)


def take(data: Data, rows: slice | Tensor) -> Data:
    """Return some rows of each tensor of data."""
    if isinstance(data, Mapping):
        return {name: value[rows] for name, value in data.items()}
    return None if data is None else data[rows]


def load_model(
    path: str | os.PathLike[str], in_features: int | None = None, **options: Any
) -> nn.Module:
    """Load `class Model` from a model file and build it. The file is code: it is executed.

    Args:
        path: A Python file that defines `class Model(PyroModule)`.
        in_features: First argument of `Model`: the number of features of x.
        **options: Keyword arguments of `Model`.

    Returns:
        The model; its attribute `pbnn_source` holds the file's name, SHA-256 and the options.

    Raises:
        ModelError: The file is missing, fails to import, has no `Model`, or refuses the options.
    """
    path = Path(path)
    if not path.is_file():
        raise ModelError(f"{path}: no such model file; expected a Python file with `class Model`")
    # The bytes that are hashed are the bytes that run: no cached bytecode comes between.
    source = path.read_bytes()
    digest = hashlib.sha256(source).hexdigest()
    module = types.ModuleType(f"pbnn_model_{digest[:16]}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except Exception as error:
        raise ModelError(f"{path}: failed to import: {type(error).__name__}: {error}") from error
    factory = getattr(module, "Model", None)
    if not isinstance(factory, type):
        raise ModelError(f"{path}: defines no class named Model; write `class Model(PyroModule)`")
    arguments = options if in_features is None else {"in_features": in_features, **options}
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        accepted = ", ".join(str(p) for p in inspect.signature(factory).parameters.values())
        raise ModelError(f"{path}: {error}; Model takes ({accepted})") from error
    try:
        model: nn.Module = factory(**arguments)
    except Exception as error:
        raise ModelError(
            f"{path}: Model({arguments}) failed: {type(error).__name__}: {error}"
        ) from error
    model.pbnn_source = {"file": path.name, "sha256": digest, "options": arguments}  # type: ignore[assignment]
    return model


@contextmanager
def isolated(seed: int | None = None, device: torch.device | None = None) -> Iterator[None]:
    """Run a block that leaves no trace: the global RNGs and Pyro's param store stay as they were.

    Gradients are on inside, whatever the caller's mode.

    Args:
        seed: Seed of torch's generators inside the block; None keeps their state.
        device: The CUDA device whose generator the block uses, if any.
    """
    devices = [device] if device is not None and device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=devices),
        pyro.get_param_store().scope(),
        torch.enable_grad(),
    ):
        if seed is not None:
            torch.manual_seed(seed)
        yield


def _moved(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Move all floating tensors inside a prior, in place, and return it."""
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=dtype if value.is_floating_point() else None)
    if isinstance(value, (torch.distributions.Distribution, torch.distributions.Transform)):
        for name, inner in vars(value).items():
            value.__dict__[name] = _moved(inner, device, dtype)
    elif isinstance(value, (list, tuple)):
        return type(value)(_moved(inner, device, dtype) for inner in value)
    elif isinstance(value, dict):
        return {name: _moved(inner, device, dtype) for name, inner in value.items()}
    return value


def copied(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return a copy in eval mode, on one device and dtype, its stored priors with it."""
    memo: dict[int, Any] = {}
    model = copy.deepcopy(model, memo).eval().to(device=device, dtype=dtype)
    for module in model.modules():
        # `.to()` moves parameters and buffers; priors built at definition time stay behind.
        for name, prior in vars(module).get("_pyro_samples", {}).items():
            prior = _rebound(prior, memo) if isinstance(prior, types.FunctionType) else prior
            module.__dict__["_pyro_samples"][name] = _moved(prior, device, dtype)
    return model


def _rebound(function: types.FunctionType, memo: Mapping[int, Any]) -> types.FunctionType:
    """Return a function whose closure holds the copies: deepcopy leaves functions as they are.

    A prior such as `lambda _: dist.Normal(0.0, self.tau)` would else read the caller's model.
    """
    cells = function.__closure__ or ()
    held = [memo.get(id(cell.cell_contents)) for cell in cells]
    if all(value is None for value in held):
        return function
    closure = tuple(
        cell if value is None else types.CellType(value)
        for cell, value in zip(cells, held, strict=True)
    )
    out = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, closure
    )
    out.__kwdefaults__ = function.__kwdefaults__
    return out


class _Given(Messenger):  # type: ignore[misc]
    """Sets latent sites and params to given values; optionally switches argument checks off.

    Priors built in a model's `__init__` keep their own checks whatever the global switch says, so
    the checks are cleared on each distribution as it passes.
    """

    def __init__(
        self, values: Mapping[str, Tensor], fill: Mapping[str, Tensor], *, checks: bool
    ) -> None:
        super().__init__()
        self.values = values
        self.fill = fill
        self.checks = checks

    def _pyro_sample(self, msg: Any) -> None:
        if not self.checks:
            _clear_checks(msg["fn"])
        if msg["is_observed"]:
            if msg["name"] in self.fill:
                # A masked NaN has a finite log density but a NaN gradient: put a legal value there.
                missing = msg["value"].isnan()
                msg["value"] = msg["value"].masked_fill(missing, self.fill[msg["name"]].item())
        elif msg["name"] in self.values:
            msg["value"] = self.values[msg["name"]]
            msg["done"] = True

    def _pyro_param(self, msg: Any) -> None:
        if msg["name"] in self.values:
            msg["value"] = self.values[msg["name"]]
            msg["done"] = True


class FunctionModel(nn.Module):
    """A plain function as a module, whose parameters are its `pyro.param` statements.

    A constrained one is held unconstrained under the name that a `PyroParam` would have,
    `NAME_unconstrained`.

    Args:
        function: A Pyro model.
        params: Nodes of its param statements in a trace.

    Raises:
        ModelError: A parameter belongs to a network outside the model.
    """

    def __init__(self, function: Model, params: Iterable[Any]) -> None:
        super().__init__()
        self.function = function
        self.held: dict[str, tuple[str, Any]] = {}
        for node in params:
            name, constraint = node["name"], node["kwargs"]["constraint"]
            if "." in name or "$" in name:
                raise ModelError(
                    f"parameter {name!r} lies in a network outside the model; write the model as a "
                    "PyroModule that holds the network"
                )
            held = name if constraint is constraints.real else f"{name}_unconstrained"
            transform = transform_to(constraint)
            self.register_parameter(
                held, nn.Parameter(transform.inv(node["value"].detach()).clone())
            )
            self.held[name] = held, transform

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function at the parameters held here."""
        values = {
            name: transform(getattr(self, held)) for name, (held, transform) in self.held.items()
        }
        with _Given(values, {}, checks=True):
            return self.function(*args, **kwargs)


def _clear_checks(fn: Any) -> None:
    while isinstance(fn, torch.distributions.Distribution):
        fn.__dict__["_validate_args"] = False
        fn = getattr(fn, "base_dist", None)


def run(
    model: Model,
    values: Mapping[str, Tensor],
    x: Data,
    y: Data = None,
    *,
    fill: Mapping[str, Tensor] | None = None,
    checks: bool = False,
    state: Mapping[str, Tensor] | None = None,
) -> poutine.Trace:
    """Run the model once at given values of its latent sites and params.

    A pure function of its tensors (apart from sites that are not given, which are sampled), so that
    it can be mapped over draws by `torch.func.vmap` and traced by `make_fx`.

    Args:
        model: The model, already in eval mode.
        values: Values by name, on each site's own support.
        x: Input, as the model takes it.
        y: Observations; None samples them.
        fill: By observed site, the value that takes the place of NaN in y.
        checks: Whether distributions check their arguments (they read values, so never in a trace).
        state: Tensors that take the place of the module's own parameters and buffers, by name.

    Returns:
        Pyro's trace; f(x) is `trace.nodes["_RETURN"]["value"]`.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(pyro.validation_enabled(checks))
        stack.enter_context(_Given(values, fill or {}, checks=checks))
        if state:
            # In an empty store: a PyroParam would be read from there instead of from its module.
            stack.enter_context(pyro.get_param_store().scope())
            stack.enter_context(_Held())
        tracer = poutine.trace(_with_state(model, state) if state else model)
        return tracer.get_trace(x) if y is None else tracer.get_trace(x, y)


def _with_state(model: Any, state: Mapping[str, Tensor]) -> Model:
    return lambda *args: functional_call(model, dict(state), args)


class _Held(Messenger):  # type: ignore[misc]
    """Gives the parameters of modules the tensors that the modules hold, past Pyro's store."""

    def _pyro_param(self, msg: Any) -> None:
        if msg["value"] is None and len(msg["args"]) > 1:
            msg["value"], msg["done"] = msg["args"][1], True


def sample_nodes(trace: poutine.Trace) -> Iterator[tuple[str, Any]]:
    """Yield name and node of each sample statement in a trace, plates left out."""
    for name, node in trace.nodes.items():
        if node["type"] == "sample" and not isinstance(node["fn"], _Subsample):
            yield name, node


@dataclass(frozen=True)
class Site:
    """One row of the table of sites.

    Attributes:
        name: Pyro's name of the site; a weight's is its module path.
        kind: "latent", "observed", "deterministic", "factor" or "constant" (no prior).
        shape: Shape of one value.
        prior: The distribution in words, such as "Normal"; empty for constants.
        support: The support in words, such as "real" or "positive".
        row_dim: Dimension (negative) of plate `data` in the site's log density; None outside it.
        discrete: Whether the support is discrete.
    """

    name: str
    kind: Literal["latent", "observed", "deterministic", "factor", "constant"]
    shape: tuple[int, ...]
    prior: str = ""
    support: str = ""
    row_dim: int | None = None
    discrete: bool = False

    @property
    def values(self) -> int:
        """Number of values."""
        return int(torch.Size(self.shape).numel())


@dataclass(frozen=True)
class BoundModel:
    """A model that passed the front door together with its data; every fit starts from one.

    Attributes:
        model: A copy in eval mode, on `device` and in `dtype`; a plain function as `FunctionModel`.
        x: Input tensor, dict of tensors, or None.
        y: Observations: a tensor, or a dict by site; None before there are any.
        sites: What the model holds, in the order in which it runs.
        rows: Number of rows of plate `data`; None for a model without it.
        fill: By observed site, the legal value that takes the place of a masked NaN.
        device: Where everything lies.
        dtype: Floating type of everything.
    """

    model: nn.Module
    x: Data
    y: Data
    sites: tuple[Site, ...]
    rows: int | None
    fill: Mapping[str, Tensor]
    device: torch.device
    dtype: torch.dtype

    def named(self, kind: str) -> dict[str, Site]:
        """Return the sites of one kind, by name."""
        return {site.name: site for site in self.sites if site.kind == kind}

    def run(self, values: Mapping[str, Tensor], *, checks: bool = False) -> poutine.Trace:
        """Run the model on its own data at given latent values; see `run`."""
        return run(self.model, values, self.x, self.y, fill=self.fill, checks=checks)

    @property
    def dim(self) -> int:
        """Number of latent values, counted on their own support."""
        return sum(site.values for site in self.named("latent").values())

    def constants(self) -> dict[str, Tensor]:
        """Return the parameters without a prior, by name."""
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def buffers(self) -> dict[str, Tensor]:
        """Return the module's buffers, by name."""
        return {name: b.detach().clone() for name, b in self.model.named_buffers()}
