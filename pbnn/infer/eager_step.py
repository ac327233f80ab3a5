"""The step of SVI through Pyro: for any guide and any model."""

import pyro
import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from pbnn.infer.adam import Adam
from pbnn.infer.elbo import Elbo
from pbnn.model import BoundModel, Data

__all__ = ["EagerStep", "learned"]


def learned(bound: BoundModel, guide: AutoGuide) -> list[Tensor]:
    """List what is learned: the guide's parameters and the model's constants."""
    named = [*guide.parameters(), *bound.model.parameters()]
    # A guide that is a plain function has its parameters in Pyro's store.
    named += [p for _, p in pyro.get_param_store().named_parameters()]
    return list({id(p): p for p in named if p.requires_grad}.values())


class EagerStep:
    """A step that runs guide and model through Pyro's handlers; see `pbnn.infer.step.Step`.

    Args:
        bound: The model and its data.
        elbo: The ELBO of the guide.
        clip: Largest norm of the gradient; None leaves it.
        rule: Why no quicker step is taken, in words.
    """

    compiled = False

    def __init__(
        self, bound: BoundModel, elbo: Elbo, *, clip: float | None = None, rule: str = "as asked"
    ) -> None:
        self.elbo = elbo
        self.parameters = learned(bound, elbo.guide)
        self.rule = rule
        self.kl = dict.fromkeys(bound.named("latent"), "Monte Carlo")
        self.estimator = dict.fromkeys(bound.named("latent"), "pathwise")
        self._rows = bound.rows or 1
        self._adam = Adam(self.parameters, clip)

    def __call__(
        self, x: Data, y: Data, factor: float, *, kl_weight: float = 1.0, lr: float
    ) -> Tensor:
        """Take one step; see `Step`."""
        try:
            terms = self.elbo(x, y, factor)
        except LinAlgError:  # a matrix of the model that is no longer positive definite
            return self.parameters[0].new_full((2,), torch.nan).detach()
        loss = (kl_weight * terms[1] - terms[0]) / self._rows
        gradients = torch.autograd.grad(loss, self.parameters, materialize_grads=True)
        with torch.no_grad():
            self._adam.step(gradients, terms, lr)
        return terms.detach()

    def culprit(self) -> str:
        """Name the first site whose draw or log density is not finite."""
        return self.elbo.culprit()

    def state(self) -> dict[str, Tensor]:
        """Return what the next step depends on beside the parameters; see `Step`."""
        return self._adam.state()

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state` returned."""
        self._adam.load(state)
