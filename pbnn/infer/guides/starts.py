"""Where a guide begins: initial values of a network's sites, as Pyro `init_loc_fn`s."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from pyro.distributions.torch import Independent
from pyro.distributions.torch_distribution import MaskedDistribution
from pyro.infer.autoguide.initialization import init_to_feasible, init_to_median
from torch import Tensor
from torch.distributions import biject_to

from pbnn.infer.guides.sites import is_real

__all__ = ["init_to_fan_in"]

# The widest of the usual fan-in rules: He et al. 2015, "Delving deep into rectifiers", eq. 10.
_WIDEST_GAIN = 2**0.5
_QUARTILE_DRAWS = 15
_NORMAL_QUARTILES = 1.349  # distance between the quartiles of N(0, 1)
_FLAT_SCALE = 0.1  # unconstrained scale of the start under a prior that cannot be sampled


def _fan_in(shape: Sequence[int]) -> int:
    """Return the number of inputs of one output: 1 for vectors and scalars."""
    return math.prod(shape[1:])


def _start_real(prior: Any) -> Tensor:
    """Return one draw of the prior, its spread about the mean cut to the fan-in scale."""
    value: Tensor = prior.sample()
    widest = _WIDEST_GAIN / _fan_in(prior.event_shape) ** 0.5
    try:
        mean, spread = prior.mean.expand(value.shape), prior.stddev.expand(value.shape)
    except NotImplementedError:
        mean = spread = torch.full_like(value, torch.nan)
    if mean.isfinite().all() and spread.isfinite().all():
        value = value + (mean - value) * (1 - widest / spread).clamp(min=0)
        return value
    # A draw of a heavy tail can lie anywhere, and moments can be unknown: the quartiles serve.
    draws = prior.sample((_QUARTILE_DRAWS,)).sort(0).values
    low, middle, high = (draws[len(draws) * k // 4] for k in (1, 2, 3))
    # A median of so few draws is itself wide; nearer to 0 than the quartiles are apart, it is 0.
    middle = torch.where(middle.abs() < high - low, 0, middle)
    spread = ((high - low) / _NORMAL_QUARTILES).clamp(max=widest)
    value = middle + spread * torch.randn_like(value)
    return value


def _start_flat(prior: Any) -> Tensor:
    """Return a start near 0 in unconstrained space, under a prior that cannot be sampled."""
    transform = biject_to(prior.support)
    shape = transform.inverse_shape(prior.shape())
    scale = min(_FLAT_SCALE, 1 / _fan_in(prior.event_shape) ** 0.5)
    value: Tensor = transform(scale * torch.randn(shape))
    return value


def _start_constrained(prior: Any) -> Tensor:
    """Return the prior's median, exactly where its quantile function is known."""
    scalar = prior
    while isinstance(scalar, Independent | MaskedDistribution):
        scalar = scalar.base_dist
    try:
        value: Tensor = scalar.icdf(torch.tensor(0.5)).expand(prior.shape())
    except (NotImplementedError, AttributeError):
        value = init_to_median({"fn": prior, "name": ""})
    inside = bool(prior.support.check(value).all()) and bool(value.isfinite().all())
    return value.clone() if inside else init_to_feasible({"fn": prior})


def init_to_fan_in(site: Any = None) -> Any:
    """Start a network where its hidden units differ and none is saturated; a Pyro `init_loc_fn`.

    - A real site starts at one draw of its prior. Where the prior is wider than the fan-in scale
      sqrt(2 / fan in) (fan in is 1 for vectors and scalars), the draw's distance from the prior
      mean is shrunk to that scale. Where the prior has no known or finite scale, the start is a
      Normal about its median, as wide as its quartiles say and no wider than that scale.
    - A site with another support (a scale, a probability) starts at its prior median.
    - A site whose prior cannot be sampled (`ImproperUniform`) starts at an unconstrained draw of
      scale at most 0.1, mapped to its support.

    Draws come from torch's global generator: seed it in the caller.

    Args:
        site: A Pyro trace site, or None, which returns the function itself, as Pyro's own do.

    Returns:
        The initial value, on the site's support.
    """
    if site is None:
        return init_to_fan_in
    prior = site["fn"]
    if prior.support.is_discrete:
        return prior.sample()
    try:
        value = _start_real(prior) if is_real(prior.support) else _start_constrained(prior)
    except NotImplementedError:
        value = _start_flat(prior)
    return value.detach()
