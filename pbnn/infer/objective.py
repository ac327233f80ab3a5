"""The evidence lower bound of a Gaussian guide as a pure function of tensors."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyro
import torch
from pyro.infer.autoguide import AutoGuide
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.func import functional_call, vmap

from pbnn.errors import FitError
from pbnn.infer.graph import LaneSafe
from pbnn.infer.guides.drawing import PackedGaussian, gaussian_blocks
from pbnn.infer.lane import Lane, flat
from pbnn.infer.unconstrained import Place
from pbnn.model import BoundModel, Data

__all__ = ["Objective"]


class Objective:
    """The loss of a step, from what is learned, noise and data; nothing of it is kept in Pyro.

    Args:
        bound: The model and its data.
        guide: The guide, which has run.
        parameters: What is learned, as `learned` lists it.
        particles: Draws for each estimate; an even number comes in mirrored pairs.
        batches: Whether the rows change from call to call, so that no value of theirs may be read.

    Attributes:
        dim: Number of unconstrained values, which are as many standard Normal values for a draw.
        noise_shape: Shape of the noise of one step.
        names: Data that are inputs, as `pbnn.infer.lane.flat` names them; parameters are not.

    Raises:
        FitError: The guide is no product of Gaussians, or something that is learned is neither the
            guide's nor the model's own.
    """

    def __init__(
        self,
        bound: BoundModel,
        guide: AutoGuide,
        parameters: Sequence[Tensor],
        *,
        particles: int,
        batches: bool,
    ) -> None:
        blocks = gaussian_blocks(guide)
        if blocks is None:
            raise FitError(f"guide {type(guide).__name__} is no product of Gaussians")
        self.bound, self.guide = bound, guide
        self.particles = particles
        self.mirrored = particles % 2 == 0
        self.batches = batches
        self._shapes = [p.shape for p in parameters]
        self._family = _Family(guide)
        place = {id(p): index for index, p in enumerate(parameters)}
        self._guide = {
            n: place[id(p)] for n, p in self._family.named_parameters() if id(p) in place
        }
        self._constants = {
            n: place[id(p)] for n, p in bound.model.named_parameters() if id(p) in place
        }
        if {*self._guide.values(), *self._constants.values()} != {*place.values()}:
            raise FitError("a parameter belongs neither to the guide nor to the model")
        if any(p.dtype != bound.dtype or p.device != bound.device for p in parameters):
            raise FitError(f"a parameter is not of {bound.dtype} on {bound.device}")
        self._lane = Lane(bound)
        self.names = tuple(
            (part, key)
            for part, key in self._lane.names
            if part != "state" or key not in self._constants
        )
        self.dim = sum(block.gaussian.loc.numel() for block in blocks)
        self.noise_shape = (particles // 2 if self.mirrored else particles, self.dim)
        self._latent = tuple(bound.named("latent"))

    def rows(self, x: Data, y: Data) -> tuple[Tensor, ...]:
        """Return x and y of one step as the first of its data."""
        return tuple(flat(x, y, {}).values())

    def state(self) -> tuple[Tensor, ...]:
        """Return the rest of its data: buffers, and parameters that are not learned."""
        held = self.bound.constants() | self.bound.buffers()
        return tuple(held[key] for part, key in self.names if part == "state")

    def loss(
        self, learned: Tensor, noise: Tensor, control: Tensor, *data: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return a tensor whose gradient is that of the loss, and the two terms of the ELBO.

        Args:
            learned: All parameters in one vector.
            noise: Standard Normal values of `noise_shape`, or with more rows of it.
            control: Factor of the log-likelihood in plate `data`, and weight of the KL divergence.
            *data: In the order of `names`.

        Returns:
            The surrogate loss, and `(expected log-likelihood, KL)`.
        """
        factor, kl_weight = control[0], control[1]
        parts = learned.split([shape.numel() for shape in self._shapes])
        tensors = [part.reshape(s) for part, s in zip(parts, self._shapes, strict=True)]
        if self.mirrored:
            noise = torch.cat([noise, -noise])
        values, log_q, score = _draw(self._gaussians(tensors), noise)
        constants = {name: tensors[index] for name, index in self._constants.items()}
        likelihood, prior = self._model_terms(values, constants, data, factor)
        kl = (log_q - prior).mean()
        likelihood = likelihood.mean()
        # The score of log q is left out of the gradient, since it only adds noise (Roeder et al.
        # 2017, eq. 7): what stays is the gradient of log q with respect to the draw.
        surrogate = kl_weight * (score - prior).mean() - likelihood
        return surrogate / (self.bound.rows or 1), torch.stack([likelihood, kl])

    def _gaussians(self, tensors: Sequence[Tensor]) -> list[PackedGaussian]:
        held = {name: tensors[index] for name, index in self._guide.items()}
        blocks: list[PackedGaussian] = functional_call(self._family, held, ())
        return blocks

    def _model_terms(
        self,
        values: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        data: Sequence[Tensor],
        factor: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return log-likelihood and log prior with log |det J| of each draw, `(particles,)`."""
        held: dict[tuple[str, str], Tensor] = {
            **dict(zip(self.names, data, strict=True)),
            **{("state", name): value for name, value in constants.items()},
        }
        inputs = tuple(held[name] for name in self._lane.names)

        def one(draw: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            return self._once(draw, inputs, factor)

        if all(len(value) == 1 for value in values.values()):  # an axis of 1 only costs calls
            return one({name: value[0] for name, value in values.items()})
        both: tuple[Tensor, Tensor] = vmap(one)(dict(values))
        return both

    def _once(
        self, draw: Mapping[str, Tensor], data: tuple[Tensor, ...], factor: Tensor
    ) -> tuple[Tensor, Tensor]:
        counted = {s.name for s in self.bound.sites if s.kind in ("latent", "observed", "factor")}
        # In an empty store: a PyroParam would be read from there instead of from its module.
        with LaneSafe(reads=not self.batches), pyro.get_param_store().scope(), _Held():
            trace, latents = self._lane.run(_from_unconstrained(draw), data)
            trace.compute_log_prob(site_filter=lambda name, _: name in counted)
            likelihood = prior = torch.zeros((), dtype=factor.dtype, device=factor.device)
            for site in self.bound.sites:
                if site.kind == "latent":
                    jacobian = latents.log_jacobian[site.name]
                    prior = prior + trace.nodes[site.name]["log_prob_sum"] + jacobian
                elif site.kind in ("observed", "factor"):
                    term = trace.nodes[site.name]["log_prob_sum"]
                    likelihood = likelihood + (term if site.row_dim is None else factor * term)
        return likelihood, prior


class _Held(Messenger):  # type: ignore[misc]
    """Gives the parameters of modules the tensors that the modules hold, past Pyro's store."""

    def _pyro_param(self, msg: Any) -> None:
        if msg["value"] is None and len(msg["args"]) > 1:
            msg["value"], msg["done"] = msg["args"][1], True


class _Family(nn.Module):
    """The Gaussian blocks of a guide as the output of a module, for `functional_call`."""

    def __init__(self, guide: AutoGuide) -> None:
        super().__init__()
        self.guide = guide

    def forward(self) -> list[PackedGaussian]:
        blocks = gaussian_blocks(self.guide)
        assert blocks is not None
        return blocks


def _draw(
    blocks: Iterable[PackedGaussian], noise: Tensor
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return draws by site, log q, and a tensor whose gradient is that of log q at fixed q."""
    values: dict[str, Tensor] = {}
    log_q = score = noise.new_zeros(())
    start = 0
    for block in blocks:
        gaussian = block.gaussian
        stop = start + gaussian.loc.numel()
        part = noise[:, start:stop].reshape(-1, *gaussian.loc.shape)
        start = stop
        value, density = gaussian.transform(part)
        values.update(block.layout.unpack(value))
        log_q = log_q + density
        score = score - (gaussian.descent(part).detach() * value).flatten(1).sum(1)
    return values, log_q, score


def _from_unconstrained(values: Mapping[str, Tensor]) -> Place:
    def place(name: str, _: Any, transform: Any) -> tuple[Tensor, Tensor]:
        return values[name], transform(values[name])

    return place
