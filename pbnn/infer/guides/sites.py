"""A guide's view of a model's latent sites: supports, bijections, and packing into one tensor."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pyro.distributions.util import sum_rightmost
from torch import Tensor
from torch.distributions import biject_to, constraints

__all__ = ["Layout", "constrain", "is_real", "unconstrain"]


def is_real(support: constraints.Constraint) -> bool:
    """Return whether a support is the real line, or a product of real lines."""
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support is constraints.real


def _log_det(site: Mapping[str, Any], value: Tensor, unconstrained: Tensor) -> Tensor:
    log_det: Tensor = biject_to(site["fn"].support).log_abs_det_jacobian(unconstrained, value)
    log_det = sum_rightmost(log_det, log_det.dim() - value.dim() + site["fn"].event_dim)
    return log_det


def constrain(site: Mapping[str, Any], unconstrained: Tensor) -> tuple[Tensor, Tensor]:
    """Map unconstrained values of a site to its support.

    Args:
        site: The site in a Pyro trace.
        unconstrained: Values `(…, *unconstrained_shape)`.

    Returns:
        The values `(…, *site_shape)`, and log|d value / d unconstrained|, `(…, *batch_shape)`.
    """
    value: Tensor = biject_to(site["fn"].support)(unconstrained)
    return value, _log_det(site, value, unconstrained)


def unconstrain(site: Mapping[str, Any], value: Tensor) -> tuple[Tensor, Tensor]:
    """Map values of a site from its support to unconstrained space: `constrain` backwards.

    Args:
        site: The site in a Pyro trace.
        value: Values `(…, *site_shape)`.

    Returns:
        The values `(…, *unconstrained_shape)`, and log|d value / d unconstrained|.
    """
    unconstrained: Tensor = biject_to(site["fn"].support).inv(value)
    return unconstrained, _log_det(site, value, unconstrained)


@dataclass(frozen=True)
class Layout:
    """How the unconstrained values of some sites lie side by side in one packed tensor.

    They are joined along the last dimension. A packed tensor is a vector `(D,)`, or a matrix
    `(rows, columns)` where every site has `rows` as its first size.

    Attributes:
        sites: Unconstrained shape of each site, in packing order.
        rows: `()` for a vector, `(rows,)` for a matrix.
    """

    sites: dict[str, torch.Size]
    rows: tuple[int, ...] = ()

    def pack(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return unconstrained values, each `(…, *shape)`, as one packed tensor `(…, *packed)`."""
        parts = []
        for name, shape in self.sites.items():
            value = values[name]
            batch = value.shape[: value.dim() - len(shape)]
            parts.append(value.reshape(*batch, *self.rows, -1))
        return torch.cat(parts, -1)

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        """Return the unconstrained value `(…, *shape)` of each site of a packed tensor."""
        batch = packed.shape[: packed.dim() - len(self.rows) - 1]
        sizes = [shape.numel() // math.prod(self.rows) for shape in self.sites.values()]
        return {
            name: part.reshape(batch + shape)
            for (name, shape), part in zip(
                self.sites.items(), torch.split(packed, sizes, -1), strict=True
            )
        }
