"""Means and scales of priors on the unconstrained space, to hold a posterior against."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pyro.distributions.transforms import biject_to
from torch import Tensor
from torch.distributions import Normal

from pbnn.checks import unwrapped
from pbnn.front_door import prior_values
from pbnn.infer.guides.sites import is_real
from pbnn.model import BoundModel, isolated

__all__ = ["PriorMoments", "prior_moments"]

# Draws of the prior of sites that do not know their moments.
_DRAWS = 400


@dataclass(frozen=True)
class PriorMoments:
    """Moments of the prior on the unconstrained space, each of its site's shape there.

    Attributes:
        means: Means by site.
        scales: Standard deviations by site.
        normal: The sites that are Normal under it, whatever the values of others.
    """

    means: dict[str, Tensor]
    scales: dict[str, Tensor]
    normal: list[str]

    def expected_log_density(
        self, means: Mapping[str, Tensor], scales: Mapping[str, Tensor]
    ) -> dict[str, float]:
        """Return E[log prior] by Normal site, in closed form, for values of these moments."""
        found = {}
        for name in self.normal:
            scale = self.scales[name]
            ratio = (scales[name].square() + (means[name] - self.means[name]).square()) / scale**2
            found[name] = float(-0.5 * (ratio + math.log(2 * math.pi)).sum() - scale.log().sum())
        return found


def prior_moments(bound: BoundModel, means: Mapping[str, Tensor]) -> PriorMoments:
    """Return the moments of the prior, given the guide's means of the sites that others depend on.

    Those of a real site are its distribution's own; others come from draws.

    Args:
        bound: The model and its data.
        means: Unconstrained values by site at which the model runs, each of the site's shape there.
    """
    moments: dict[str, tuple[Tensor, Tensor]] = {}
    normal = []
    with isolated(0, bound.device), torch.no_grad(), prior_values(bound.dtype, bound.device):
        nodes = bound.run({}).nodes
        elsewhere = {name: nodes[name]["fn"] for name in means}
        values = {
            name: biject_to(fn.support)(means[name].to(bound.device, bound.dtype))
            for name, fn in elsewhere.items()
        }
        here = bound.run(values).nodes
        rest = []
        for name in means:
            fn, other = unwrapped(here[name]["fn"]), unwrapped(elsewhere[name])
            known = _moments(fn) if is_real(here[name]["fn"].support) else None
            if known is None:
                rest.append(name)
                continue
            moments[name] = known
            if isinstance(fn, Normal) and torch.equal(fn.loc, other.loc):
                normal += [name] if torch.equal(fn.scale, other.scale) else []
        draws: dict[str, list[Tensor]] = {name: [] for name in rest}
        for _ in range(_DRAWS if rest else 0):
            nodes = bound.run({}).nodes
            for name in rest:
                draws[name].append(biject_to(nodes[name]["fn"].support).inv(nodes[name]["value"]))
    for name, drawn in draws.items():
        stacked = torch.stack(drawn).double()
        scale = stacked.std(0)
        # A flat prior has no draws but the middle of its support.
        moments[name] = stacked.mean(0), torch.where(scale > 0, scale, torch.inf)
    own = {
        name: tuple(value.double().cpu().expand(means[name].shape) for value in pair)
        for name, pair in moments.items()
    }
    return PriorMoments(
        {k: v[0] for k, v in own.items()}, {k: v[1] for k, v in own.items()}, normal
    )


def _moments(fn: Any) -> tuple[Tensor, Tensor] | None:
    """Return mean and scale of a distribution, where it knows them and they are finite."""
    try:
        mean, scale = fn.mean, fn.stddev
    except NotImplementedError:
        return None
    return (mean, scale) if bool(mean.isfinite().all() and scale.isfinite().all()) else None
