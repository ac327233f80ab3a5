"""The state of all chains between two leapfrogs, and the words that the sampler's files share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

__all__ = ["STATS", "UNIFORMS", "Density", "Lanes", "Outcome", "Rule", "pick"]

Density = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Positions `(lanes, dim)` to log densities `(lanes,)` and gradients `(lanes, dim)`."""

STATS = (
    "lp",
    "energy",
    "energy_error",
    "acceptance_rate",
    "step_size",
    "tree_depth",
    "n_steps",
    "diverging",
    "reached_max_treedepth",
)
"""Statistics of a transition, under ArviZ's names, in the order of `Outcome.stats`."""

UNIFORMS = 3
"""Uniform numbers that a lane consumes in a step: leaf, tree, direction."""


@dataclass(frozen=True)
class Rule:
    """What makes a trajectory.

    Attributes:
        algorithm: "nuts" (Hoffman & Gelman 2014; Betancourt 2017) or "hmc".
        max_tree_depth: Largest number of doublings; trajectories of HMC have at most as many
            leapfrogs as that depth allows.
        path_length: Mean length of a trajectory of HMC, in whitened units; each is jittered.
    """

    algorithm: Literal["nuts", "hmc"] = "nuts"
    max_tree_depth: int = 10
    path_length: float = torch.pi / 2


class Lanes(NamedTuple):
    """State of all chains; the first dimension of each tensor is the lane.

    A trajectory has a moving end, which the next leapfrog extends, and a far end. Levels of the
    tree are counted from 1: a sub-tree of level k has 2ᵏ leaves. While a sub-tree of level `depth`
    is built next to the old tree, which has as many leaves, both are the halves of one of level
    depth + 1. `start_*[:, k]` hold the first leaf of the open sub-tree of level k, and
    `end_r[:, k − 1]` the last leaf of its first half. `rho` is the sum of all momenta so far, and
    `start_rho` that sum before a first leaf: their difference is the sum over a sub-tree.
    """

    keys: Tensor
    z: Tensor
    r: Tensor
    g: Tensor
    far_z: Tensor
    far_r: Tensor
    far_g: Tensor
    proposal_z: Tensor
    proposal_g: Tensor
    proposal_lp: Tensor
    proposal_energy: Tensor
    sample_z: Tensor
    sample_g: Tensor
    sample_lp: Tensor
    sample_energy: Tensor
    rho: Tensor
    start_r: Tensor
    start_rho: Tensor
    end_r: Tensor
    log_weight: Tensor
    subtree_log_weight: Tensor
    start_energy: Tensor
    accept_sum: Tensor
    direction: Tensor
    depth: Tensor
    leaf: Tensor
    n_steps: Tensor
    goal: Tensor
    scale: Tensor
    step_size: Tensor
    search_way: Tensor
    average_center: Tensor
    average_count: Tensor
    average_error: Tensor
    average_mean: Tensor
    target_accept: Tensor
    momenta: Tensor
    leapfrogs: Tensor
    iteration: Tensor
    stop: Tensor
    searching: Tensor
    adapting: Tensor
    paused: Tensor


class Outcome(NamedTuple):
    """What a step leaves behind.

    Attributes:
        finished: Lanes whose transition ended in this step, `(lanes,)`.
        z: Their draws, `(lanes, dim)`; other rows have no meaning.
        stats: Their statistics, `(lanes, len(STATS))`, in the order of `STATS`.
    """

    finished: Tensor
    z: Tensor
    stats: Tensor


def pick(mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """Choose by lane (or by lane and level)."""
    return torch.where(mask.reshape(mask.shape + (1,) * (no.ndim - mask.ndim)), yes, no)
