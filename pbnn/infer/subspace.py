"""Subspace inference: NUTS or a guide in a plane through the trained weights."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import constraints

from pbnn.errors import FitError
from pbnn.front_door import bind
from pbnn.infer.map import start_word, trained_point
from pbnn.infer.nuts import fit_nuts
from pbnn.infer.options import whole_number
from pbnn.infer.points import Points, Space
from pbnn.infer.posterior import Posterior, provenance
from pbnn.infer.svi import fit_svi
from pbnn.infer.swag import fit_swag
from pbnn.infer.unconstrained import Latents, from_flat
from pbnn.model import Data, Model, isolated, run

__all__ = ["fit_subspace", "sweep_subspace"]

Basis = Literal["pca", "random"]
PlaneDensity = Literal["model", "z_prior"]

# What a road says of its run, beside its options, that holds for the plane as well.
_KEPT = ("interrupted", "leapfrogs", "step_size", "notes", "compiled", "compile_rule")


@dataclass(frozen=True, kw_only=True)
class _Target:
    """Which density z has in the plane, checked; see `fit_subspace`."""

    density: PlaneDensity
    temperature: float
    prior_scale: float

    def __post_init__(self) -> None:
        if self.density not in get_args(PlaneDensity):
            raise FitError(f"density={self.density!r}; expected 'model' or 'z_prior'")
        for name in ("temperature", "prior_scale"):
            if not 0 < getattr(self, name) < float("inf"):
                raise FitError(f"{name}={getattr(self, name)}; expected a positive number")
        if self.density == "model" and self.prior_scale != 1:
            raise FitError("prior_scale is that of density='z_prior'; leave it out, or pass that")


def fit_subspace(
    model: Model,
    x: Data,
    y: Data = None,
    *,
    start: Posterior | Mapping[str, Tensor] | None = None,
    rank: int = 5,
    basis: Basis | Tensor = "pca",
    snapshots: int = 20,
    density: PlaneDensity = "model",
    temperature: float = 1.0,
    prior_scale: float = 1.0,
    guide: Any = None,
    inner: Mapping[str, Any] | None = None,
    steps: int = 2_000,
    draws: int = 1000,
    seed: int = 0,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    compile: bool | None = None,
    progress: bool = True,
) -> Posterior:
    """Draw from the posterior in a plane of few dimensions (Izmailov et al. 2020, "Subspace").

    On the unconstrained space, w = w₀ + P z, where w₀ is a trained point and the columns of P span
    the plane; z is the one latent site that NUTS, or a guide, sees. Constants belong to w; the
    statistics of BatchNorm layers are those of w₀.

    Two densities of z:

    * "model": the model's own log joint at w, a slice through the posterior, not a projection of
      it. On a linear model with posterior N(m, Λ⁻¹) its precision is PᵀΛP and its mean
      (PᵀΛP)⁻¹PᵀΛ(m − w₀).
    * "z_prior": z ~ N(0, `prior_scale`) in place of the model's priors (section 3.2).

    With either, the log-likelihood is divided by `temperature`. Anything but 1 does not draw from a
    posterior of this model; the paper needs it for "z_prior", where a plane of few dimensions
    meets all of the data.

    Args:
        model: A Pyro model `(x, y=None)`.
        x: Input `(n, …)`, a dict of inputs, or None.
        y: Observations `(n,)` or `(n, outputs)`, or a dict by site.
        start: What `fit_swag` returned, whose snapshots make the plane; or a trained point (a
            posterior of one draw, or a `state_dict`), from which snapshots are taken first, if the
            basis needs them. None trains a MAP.
        rank: Dimension of the plane.
        basis: "pca": the first principal axes of the snapshots about their mean w₀, each as long
            as the snapshots' scale along it; "random": orthonormal directions through the trained
            point; or P itself, `(size, rank)`.
        snapshots: Snapshots for "pca", where `start` has none; see `pbnn.fit_swag`.
        density: Which density z has, "model" or "z_prior".
        temperature: What the log-likelihood is divided by.
        prior_scale: Scale of z under "z_prior".
        guide: A guide for z, as `pbnn.fit_svi` takes it; None runs NUTS.
        inner: Further options of `pbnn.fit_nuts`, such as `{"chains": 2, "warmup": 300}`, or with a
            guide of `pbnn.fit_svi`.
        steps: Steps of the MAP run where `start` is None; see `pbnn.fit_map`.
        draws: Number of draws, of each chain of NUTS.
        seed: Seed; the global random state and Pyro's param store stay untouched.
        device: Where to run; see `pbnn.front_door.bind`.
        dtype: `torch.float32` or `torch.float64`; see `pbnn.front_door.bind`.
        compile: Whether to compile; see `pbnn.fit_nuts`.
        progress: Whether to show a progress bar on stderr.

    Returns:
        The draws of all sites; those of z are `deterministic["subspace"]`, `(chain, draw, rank)`.
        `stats` are those of NUTS or of the guide: `lp` is the log density of z, and a guide's
        `log_q_subspace` that of the guide, not of the weights. `approximation` holds w₀ as `origin`
        `(size,)` and P as `basis` `(size, rank)`.

    Raises:
        DataError: The data cannot be used as they are.
        ModelError: The front door refuses the model.
        FitError: An option is out of range, or `start` is no point of this model.
    """
    seed, rank = whole_number("seed", seed, least=0), whole_number("rank", rank)
    target = _Target(density=density, temperature=temperature, prior_scale=prior_scale)
    started = time.perf_counter()
    common: dict[str, Any] = {
        "seed": seed,
        "device": device,
        "dtype": dtype,
        "compile": compile,
        "progress": progress,
    }
    path = _path(start)
    if path is None and isinstance(basis, str) and basis == "pca":
        count = max(whole_number("snapshots", snapshots), rank + 1)
        swag = fit_swag(model, x, y, start=start, snapshots=count, steps=steps, draws=1, **common)
        path = _path(swag)
    bound = bind(model, x, y, device=device, dtype=dtype)
    with isolated(seed, bound.device), pyro.validation_enabled(False):
        space = Space(bound)
        if path is None:
            origin = trained_point(
                space, start, seed=seed, steps=steps, compile=compile, progress=progress
            )
        else:
            _check_size(space, len(path.mT), "the snapshots have")
            mean = path.to(bound.device, bound.dtype).mean(0, keepdim=True)
            origin = space.points(mean)
        plane = _directions(space, path, basis, rank, seed)
        restricted = _plane_model(space, origin, plane, target)
    fit: Callable[..., Posterior] = fit_nuts if guide is None else fit_svi
    # Guides start at the trained point; chains apart from each other, as always.
    chosen = {} if guide is None else {"guide": guide, "init": {"z": plane.new_zeros(rank)}}
    options = {**common, "draws": draws, **chosen, **(inner or {})}
    found = fit(restricted, bound.x, bound.y, **options)
    z = found.draws["z"]
    with isolated(seed, bound.device):
        fields = _in_model(space, origin, plane, z)
    settings = {
        "start": "map" if start is None else start_word(start),
        "rank": rank,
        "basis": basis if isinstance(basis, str) else "as given",
        **vars(target),
        "draws": draws,
        "inner": found.provenance["options"],
    }
    fields["deterministic"]["subspace"] = z
    kept = {k: v for k, v in found.provenance.items() if k in _KEPT}
    return Posterior(
        **fields,
        stats={"log_q_subspace" if k == "log_q" else k: v for k, v in found.stats.items()},
        method=f"subspace {found.method}",
        markov=found.markov,
        seconds=time.perf_counter() - started,
        history=found.history,
        approximation={
            "family": "subspace",
            "tensors": {"origin": origin.values[0].cpu(), "basis": plane.cpu()},
        },
        provenance={**provenance(bound, seed=seed, **settings), **kept},
    )


def sweep_subspace(
    model: Model,
    x: Data,
    y: Data = None,
    *,
    ranks: Sequence[int] = (2, 5, 10, 20),
    start: Posterior | Mapping[str, Tensor] | None = None,
    seed: int = 0,
    **options: Any,
) -> dict[int, Posterior]:
    """Draw in planes of several dimensions, each a part of the next, through one trained point.

    `pbnn.compare` then tells them apart on held-out rows.

    Args:
        model: A Pyro model `(x, y=None)`.
        x: Input, as for `fit_subspace`.
        y: Observations, as for `fit_subspace`.
        ranks: Dimensions.
        start: As for `fit_subspace`; the point is trained, and snapshots are taken, only once.
        seed: Seed.
        **options: Further options of `fit_subspace`.

    Returns:
        The posteriors by dimension.

    Raises:
        FitError: See `fit_subspace`.
    """
    common = {k: v for k, v in options.items() if k in ("device", "dtype", "compile", "progress")}
    if _path(start) is None and options.get("basis", "pca") == "pca":
        count = max(options.get("snapshots", 20), max(ranks) + 1)
        steps = {"steps": options["steps"]} if "steps" in options else {}
        start = fit_swag(
            model, x, y, start=start, snapshots=count, draws=1, seed=seed, **steps, **common
        )
    return {
        rank: fit_subspace(model, x, y, start=start, rank=rank, seed=seed, **options)
        for rank in ranks
    }


def _path(start: Any) -> Tensor | None:
    """Return the snapshots `(snapshots, size)` that a start holds."""
    return start.history.get("snapshots") if isinstance(start, Posterior) else None


def _check_size(space: Space, size: int, found: str) -> None:
    if size != space.size:
        raise FitError(
            f"{found} {size} values and the model {space.size} on its unconstrained space; pass "
            "what belongs to this model"
        )


def _directions(
    space: Space, path: Tensor | None, basis: str | Tensor, rank: int, seed: int
) -> Tensor:
    """Return P, `(size, rank)`."""
    place: dict[str, Any] = {"device": space.bound.device, "dtype": space.bound.dtype}
    if isinstance(basis, Tensor):
        _check_size(space, len(basis), "basis has")
        if basis.shape != (space.size, rank):
            raise FitError(f"basis has shape {tuple(basis.shape)}; expected ({space.size}, {rank})")
        return basis.to(**place)
    if basis == "random":
        if rank > space.size:
            raise FitError(f"rank={rank}, but the model has {space.size} values")
        generator = torch.Generator().manual_seed(seed)
        # Row by row, and made orthonormal in this order: a lower rank has the first of them.
        rows = torch.randn(rank, space.size, generator=generator, dtype=torch.float64)
        orthonormal: Tensor = torch.linalg.qr(rows.mT).Q
        return orthonormal.to(**place)
    if basis != "pca" or path is None:
        raise FitError(f"basis={basis!r}; expected 'pca', 'random' or a tensor (size, rank)")
    if rank >= len(path):
        raise FitError(
            f"rank={rank} with {len(path)} snapshots, which span {len(path) - 1} dimensions about "
            "their mean; take more snapshots"
        )
    exact = path.double()
    _, scales, axes = torch.linalg.svd(exact - exact.mean(0), full_matrices=False)
    columns: Tensor = axes[:rank].mT * scales[:rank] / (len(path) - 1) ** 0.5
    return columns.to(**place)


def _plane_model(
    space: Space, origin: Points, basis: Tensor, target: _Target
) -> Callable[..., Tensor]:
    """Return the model of z: a Pyro model `(x, y=None)` with one latent site."""
    module, held = space.bound.model, space.bound.buffers()
    buffers = {**held, **{name: value[0] for name, value in origin.buffers.items()}}
    rank = basis.shape[1]

    def plane(x: Data, y: Data = None) -> Tensor:
        if target.density == "model":
            flat = dist.ImproperUniform(constraints.real_vector, (), (rank,))
            z = pyro.sample("z", flat)
        else:
            scale = basis.new_full((rank,), target.prior_scale)
            z = pyro.sample("z", dist.Normal(0.0, scale).to_event(1))
        latent, constants = space.split(origin.values[0] + basis @ z)
        weights = _Weights(space, latent)
        with (
            poutine.scale(scale=1 / target.temperature),
            poutine.block(hide_fn=weights.hides),
            weights,
        ):
            nodes = run(module, {}, x, y, state={**constants, **buffers}).nodes
        if target.density == "model":
            priors = (nodes[s]["fn"].log_prob(nodes[s]["value"]).sum() for s in weights.values)
            pyro.factor("prior", sum(priors) + sum(weights.log_jacobian.values()))
        f: Tensor = nodes["_RETURN"]["value"]
        return f

    return plane


class _Weights(Latents):
    """Gives the latent sites of the model the values that z stands for; y is left alone.

    Args:
        space: The vectors.
        latent: Unconstrained values `(dim,)`.
    """

    def __init__(self, space: Space, latent: Tensor) -> None:
        super().__init__(from_flat(space.sites, latent))
        self._names = {site.name for site in space.sites}

    def hides(self, msg: Any) -> bool:
        """Whether a statement stays unseen outside of the plane's model."""
        return msg["type"] == "param" or msg["name"] in self._names

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self._names:
            super()._pyro_sample(msg)


def _in_model(space: Space, origin: Points, basis: Tensor, z: Tensor) -> dict[str, Any]:
    """Return the fields of a posterior of the model at draws of z, `(chain, draw, rank)`."""
    values = origin.values[0] + z.flatten(0, 1).to(basis.device) @ basis.T
    buffers = {k: v.expand(len(values), *v.shape[1:]) for k, v in origin.buffers.items()}
    fields = space.fields(Points(values=values, buffers=buffers))
    varying, lead = fields["per_draw"], z.shape[:2]

    def by_chain(named: Mapping[str, Tensor], names: Any) -> dict[str, Tensor]:
        return {k: v.reshape(*lead, *v.shape[2:]) if k in names else v for k, v in named.items()}

    return {
        "draws": by_chain(fields["draws"], fields["draws"]),
        "deterministic": by_chain(fields["deterministic"], fields["deterministic"]),
        "constants": by_chain(fields["constants"], varying),
        "buffers": fields["buffers"],
        "per_draw": varying,
    }
