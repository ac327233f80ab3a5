"""Where a guide's scales begin: by the fan-in of each site, for every Gaussian family."""

import math
from operator import attrgetter
from typing import Any

import torch
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from pyro.infer.autoguide.utils import deep_setattr
from torch import Tensor

from pbnn.errors import FitError
from pbnn.infer.guides.blocks import AutoBlocks, MatrixBlock
from pbnn.infer.guides.sites import Layout

__all__ = ["FAN_IN_SCALE", "start_scales_by_fan_in"]

# For a site of fan-in 1; methods that train networks by SVI start at 1e-3 to 1e-2.
FAN_IN_SCALE = 0.02


def start_scales_by_fan_in(guide: Any) -> None:
    """Start each site's scale at 0.02 / sqrt(fan in), in place.

    The fan-in is the number of inputs of one output: the product of all sizes of a site but the
    first, and 1 for vectors and scalars. A bias in a matrix normal shares the scale of its weight.

    Args:
        guide: A guide that has run and whose entries all have one scale.

    Raises:
        FitError: The guide is of no Gaussian family known here.
    """
    with torch.no_grad():
        if isinstance(guide, AutoBlocks):
            for block in guide.named_blocks().values():
                if isinstance(block, MatrixBlock):
                    first = next(iter(block.layout.sites.values()))
                    block.scale = block.scale * _share(first, guide.init_scale)
                else:
                    shares = _packed(block.layout, guide.init_scale, block.loc)
                    block.spread.scale = block.spread.scale * shares
        elif isinstance(guide, AutoNormal):
            for name, site in guide.prototype_trace.iter_stochastic_nodes():
                scale = attrgetter(name)(guide.scales)
                share = _share(torch.Size(site["fn"].shape()), guide._init_scale)
                deep_setattr(guide.scales, name, scale * share)
        elif isinstance(
            guide, AutoDiagonalNormal | AutoLowRankMultivariateNormal | AutoMultivariateNormal
        ):
            layout = Layout(guide._unconstrained_shapes)
            guide.scale = guide.scale * _packed(layout, guide._init_scale, guide.loc)
        else:
            raise FitError(
                f"init_scale='fan_in' does not know the scales of {type(guide).__name__}; give it "
                "a number, or set them where the guide is made"
            )


def _share(shape: torch.Size, present: float) -> float:
    return float(FAN_IN_SCALE / math.prod(shape[1:]) ** 0.5 / present)


def _packed(layout: Layout, present: float, like: Tensor) -> Tensor:
    shares = {
        name: like.new_full(shape, _share(shape, present)) for name, shape in layout.sites.items()
    }
    return layout.pack(shares)
