"""Log-likelihood and log prior of a model as a pure function of one draw, parameters and data."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pbnn.infer.divergence import expected_log_prob
from pbnn.infer.graph import LaneSafe
from pbnn.infer.lane import Lane, flat
from pbnn.infer.unconstrained import Place
from pbnn.model import BoundModel, Data

__all__ = ["Moments", "Terms"]

Moments = Mapping[str, tuple[Tensor, Tensor]]
"""Mean and variance of a site under the guide, by name."""


class Terms:
    """The two sums of log densities that the evidence lower bound takes from a model.

    Args:
        bound: The model and its data.
        learned: Names of the model's parameters that are learned.
        reads: Whether the model may read values of its data (`int(y.max())`).

    Attributes:
        sites: Where each latent site lies in a flat vector of unconstrained values.
        held: Names of the tensors that `state` returns.
    """

    def __init__(self, bound: BoundModel, learned: Sequence[str], *, reads: bool) -> None:
        self.bound = bound
        self._lane = Lane(bound)
        self.sites = self._lane.sites
        self._learned = set(learned)
        state = [key for part, key in self._lane.names if part == "state"]
        self.held = tuple(name for name in state if name not in self._learned)
        self._reads = reads
        self._counted = {s.name for s in bound.sites if s.kind in ("latent", "observed", "factor")}

    def rows(self, x: Data, y: Data) -> tuple[Tensor, ...]:
        """Return x and y as the first part of `data`."""
        return tuple(flat(x, y, {}).values())

    def state(self) -> tuple[Tensor, ...]:
        """Return the second part of `data`: buffers, and parameters that are not learned."""
        held = self.bound.constants() | self.bound.buffers()
        return tuple(held[name] for name in self.held)

    def __call__(
        self,
        draw: Mapping[str, Tensor],
        learned: Mapping[str, Tensor],
        data: Sequence[Tensor],
        factor: Tensor | float = 1.0,
        *,
        moments: Moments | None = None,
        mode: AbstractContextManager[Any] | None = None,
        shift: Mapping[str, Tensor] | None = None,
        jacobian: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Return log-likelihood, and log prior with log |det J|.

        Args:
            draw: Unconstrained values by latent site.
            learned: Values of the parameters that are learned.
            data: What `rows` and `state` return, one after the other.
            factor: What the log-likelihood in plate `data` is scaled by.
            moments: Of the sites whose log prior is that expected under the guide, in closed form,
                in place of that of the draw.
            mode: What the model runs inside of.
            shift: By site, by how many standard deviations of its distribution the value at which
                the log density is taken lies above the site's own.
            jacobian: Whether log |det J| is added.
        """
        moments = moments or {}
        given = iter(data)
        inputs = tuple(
            learned[key] if part == "state" and key in self._learned else next(given)
            for part, key in self._lane.names
        )
        likelihood = prior = torch.zeros((), dtype=self.bound.dtype, device=self.bound.device)
        with LaneSafe(reads=self._reads):
            with mode or nullcontext():
                trace, latents = self._lane.run(_from_unconstrained(draw), inputs)
            for name, scales in (shift or {}).items():
                node = trace.nodes[name]
                node["value"] = node["value"] + node["fn"].stddev * scales
            trace.compute_log_prob(
                site_filter=lambda name, _: name in self._counted and name not in moments
            )
            for site in self.bound.sites:
                if site.name in moments:
                    node = trace.nodes[site.name]
                    prior = prior + expected_log_prob(node["fn"], *moments[site.name])
                elif site.kind == "latent":
                    prior = prior + trace.nodes[site.name]["log_prob_sum"]
                    if jacobian:
                        prior = prior + latents.log_jacobian[site.name]
                elif site.kind in ("observed", "factor"):
                    term = trace.nodes[site.name]["log_prob_sum"]
                    likelihood = likelihood + (term if site.row_dim is None else factor * term)
        return likelihood, prior


def _from_unconstrained(values: Mapping[str, Tensor]) -> Place:
    def place(name: str, _: Any, transform: Any) -> tuple[Tensor, Tensor]:
        return values[name], transform(values[name])

    return place
