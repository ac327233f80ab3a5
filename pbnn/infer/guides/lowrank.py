"""Guides whose covariance is diagonal plus low rank: over all sites together, or layer by layer."""

from typing import Any

import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoLowRankMultivariateNormal
from pyro.nn import PyroParam

from pbnn.errors import FitError
from pbnn.infer.guides.blocks import AutoBlocks, Block, GuideSite, VectorBlock
from pbnn.infer.guides.gaussians import AffineTransform, VectorNormal
from pbnn.infer.guides.roots import LowRankRoot
from pbnn.infer.guides.starts import init_to_fan_in

__all__ = ["DEFAULT_RANK", "AutoLayerLowRank", "AutoLowRank", "check_rank"]

DEFAULT_RANK = 10


class AutoLowRank(AutoLowRankMultivariateNormal):  # type: ignore[misc]
    """Pyro's AutoLowRankMultivariateNormal with a rank and a start that suit networks.

    Σ = S (I + W Wᵀ) S with S = diag(scale) and W = cov_factor, of `rank` columns.

    Args:
        model: A Pyro model.
        init_loc_fn: Initial value of each site.
        init_scale: Initial marginal standard deviation of each entry.
        rank: Columns of W; by default 10, or the number of latent values where that is less.
    """

    rank: int | None

    def __init__(
        self,
        model: Any,
        init_loc_fn: Any = init_to_fan_in,
        init_scale: float = 0.01,
        rank: int | None = None,
    ) -> None:
        super().__init__(model, init_loc_fn=init_loc_fn, init_scale=init_scale, rank=rank)

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super(AutoLowRankMultivariateNormal, self)._setup_prototype(*args, **kwargs)
        size: int = self.latent_dim
        rank = self.rank or min(DEFAULT_RANK, size)
        if rank > size:
            self.prototype_trace = None
            raise FitError(
                f"rank {rank} is above the model's {size} latent values; use rank 1 to {size}"
            )
        self.rank = rank
        loc = self._init_loc()
        # W = 0 is a stationary point in expectation: W begins with half of the variance.
        factor = torch.randn_like(loc.new_empty(size, rank)) / rank**0.5
        scale = self._init_scale * (1 + factor.square().sum(-1)).rsqrt()
        # As PyroParams all three also work under Pyro's setting `module_local_params`.
        self.loc = PyroParam(loc)
        self.scale = PyroParam(scale, self.scale_constraint)
        self.cov_factor = PyroParam(factor)

    def get_base_dist(self) -> Any:
        """Return standard Normal noise of one value for each latent value."""
        return dist.Normal(torch.zeros_like(self.loc), 1).to_event(1)

    def get_transform(self, *args: Any, **kwargs: Any) -> AffineTransform:
        """Return the affine map from that noise to the packed latent values."""
        root = LowRankRoot(self.scale, self.cov_factor)
        return AffineTransform(VectorNormal(self.loc, root))

    def get_posterior(self, *args: Any, **kwargs: Any) -> Any:
        """Return the distribution of the packed latent values in unconstrained space."""
        return super(AutoLowRankMultivariateNormal, self).get_posterior(*args, **kwargs)


class AutoLayerLowRank(AutoBlocks):
    """One D + U Uᵀ for each layer: a module's sites share a block, and modules are independent.

    A site's module is its name up to the last dot; sites without a dot are a module together. A
    constrained site is in its block by its unconstrained value.

    Args:
        model: A Pyro model.
        init_loc_fn: Initial value of each site.
        init_scale: Initial marginal standard deviation of each entry.
        rank: Columns of each U; a layer of fewer values has as many columns as values.

    Raises:
        FitError: The rank is below 1, or above the number of values of every layer.
    """

    family = "layer_lowrank"

    def __init__(
        self,
        model: Any,
        *,
        init_loc_fn: Any = init_to_fan_in,
        init_scale: float = 0.01,
        rank: int | None = None,
    ) -> None:
        super().__init__(model, init_loc_fn=init_loc_fn, init_scale=init_scale)
        self.rank = check_rank(rank)

    def _make_blocks(self, sites: list[GuideSite]) -> dict[str, Block]:
        layers: dict[str, list[GuideSite]] = {}
        for site in sites:
            layers.setdefault(site.name.rpartition(".")[0], []).append(site)
        sizes = {name: sum(s.start.numel() for s in layer) for name, layer in layers.items()}
        if self.rank is not None and self.rank > max(sizes.values()):
            raise FitError(
                f"rank {self.rank} is above the size of every layer; "
                f"use a rank from 1 to {max(sizes.values())}"
            )
        rank = self.rank or DEFAULT_RANK
        return {
            f"{name or 'top'}.lowrank": VectorBlock(
                layer, self.init_scale, ("lowrank", min(rank, sizes[name]))
            )
            for name, layer in layers.items()
        }


def check_rank(rank: int | None) -> int | None:
    """Return a rank, or None for the default; raise a FitError where it is no positive integer."""
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
        raise FitError(f"rank is {rank!r}; expected a whole number from 1 up")
    return rank
