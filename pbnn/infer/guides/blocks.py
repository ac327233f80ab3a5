"""Learnable Gaussians over blocks of sites, and the guide that is made of such blocks."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from pyro.distributions.util import broadcast_shape
from pyro.infer.autoguide import AutoGuide
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.infer.autoguide.utils import deep_setattr, helpful_support_errors
from pyro.nn import PyroModule, PyroParam
from torch import Tensor
from torch.distributions import biject_to

from pbnn.errors import FitError, ModelError
from pbnn.infer.guides.gaussians import AffineTransform, MatrixNormal, VectorNormal
from pbnn.infer.guides.roots import (
    DiagonalRoot,
    LowRankRoot,
    Root,
    TriangularRoot,
    unit_mean_variance,
)
from pbnn.infer.guides.sites import Layout, constrain, is_real
from pbnn.infer.guides.starts import init_to_fan_in

__all__ = [
    "AutoBlocks",
    "Block",
    "GuideSite",
    "MatrixBlock",
    "RootKind",
    "VectorBlock",
    "check_root_kind",
]

RootKind = str | tuple[str, int]
"""Form of a covariance root: "full", "diagonal" or ("lowrank", rank), diagonal plus low rank."""


def check_root_kind(kind: RootKind) -> None:
    """Raise a FitError where `kind` is no form of a covariance root."""
    lowrank = isinstance(kind, tuple) and len(kind) == 2 and kind[0] == "lowrank"
    if not (lowrank and isinstance(kind[1], int) and kind[1] > 0) and kind not in (
        "full",
        "diagonal",
    ):
        raise FitError(
            f"factors is {kind!r}; expected 'full', 'diagonal' or ('lowrank', rank) with rank ≥ 1"
        )


@dataclass(frozen=True)
class GuideSite:
    """A latent site as a guide sees it.

    Attributes:
        name: Its name in the model.
        start: Initial value in unconstrained space.
        real_event: Whether it is real and all its dimensions are event dimensions.
    """

    name: str
    start: Tensor
    real_event: bool


class _RootParameters(PyroModule):  # type: ignore[misc]
    """The parameters of one root; marginal variances start at `init_scale`²."""

    def __init__(self, kind: RootKind, size: int, init_scale: float, like: Tensor) -> None:
        super().__init__()
        self.kind, rank = kind if isinstance(kind, tuple) else (kind, 0)
        if size == 1:  # all forms are the same
            self.kind = "diagonal"
        scale = like.new_full((size,), init_scale)
        # Everything else is relative to `scale`, so that one learning rate suits all of it.
        if self.kind == "full":
            unit = torch.eye(size, dtype=like.dtype, device=like.device)
            self.unit_tril = PyroParam(unit, constraints.unit_lower_cholesky)
        elif self.kind == "lowrank":
            # Zero columns are a stationary point in expectation: begin with half of the variance.
            factor = torch.randn_like(like.new_empty(size, rank)) / rank**0.5
            scale = scale * (1 + factor.square().sum(-1)).rsqrt()
            self.factor = PyroParam(factor)
        self.scale = PyroParam(scale, constraints.softplus_positive)

    def root(self) -> Root:
        if self.kind == "full":
            return TriangularRoot(self.scale.unsqueeze(-1) * self.unit_tril)
        if self.kind == "lowrank":
            return LowRankRoot(self.scale, self.factor)
        return DiagonalRoot(self.scale)


class Block(PyroModule):  # type: ignore[misc]
    """A learnable Gaussian over the unconstrained values of some sites, packed into one tensor.

    Attributes:
        layout: The sites and how they are packed.
    """

    def __init__(self, sites: Sequence[GuideSite], rows: tuple[int, ...]) -> None:
        super().__init__()
        self.layout = Layout({site.name: site.start.shape for site in sites}, rows)

    def gaussian(self) -> VectorNormal | MatrixNormal:
        """Return the Gaussian at the present parameters, over the packed value."""
        raise NotImplementedError

    def distribution(self) -> dist.TransformedDistribution:
        """Return the same as a Pyro distribution."""
        gaussian = self.gaussian()
        zero = torch.zeros_like(gaussian.loc)
        noise = dist.Normal(zero, 1).to_event(zero.dim())
        return dist.TransformedDistribution(noise, AffineTransform(gaussian))


class VectorBlock(Block):
    """A Normal over the flattened sites: independent entries, D + U Uᵀ, or any covariance.

    Args:
        sites: The sites it covers.
        init_scale: Initial marginal scale of each entry.
        root: "diagonal", ("lowrank", rank) or "full".
    """

    def __init__(
        self, sites: Sequence[GuideSite], init_scale: float, root: RootKind = "diagonal"
    ) -> None:
        super().__init__(sites, ())
        loc = self.layout.pack({site.name: site.start for site in sites})
        self.loc = PyroParam(loc)
        self.spread = _RootParameters(root, loc.numel(), init_scale, loc)

    def gaussian(self) -> VectorNormal:
        """Return the Normal at the present parameters."""
        return VectorNormal(self.loc, self.spread.root())


class MatrixBlock(Block):
    """A matrix normal over one layer: its weight as `(out, rest)`, and its bias as a last column.

    The free scale between the factors U and V is pinned: both have a diagonal of mean 1, and
    `scale` is the root mean square of all entries' standard deviations.

    Args:
        sites: The weight, and the bias where it is a homogeneous coordinate.
        init_scale: Initial scale of each entry.
        row: Root of U, the covariance between outputs.
        column: Root of V, the covariance between inputs.
    """

    def __init__(
        self, sites: Sequence[GuideSite], init_scale: float, row: RootKind, column: RootKind
    ) -> None:
        super().__init__(sites, tuple(sites[0].start.shape[:1]))
        loc = self.layout.pack({site.name: site.start for site in sites})
        self.loc = PyroParam(loc)
        self.scale = PyroParam(loc.new_tensor(init_scale), constraints.softplus_positive)
        self.row = _RootParameters(row, loc.shape[0], 1.0, loc)
        self.column = _RootParameters(column, loc.shape[1], 1.0, loc)

    def gaussian(self) -> MatrixNormal:
        """Return the matrix normal at the present parameters."""
        row, column = unit_mean_variance(self.row.root()), unit_mean_variance(self.column.root())
        return MatrixNormal(self.loc, self.scale, row, column)


class AutoBlocks(AutoGuide):  # type: ignore[misc]
    """A Pyro AutoGuide made of independent Gaussian blocks in unconstrained space.

    A subclass says in `_make_blocks` which sites share a block. The packed value of a block is an
    auxiliary site, and each of its sites a Delta that carries the Jacobian of its bijection, so
    that the log probability of a trace of the guide is log q of the constrained values. As for
    Pyro's AutoNormal, train it by Trace_ELBO: TraceMeanField_ELBO drops the Jacobian of a Delta.

    Args:
        model: A Pyro model.
        init_loc_fn: Initial value of each site.
        init_scale: Initial standard deviation of each entry in unconstrained space.

    Attributes:
        family: Name of the variational family, as results record it.
    """

    family = "blocks"

    def __init__(
        self, model: Any, *, init_loc_fn: Any = init_to_fan_in, init_scale: float = 0.01
    ) -> None:
        if not init_scale > 0:
            raise FitError(f"init_scale is {init_scale}; expected a positive standard deviation")
        super().__init__(InitMessenger(init_loc_fn)(model))
        self.init_scale = float(init_scale)

    def _make_blocks(self, sites: list[GuideSite]) -> dict[str, Block]:
        """Return the blocks, by the name that their parameters carry; each site is in one."""
        raise NotImplementedError

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)
        sites = []
        for name, site in self.prototype_trace.iter_stochastic_nodes():
            for frame in site["cond_indep_stack"]:
                if frame.full_size not in (None, frame.size):
                    raise ModelError(
                        f"site {name!r} is inside the subsampled plate {frame.name!r}; "
                        f"{type(self).__name__} needs sites of a fixed size: use AutoNormal for it"
                    )
            with helpful_support_errors(site):
                start = biject_to(site["fn"].support).inv(site["value"].detach()).detach()
            whole = site["fn"].event_dim == start.dim()
            sites.append(GuideSite(name, start, whole and is_real(site["fn"].support)))
        if not sites:
            raise ModelError(
                "the model has no latent sites for a guide; "
                "give its parameters priors: layer.weight = PyroSample(...)"
            )
        self._unconstrained_shapes = {site.name: site.start.shape for site in sites}
        self.blocks = PyroModule()
        self._block_names = []
        for name, block in self._make_blocks(sites).items():
            deep_setattr(self.blocks, name, block)
            self._block_names.append(name)

    def named_blocks(self) -> dict[str, Block]:
        """Return the blocks by name.

        Raises:
            FitError: The guide has not run yet, so that it does not know the model's sites.
        """
        if self.prototype_trace is None:
            raise FitError(
                f"{type(self).__name__} has not seen the model run yet; call guide(x, y) once first"
            )
        return {name: attrgetter(name)(self.blocks) for name in self._block_names}

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Sample every site.

        Args:
            *args: The model's arguments; they serve to find its sites, at the first call.
            **kwargs: Likewise.

        Returns:
            The constrained value of each site.
        """
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        unconstrained: dict[str, Tensor] = {}
        for name, block in self.named_blocks().items():
            packed = pyro.sample(
                f"_{self._pyro_name}.{name}", block.distribution(), infer={"is_auxiliary": True}
            )
            unconstrained.update(block.layout.unpack(packed))
        plates = self._create_plates(*args, **kwargs)
        return {
            name: self._sample_site(site, unconstrained[name], plates)
            for name, site in self.prototype_trace.iter_stochastic_nodes()
        }

    def _sample_site(self, site: Any, unconstrained: Tensor, plates: Any) -> Tensor:
        # Vectorised particles come as (particles, 1, plate, …); plates want (particles, plate, …).
        shape = self._unconstrained_shapes[site["name"]]
        event_dim = len(shape) - len(site["fn"].batch_shape)
        batch = unconstrained.shape[: unconstrained.dim() - len(shape)]
        shape = broadcast_shape(shape, batch + (1,) * event_dim)
        unconstrained = unconstrained.reshape(shape)
        value, jacobian = constrain(site, unconstrained)
        with ExitStack() as stack:
            for frame in site["cond_indep_stack"]:
                stack.enter_context(plates[frame.name])
            delta = dist.Delta(value, log_density=-jacobian, event_dim=site["fn"].event_dim)
            result: Tensor = pyro.sample(site["name"], delta)
        return result

    @torch.no_grad()
    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return the median of each site, on its support.

        Args:
            *args: Ignored, as in Pyro's guides.
            **kwargs: Likewise.
        """
        return self._constrained(block.gaussian().loc for block in self.named_blocks().values())

    @torch.no_grad()
    def quantiles(
        self, quantiles: Sequence[float] | Tensor, *args: Any, **kwargs: Any
    ) -> dict[str, Tensor]:
        """Return marginal quantiles of each site, `(len(quantiles), *site_shape)`.

        Args:
            quantiles: Probabilities between 0 and 1.
            *args: Ignored, as in Pyro's guides.
            **kwargs: Likewise.
        """
        packed = []
        for block in self.named_blocks().values():
            gaussian = block.gaussian()
            z = torch.special.ndtri(torch.as_tensor(quantiles).to(gaussian.loc))
            z = z.reshape(-1, *[1] * gaussian.loc.dim())
            packed.append(gaussian.loc + z * gaussian.variance().sqrt())
        return self._constrained(packed)

    def _constrained(self, packed: Iterable[Tensor]) -> dict[str, Tensor]:
        unconstrained: dict[str, Tensor] = {}
        for block, value in zip(self.named_blocks().values(), packed, strict=True):
            unconstrained.update(block.layout.unpack(value))
        return {
            name: biject_to(site["fn"].support)(unconstrained[name]).clone()
            for name, site in self.prototype_trace.iter_stochastic_nodes()
        }
