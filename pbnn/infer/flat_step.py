"""The step of a Gaussian guide as one flat graph: gradient, clipping and Adam, without Pyro."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functionalize, grad

from pbnn.errors import FitError
from pbnn.infer.adam import Adam, update_
from pbnn.infer.elbo import culprit
from pbnn.infer.graph import FlatGraph, agree, compile_graph, disk_cache, trace
from pbnn.infer.objective import Objective
from pbnn.model import Data, isolated

__all__ = ["FlatStep"]

# The graph is held against the model at parameters shifted by Normal noise of this scale.
_SHIFT = 0.1


class FlatStep:
    """A step that is traced once, and may be compiled; see `pbnn.infer.step.Step`.

    Args:
        objective: The loss.
        parameters: What is learned, as `objective` was given them.
        clip: Largest norm of the gradient; None leaves it.

    Raises:
        FitError: The graph gives other numbers than the model. A model that cannot be traced raises
            what its own code raised.
    """

    def __init__(
        self,
        objective: Objective,
        parameters: Sequence[Tensor],
        *,
        clip: float | None = None,
    ) -> None:
        self.objective = objective
        self.bound = objective.bound
        self.parameters = list(parameters)
        self.compiled, self.rule = False, "traced"
        self.kl, self.estimator = objective.kl, objective.estimator
        self._clip = clip
        self._state = objective.terms.state()
        self._rows: tuple[Any, Any] = (None, None)
        rows = objective.terms.rows(*objective.example)
        self._data: tuple[Tensor, ...] = tuple(value.contiguous() for value in rows)
        self._update: Callable[..., tuple[Tensor]] = self._eager
        self.graph = self._trace()
        self._adam = Adam(self.parameters)

    def __call__(
        self, x: Data, y: Data, factor: float, *, kl_weight: float = 1.0, lr: float
    ) -> Tensor:
        """Take one step; see `Step`."""
        if x is not self._rows[0] or y is not self._rows[1]:
            self._take(x, y)
        adam = self._adam
        control = adam.learned.new_tensor([factor, kl_weight, *adam.rates(lr)])
        with torch.no_grad():
            (terms,) = self._update(
                adam.learned,
                adam.first,
                adam.second,
                self._noise(),
                control,
                *self._data,
                *self._state,
            )
        return terms

    def compile(self) -> None:
        """Compile the step.

        Raises:
            FitError: Inductor cannot compile here, or gives other numbers.
        """
        adam = self._adam
        with isolated(0, self.bound.device), torch.no_grad():
            control = adam.learned.new_tensor([1.0, 1.0, 0.01, 1.0])
            held = (adam.learned, adam.first, adam.second, self._noise(), control)
            inputs = (*held, *self._data, *self._state)
            with disk_cache():
                compiled = compile_graph(functionalize(self._eager), inputs)
            found, expected = ([v.clone() for v in inputs] for _ in range(2))
            found += compiled(*found)
            expected += self._eager(*expected)
        if not agree(found, expected):
            raise FitError("the compiled step gives other numbers; pass compile=False")
        self._update, self.compiled = compiled, True

    def culprit(self) -> str:
        """Name the first site whose draw or log density is not finite."""
        return culprit(self.bound, self.objective.guide)

    def state(self) -> dict[str, Tensor]:
        """Return what the next step depends on beside the parameters; see `Step`."""
        return self._adam.state()

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state` returned."""
        self._adam.load(state)

    def _noise(self) -> Tensor:
        bound = self.bound
        return torch.randn(self.objective.noise_shape, dtype=bound.dtype, device=bound.device)

    def _take(self, x: Data, y: Data) -> None:
        """Set the rows of the next steps: a graph holds for one shape, and does not look."""
        rows = tuple(value.contiguous() for value in self.objective.terms.rows(x, y))
        for new, old in zip(rows, self._data, strict=True):
            if new.shape != old.shape or new.dtype != old.dtype:
                raise FitError(
                    f"the step was traced for rows of shape {tuple(old.shape)} and {old.dtype}; "
                    f"got {tuple(new.shape)} and {new.dtype}"
                )
        self._rows, self._data = (x, y), rows

    def _eager(
        self,
        learned: Tensor,
        first: Tensor,
        second: Tensor,
        noise: Tensor,
        control: Tensor,
        *data: Tensor,
    ) -> tuple[Tensor]:
        """Take one step in place; return the terms of the ELBO."""
        gradient, terms = self.graph(learned, noise, control, *data)
        update_(learned, first, second, gradient, terms, control[2], control[3], self._clip)
        return (terms,)

    def _trace(self) -> FlatGraph:
        """Trace terms and gradient; hold the graph against the model where it was not traced."""
        function = grad(self.objective.loss, has_aux=True)
        learned = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        control = learned.new_ones(4)
        data = (*self._data, *self._state)
        with isolated(0, self.bound.device), torch.no_grad():
            graph = trace(function, (learned, self._noise(), control, *data))
            shifted = learned + _SHIFT * torch.randn_like(learned)
            noise = self._noise(), self._noise()
            # Both draws at once, mapped, so that a model that reads its own values shows itself.
            expected = function(shifted, torch.cat(noise), control, *data)
            found = [graph(shifted, part, control, *data) for part in noise]
        if not agree([(a + b) / 2 for a, b in zip(*found, strict=True)], expected):
            raise FitError("its graph gives other numbers than the model itself")
        return graph
