"""Step sizes of stochastic-gradient MCMC, and which of its steps end in a draw."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from pbnn.errors import FitError
from pbnn.infer.options import whole_number

__all__ = ["Schedule", "StepSizes"]

Schedule = Literal["cyclical", "constant"]


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """How large each step is, and which of them end in a draw.

    Attributes:
        steps: Steps of each chain.
        lr: Largest step size, times rows.
        schedule: "cyclical" (Zhang et al. 2020, eq. 1) or "constant".
        cycles: Cycles of the cyclical schedule; 4 by default.
        burn_in: Share of each cycle, or of the run at constant step size, that gives no draws.
        draws: Kept draws of each chain.
    """

    steps: int
    lr: float
    schedule: Schedule
    cycles: int
    burn_in: float
    draws: int

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("steps", "cycles", "draws"):
            whole_number(name, getattr(self, name))
        if not 0 < self.lr < math.inf:
            raise FitError(f"lr={self.lr}; expected a positive number")
        if self.schedule not in get_args(Schedule):
            raise FitError(f"schedule={self.schedule!r}; expected 'cyclical' or 'constant'")
        if not 0 <= self.burn_in < 1:
            raise FitError(f"burn_in={self.burn_in}; expected a share of at least 0, below 1")
        if len(self._sampling()) < self.draws:
            raise FitError(
                f"draws={self.draws}, but after burn_in={self.burn_in} a chain has "
                f"{len(self._sampling())} of its {self.steps} steps left; give more steps"
            )

    def _place(self, step: int) -> float:
        """Return how far a step is in its cycle, from 0 to 1."""
        length = self.steps if self.schedule == "constant" else math.ceil(self.steps / self.cycles)
        return (step % length) / length

    def _sampling(self) -> list[int]:
        return [k for k in range(self.steps) if self._place(k) >= self.burn_in]

    def size(self, step: int) -> float:
        """Return the step size of a step, times rows."""
        if self.schedule == "constant":
            return self.lr
        return self.lr / 2 * (math.cos(math.pi * self._place(step)) + 1)

    def noisy(self, step: int) -> bool:
        """Whether a step has noise: not in the exploration stage of a cycle."""
        return self.schedule == "constant" or self._place(step) >= self.burn_in

    def kept(self) -> list[int]:
        """Return the steps that end in a draw, spread evenly over those after burn-in."""
        sampling = self._sampling()
        return [sampling[(k + 1) * len(sampling) // self.draws - 1] for k in range(self.draws)]
