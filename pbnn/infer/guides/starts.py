"""Where a guide begins: initial values of a network's sites, as Pyro `init_loc_fn`s."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from pyro.distributions.torch import Independent
from pyro.distributions.torch_distribution import MaskedDistribution
from pyro.infer.autoguide.initialization import (
    InitMessenger,
    init_to_feasible,
    init_to_median,
)
from torch import Tensor
from torch.distributions import biject_to

from pbnn.errors import FitError
from pbnn.front_door import prior_values
from pbnn.infer.density import Density
from pbnn.infer.guides.sites import is_real
from pbnn.infer.uphill import climb
from pbnn.model import BoundModel

__all__ = ["STARTS", "Start", "find_start", "init_to_fan_in", "init_to_map", "init_to_values"]

Start = Callable[[Any], Any]
"""A Pyro `init_loc_fn`: from a site of a trace to its initial value, on the site's support."""

STARTS = ("fan_in", "map")

# The widest of the usual fan-in rules: He et al. 2015, "Delving deep into rectifiers", eq. 10.
_WIDEST_GAIN = 2**0.5
_QUARTILE_DRAWS = 15
_NORMAL_QUARTILES = 1.349  # distance between the quartiles of N(0, 1)
_FLAT_SCALE = 0.1  # unconstrained scale of the start under a prior that cannot be sampled
# Short, since the optimum of a hierarchical scale is degenerate: its density has no maximum.
_MAP_STEPS = 300
_MAP_RATE = 0.05


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


def find_start(init: str | Mapping[str, Tensor], bound: BoundModel) -> Start:
    """Return the `init_loc_fn` that a user's choice names.

    Args:
        init: "fan_in" (see `init_to_fan_in`), "map" (see `init_to_map`), or a trained network's
            `state_dict` (see `init_to_values`).
        bound: The model and its data. Parameters without a prior and buffers that a state dict
            holds are set in it, in place.

    Raises:
        FitError: `init` is none of these, or its values do not fit the model.
    """
    if isinstance(init, Mapping):
        return init_to_values(_by_site(init, bound))
    if init not in STARTS:
        raise FitError(
            f"init={init!r}; expected one of {', '.join(map(repr, STARTS))}, or a state dict"
        )
    return init_to_fan_in if init == "fan_in" else init_to_map(bound)


def init_to_values(values: Mapping[str, Tensor]) -> Start:
    """Start sites at given values, and others as `init_to_fan_in` does.

    Args:
        values: By site, on its support.
    """

    def start(site: Any = None) -> Any:
        if site is None:
            return start
        if site["name"] in values:
            return values[site["name"]].detach().clone()
        return init_to_fan_in(site)

    return start


def init_to_map(bound: BoundModel) -> Start:
    """Start at the best point of a short run of Adam up the log joint, from a fan-in draw.

    The log joint is that of the unconstrained space, with its Jacobian. Parameters without a prior
    stay where they are.

    Args:
        bound: The model and its data.
    """
    with InitMessenger(init_to_fan_in):
        nodes = bound.run({}).nodes
    density = Density(bound, compile=False)
    z = density.unconstrain({name: nodes[name]["value"] for name in bound.named("latent")})
    best = climb(density, z[None], steps=_MAP_STEPS, rate=_MAP_RATE)[0]
    return init_to_values(density.constrain(best))


def _by_site(state: Mapping[str, Tensor], bound: BoundModel) -> dict[str, Tensor]:
    """Return a state dict's values by latent site; set the rest of it in the model."""
    latent, held = bound.named("latent"), bound.model.state_dict(keep_vars=True)
    with prior_values(bound.dtype, bound.device):
        nodes = bound.run({}).nodes
    found: dict[str, Tensor] = {}
    for key, given in state.items():
        name = key.removesuffix("_unconstrained") if key not in held else key
        if name not in latent and name not in held:
            raise FitError(
                f"init has {key!r}, which the model does not; it has {', '.join([*latent, *held])}"
            )
        value = torch.as_tensor(given).detach().to(bound.device)
        if name in held:
            _check_shape(key, value, tuple(held[name].shape))
            with torch.no_grad():
                held[name].copy_(value)
            continue
        value = value.to(bound.dtype)
        support = nodes[name]["fn"].support
        if key != name:  # a PyroParam keeps the unconstrained value
            value = biject_to(support)(value)
        _check_shape(key, value, latent[name].shape)
        if not (bool(support.check(value).all()) and bool(value.isfinite().all())):
            raise FitError(f"init[{key!r}] lies outside the support of its site, {support}")
        found[name] = value
    if not found:
        raise FitError(f"init has no value for any site of the model: {', '.join(latent)}")
    return found


def _check_shape(key: str, value: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(value.shape) != shape:
        raise FitError(f"init[{key!r}] has shape {tuple(value.shape)}; expected {shape}")
