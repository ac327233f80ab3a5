"""Warm-up: step size by dual averaging, mass matrix by Stan's windows. Spreads are scales."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["MassEstimate", "Schedule", "average_step_size", "search_step_size", "warmup_schedule"]

# Hoffman & Gelman (2014), §3.2.1; Stan's values.
_GAMMA, _T0, _KAPPA = 0.05, 10.0, 0.75
_LOG_BOUND = 16.0
"""Bound on |log step size| in the search: a flat or a broken density must not keep it going."""


def average_step_size(
    accept: Tensor, target: Tensor, center: Tensor, count: Tensor, error: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Update dual averaging after one transition (Hoffman & Gelman 2014, eq. 6).

    Args:
        accept: Acceptance statistic of the transition, `(chains,)`, as all arguments are.
        target: Acceptance statistic to reach.
        center: Log step size that the iterates shrink to, log of 10 times the start.
        count: Transitions averaged so far.
        error: Running mean of target − accept.
        mean: Log of the averaged step size.

    Returns:
        Log step size of the next transition, and the new count, error and mean.
    """
    count = count + 1
    weight = 1 / (count + _T0)
    error = (1 - weight) * error + weight * (target - accept)
    log_step = center - error * count.sqrt() / _GAMMA
    decay = count**-_KAPPA
    return log_step, count, error, (1 - decay) * mean + decay * log_step


def search_step_size(delta: Tensor, step_size: Tensor, way: Tensor) -> tuple[Tensor, Tensor]:
    """Double or halve a step size until the acceptance of one leapfrog crosses 0.8, as Stan does.

    Args:
        delta: Initial minus final energy of a leapfrog with `step_size`, `(chains,)`.
        step_size: Step size tried.
        way: 1 while doubling, −1 while halving, 0 at the first trial.

    Returns:
        The next step size to try, and the way on; 0 when the search is over.
    """
    now = torch.where(delta > torch.log(torch.tensor(0.8, dtype=delta.dtype)), 1.0, -1.0)
    now = now.to(delta.dtype)
    wide = step_size.log().abs() > _LOG_BOUND
    go = ((way == 0) | (way == now)) & ~wide
    way = torch.where(go, now, torch.zeros_like(now))
    return step_size * 2.0**way, way


@dataclass(frozen=True)
class Schedule:
    """Stan's warm-up, counted in transitions.

    Attributes:
        warmup: All transitions of the warm-up.
        start: First transition that the mass matrix learns from.
        ends: Numbers of transitions after which a window of the mass matrix closes.
    """

    warmup: int
    start: int
    ends: tuple[int, ...]


def warmup_schedule(warmup: int) -> Schedule:
    """Lay out the windows: 75 transitions of step size alone, 25, 50, 100, …, and 50 at the end.

    A short warm-up gets 15%, 75% and 10% (Stan reference manual, "Automatic parameter tuning");
    below 20 transitions the mass matrix stays at its start.

    Args:
        warmup: Number of transitions.
    """
    if warmup < 20:
        return Schedule(warmup, warmup, ())
    first, base, last = 75, 25, 50
    if first + base + last > warmup:
        first, last = int(0.15 * warmup), int(0.1 * warmup)
        base = warmup - first - last
    stop, ends, end, size = warmup - last, [], first + base, base
    while end < stop:
        ends.append(end)
        size *= 2
        # A window that would leave less than the next one behind it takes the rest as well.
        end = end + size if end + 3 * size <= stop else stop
    return Schedule(warmup, first, (*ends, stop))


class MassEstimate:
    """Running covariance of draws (Welford 1962), one for each lane, in float64 on the CPU.

    Args:
        lanes: Number of lanes.
        dim: Length of a draw.
        dense: Whether to estimate the whole covariance, or its diagonal.
        pool: Whether lanes share their estimates.
    """

    def __init__(self, lanes: int, dim: int, *, dense: bool, pool: bool) -> None:
        self.dense, self.pool = dense, pool
        shape = (lanes, dim, dim) if dense else (lanes, dim)
        self.count = torch.zeros(lanes, dtype=torch.float64)
        self.mean = torch.zeros(lanes, dim, dtype=torch.float64)
        self.squares = torch.zeros(shape, dtype=torch.float64)

    def add(self, draws: Tensor, lanes: Tensor) -> None:
        """Take in one draw of some lanes.

        Args:
            draws: Draws `(some, dim)`.
            lanes: Their lanes, `(some,)`, each at most once.
        """
        draws = draws.double()
        self.count[lanes] += 1
        before = draws - self.mean[lanes]
        self.mean[lanes] += before / self.count[lanes, None]
        after = draws - self.mean[lanes]
        product = before[:, :, None] * after[:, None, :] if self.dense else before * after
        self.squares[lanes] += product

    def scale(self, lane: int) -> Tensor:
        """Return the spread of a lane, regularised towards scale² = 0.001 as in Stan.

        Args:
            lane: The lane, whose own draws are then forgotten by `clear`.

        Returns:
            Scales `(dim,)`, or the Cholesky factor of the covariance `(dim, dim)`.
        """
        if self.pool:
            used = self.count > 1
            count = self.count[used].sum() - used.sum() + 1
            squares = self.squares[used].sum(0)
        else:
            count, squares = self.count[lane], self.squares[lane]
        count = count.clamp(min=2)
        covariance = squares / (count - 1) * (count / (count + 5))
        shrink = 1e-3 * 5 / (count + 5)
        if not self.dense:
            return (covariance + shrink).sqrt()
        factor: Tensor = torch.linalg.cholesky(covariance + shrink * torch.eye(len(covariance)))
        return factor

    def clear(self, lane: int) -> None:
        """Forget the draws of a lane."""
        self.count[lane] = 0
        self.mean[lane] = 0
        self.squares[lane] = 0

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint keeps."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go back to a state that `state` returned."""
        self.count, self.mean, self.squares = state["count"], state["mean"], state["squares"]
