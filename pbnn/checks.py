"""What no road can run: the sites of a traced model, and one check for each fault they can have.

Each check raises one line that names the site and shows the repair. `pbnn.front_door.bind` is where
they are called.
"""

import warnings
from typing import Any

import torch
from pyro import poutine
from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution
from torch import Tensor, nn
from torch.distributions import Independent, constraints

from pbnn.errors import DataError, ModelError, PbnnWarning
from pbnn.model import BoundModel, Data, Site, leaves, sample_nodes

__all__ = [
    "PLATE",
    "bounds",
    "check_density",
    "check_observed",
    "check_output",
    "check_plates",
    "check_sites",
    "list_sites",
    "support_of",
    "unwrapped",
]

PLATE = "data"
# Two runs at the same values may differ by the order of a sum on a GPU, and by nothing else.
_SAME = 1e-3


def list_sites(model: nn.Module, trace: poutine.Trace) -> tuple[Site, ...]:
    """Return the sites of a traced model in the order in which it runs, then its constants.

    Raises:
        ModelError: A site observes no tensor, or a parameter is not the model's own.
    """
    sites = []
    for name, node in sample_nodes(trace):
        fn, infer = node["fn"], node["infer"]
        if not isinstance(node["value"], Tensor):
            raise ModelError(
                f"site {name!r} observes a {type(node['value']).__name__}; expected a tensor: with "
                f"y a dict by site, write `obs=None if y is None else y[{name!r}]`"
            )
        if infer.get("_deterministic"):
            kind = "deterministic"
        elif infer.get("is_auxiliary") and node["is_observed"]:
            kind = "factor"
        else:
            kind = "observed" if node["is_observed"] else "latent"
        frames = {f.name: f for f in node["cond_indep_stack"]}
        described = kind in ("latent", "observed")
        sites.append(
            Site(
                name=name,
                kind=kind,  # type: ignore[arg-type]
                shape=tuple(node["value"].shape),
                prior=type(unwrapped(fn)).__name__ if described else "",
                support=_words(support_of(fn)) if described else "",
                row_dim=frames[PLATE].dim if PLATE in frames else None,
                discrete=support_of(fn).is_discrete,
            )
        )
    return (*sites, *_constants(model, trace))


def _constants(model: nn.Module, trace: poutine.Trace) -> list[Site]:
    """List the parameters without a prior; each must be an attribute of the model."""
    held = dict(model.named_parameters())
    for name, node in trace.nodes.items():
        # Pyro writes the parameters of plain modules inside a PyroModule as `module$$$parameter`.
        plain = name.replace("$$$", ".")
        if node["type"] == "param" and plain not in held and f"{plain}_unconstrained" not in held:
            raise ModelError(
                f"parameter {plain!r} is made in forward; make it an attribute of the model: write "
                f"`self.{plain} = PyroParam(…)` in `__init__`"
            )
    return [Site(name, "constant", tuple(value.shape)) for name, value in held.items()]


def unwrapped(fn: Any) -> Any:
    """Return a distribution as its author wrote it, without the wrappers that shape it."""
    while isinstance(fn, Independent | ExpandedDistribution | MaskedDistribution):
        fn = fn.base_dist
    return fn


def support_of(fn: Any) -> constraints.Constraint:
    """Return a distribution's support; the real line where it does not say."""
    try:
        support: constraints.Constraint = fn.support
    except NotImplementedError:
        return constraints.real
    return support


def bounds(support: Any) -> tuple[Any, Any]:
    """Return the lower and upper bound of a support, None where there is none."""
    support = _elementwise(support)
    return getattr(support, "lower_bound", None), getattr(support, "upper_bound", None)


def _elementwise(support: Any) -> Any:
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    return support


def _words(support: Any) -> str:
    lower, upper = (None if bound is None else _number(bound) for bound in bounds(support))
    if lower is not None and support.is_discrete:
        return f"{lower}, …" if upper is None else f"{lower}, …, {upper}"
    if lower is not None and upper is not None:
        return f"[{lower}, {upper}]"
    if lower is not None:
        return "positive" if lower == "0" else f"above {lower}"
    return type(_elementwise(support)).__name__.lstrip("_").lower()


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float | int) else "…"


def check_sites(
    trace: poutine.Trace, sites: tuple[Site, ...], y: Data, rows: int | None, dtype: torch.dtype
) -> int | None:
    """Refuse what no road can run; return the number of rows of plate `data`, if there is one.

    Args:
        trace: The model run on prior draws and its data.
        sites: Its sites.
        y: Observations.
        rows: Number of rows of the data, where there are any.
        dtype: Floating type of the fit.

    Raises:
        DataError: y lies outside the support of its site.
        ModelError: Any other fault.
    """
    observed = [s for s in sites if s.kind == "observed"]
    latent = [s for s in sites if s.kind == "latent"]
    if not latent:
        raise ModelError(
            "the model has no latent site; declare a prior, such as "
            "`self.fc.weight = PyroSample(dist.Normal(0., 1.).expand([1, 3]).to_event(2))`"
        )
    if not observed and not any(s.kind == "factor" for s in sites):
        raise ModelError(
            "nothing is observed; pass y, and write `pyro.sample('y', …, obs=y)` in plate 'data'"
        )
    check_plates(trace, rows)
    given = {name or "y": value for name, value in leaves(y)}
    for name in given:
        if not observed:
            raise ModelError(
                f"y is given for site {name!r}, but the model observes no site: its data are in "
                "its factors; leave y out"
            )
        if name not in {s.name for s in observed}:
            raise ModelError(
                f"y is given for site {name!r}, which the model does not observe; it observes "
                f"{[s.name for s in observed]}: give both the same name"
            )
    for site in latent:
        _check_latent(site, trace.nodes[site.name], dtype)
    plated = None
    for site in observed:
        node = trace.nodes[site.name]
        if site.row_dim is not None:
            plated = next(f.size for f in node["cond_indep_stack"] if f.name == PLATE)
            check_output(trace, plated)
        check_observed(trace, site.name, given.get(site.name))
    return plated


def check_plates(trace: poutine.Trace, rows: int | None) -> None:
    """Refuse plates that subsample, observations in a loop, and a `data` of fixed size."""
    for name, node in sample_nodes(trace):
        for frame in node["cond_indep_stack"]:
            if not frame.vectorized and node["is_observed"]:
                raise ModelError(
                    f"site {name!r} lies in the sequential plate {frame.name!r}; write "
                    "`with pyro.plate(…):` instead of `for … in pyro.plate(…)`"
                )
            if frame.full_size not in (None, frame.size):
                raise ModelError(
                    f"plate {frame.name!r} takes {frame.size} of its {frame.full_size} rows at "
                    "random; the batch size belongs to the inference call: write "
                    "`pyro.plate('data', x.shape[0])` and pass batch_size="
                )
            if frame.name == PLATE and rows is not None and frame.size != rows:
                raise ModelError(
                    f"plate 'data' has size {frame.size} where x has {rows} row{_s(rows)}; write "
                    "`pyro.plate('data', x.shape[0])`, so that the model takes any number of rows"
                )


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def check_output(trace: poutine.Trace, rows: int) -> None:
    """Refuse an output that does not have the rows of the data as its first size."""
    output = trace.nodes["_RETURN"]["value"]
    if not isinstance(output, Tensor) or output.ndim == 0 or output.shape[0] != rows:
        found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ModelError(
            f"for {rows} row{_s(rows)} the model returns {found}; expected f(x), rows first: end "
            "with `return f`, and write `f.squeeze(-1)` instead of `f.squeeze()`"
        )


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


def check_observed(trace: poutine.Trace, name: str, y: Tensor | None) -> None:
    """Refuse a y whose shape or values are not those of its site.

    Args:
        trace: The model run with y.
        name: The observed site.
        y: Its observations; None where the model holds them.

    Raises:
        DataError: y lies outside the support.
        ModelError: The site scores another shape.
    """
    node, output = trace.nodes[name], trace.nodes["_RETURN"]["value"]
    fn = node["fn"]
    shape = tuple(fn.batch_shape + fn.event_shape)
    planned = max((-frame.dim for frame in node["cond_indep_stack"]), default=None)
    extra = planned is not None and len(fn.batch_shape) > planned
    if y is not None and (tuple(y.shape) != shape or extra):
        f = f"f(x) has shape {tuple(output.shape)}" if isinstance(output, Tensor) else "no f(x)"
        raise ModelError(
            f"site {name!r} would score {' × '.join(map(str, shape))} values for y of shape "
            f"{tuple(y.shape)} ({f}); {_mend(y, output, fn)}"
        )
    support = support_of(fn)
    if any(isinstance(bound, Tensor) for bound in bounds(support)):
        return  # the support depends on the model's own values, which are a prior draw here
    legal = support.check(node["value"])
    if node["mask"] is not None:
        legal = legal | ~torch.as_tensor(node["mask"], device=legal.device)
    if not legal.all():
        where = (~legal).nonzero()[0].tolist()
        raise DataError(
            f"y at site {name!r} is {node['value'][tuple(where)].tolist()} in row "
            f"{where[0] if where else 0}; expected values that {type(unwrapped(fn)).__name__} can "
            f"take ({_words(support)})"
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


def _check_repeats(first: poutine.Trace, second: poutine.Trace) -> None:
    """Refuse a model that is random beyond its sites, by two runs at the same values."""
    sites = dict(sample_nodes(first))
    for name, node in sample_nodes(second):
        same = name in sites and torch.allclose(
            node["log_prob"], sites[name]["log_prob"], rtol=_SAME, atol=_SAME, equal_nan=True
        )
        if not same:
            raise ModelError(
                f"site {name!r} changes when the model runs again at the same values: it is random "
                "beyond its sites; use `nn.Dropout` (off in eval mode) instead of `F.dropout`, and "
                "`pyro.sample` for random values"
            )


def check_density(bound: BoundModel, trace: poutine.Trace) -> None:
    """Look at the log joint at one prior draw: NaN is refused, a site that does nothing is told."""
    latent = bound.named("latent")
    values = {name: trace.nodes[name]["value"].clone().requires_grad_() for name in latent}
    once, again = bound.run(values), bound.run(values)
    for run in (once, again):
        run.compute_log_prob()
    _check_repeats(once, again)
    terms = {name: node["log_prob"].sum() for name, node in sample_nodes(once)}
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
