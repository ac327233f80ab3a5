"""Laplace approximation of the network's weights, by the library laplace-torch."""

import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import pyro
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pbnn.checks import unwrapped
from pbnn.errors import FitError
from pbnn.front_door import bind
from pbnn.infer.map import start_word, trained_point
from pbnn.infer.options import whole_number
from pbnn.infer.points import Points, Space
from pbnn.infer.posterior import Posterior, provenance
from pbnn.model import BoundModel, Data, Model, copied, isolated, run

__all__ = ["fit_laplace"]

Structure = Literal["kron", "diag", "full"]
Layers = Literal["all", "last"]


def fit_laplace(
    model: Model,
    x: Data,
    y: Data = None,
    *,
    start: Posterior | Mapping[str, Tensor] | None = None,
    structure: Structure = "kron",
    layers: Layers = "all",
    batch_size: int | None = None,
    steps: int = 2_000,
    draws: int = 1000,
    seed: int = 0,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    compile: bool | None = None,
    progress: bool = True,
) -> Posterior:
    """Draw from a Gaussian about the MAP, whose precision is the curvature there.

    The precision of the weights is the generalised Gauss-Newton matrix of the log-likelihood, in
    one of three structures (Daxberger et al. 2021, "Laplace redux", section 2), plus the precision
    of their Normal priors. What f(x) does not depend on, such as a noise scale, is held at its
    value at the MAP, as are constants, the scales of hierarchical priors, and with `layers="last"`
    all weights but the last layer's. The draws are of the weights, so that predictions are those of
    the network, not of its linearisation.

    Args:
        model: A Pyro model `(x, y=None)` whose weights are `PyroSample` sites with Normal priors,
            and y ~ Categorical(logits=f(x)), or Normal(f(x), scale) with one scale for all rows.
        x: Input `(n, …)`.
        y: Observations `(n,)` or `(n, outputs)`.
        start: The MAP: a posterior of one draw, such as `fit_map` returns, or a trained network's
            `state_dict`. None trains one.
        structure: "kron" (a Kronecker product for each weight matrix), "diag" or "full".
        layers: "all", or "last": the layer whose weights the model meets last.
        batch_size: Rows taken at once; all by default. The result does not depend on it.
        steps: Steps of the MAP run where `start` is None; see `pbnn.fit_map`.
        draws: Number of draws.
        seed: Seed; the global random state and Pyro's param store stay untouched.
        device: Where to run; see `pbnn.front_door.bind`.
        dtype: `torch.float32` or `torch.float64`; see `pbnn.front_door.bind`.
        compile: Whether to compile the step of the MAP run.
        progress: Whether to show a progress bar on stderr.

    Returns:
        One chain of independent draws with `lp`, and `log_q` where nothing is held.

    Raises:
        DataError: The data cannot be used as they are.
        ModelError: The front door refuses the model.
        FitError: laplace-torch is not installed, an option is out of range, or the model has
            another prior or likelihood than these.
    """
    seed, draws = whole_number("seed", seed, least=0), whole_number("draws", draws)
    for name, value, known in (("structure", structure, Structure), ("layers", layers, Layers)):
        if value not in get_args(known):
            words = ", ".join(map(repr, get_args(known)))
            raise FitError(f"{name}={value!r}; expected one of {words}")
    _library()  # before anything is trained
    started = time.perf_counter()
    bound = bind(model, x, y, device=device, dtype=dtype)
    if not isinstance(bound.x, Tensor) or not isinstance(bound.y, Tensor) or bound.rows is None:
        raise FitError("fit_laplace takes x and y as one tensor each, rows in plate 'data'")
    with isolated(seed, bound.device), pyro.validation_enabled(False):
        space = Space(bound)
        point = trained_point(
            space, start, seed=seed, steps=steps, compile=compile, progress=progress
        )
        fields = space.fields(point)  # the bound model then has the constants of the point
        network, precisions = _network(bound, fields["draws"], layers, structure)
        size = bound.rows if batch_size is None else whole_number("batch_size", batch_size)
        approximation = _fitted(network, precisions, structure, bound, size)
        values = approximation.sample(draws)
        fields = space.fields(_points(space, point, network.sites, values))
        if len(network.sites) == len(space.sites) and not space.constants:
            log_q = torch.stack([approximation.log_prob(value) for value in values])
            fields["stats"]["log_q"] = log_q.detach()[None].cpu()
    settings = {
        "start": "map" if start is None else start_word(start),
        "structure": structure,
        "layers": layers,
        "batch_size": batch_size,
        "steps": steps if start is None else 0,
        "draws": draws,
    }
    return Posterior(
        **fields,
        method="laplace",
        markov=False,
        seconds=time.perf_counter() - started,
        provenance={
            **provenance(bound, seed=seed, **settings),
            "held": [s.name for s in space.sites if s.name not in network.sites],
        },
    )


def _library() -> Any:
    """Return `laplace.Laplace`, or say how it is installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # import-time deprecations of what it builds on
            from laplace import Laplace  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise FitError(
            f"fit_laplace needs the library laplace-torch ({error}); pip install 'pbnn[laplace]'"
        ) from error
    except RuntimeError as error:
        raise FitError(
            f"laplace-torch cannot be imported ({error}); install the torchvision that was built "
            "for this torch, or none"
        ) from error
    return Laplace


class _Network(nn.Module):
    """The network as laplace-torch takes it: weights are parameters, and all it returns is f(x).

    Args:
        model: A model whose weight sites have become parameters.
        held: Values of the other sites.
        scale: Scale of y by output, which f(x) is divided by; None for classes.

    Attributes:
        sites: Names of the weight sites, in the order of the parameters.
        likelihood: "regression" (of unit noise) or "classification".
    """

    def __init__(self, model: nn.Module, held: Mapping[str, Tensor], scale: Tensor | None) -> None:
        super().__init__()
        self.model, self._given, self._scale = model, dict(held), scale
        self.sites = [name for name, p in model.named_parameters() if p.requires_grad]
        self.likelihood = "classification" if scale is None else "regression"

    def forward(self, x: Tensor) -> Tensor:
        """Return f(x) in units of the noise, `(n, outputs)`."""
        state = dict(self.model.named_parameters())
        f: Tensor = run(self.model, self._given, x, state=state).nodes["_RETURN"]["value"]
        f = f.reshape(len(f), -1)
        return f if self._scale is None else f / self._scale

    def targets(self, y: Tensor) -> Tensor:
        """Return y as laplace-torch takes it."""
        return y if self._scale is None else y.reshape(len(y), -1) / self._scale


def _network(
    bound: BoundModel, point: Mapping[str, Tensor], layers: Layers, structure: Structure
) -> tuple[_Network, Tensor]:
    """Return the network at a point, and the prior precisions of its weights."""
    values = {k: v[0, 0].to(bound.device).requires_grad_() for k, v in point.items()}
    nodes = bound.run(values).nodes
    f = nodes["_RETURN"]["value"]
    slopes = torch.autograd.grad(f.sum(), list(values.values()), allow_unused=True)
    acting = [name for name, g in zip(values, slopes, strict=True) if g is not None]
    sites = acting
    if layers == "last":
        sites = [name for name in acting if _layer(name) == _layer(acting[-1])]
    (outcome,) = bound.named("observed")
    scale = _scale_of_y(outcome, nodes[outcome], f.detach())
    held = {name: v.detach() for name, v in values.items() if name not in sites}
    # A value for y, of any shape, keeps it from being sampled.
    held[outcome] = f.new_zeros(())
    model = copied(bound.model, bound.device, bound.dtype).requires_grad_(False)
    for site in sites:
        module = model.get_submodule(_layer(site))
        name = site.rpartition(".")[2]
        if name not in vars(module).get("_pyro_samples", {}):
            raise FitError(
                f"site {site!r} is sampled in forward; make it a layer's own, as in "
                "`layer.weight = PyroSample(…)`"
            )
        setattr(module, name, nn.Parameter(values[site].detach().clone()))
    network = _Network(model, held, scale)
    precisions = [_prior_precision(site, nodes[site], structure) for site in network.sites]
    return network, torch.cat(precisions)


def _layer(site: str) -> str:
    return site.rpartition(".")[0]


def _prior_precision(site: str, node: Any, structure: Structure) -> Tensor:
    """Return one number for a Kronecker product, else one for each value."""
    prior = unwrapped(node["fn"])
    if not isinstance(prior, torch.distributions.Normal):
        raise FitError(
            f"site {site!r} has a {type(prior).__name__} prior; a Laplace approximation by "
            "laplace-torch takes Normal priors only: use fit_svi, or fit_nuts"
        )
    precision = prior.scale.detach().expand(node["value"].shape).reshape(-1) ** -2
    if structure != "kron":
        return precision
    if not bool((precision == precision[0]).all()):
        raise FitError(
            f"site {site!r} has priors of several scales, which structure='kron' cannot take; pass "
            "structure='diag'"
        )
    return precision[:1]


def _scale_of_y(outcome: str, node: Any, f: Tensor) -> Tensor | None:
    """Return the scale of y by output `(1, outputs)`, or None where y is a class."""
    fn, plain = unwrapped(node["fn"]), node["mask"] is None and node["scale"] == 1
    if isinstance(fn, torch.distributions.Categorical):
        if plain and torch.allclose(fn.logits, f.log_softmax(-1), atol=1e-5):
            return None
    elif isinstance(fn, torch.distributions.Normal) and fn.loc.numel() == f.numel():
        scale = fn.scale.detach().expand(fn.loc.shape).reshape(len(f), -1)
        same = torch.allclose(fn.loc.reshape(f.shape), f) and bool((scale == scale[:1]).all())
        if plain and same:
            return scale[:1]
    raise FitError(
        f"site {outcome!r} is {type(fn).__name__} with other parameters than a Laplace "
        "approximation by laplace-torch takes; expected Normal(f(x), scale) with one scale for all "
        "rows, or Categorical(logits=f(x)), unmasked"
    )


def _points(space: Space, point: Points, sites: Sequence[str], weights: Tensor) -> Points:
    """Return the points whose weights are drawn, all else being as it is at the MAP."""
    values = point.values.repeat(len(weights), 1)
    places = {site.name: site.slice for site in space.sites}
    start = 0
    for name in sites:
        stop = start + places[name].stop - places[name].start
        values[:, places[name]] = weights[:, start:stop]
        start = stop
    buffers = {k: v.expand(len(weights), *v.shape[1:]) for k, v in point.buffers.items()}
    return Points(values=values, buffers=buffers)


def _fitted(
    network: _Network, precisions: Tensor, structure: Structure, bound: BoundModel, size: int
) -> Any:
    """Return laplace-torch's approximation.

    Raises:
        FitError: It cannot take this network.
    """
    approximation = _library()(
        network,
        network.likelihood,
        subset_of_weights="all",
        hessian_structure=structure,
        prior_precision=precisions,
    )
    rows = TensorDataset(bound.x, network.targets(bound.y))
    before = torch.get_default_dtype()
    torch.set_default_dtype(bound.dtype)  # the library makes matrices of the default type
    try:
        approximation.fit(DataLoader(rows, batch_size=size))
    except Exception as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FitError(
            f"laplace-torch cannot take this network with structure={structure!r} ({line}); try "
            "another structure"
        ) from error
    finally:
        torch.set_default_dtype(before)
    return approximation
