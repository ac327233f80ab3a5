"""How to sample: the options of NUTS and HMC, checked once."""

import dataclasses
import operator
from dataclasses import dataclass, field
from typing import Any

from pbnn.errors import FitError
from pbnn.infer.lanes import Rule

__all__ = ["Options", "whole_number"]


def whole_number(name: str, value: Any, *, least: int = 1) -> int:
    """Return an option that counts something, of any integer type, as an int.

    Args:
        name: Name of the option.
        value: What was given.
        least: Smallest value that it may have.

    Raises:
        FitError: It is no whole number, or too small.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise FitError(f"{name}={value!r}; expected a whole number of at least {least}")
    return number


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to sample.

    Attributes:
        warmup: Transitions of the warm-up.
        draws: Kept draws of each chain.
        thin: Transitions for each kept draw.
        target_accept: Acceptance statistic that the warm-up aims at.
        dense_mass: Whether the mass matrix is dense.
        pool_mass: Whether chains share their estimate of it.
        step_size: Step size to begin with; None searches for one. Without warm-up it stays.
        keep_warmup: Whether the transitions of the warm-up are kept, apart from the draws.
        seed: Seed of the run.
        rule: What makes a trajectory.
    """

    warmup: int = 1000
    draws: int = 1000
    thin: int = 1
    target_accept: float = 0.8
    dense_mass: bool = False
    pool_mass: bool = False
    step_size: float | None = None
    keep_warmup: bool = False
    seed: int = 0
    rule: Rule = field(default_factory=Rule)

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name, least in (("warmup", 0), ("draws", 1), ("thin", 1), ("seed", 0)):
            number = whole_number(name, getattr(self, name), least=least)
            object.__setattr__(self, name, number)
        if not 0 < self.target_accept < 1:
            raise FitError(f"target_accept={self.target_accept}; expected a number between 0 and 1")
        if not 1 <= self.rule.max_tree_depth <= 20:
            raise FitError(f"max_tree_depth={self.rule.max_tree_depth}; expected 1 to 20")
        if self.rule.algorithm not in ("nuts", "hmc"):
            raise FitError(f'algorithm={self.rule.algorithm!r}; expected "nuts" or "hmc"')
        if not self.rule.path_length > 0:
            raise FitError(f"path_length={self.rule.path_length}; expected a positive length")
        if self.step_size is not None and not self.step_size > 0:
            raise FitError(f"step_size={self.step_size}; expected a positive number")

    @property
    def transitions(self) -> int:
        """Number of transitions of a chain, warm-up included."""
        return self.warmup + self.draws * self.thin

    def plain(self) -> dict[str, Any]:
        """Return the options by name, as plain JSON values."""
        values = dataclasses.asdict(self)
        return {**values.pop("rule"), **values}
