"""One optimiser step of SVI: what every step offers, the step through Pyro, and which one to take.

The training loop makes a step by `make_step`, calls it once for each batch and never asks which
kind it has:

    step = make_step(bound, guide, particles=1, steps=10_000)
    terms = step(x, y, factor, kl_weight=1.0, lr=0.01)   # (expected log-likelihood, KL), detached

All calls are made inside `pbnn.model.isolated` and `pyro.validation_enabled(False)`: noise comes
from torch's global generator of the device. A step does not look at what it computes: terms that
are not finite have made parameters that are not, and the caller goes back to values it has kept
(`parameter.copy_(kept)` in place). Adam's moments belong to the step: `state` and `load`.
"""

from typing import Literal, Protocol

import pyro
import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from pbnn.infer.elbo import Elbo
from pbnn.model import BoundModel, Data

__all__ = ["EagerStep", "Estimator", "Step", "learned", "make_step"]

Estimator = Literal["pathwise", "local", "flipout"]


class Step(Protocol):
    """One Adam step (Kingma & Ba 2015, algorithm 1) on the negative ELBO.

    Attributes:
        parameters: What is learned, the guide's parameters and the model's constants; they are
            written in place and may be, as long as they keep their shapes.
        compiled: Whether inductor compiled the step.
        rule: Why it is compiled, or traced, or neither, in words.
        kl: By latent site, how its KL divergence is had: "closed form" or "Monte Carlo".
        estimator: By latent site, how its noise enters: "pathwise", "local" or "flipout".
    """

    parameters: list[Tensor]
    compiled: bool
    rule: str
    kl: dict[str, str]
    estimator: dict[str, str]

    def __call__(
        self, x: Data, y: Data, factor: float, *, kl_weight: float = 1.0, lr: float
    ) -> Tensor:
        """Take one step on (kl_weight · KL − expected log-likelihood) / rows of the whole data.

        Args:
            x: Input rows; as many in each call.
            y: Their observations.
            factor: What the log-likelihood in plate `data` is scaled by, rows / batch size.
            kl_weight: Weight of the KL divergence in the loss; the returned KL is without it.
            lr: Learning rate of this step.

        Returns:
            Expected log-likelihood (scaled by `factor`) and KL divergence before the step,
            detached, `(2,)`. A tensor of its own, which later calls leave alone.
        """
        ...

    def culprit(self) -> str:
        """Name the first site whose draw or log density is not finite, in words for a message."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Return copies of what the next step depends on beside the parameters.

        Adam's moments and count, and the state of the global generator of the device.
        """
        ...

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state` returned, in a step of the same kind or of another one."""
        ...


def make_step(
    bound: BoundModel,
    guide: AutoGuide,
    *,
    particles: int = 1,
    batch_size: int | None = None,
    steps: int | None = None,
    compile: bool | None = None,
    estimator: Estimator = "pathwise",
    clip: float | None = None,
) -> Step:
    """Return the quickest step that fits a model and a guide.

    Args:
        bound: The model and its data.
        guide: The guide; it is run once here, so that its parameters exist.
        particles: Draws of the guide in each step; an even number comes in mirrored pairs.
        batch_size: Rows in each call; all by default.
        steps: Steps that will be taken, which the rule on compiling counts on; None is few.
        compile: Whether inductor compiles the step; None decides by a rule of counts.
        estimator: How noise enters.
        clip: Largest norm of the gradient of the loss; a longer one is cut to it.

    Raises:
        FitError: `compile` or `estimator` asks for what cannot be.
        ModelError: The guide draws other sites than the model's, or draws without a gradient.
    """
    return EagerStep(bound, guide, particles=particles, clip=clip)


def learned(bound: BoundModel, guide: AutoGuide) -> list[Tensor]:
    """List what is learned: the guide's parameters and the model's constants."""
    named = [*guide.parameters(), *bound.model.parameters()]
    # A guide that is a plain function has its parameters in Pyro's store.
    named += [p for _, p in pyro.get_param_store().named_parameters()]
    return list({id(p): p for p in named if p.requires_grad}.values())


class EagerStep:
    """A step that runs guide and model through Pyro: for any guide and any model.

    Args:
        bound: The model and its data.
        guide: The guide.
        particles: Draws of the guide in each step; an even number comes in mirrored pairs.
        clip: Largest norm of the gradient.
        rule: Why no quicker step is taken, in words.
    """

    def __init__(
        self,
        bound: BoundModel,
        guide: AutoGuide,
        *,
        particles: int,
        clip: float | None = None,
        rule: str = "as asked",
    ) -> None:
        self.elbo = Elbo(bound, guide, particles)
        self.parameters = learned(bound, guide)
        self.clip = clip
        self.compiled = False
        self.rule = rule
        self.kl = {name: "Monte Carlo" for name in bound.named("latent")}
        self.estimator = {name: "pathwise" for name in bound.named("latent")}
        self._rows = bound.rows or 1
        self._device = bound.device
        self._optimiser = torch.optim.Adam(self.parameters)

    def __call__(
        self, x: Data, y: Data, factor: float, *, kl_weight: float = 1.0, lr: float
    ) -> Tensor:
        """Take one step; see `Step`."""
        try:
            terms = self.elbo(x, y, factor)
        except LinAlgError:  # a matrix of the model that is no longer positive definite
            return self.parameters[0].new_full((2,), torch.nan)
        loss = (kl_weight * terms[1] - terms[0]) / self._rows
        self._optimiser.zero_grad(set_to_none=True)
        loss.backward()
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self._optimiser.param_groups[0]["lr"] = lr
        self._optimiser.step()
        return terms.detach()

    def culprit(self) -> str:
        """Name the first site whose draw or log density is not finite."""
        return self.elbo.culprit()

    def state(self) -> dict[str, Tensor]:
        """Return Adam's moments, flat over all parameters, its count, and the generator's state."""
        held = [self._optimiser.state.get(p, {}) for p in self.parameters]
        moments = {
            name: torch.cat(
                [
                    h.get(name, torch.zeros_like(p)).reshape(-1)
                    for h, p in zip(held, self.parameters, strict=True)
                ]
            ).detach()
            for name in ("exp_avg", "exp_avg_sq")
        }
        count = max((int(h["step"]) for h in held if h), default=0)
        return {**moments, "count": torch.tensor(count), "rng": generator_state(self._device)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state` returned."""
        sizes = [p.numel() for p in self.parameters]
        parts = [state[name].split(sizes) for name in ("exp_avg", "exp_avg_sq")]
        for p, first, second in zip(self.parameters, *parts, strict=True):
            self._optimiser.state[p] = {
                "step": torch.tensor(float(state["count"])),
                "exp_avg": first.reshape(p.shape).to(p).clone(),
                "exp_avg_sq": second.reshape(p.shape).to(p).clone(),
            }
        set_generator_state(self._device, state["rng"])


def generator_state(device: torch.device) -> Tensor:
    """Return the state of torch's global generator of a device."""
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def set_generator_state(device: torch.device, state: Tensor) -> None:
    """Set the state of torch's global generator of a device."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
