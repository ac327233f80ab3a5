"""The unconstrained space: where each latent site lies in a flat vector, and its way back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from pyro.distributions.transforms import biject_to
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor
from torch.distributions import constraints

from pbnn.errors import ModelError

__all__ = ["Latent", "Latents", "Place", "from_flat", "from_prior", "from_values", "layout"]

T = TypeVar("T")
# By name, distribution and bijection (unconstrained to support): the site's (unconstrained, value).
Place = Callable[[str, Any, Any], tuple[Tensor, Tensor]]


def _register() -> None:
    """Give mixtures (a spike-and-slab prior, say) the bijection of their components' support."""
    mixture = getattr(constraints, "MixtureSameFamilyConstraint", None)
    if mixture is not None:
        biject_to.register(mixture, lambda support: biject_to(support.base_constraint))


_register()


@dataclass(frozen=True)
class Latent:
    """Where one latent site lies in the flat vector.

    Attributes:
        name: Name of the site.
        shape: Shape of its value.
        unconstrained_shape: Shape of its unconstrained value (a simplex of 3 has 2).
        slice: Its place in the flat vector.
    """

    name: str
    shape: tuple[int, ...]
    unconstrained_shape: tuple[int, ...]
    slice: slice


class Latents(Messenger):  # type: ignore[misc]
    """Gives each latent site its value, and keeps log |det J| of its bijection.

    The bijection is built when the site is met, from the support that it has given the values of
    the sites before it, so that a support may depend on another site.

    Args:
        place: Decides the value of a site.

    Attributes:
        unconstrained: Unconstrained values, by site.
        values: Values, by site.
        log_jacobian: Log |det J| summed over the site, by site.
    """

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place
        self.unconstrained: dict[str, Tensor] = {}
        self.values: dict[str, Tensor] = {}
        self.log_jacobian: dict[str, Tensor] = {}

    def flat(self) -> Tensor:
        """Return the unconstrained values as one vector `(dim,)`."""
        return torch.cat([value.reshape(-1) for value in self.unconstrained.values()])

    def _pyro_sample(self, msg: Any) -> None:
        fn, name = msg["fn"], msg["name"]
        if isinstance(fn, _Subsample):
            if fn.subsample_size is not None and fn.subsample_size < fn.size:
                raise ModelError(
                    f"plate {name!r} takes {fn.subsample_size} of its {fn.size} rows at random; "
                    "the density needs all of them: drop `subsample_size`"
                )
        elif not msg["is_observed"]:
            transform = _bijection(name, fn)
            unconstrained, value = self.place(name, fn, transform)
            self.unconstrained[name] = unconstrained
            self.values[name] = value
            self.log_jacobian[name] = transform.log_abs_det_jacobian(unconstrained, value).sum()
            msg["value"] = value
            msg["done"] = True


def _bijection(name: str, fn: Any) -> Any:
    try:
        return biject_to(fn.support)
    except NotImplementedError as error:
        raise ModelError(
            f"site {name!r} has support {fn.support}, which no bijection maps to the real numbers; "
            "build the value from sites that have one (LKJCholesky and scales for a covariance)"
        ) from error


def layout(latents: Latents) -> tuple[Latent, ...]:
    """Lay the sites of one run out in a flat vector, in the order in which the model runs."""
    sites, start = [], 0
    for name, unconstrained in latents.unconstrained.items():
        stop = start + unconstrained.numel()
        shapes = tuple(latents.values[name].shape), tuple(unconstrained.shape)
        sites.append(Latent(name, *shapes, slice(start, stop)))
        start = stop
    return tuple(sites)


def from_flat(sites: Sequence[Latent], z: Tensor) -> Place:
    """Take the values from an unconstrained vector `(dim,)`."""
    parts = z.split([site.slice.stop - site.slice.start for site in sites])
    values = {
        site.name: part.reshape(site.unconstrained_shape)
        for site, part in zip(sites, parts, strict=True)
    }

    def place(name: str, _: Any, transform: Any) -> tuple[Tensor, Tensor]:
        unconstrained = _known(values, name)
        return unconstrained, transform(unconstrained)

    return place


def from_values(values: Mapping[str, Tensor]) -> Place:
    """Take the values as they are, on each site's own support."""

    def place(name: str, _: Any, transform: Any) -> tuple[Tensor, Tensor]:
        value = _known(values, name)
        return transform.inv(value), value

    return place


def from_prior(device: torch.device, dtype: torch.dtype) -> Place:
    """Draw from the prior; a flat prior has no draws, so U(-2, 2) on the unconstrained space."""

    def place(_: str, fn: Any, transform: Any) -> tuple[Tensor, Tensor]:
        try:
            value = fn.sample()
        except NotImplementedError:
            shape = transform.inverse_shape(fn.shape())
            unconstrained = 4 * torch.rand(shape, dtype=dtype, device=device) - 2
            return unconstrained, transform(unconstrained)
        return transform.inv(value), value

    return place


def _known(sites: Mapping[str, T], name: str) -> T:
    if name not in sites:
        raise ModelError(
            f"site {name!r} is met here but was not at the first run, which had {list(sites)}; a "
            "model must have the same sites whatever their values"
        )
    return sites[name]
