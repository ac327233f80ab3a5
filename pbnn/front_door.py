"""The front door: where every fit meets its model and data, with one verdict for all roads.

`bind` checks and returns a `BoundModel`; `check_model` is the same check with a table for people.
"""

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from pyro import poutine
from pyro.distributions.transforms import biject_to
from pyro.infer.autoguide.initialization import InitMessenger
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical

from pbnn.checks import (
    bounds,
    check_density,
    check_output,
    check_plates,
    check_sites,
    list_sites,
    support_of,
    unwrapped,
)
from pbnn.errors import DataError, ModelError
from pbnn.model import (
    BoundModel,
    Data,
    FunctionModel,
    Model,
    copied,
    isolated,
    leaves,
    run,
    sample_nodes,
    take,
)

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["bind", "check_model", "observations", "prepare", "prior_values", "target_kind"]

# Draws from the prior on which the model may fail (a matrix just not positive definite, say).
_TRIES = 10


def bind(
    model: Model,
    x: Data,
    y: Data = None,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    constants: Mapping[str, Tensor] | None = None,
    buffers: Mapping[str, Tensor] | None = None,
) -> BoundModel:
    """Pass a model and its data through the front door.

    Args:
        model: A Pyro model `(x, y=None)`; a module is copied, and the copy is in eval mode.
        x: Input `(n, …)`, a dict of inputs of equal length, or None.
        y: Observations `(n,)` or `(n, outputs)`, or a dict by observed site.
        device: Where to run; by default where the model's parameters or x are.
        dtype: `torch.float32` or `torch.float64`; by default that of the model's parameters, of a
            tensor x, or torch's default, in this order. Everything is brought to it.
        constants: Values for parameters without a prior, by name.
        buffers: Values for buffers, by name.

    Returns:
        The bound model.

    Raises:
        DataError: x or y cannot be used as they are.
        ModelError: The model does not fit the data, or no road can run it.
    """
    model, x, y = prepare(
        model, x, y, device=device, dtype=dtype, constants=constants, buffers=buffers
    )
    where, kind = _placement(model, x, device, dtype)
    with isolated(0, where):
        single = _attempt(model, take(x, slice(0, 1)), None, {}, where, kind)
        sampled = single if isinstance(single, poutine.Trace) else None
        y, fill = observations(model, x, y, sampled, where, kind)
        trace = _attempt(model, x, y, fill, where, kind)
        if isinstance(trace, Exception):
            raise _failure(trace, x, y) from trace
        sites = list_sites(model, trace)
        rows = check_sites(trace, sites, y, _length(x, y), kind)
        if rows is not None and x is not None:
            _check_single(single)
        bound = BoundModel(model, x, y, sites, rows, fill, where, kind)
        check_density(bound, trace)
    return bound


def check_model(
    model: Model,
    x: Data,
    y: Data,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> "pd.DataFrame":
    """Check a model against its data, as every fit does, and list its sites.

    Args:
        model: A Pyro model `(x, y=None)`.
        x: Input, as for a fit.
        y: Observations, as for a fit.
        device: Where to run; see `bind`.
        dtype: Floating type; see `bind`.

    Returns:
        A table with one row a site: name, kind, shape, prior, support, number of values.

    Raises:
        DataError: x or y cannot be used as they are.
        ModelError: The model does not fit the data, or no road can run it.
    """
    import pandas as pd

    bound = bind(model, x, y, device=device, dtype=dtype)
    return pd.DataFrame(
        [(s.name, s.kind, s.shape, s.prior, s.support, s.values) for s in bound.sites],
        columns=["site", "kind", "shape", "prior", "support", "values"],
    )


def target_kind(model: Model, x: Data) -> Literal["real", "class", "count", "positive"]:
    """Return what kind of y a model observes, by the support of its observed site.

    Args:
        model: A Pyro model `(x, y=None)` with one observed site, `y`.
        x: A few rows of input.

    Raises:
        ModelError: The model cannot run without y, or has no site `y`.
    """
    model, x, _ = prepare(model, x)
    device, dtype = _placement(model, x, None, None)
    with isolated(0, device):
        trace = _attempt(model, x, None, {}, device, dtype)
    if isinstance(trace, Exception):
        raise _failure(trace, x, None) from trace
    nodes = dict(sample_nodes(trace))
    if "y" not in nodes:
        raise ModelError(
            f"the model has no site 'y'; it has {list(nodes)}: name the observed one so"
        )
    fn = unwrapped(nodes["y"]["fn"])
    support = support_of(fn)
    if isinstance(fn, Categorical | Bernoulli):
        return "class"
    if support.is_discrete:
        return "count"
    return "real" if bounds(support)[0] is None else "positive"


def prepare(
    model: Model,
    x: Data,
    y: Data = None,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    constants: Mapping[str, Tensor] | None = None,
    buffers: Mapping[str, Tensor] | None = None,
) -> tuple[nn.Module, Data, Data]:
    """Bring a model (a copy of it, in eval mode) and its data to one device and one dtype.

    Arguments and errors are those of `bind`, which also runs the model.
    """
    if not callable(model):
        raise ModelError(f"model is {type(model).__name__}; expected a Pyro model (x, y=None)")
    where, kind = _placement(model, x, device, dtype)
    x, y = _tensors("x", x, where, kind), _tensors("y", y, where, kind)
    for name, value in leaves(x):
        if value.ndim == 0:
            raise DataError(f"x{_key(name)} is one number; expected rows, of shape (n, …)")
    lengths = {
        **{f"x{_key(k)}": v.shape[0] for k, v in leaves(x)},
        **{f"y{_key(k)}": v.shape[0] for k, v in leaves(y) if v.ndim},
    }
    if x is not None and len(set(lengths.values())) > 1:
        found = ", ".join(f"{k} has {n}" for k, n in lengths.items())
        raise DataError(f"rows differ: {found}; expected as many rows in each")
    if 0 in lengths.values():
        raise DataError("the data have no rows; expected at least one")
    for name, value in leaves(x):
        bad = ~value.isfinite()
        if bad.any():
            raise DataError(f"x{_key(name)} is not finite in row {_row(bad)}; impute or drop it")
    for name, value in leaves(y):
        if value.is_floating_point() and value.isinf().any():
            raise DataError(f"y{_key(name)} is infinite in some row")
    module = model if isinstance(model, nn.Module) else _as_module(model, x, y, where, kind)
    module = copied(module, where, kind)
    _set_state(module, {**(constants or {}), **(buffers or {})})
    return module, x, y


def _as_module(
    function: Model, x: Data, y: Data, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """Hold the `pyro.param` statements of a plain function in a module, as it first meets them."""
    with isolated(0, device):
        trace = _attempt(function, x, y, {}, device, dtype)
    if isinstance(trace, Exception):
        raise _failure(trace, x, y) from trace
    return FunctionModel(function, [n for n in trace.nodes.values() if n["type"] == "param"])


def prior_values(dtype: torch.dtype, device: torch.device) -> InitMessenger:
    """Return a handler that draws each latent site from its prior.

    A prior that cannot be sampled (a flat one) gives the middle of its support instead.
    """

    def value(site: Any) -> Tensor:
        fn = site["fn"]
        try:
            draw: Tensor = fn.sample()
        except NotImplementedError:
            transform = biject_to(fn.support)
            draw = transform(
                torch.zeros(transform.inverse_shape(fn.shape()), dtype=dtype, device=device)
            )
        return draw.detach()

    return InitMessenger(value)


def _tensors(name: str, data: Data, device: torch.device, dtype: torch.dtype) -> Data:
    if data is None:
        return None
    if isinstance(data, Mapping):
        return {k: _tensors(f"{name}[{k!r}]", v, device, dtype) for k, v in data.items()}
    if not isinstance(data, Tensor):
        try:
            array = np.asarray(data)
        except ValueError as error:
            raise DataError(f"{name} is no array: {error}") from error
        if array.dtype.kind not in "fiub":
            raise DataError(f"{name} has type {array.dtype}; expected numbers")
        data = torch.from_numpy(np.array(array))
    if data.is_complex():
        raise DataError(f"{name} is complex; expected real numbers")
    floating = data.is_floating_point() or data.dtype == torch.bool
    moved = data.detach().to(device=device, dtype=dtype if floating else torch.int64)
    if data.is_floating_point() and data.dtype.itemsize > moved.dtype.itemsize:
        wide = moved.isinf() & ~data.to(device).isinf()
        if wide.any():
            raise DataError(
                f"{name} ranges too widely: row {_row(wide)} has a value beyond {dtype}; rescale "
                "it, or pass dtype=torch.float64"
            )
    return moved


def _placement(
    model: Model, x: Data, device: str | torch.device | None, dtype: torch.dtype | None
) -> tuple[torch.device, torch.dtype]:
    """Decide on the one device and dtype of a fit, by the order that `bind` documents."""
    held = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    held = [t for t in held if t.is_floating_point()]
    given = [v for _, v in leaves(x) if isinstance(v, Tensor)]
    if device is None:
        where = next((t.device for t in (*held, *given)), torch.device("cpu"))
    else:
        try:
            where = torch.device(device)
        except RuntimeError as error:
            raise ModelError(f"device is {device!r}; expected such as 'cpu' or 'cuda'") from error
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device {str(where)!r} was asked for, but torch sees no CUDA device")
    if dtype is None:
        floats = (t.dtype for t in (*held, *given) if t.is_floating_point())
        dtype = next(floats, torch.get_default_dtype())
    if dtype not in (torch.float32, torch.float64):
        raise ModelError(f"dtype is {dtype}; expected torch.float32 or torch.float64")
    return where, dtype


def _set_state(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Set constants and buffers in place."""
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in values.items():
        if name not in held or held[name].shape != value.shape:
            expected = ", ".join(f"{k} {tuple(v.shape)}" for k, v in held.items())
            raise ModelError(
                f"constant {name!r} of shape {tuple(value.shape)} has no place in this model; "
                + (
                    f"it has {expected}"
                    if expected
                    else "it has no parameter without a prior, and no buffer: leave it out"
                )
            )
        with torch.no_grad():
            held[name].copy_(value)


def _attempt(
    model: Model,
    x: Data,
    y: Data,
    fill: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> poutine.Trace | Exception:
    """Run the model on prior draws with all argument checks on; return the trace or the error."""
    failure: Exception
    for _ in range(_TRIES):
        try:
            with prior_values(dtype, device), torch.no_grad():
                return run(model, {}, x, y, fill=fill, checks=True)
        except Exception as error:
            failure = error
    return failure


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"


def _failure(error: Exception, x: Data, y: Data) -> ModelError:
    shapes = ", ".join(
        f"{label}{_key(k)} of shape {tuple(v.shape)}"
        for label, data in (("x", x), ("y", y))
        for k, v in leaves(data)
    )
    hint = ""
    if "inside plate" in str(error):
        hint = (
            "; a row of several values is one event: add `.to_event(1)` to the distribution of "
            "'y', and write `pyro.plate('data', x.shape[0])`"
        )
    elif any(not v.is_floating_point() for _, v in leaves(x)):
        hint = "; x holds integers, which stay integers: pass `x.float()` where numbers are meant"
    return ModelError(f"the model failed on {shapes or 'no data'}: {_line(error)}{hint}")


def _key(name: str) -> str:
    return f"[{name!r}]" if name else ""


def _length(x: Data, y: Data) -> int | None:
    """Return the number of rows of x, or of y where x is None."""
    return next((v.shape[0] for _, v in (*leaves(x), *leaves(y)) if v.ndim), None)


def _row(bad: Tensor) -> int:
    """Return the first row in which something is bad."""
    return int(bad.reshape(bad.shape[0] if bad.ndim else 1, -1).any(1).nonzero()[0])


def _check_single(single: poutine.Trace | Exception) -> None:
    """Refuse a model with rows that cannot run on one row of x and no y."""
    if isinstance(single, Exception):
        raise ModelError(
            f"the model cannot run on one row without y ({_line(single)}); so that it can predict, "
            "write `def forward(self, x, y=None)` and `pyro.plate('data', x.shape[0])`, and pass y "
            "only as `obs=y`"
        ) from single
    check_plates(single, 1)
    check_output(single, 1)


def observations(
    model: nn.Module,
    x: Data,
    y: Data,
    sampled: poutine.Trace | None,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Data, dict[str, Tensor]]:
    """Give y the kind of number that its sites sample, and find what takes the place of NaN.

    Args:
        model: The model, as `prepare` returns it.
        x: Input, likewise.
        y: Observations, likewise.
        sampled: The model run without y; None where it cannot be.
        device: Where everything lies.
        dtype: Floating type of everything.

    Returns:
        y, and by observed site a legal value in the place of NaN that the model masks.

    Raises:
        DataError: y has fractions where classes are expected, or NaN that the model does not mask.
    """
    if sampled is not None:
        y = _cast(y, sampled)
    return y, _fill(model, x, y, device, dtype)


def _cast(y: Data, sampled: poutine.Trace) -> Data:
    """Give y the kind of number that its site samples: integers for classes, floats otherwise."""

    def like(name: str, value: Tensor) -> Tensor:
        if name not in sampled.nodes:
            return value
        sample = sampled.nodes[name]["value"]
        if not value.is_floating_point() and sample.is_floating_point():
            return value.to(sample.dtype)
        if value.is_floating_point() and not sample.is_floating_point():
            odd = value != value.round()
            if odd.any():
                raise DataError(
                    f"y at site {name!r} is not a whole number in row {_row(odd)}; expected "
                    "classes or counts, none of them missing"
                )
            return value.to(sample.dtype)
        return value

    if isinstance(y, Mapping):
        return {name: like(name, value) for name, value in y.items()}
    return None if y is None else like("y", y)


def _fill(
    model: Model, x: Data, y: Data, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return a legal value for each observed site whose y has NaN, all of them masked."""
    missing = {k or "y": v for k, v in leaves(y) if v.is_floating_point() and v.isnan().any()}
    if not missing:
        return {}
    fill = {}
    for name, value in missing.items():
        if value.isnan().all():
            raise DataError(f"y at site {name!r} is NaN in every row; expected some observations")
        fill[name] = value[~value.isnan()][0]
    with prior_values(dtype, device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pyro announces the very NaN that is looked for
        try:
            trace = run(model, {}, x, y)
            trace.compute_log_prob()
        except Exception as error:
            raise _failure(error, x, y) from error
    for name, value in missing.items():
        if name in trace.nodes and trace.nodes[name]["log_prob"].isnan().any():
            raise DataError(
                f"y is NaN in row {_row(value.isnan())} and the model does not mask it; drop the "
                "row, or write `with poutine.mask(mask=y is None or ~y.isnan()):` around the "
                "observed site"
            )
    return fill
