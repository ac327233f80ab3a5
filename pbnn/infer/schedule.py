"""How a training run of SVI is laid out: learning rates, the weight of the KL, when it may end."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pbnn.errors import FitError
from pbnn.infer.options import whole_number

__all__ = ["SCHEDULES", "Plan", "is_flat"]

SCHEDULES = ("plateau", "constant", "cosine")
# The last phase is as long as the steps before it, and brings the rate down to this share.
_FINAL_RATE = 0.01
# The plateau counts when the smoothed ELBO has not risen over the last quarter of the run, or over
# so many windows where that is more: a slow rise under noise would pass for flat over few of them.
_PATIENCE, _SHARE = 5, 4


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a training run goes.

    Attributes:
        steps: Largest number of steps.
        lr: Learning rate of Adam at the start.
        schedule: "plateau", "constant", "cosine", or a function from the share of the steps that
            are done, in [0, 1), to the factor of `lr`.
        kl_weight: Weight of the KL divergence in the loss, once annealing is over.
        kl_annealing: Steps over which that weight rises linearly from 0.
        early_stopping: Whether the run may end before `steps`.
        average: Whether the result is the mean of the parameters over the last phase, at a rate
            that stays constant, in place of the last parameters at a falling one.

    Raises:
        FitError: An option is out of its range.
    """

    steps: int = 10_000
    lr: float = 0.01
    schedule: str | Callable[[float], float] = "plateau"
    kl_weight: float = 1.0
    kl_annealing: int = 0
    early_stopping: bool = True
    average: bool = False

    def __post_init__(self) -> None:
        """Check the ranges."""
        object.__setattr__(self, "steps", whole_number("steps", self.steps))
        if not self.lr > 0:
            raise FitError(f"lr={self.lr}; expected a positive learning rate")
        if not callable(self.schedule) and self.schedule not in SCHEDULES:
            raise FitError(
                f"schedule={self.schedule!r}; expected one of {', '.join(map(repr, SCHEDULES))}, "
                "or a function from the share of the steps done to the factor of lr"
            )
        if not 0 < self.kl_weight < math.inf:
            raise FitError(f"kl_weight={self.kl_weight}; expected a positive number, 1 by rights")
        if not 0 <= self.kl_annealing < self.steps:
            raise FitError(
                f"kl_annealing={self.kl_annealing}; expected a number of steps from 0 up, and "
                f"below steps={self.steps}"
            )

    def weight(self, done: int) -> float:
        """Return the weight of the KL divergence in the step after `done` steps."""
        if done >= self.kl_annealing:
            return self.kl_weight
        return self.kl_weight * (done + 1) / (self.kl_annealing + 1)

    def rate(self, done: int, last_phase: int, end: int) -> float:
        """Return the learning rate of the step after `done` steps.

        Args:
            done: Steps that are done.
            last_phase: Step at which the last phase begins.
            end: Step at which the run ends.
        """
        if callable(self.schedule):
            factor = self.schedule(done / self.steps)
            if not (isinstance(factor, float | int) and 0 <= factor < math.inf):
                raise FitError(
                    f"schedule returned {factor!r} at share {done / self.steps:.3g} of the steps; "
                    "expected a number from 0 up"
                )
            return self.lr * factor
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1 + math.cos(math.pi * done / self.steps))
        if self.schedule == "constant" or self.average or done < last_phase:
            return self.lr
        return float(self.lr * _FINAL_RATE ** ((done - last_phase) / max(end - last_phase, 1)))

    @property
    def last_phase(self) -> int:
        """Step at which the last phase begins, where no plateau is met before."""
        return self.steps // 2

    def end_after(self, plateau: int) -> int:
        """Return the step at which the run ends, when a plateau was met after so many steps."""
        if self.schedule == "plateau" or self.average:
            return min(self.steps, 2 * plateau)
        return plateau

    def plain(self) -> dict[str, Any]:
        """Return the options by name, as plain JSON values."""
        schedule = self.schedule
        if callable(schedule):
            schedule = getattr(schedule, "__qualname__", type(schedule).__name__)
        return {**vars(self), "schedule": schedule}


def is_flat(windows: list[float]) -> bool:
    """Whether the mean ELBO of the last windows rose by no more than its standard error.

    Args:
        windows: Mean ELBO of each window of steps.
    """
    count = max(_PATIENCE, len(windows) // _SHARE)
    if len(windows) < 2 * count:
        return False
    before = torch.tensor(windows[-2 * count : -count], dtype=torch.float64)
    after = torch.tensor(windows[-count:], dtype=torch.float64)
    error = ((before.var() + after.var()) / count).sqrt()
    return bool(after.mean() - before.mean() <= error)
