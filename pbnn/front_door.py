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

from pbnn.errors import DataError, ModelError, PbnnWarning
from pbnn.model import BoundModel, Data, Model, Site, copied, isolated, run, sample_nodes

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["PLATE", "bind", "check_model", "length", "prepare", "prior_values", "target_kind"]

PLATE = "data"


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
        sampled = _attempt(model, x, None, {}, where, kind)
        if isinstance(sampled, poutine.Trace):
            y = _cast(y, sampled)
        fill = _fill(model, x, y, where, kind)
        trace = _attempt(model, x, y, fill, where, kind)
        if isinstance(trace, Exception):
            raise _failure(trace, x, y) from trace
        sites = (*_sites(trace), *_constants(model, trace))
        rows = _check_sites(trace, sites, x, y, kind)
        if rows is not None and isinstance(sampled, Exception):
            raise ModelError(
                f"the model cannot run without y ({_line(sampled)}); write `def forward(self, x, "
                "y=None)` and pass y only as `obs=y`, so that it can predict"
            ) from sampled
        bound = BoundModel(model, x, y, sites, rows, fill, where, kind)
        _check_density(bound, trace)
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
    support = nodes["y"]["fn"].support
    lower, upper = _bounds(support)
    if getattr(support, "is_discrete", False):
        return "count" if upper is None and lower is not None else "class"
    return "real" if lower is None else "positive"


def prepare(
    model: Model,
    x: Data,
    y: Data = None,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    constants: Mapping[str, Tensor] | None = None,
    buffers: Mapping[str, Tensor] | None = None,
) -> tuple[Model, Data, Data]:
    """Bring a model (a copy of it, in eval mode) and its data to one device and one dtype.

    Arguments and errors are those of `bind`, which also runs the model.
    """
    if not callable(model):
        raise ModelError(f"model is {type(model).__name__}; expected a Pyro model (x, y=None)")
    where, kind = _placement(model, x, device, dtype)
    x, y = _tensors("x", x, where, kind), _tensors("y", y, where, kind)
    lengths = {
        **{f"x[{k!r}]" if k else "x": v.shape[0] for k, v in _leaves(x)},
        **{f"y[{k!r}]" if k else "y": v.shape[0] for k, v in _leaves(y) if v.ndim},
    }
    if x is not None and len(set(lengths.values())) > 1:
        found = ", ".join(f"{k} has {n}" for k, n in lengths.items())
        raise DataError(f"rows differ: {found}; expected as many rows in each")
    if 0 in lengths.values():
        raise DataError("the data have no rows; expected at least one")
    for name, value in _leaves(x):
        bad = ~value.isfinite() if value.is_floating_point() else torch.zeros(1, dtype=torch.bool)
        if bad.any():
            row = int(bad.reshape(len(bad), -1).any(1).nonzero()[0])
            raise DataError(
                f"x{f'[{name!r}]' if name else ''} is not finite in row {row}; impute or drop it"
            )
    for name, value in _leaves(y):
        if value.is_floating_point() and value.isinf().any():
            raise DataError(f"y{f'[{name!r}]' if name else ''} is infinite in some row")
    model = _with_state(copied(model, where, kind), {**(constants or {}), **(buffers or {})})
    return model, x, y


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


def length(x: Data, y: Data = None) -> int:
    """Return the number of rows of x, or of y where x is None."""
    return next(v.shape[0] for _, v in (*_leaves(x), *_leaves(y)))


def _leaves(data: Data) -> list[tuple[str, Tensor]]:
    if data is None:
        return []
    return list(data.items()) if isinstance(data, Mapping) else [("", data)]


def _tensors(name: str, data: Data, device: torch.device, dtype: torch.dtype) -> Data:
    if data is None:
        return None
    if isinstance(data, Mapping):
        return {k: _tensors(f"{name}[{k!r}]", v, device, dtype) for k, v in data.items()}
    if not isinstance(data, Tensor):
        array = np.asarray(data)
        if array.dtype.kind not in "fiub":
            raise DataError(f"{name} has type {array.dtype}; expected numbers")
        data = torch.from_numpy(np.array(array))
    if data.is_complex():
        raise DataError(f"{name} is complex; expected real numbers")
    floating = data.is_floating_point() or data.dtype == torch.bool
    return data.detach().to(device=device, dtype=dtype if floating else torch.int64)


def _placement(
    model: Model, x: Data, device: str | torch.device | None, dtype: torch.dtype | None
) -> tuple[torch.device, torch.dtype]:
    """Decide on the one device and dtype of a fit, by the order that `bind` documents."""
    held = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    held = [t for t in held if t.is_floating_point()]
    given = [v for _, v in _leaves(x) if isinstance(v, Tensor)]
    if device is None:
        where = next((t.device for t in (*held, *given)), torch.device("cpu"))
    else:
        where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device {str(where)!r} was asked for, but torch sees no CUDA device")
    if dtype is None:
        floats = [t.dtype for t in (*held, *given) if t.is_floating_point()]
        dtype = torch.float64 if torch.float64 in floats else torch.get_default_dtype()
    if dtype not in (torch.float32, torch.float64):
        raise ModelError(f"dtype is {dtype}; expected torch.float32 or torch.float64")
    return where, dtype


def _with_state(model: Model, values: Mapping[str, Tensor]) -> Model:
    """Set constants and buffers: in a module in place, around a plain function by a handler."""
    if not isinstance(model, nn.Module):
        return poutine.substitute(model, data=dict(values)) if values else model
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in values.items():
        if name not in held or held[name].shape != value.shape:
            expected = {k: tuple(v.shape) for k, v in held.items()}
            raise ModelError(
                f"constant {name!r} of shape {tuple(value.shape)} has no place in this model; "
                f"expected one of {expected}"
            )
        with torch.no_grad():
            held[name].copy_(value)
    return model


def _attempt(
    model: Model,
    x: Data,
    y: Data,
    fill: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> poutine.Trace | Exception:
    """Run the model on prior draws with all argument checks on; return the trace or the error."""
    try:
        with prior_values(dtype, device):
            return run(model, {}, x, y, fill=fill, checks=True)
    except Exception as error:
        return error


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"


def _failure(error: Exception, x: Data, y: Data) -> ModelError:
    shapes = ", ".join(
        f"{label}{f'[{k!r}]' if k else ''} of shape {tuple(v.shape)}"
        for label, data in (("x", x), ("y", y))
        for k, v in _leaves(data)
    )
    hint = (
        "; a row of several values is one event: add `.to_event(1)` to the distribution of 'y', "
        "and write `pyro.plate('data', x.shape[0])`"
        if "inside plate" in str(error)
        else ""
    )
    return ModelError(f"the model failed on {shapes or 'no data'}: {_line(error)}{hint}")


def _cast(y: Data, sampled: poutine.Trace) -> Data:
    """Give y the kind of number that its site samples: integers for classes, floats otherwise."""

    def like(name: str, value: Tensor) -> Tensor:
        if name not in sampled.nodes:
            return value
        sample = sampled.nodes[name]["value"]
        if not value.is_floating_point() and sample.is_floating_point():
            return value.to(sample.dtype)
        if value.is_floating_point() and not sample.is_floating_point():
            if not bool((value == value.round()).all()):
                raise DataError(
                    f"y at site {name!r} has values that are not whole numbers; expected "
                    "classes or counts"
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
    missing = {k or "y": v for k, v in _leaves(y) if v.is_floating_point() and v.isnan().any()}
    if not missing:
        return {}
    fill = {}
    for name, value in missing.items():
        if value.isnan().all():
            raise DataError(f"y at site {name!r} is NaN in every row; expected some observations")
        fill[name] = value[~value.isnan()][0]
    with prior_values(dtype, device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pyro announces the very NaN that is looked for
        trace = run(model, {}, x, y)
        trace.compute_log_prob()
    for name, value in missing.items():
        if name not in trace.nodes or trace.nodes[name]["log_prob"].isnan().any():
            row = int(value.isnan().reshape(len(value), -1).any(1).nonzero()[0])
            raise DataError(
                f"y is NaN in row {row} and the model does not mask it; drop the row, or write "
                "`with poutine.mask(mask=y is None or ~y.isnan()):` around the observed site"
            )
    return fill


def _sites(trace: poutine.Trace) -> list[Site]:
    sites = []
    for name, node in sample_nodes(trace):
        fn, infer = node["fn"], node["infer"]
        frames = {f.name: f for f in node["cond_indep_stack"]}
        if infer.get("_deterministic"):
            kind = "deterministic"
        elif infer.get("is_auxiliary") and node["is_observed"]:
            kind = "factor"
        else:
            kind = "observed" if node["is_observed"] else "latent"
        sites.append(
            Site(
                name=name,
                kind=kind,  # type: ignore[arg-type]
                shape=tuple(node["value"].shape),
                prior="" if kind in ("deterministic", "factor") else _family(fn),
                support="" if kind in ("deterministic", "factor") else _words(fn.support),
                row_dim=frames[PLATE].dim if PLATE in frames else None,
                discrete=bool(getattr(fn.support, "is_discrete", False)),
            )
        )
    return sites


def _constants(model: Model, trace: poutine.Trace) -> list[Site]:
    """List parameters without a prior: the module's, and `pyro.param` statements."""
    held = {k: v for k, v in model.named_parameters()} if isinstance(model, nn.Module) else {}
    named = {k: n["value"] for k, n in trace.nodes.items() if n["type"] == "param"}
    # Pyro writes the parameters of plain modules inside a PyroModule as `module$$$parameter`.
    named = {k.replace("$$$", "."): v for k, v in named.items()}
    named = {k: v for k, v in named.items() if k not in held and f"{k}_unconstrained" not in held}
    return [Site(k, "constant", tuple(v.shape)) for k, v in {**held, **named}.items()]


def _family(fn: Any) -> str:
    """Name a distribution as its author wrote it, without the wrappers that shape it."""
    while type(fn).__name__ in ("Independent", "ExpandedDistribution", "MaskedDistribution"):
        fn = fn.base_dist
    return type(fn).__name__


def _bounds(support: Any) -> tuple[Any, Any]:
    """Return the lower and upper bound of a support, None where there is none."""
    support = _elementwise(support)
    return getattr(support, "lower_bound", None), getattr(support, "upper_bound", None)


def _elementwise(support: Any) -> Any:
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    return support


def _words(support: Any) -> str:
    support = _elementwise(support)
    lower, upper = _bounds(support)
    if lower is not None and upper is not None:
        return f"[{_number(lower)}, {_number(upper)}]"
    if lower is not None:
        return {0.0: "positive"}.get(lower, f"above {_number(lower)}")
    return type(support).__name__.lstrip("_").lower()


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float | int) else "…"


def _check_sites(
    trace: poutine.Trace, sites: tuple[Site, ...], x: Data, y: Data, dtype: torch.dtype
) -> int | None:
    """Refuse what no road can run; return the number of rows of plate `data`, if there is one."""
    nodes = trace.nodes
    observed = [s for s in sites if s.kind == "observed"]
    latent = [s for s in sites if s.kind == "latent"]
    if not latent:
        raise ModelError(
            "the model has no latent site; declare a prior, such as "
            "`self.fc.weight = PyroSample(dist.Normal(0., 1.).expand([1, 3]).to_event(2))`"
        )
    if not observed and not any(s.kind == "factor" for s in sites):
        raise ModelError(
            "the model observes nothing; write `pyro.sample('y', …, obs=y)` in plate 'data'"
        )
    for name, _ in _leaves(y):
        if (name or "y") not in {s.name for s in observed} and (name or len(observed) != 1):
            raise ModelError(
                f"y is given for site {name or 'y'!r}, which the model does not observe; it "
                f"observes {[s.name for s in observed]}"
            )
    for site in latent:
        _check_latent(site, nodes[site.name], dtype)
    rows = None
    given = dict((name or "y", value) for name, value in _leaves(y))
    for site in observed:
        frames = nodes[site.name]["cond_indep_stack"]
        _check_frames(site.name, frames, length(x, y) if (x is not None or y is not None) else None)
        if site.row_dim is not None:
            rows = next(f.size for f in frames if f.name == PLATE)
            _check_output(nodes["_RETURN"]["value"], rows)
        _check_observed(site, nodes[site.name], given.get(site.name), nodes["_RETURN"]["value"])
    return rows


def _check_latent(site: Site, node: Any, dtype: torch.dtype) -> None:
    name, fn, value = site.name, node["fn"], node["value"]
    if site.discrete:
        raise ModelError(
            f"site {name!r} is discrete ({site.prior}); gradients need continuous sites: sum it "
            "out by hand, such as with dist.MixtureSameFamily"
        )
    if value.dtype != dtype:
        raise ModelError(
            f"site {name!r} draws {value.dtype} where the fit runs in {dtype}; build its prior "
            "from numbers or from x (`x.new_zeros(…)`), or pass dtype="
        )
    planned = max((-f.dim for f in node["cond_indep_stack"] if f.vectorized), default=0)
    loose = fn.batch_shape[: len(fn.batch_shape) - planned]
    if any(size != 1 for size in loose):
        raise ModelError(
            f"site {name!r}: its prior has batch shape {tuple(fn.batch_shape)} outside any plate, "
            f"so its log density would not be one number; add `.to_event({len(fn.batch_shape)})`"
        )


def _check_frames(name: str, frames: Any, rows: int | None) -> None:
    for frame in frames:
        if not frame.vectorized:
            raise ModelError(
                f"site {name!r} lies in the sequential plate {frame.name!r}; write "
                f"`with pyro.plate(…):` instead of `for … in pyro.plate(…)`"
            )
        if frame.name != PLATE:
            continue
        if frame.full_size is not None and frame.full_size != frame.size:
            raise ModelError(
                "plate 'data' subsamples; the batch size belongs to the inference call: write "
                "`pyro.plate('data', x.shape[0])` and pass batch_size="
            )
        if rows is not None and frame.size != rows:
            raise ModelError(
                f"plate 'data' has size {frame.size} for {rows} rows; write "
                "`pyro.plate('data', x.shape[0])`, so that the model takes any number of rows"
            )


def _check_output(output: Any, rows: int) -> None:
    if not isinstance(output, Tensor) or output.ndim == 0 or output.shape[0] != rows:
        found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ModelError(
            f"the model returns {found}; expected f(x) with {rows} rows: end with `return f`"
        )


def _check_observed(site: Site, node: Any, y: Tensor | None, output: Any) -> None:
    fn = node["fn"]
    shape = tuple(fn.batch_shape + fn.event_shape)
    f = f"f(x) has shape {tuple(output.shape)}" if isinstance(output, Tensor) else "no f(x)"
    planned = max((-frame.dim for frame in node["cond_indep_stack"]), default=None)
    extra = planned is not None and len(fn.batch_shape) > planned
    if y is not None and (tuple(y.shape) != shape or extra):
        raise ModelError(
            f"site {site.name!r} would score {' × '.join(map(str, shape))} values for y of shape "
            f"{tuple(y.shape)} ({f}); {_mend(y, output, fn)}"
        )


def _mend(y: Tensor, output: Any, fn: Any) -> str:
    """Return the line that makes f(x) and y agree."""
    f = tuple(output.shape) if isinstance(output, Tensor) else ()
    if f == (*y.shape, 1):
        return "write `f = f.squeeze(-1)` before the observed site"
    if tuple(y.shape) == (*f, 1):
        return "pass `y.squeeze(-1)`"
    if f == tuple(y.shape) and y.ndim > 1 and len(fn.batch_shape) > 1:
        return "add `.to_event(1)` to the distribution of 'y', so that a row is one event"
    return f"expected the distribution of 'y' to have the shape of y, {tuple(y.shape)}"


def _check_density(bound: BoundModel, trace: poutine.Trace) -> None:
    """Look at the log joint at one prior draw: NaN is refused, a site that does nothing is told."""
    latent = bound.named("latent")
    values = {name: trace.nodes[name]["value"].clone().requires_grad_() for name in latent}
    again = bound.run(values)
    again.compute_log_prob()
    terms = {name: node["log_prob"].sum() for name, node in sample_nodes(again)}
    for name, term in terms.items():
        if term.isnan():
            raise ModelError(
                f"site {name!r} has log density NaN at a draw from the prior; its parameters leave "
                "their support (a negative scale?) for some values of the other sites"
            )
    for name, value in values.items():
        rest = [term for other, term in terms.items() if other != name and term.requires_grad]
        gradient = (
            torch.autograd.grad(sum(rest), value, retain_graph=True, allow_unused=True)[0]
            if rest
            else None
        )
        if gradient is None or not bool((gradient != 0).any()):
            warnings.warn(
                f"site {name!r} does not act on the data: the log density of everything else has "
                "no gradient in it; use it in forward, or remove its prior",
                PbnnWarning,
                stacklevel=4,
            )
