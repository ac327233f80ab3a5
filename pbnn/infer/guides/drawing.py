"""Draws, densities and plain tensors of any guide: all that a fit needs once a guide is trained."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from pyro import poutine
from pyro.infer.autoguide import (
    AutoContinuous,
    AutoDelta,
    AutoDiagonalNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from pyro.infer.autoguide.initialization import InitMessenger
from torch import Tensor

from pbnn.errors import ModelError
from pbnn.infer.guides.blocks import AutoBlocks
from pbnn.infer.guides.gaussians import MatrixNormal, VectorNormal, gaussian_from_tensors
from pbnn.infer.guides.lowrank import AutoLowRank
from pbnn.infer.guides.roots import DiagonalRoot, LowRankRoot, TriangularRoot
from pbnn.infer.guides.sites import Layout, constrain, unconstrain
from pbnn.infer.guides.starts import init_to_fan_in

__all__ = [
    "PackedGaussian",
    "approximation",
    "dense_moments",
    "draw_guide",
    "gaussian_blocks",
    "log_prob_guide",
    "prepare_guide",
]


@dataclass(frozen=True)
class PackedGaussian:
    """One independent Gaussian block of a guide.

    Attributes:
        layout: Its sites and how they are packed.
        gaussian: The density of their packed unconstrained values.
    """

    layout: Layout
    gaussian: VectorNormal | MatrixNormal

    @property
    def independent(self) -> bool:
        """Whether all entries are independent."""
        gaussian = self.gaussian
        return isinstance(gaussian, VectorNormal) and isinstance(gaussian.root, DiagonalRoot)

    def by_site(self) -> "list[PackedGaussian]":
        """Return a block for each site, where entries are independent; else the block itself."""
        gaussian = self.gaussian
        if not isinstance(gaussian, VectorNormal) or not isinstance(gaussian.root, DiagonalRoot):
            return [self]
        sizes = [shape.numel() for shape in self.layout.sites.values()]
        parts = zip(gaussian.loc.split(sizes), gaussian.root.scale.split(sizes), strict=True)
        return [
            PackedGaussian(Layout({name: shape}), VectorNormal(loc, DiagonalRoot(scale)))
            for (name, shape), (loc, scale) in zip(self.layout.sites.items(), parts, strict=True)
        ]


def prepare_guide(
    guide: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> None:
    """Run a guide once where it has not yet seen its model, so that its parameters exist.

    Args:
        guide: An AutoGuide.
        args: The model's arguments.
        kwargs: The model's keyword arguments.
    """
    if guide.prototype_trace is None:
        guide(*args, **(kwargs or {}))


def _latent_sites(guide: Any) -> dict[str, Any]:
    return dict(guide.prototype_trace.iter_stochastic_nodes())


def _model_sites(guide: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the latent sites of a guide's model by running it: not every guide keeps them."""
    hidden = poutine.block(guide.model, guide._prototype_hide_fn)
    with poutine.block(), InitMessenger(init_to_fan_in):
        trace = poutine.trace(hidden).get_trace(*args, **kwargs)
    return dict(trace.iter_stochastic_nodes())


def _inherits(guide: Any, base: type, *methods: str) -> bool:
    """Return whether a guide is a `base` that keeps that class's own methods."""
    return isinstance(guide, base) and all(
        getattr(type(guide), method) is getattr(base, method) for method in methods
    )


def gaussian_blocks(guide: Any) -> list[PackedGaussian] | None:
    """Return the independent blocks of a guide as functions of its present parameters.

    Args:
        guide: A guide that has run.

    Returns:
        None where the guide is no product of Gaussians known here.
    """
    if isinstance(guide, AutoBlocks):
        blocks = guide.named_blocks().values()
        return [PackedGaussian(block.layout, block.gaussian()) for block in blocks]
    if _inherits(guide, AutoNormal, "forward", "_get_loc_and_scale"):
        pairs = {name: guide._get_loc_and_scale(name) for name in _latent_sites(guide)}
        layout = Layout({name: loc.shape for name, (loc, _) in pairs.items()})
        loc = layout.pack({name: pair[0] for name, pair in pairs.items()})
        scale = layout.pack({name: pair[1] for name, pair in pairs.items()})
        return [PackedGaussian(layout, VectorNormal(loc, DiagonalRoot(scale)))]
    if not isinstance(guide, AutoContinuous):
        return None
    layout = Layout(guide._unconstrained_shapes)
    kept = ("forward", "sample_latent", "get_posterior")
    if _inherits(guide, AutoDiagonalNormal, *kept):
        return [PackedGaussian(layout, VectorNormal(guide.loc, DiagonalRoot(guide.scale)))]
    if _inherits(guide, AutoLowRank, *kept) or _inherits(
        guide, AutoLowRankMultivariateNormal, *kept
    ):
        root = LowRankRoot(guide.scale, guide.cov_factor)
        return [PackedGaussian(layout, VectorNormal(guide.loc, root))]
    if _inherits(guide, AutoMultivariateNormal, *kept):
        root_full = TriangularRoot(guide.scale[..., None] * guide.scale_tril)
        return [PackedGaussian(layout, VectorNormal(guide.loc, root_full))]
    return None


def draw_guide(
    guide: Any,
    n: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    seed: int | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Draw from any AutoGuide, with the density of each draw.

    `log_q` is the density of the draw in *unconstrained* space, so without the Jacobian of the
    bijections: it pairs with `lp`, the log joint on that space, and `lp − log_q` is the log of an
    importance weight. Pyro's own Gaussian guides, normalizing flows and the guides of pbnn are
    drawn at once; any other guide is run n times, with all its sample sites in the density (a guide
    whose auxiliary noise cannot be read off its sites has the joint density of both). A point
    estimate (AutoDelta) has no density: its log_q is infinite.

    Args:
        guide: The guide; it must cover every latent site of its model.
        n: Number of draws.
        args: The model's arguments, which a guide of unknown kind is run with.
        kwargs: The model's keyword arguments, likewise.
        seed: Seed of the draws, in a generator state of their own; None draws from torch's global
            generator.

    Returns:
        Values of each site on its support, `(n, *site_shape)`, and log_q, `(n,)`.

    Raises:
        ModelError: The guide leaves out a latent site of the model.
    """
    kwargs = kwargs or {}
    with _seeded(guide, seed), torch.no_grad():
        prepare_guide(guide, args, kwargs)
        blocks = gaussian_blocks(guide)
        if blocks is not None:
            unconstrained, log_q = _draw_blocks(blocks, n)
        elif _inherits(guide, AutoContinuous, "forward", "sample_latent"):
            posterior = guide.get_posterior(*args, **kwargs)
            latent = posterior.sample((n,))
            unconstrained = Layout(guide._unconstrained_shapes).unpack(latent)
            log_q = posterior.log_prob(latent)
        else:
            return _draw_by_running(guide, n, args, kwargs)
        values = {
            name: constrain(site, unconstrained[name])[0]
            for name, site in _latent_sites(guide).items()
        }
    return values, log_q


@contextmanager
def _seeded(guide: Any, seed: int | None) -> Iterator[None]:
    if seed is None:
        yield
        return
    devices = {p.device for p in guide.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=[device.index or 0 for device in devices]):
        torch.manual_seed(seed)
        yield


def _draw_blocks(blocks: Sequence[PackedGaussian], n: int) -> tuple[dict[str, Tensor], Tensor]:
    values: dict[str, Tensor] = {}
    log_q: Tensor | float = 0.0
    for block in blocks:
        loc = block.gaussian.loc
        packed, log_density = block.gaussian.transform(torch.randn_like(loc.expand(n, *loc.shape)))
        values.update(block.layout.unpack(packed))
        log_q = log_q + log_density
    return values, torch.as_tensor(log_q)


def _draw_by_running(
    guide: Any, n: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Tensor], Tensor]:
    sites = _model_sites(guide, args, kwargs)
    rows: dict[str, list[Tensor]] = {name: [] for name in sites}
    log_q = []
    for _ in range(n):
        trace = poutine.trace(guide).get_trace(*args, **kwargs)
        density = trace.log_prob_sum()
        for name, site in sites.items():
            if name not in trace.nodes:
                raise ModelError(
                    f"guide {type(guide).__name__} does not sample the model's site {name!r}; "
                    f"it samples {sorted(trace.stochastic_nodes)}: add a pyro.sample for it"
                )
            value = trace.nodes[name]["value"]
            density = density + unconstrain(site, value)[1].sum()
            rows[name].append(value)
        log_q.append(density)
    values = {name: torch.stack(row) for name, row in rows.items()}
    if isinstance(guide, AutoDelta):
        return values, torch.full((n,), torch.inf)
    return values, torch.stack(log_q)


def log_prob_guide(guide: Any, values: Mapping[str, Tensor]) -> Tensor:
    """Return the density of given values under a Gaussian guide, in unconstrained space.

    Args:
        guide: A guide that has run, of a family that `approximation` knows.
        values: Values of each site on its support, `(*batch, *site_shape)`.

    Returns:
        log q of the unconstrained values, without Jacobian, `batch`.

    Raises:
        ModelError: The guide is no product of Gaussians known here.
    """
    blocks = gaussian_blocks(guide)
    if blocks is None:
        raise ModelError(
            f"guide {type(guide).__name__} has no density that can be evaluated at given values; "
            "draw_guide gives it at the guide's own draws"
        )
    sites = _latent_sites(guide)
    unconstrained = {name: unconstrain(sites[name], values[name])[0] for name in sites}
    log_q = [block.gaussian.log_prob(block.layout.pack(unconstrained)) for block in blocks]
    return torch.stack(log_q).sum(0)


def approximation(guide: Any) -> dict[str, Any] | None:
    """Return a Gaussian guide as plain tensors, in the form that `Posterior.approximation` keeps.

    Args:
        guide: A guide that has run.

    Returns:
        None for a guide that is no product of Gaussians known here, else a dict of
        - `family`: "normal", "lowrank", "multivariate_normal", "kronecker", "layer_lowrank" or
          "patterns";
        - `sites`: name and unconstrained shape of each site, in the model's order;
        - `blocks`: for each independent block its `sites` in packing order, its `rows` (see
          `Layout`), and the `prefix` of its tensors' names;
        - `tensors`: over the packed unconstrained values, `loc` and the square root of the
          covariance: `scale` (standard deviations), with `factor` G for scale (I + G Gᵀ) scale, or
          `tril`; for matrix normals `scale` and the roots of both factors as `row.…`, `column.…`.
    """
    blocks = gaussian_blocks(guide)
    if blocks is None:
        return None
    tensors: dict[str, Tensor] = {}
    described = []
    for index, block in enumerate(blocks):
        prefix = f"{index}." if isinstance(guide, AutoBlocks) else ""
        for name, tensor in block.gaussian.tensors().items():
            tensors[prefix + name] = tensor.detach().clone()
        described.append(
            {"sites": list(block.layout.sites), "rows": list(block.layout.rows), "prefix": prefix}
        )
    shapes = {name: list(s) for block in blocks for name, s in block.layout.sites.items()}
    return {
        "family": _family(guide, blocks),
        "sites": [[name, shapes[name]] for name in _latent_sites(guide)],
        "blocks": described,
        "tensors": tensors,
    }


def _family(guide: Any, blocks: Sequence[PackedGaussian]) -> str:
    if isinstance(guide, AutoBlocks):
        return guide.family
    names = {DiagonalRoot: "normal", LowRankRoot: "lowrank", TriangularRoot: "multivariate_normal"}
    gaussian = blocks[0].gaussian
    assert isinstance(gaussian, VectorNormal)
    return names[type(gaussian.root)]


def dense_moments(approximation: Mapping[str, Any]) -> tuple[Tensor, Tensor, list[str]]:
    """Return the mean and dense covariance of a small Gaussian approximation.

    Args:
        approximation: What `approximation` returned.

    Returns:
        Mean `(D,)` and covariance `(D, D)` of the unconstrained values, each site flattened row by
        row, sites one after another in the order of the third value, their names.
    """
    shapes = {name: torch.Size(shape) for name, shape in approximation["sites"]}
    start, position = 0, {}
    for name, shape in shapes.items():
        position[name] = torch.arange(start, start + shape.numel()).reshape(shape)
        start += shape.numel()
    tensors = approximation["tensors"]
    like = next(iter(tensors.values()))
    mean, covariance = like.new_zeros(start), like.new_zeros(start, start)
    for block in approximation["blocks"]:
        prefix = block["prefix"]
        gaussian = gaussian_from_tensors(
            {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        )
        layout = Layout({name: shapes[name] for name in block["sites"]}, tuple(block["rows"]))
        order = layout.pack(position).flatten()
        mean[order] = gaussian.loc.flatten()
        covariance[order[:, None], order] = gaussian.covariance()
    return mean, covariance, list(shapes)
