"""Adam over one vector, of which all parameters are views, in calls that can be compiled."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["Adam", "update_"]

# The defaults of Kingma & Ba 2015, "Adam: a method for stochastic optimization", algorithm 1.
_FIRST, _SECOND, _EPSILON = 0.9, 0.999, 1e-8


class Adam:
    """The state of Adam, and the parameters as one vector.

    Args:
        parameters: What is learned, of one dtype and device; they become views of the vector.
        clip: Largest norm of the gradient; a longer one is cut to it. None leaves it.

    Attributes:
        learned: The parameters, flat, one after another `(P,)`.
        first: Running mean of the gradient `(P,)`.
        second: Running mean of its square `(P,)`.
        count: Steps taken.
    """

    def __init__(self, parameters: Sequence[Tensor], clip: float | None = None) -> None:
        self.parameters = list(parameters)
        self.clip = clip
        self.learned = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        self.first, self.second = torch.zeros_like(self.learned), torch.zeros_like(self.learned)
        self.count = 0
        sizes = [p.numel() for p in self.parameters]
        for p, part in zip(self.parameters, self.learned.split(sizes), strict=True):
            p.data = part.view(p.shape)

    def rates(self, lr: float) -> tuple[float, float]:
        """Count a step; return its rate and the factor of the root of the second moment."""
        self.count += 1
        return lr / (1 - _FIRST**self.count), (1 - _SECOND**self.count) ** -0.5

    def step(self, gradients: Sequence[Tensor], terms: Tensor, lr: float) -> None:
        """Take a step along gradients, one for each parameter; see `update_`."""
        gradient = torch.cat([g.reshape(-1) for g in gradients])
        rate, root = self.learned.new_tensor(self.rates(lr))
        update_(self.learned, self.first, self.second, gradient, terms, rate, root, self.clip)

    def state(self) -> dict[str, Tensor]:
        """Return copies of the moments, the count, and the state of the device's generator."""
        device = self.learned.device
        cuda = device.type == "cuda"
        return {
            "first": self.first.clone(),
            "second": self.second.clone(),
            "count": torch.tensor(self.count),
            "generator": torch.cuda.get_rng_state(device) if cuda else torch.get_rng_state(),
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned."""
        self.first.copy_(state["first"])
        self.second.copy_(state["second"])
        self.count = int(state["count"])
        if self.learned.device.type == "cuda":
            torch.cuda.set_rng_state(state["generator"], self.learned.device)
        else:
            torch.set_rng_state(state["generator"])


def update_(
    learned: Tensor,
    first: Tensor,
    second: Tensor,
    gradient: Tensor,
    terms: Tensor,
    rate: Tensor,
    root: Tensor,
    clip: float | None = None,
) -> None:
    """Take one step in place; stay where terms of the loss are not finite.

    So the fault can still be found at the parameters that had it.

    Args:
        learned: The parameters `(P,)`.
        first: Running mean of the gradient.
        second: Running mean of its square.
        gradient: Gradient of the loss.
        terms: Terms of the loss.
        rate: Learning rate / (1 - 0.9^count), a scalar.
        root: (1 - 0.999^count)^(-1/2), a scalar.
        clip: Largest norm of the gradient.
    """
    if clip is not None:
        norm = torch.linalg.vector_norm(gradient)
        gradient = gradient * (clip / (norm + 1e-6)).clamp(max=1.0)
    finite = terms.isfinite().all()
    gradient, rate = torch.where(finite, gradient, 0), torch.where(finite, rate, 0)
    first.lerp_(gradient, 1 - _FIRST)
    second.mul_(_SECOND).addcmul_(gradient, gradient, value=1 - _SECOND)
    learned.sub_(first / second.sqrt().mul_(root).add_(_EPSILON) * rate)
