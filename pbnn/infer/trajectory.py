"""One leapfrog of every lane, and what the point it reached does to each lane's trajectory.

Momenta are whitened: with position scale S (inverse mass matrix S Sᵀ) the momentum is Sᵀ times
Stan's, so that its law is N(0, 1), the kinetic energy is half its square, and the products of
the U-turn test are plain dot products.
"""

from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from pbnn.infer.lanes import Density, Lanes, Rule, pick

__all__ = ["Leaf", "Tree", "extend_path", "extend_tree", "leapfrog"]

_MAX_ENERGY_ERROR = 1000.0


class Leaf(NamedTuple):
    """A point that a leapfrog reached; `delta` is the initial energy minus its own."""

    z: Tensor
    r: Tensor
    g: Tensor
    lp: Tensor
    energy: Tensor
    delta: Tensor
    diverging: Tensor


class Tree(NamedTuple):
    """The lanes with a leaf added, and what became of their trajectories."""

    lanes: Lanes
    merged: Tensor
    ended: Tensor
    diverging: Tensor
    saturated: Tensor


def _apply(scale: Tensor, vector: Tensor, *, transpose: bool = False) -> Tensor:
    if scale.ndim == 2:
        return scale * vector
    return ((scale.mT if transpose else scale) @ vector[:, :, None]).squeeze(-1)


def leapfrog(lanes: Lanes, density: Density) -> Leaf:
    """Move the end of each trajectory by one step (Neal 2011, eqs. 2.28 to 2.30).

    Args:
        lanes: State of the lanes.
        density: Log density and gradient.

    Returns:
        The points reached. Where the energy is not finite, the trajectory diverges.
    """
    stride = (lanes.direction * lanes.step_size)[:, None]
    r = lanes.r + 0.5 * stride * _apply(lanes.scale, lanes.g, transpose=True)
    z = lanes.z + stride * _apply(lanes.scale, r)
    lp, g = density(z)
    r = r + 0.5 * stride * _apply(lanes.scale, g, transpose=True)
    energy = 0.5 * (r * r).sum(1) - lp
    delta = lanes.start_energy - energy
    delta = torch.where(delta.isfinite(), delta, torch.full_like(delta, -torch.inf))
    return Leaf(z, r, g, lp, energy, delta, delta < -_MAX_ENERGY_ERROR)


def extend_tree(lanes: Lanes, leaf: Leaf, uniforms: Tensor, sampling: Tensor, rule: Rule) -> Tree:
    """Add a leaf: multinomial choice within the sub-tree, biased progressive choice between trees.

    Betancourt (2017), appendices A.3 and A.4; reservoir sampling gives each leaf of a sub-tree the
    probability that Stan's recursion gives it.
    """
    weight = torch.logaddexp(lanes.subtree_log_weight, leaf.delta)
    chosen = uniforms[:, 0].log() < leaf.delta - weight
    lanes = lanes._replace(
        proposal_z=pick(chosen, leaf.z, lanes.proposal_z),
        proposal_g=pick(chosen, leaf.g, lanes.proposal_g),
        proposal_lp=torch.where(chosen, leaf.lp, lanes.proposal_lp),
        proposal_energy=torch.where(chosen, leaf.energy, lanes.proposal_energy),
    )
    lanes, turning, top_turning = _check_turns(lanes, leaf)
    complete = lanes.leaf + 1 == (1 << lanes.depth)
    valid = ~leaf.diverging & ~turning
    merged = complete & valid & sampling
    deep = lanes.depth + 1 == rule.max_tree_depth
    ended = ~valid | (merged & (top_turning | deep))
    moved = merged & (uniforms[:, 1].log() < weight - lanes.log_weight)
    lanes = lanes._replace(
        **_moved(lanes, leaf, moved),
        z=leaf.z,
        r=leaf.r,
        g=leaf.g,
        subtree_log_weight=weight,
        log_weight=torch.where(merged, torch.logaddexp(lanes.log_weight, weight), lanes.log_weight),
        depth=lanes.depth + merged,
    )
    return Tree(lanes, merged, ended, leaf.diverging, merged & deep & ~top_turning)


def extend_path(lanes: Lanes, leaf: Leaf, uniforms: Tensor, sampling: Tensor, rule: Rule) -> Tree:
    """Add a leaf to a trajectory of HMC; at its goal it is accepted or refused (Neal 2011)."""
    reached = lanes.leaf + 1 >= lanes.goal
    moved = reached & ~leaf.diverging & sampling & (uniforms[:, 1].log() < leaf.delta)
    lanes = lanes._replace(
        proposal_z=leaf.z,
        proposal_g=leaf.g,
        proposal_lp=leaf.lp,
        proposal_energy=leaf.energy,
        z=leaf.z,
        r=leaf.r,
        g=leaf.g,
    )
    lanes = lanes._replace(**_moved(lanes, leaf, moved))
    saturated = reached & (lanes.goal == (1 << rule.max_tree_depth))
    ended = reached | leaf.diverging
    return Tree(lanes, torch.zeros_like(reached), ended, leaf.diverging, saturated)


def _moved(lanes: Lanes, leaf: Leaf, moved: Tensor) -> dict[str, Tensor]:
    """Return the fields of the sample after its move to the proposal, and the leaf's counts."""
    return {
        "sample_z": pick(moved, lanes.proposal_z, lanes.sample_z),
        "sample_g": pick(moved, lanes.proposal_g, lanes.sample_g),
        "sample_lp": torch.where(moved, lanes.proposal_lp, lanes.sample_lp),
        "sample_energy": torch.where(moved, lanes.proposal_energy, lanes.sample_energy),
        "accept_sum": lanes.accept_sum + leaf.delta.clamp(max=0).exp(),
        "n_steps": lanes.n_steps + 1,
    }


def _check_turns(lanes: Lanes, leaf: Leaf) -> tuple[Lanes, Tensor, Tensor]:
    """Update the checkpoints with a leaf, and test all sub-trees that it completes.

    The generalised U-turn test (Betancourt 2017, appendix A.4.2) on each sub-tree, and Stan's two
    extra ones across the seam of its halves: first half with the first leaf of the second, last
    leaf of the first half with the second.

    Returns:
        The lanes; whether some sub-tree of the new half turns; whether the whole tree turns.
    """
    levels = torch.arange(1, lanes.end_r.shape[1] + 1, device=leaf.z.device)
    slots = torch.arange(lanes.end_r.shape[1] + 1, device=leaf.z.device)
    index, depth = lanes.leaf[:, None], lanes.depth[:, None]
    before, r = lanes.rho[:, None], leaf.r[:, None]
    opens = (index & ((1 << slots) - 1) == 0) & (slots <= depth)
    start_r = pick(opens, r, lanes.start_r)
    start_rho = pick(opens, before, lanes.start_rho)
    first_r, first_rho = start_r[:, 1:], start_rho[:, 1:]
    middle_r, middle_rho = start_r[:, :-1], start_rho[:, :-1]
    last_r, rho = lanes.end_r, before + r
    whole = rho - first_rho
    left = middle_rho + middle_r - first_rho
    right = rho - middle_rho + last_r
    ends = ((whole, first_r, r), (left, first_r, middle_r), (right, last_r, r))
    products = [(total * end).sum(-1) for total, *both in ends for end in both]
    turns = reduce(torch.minimum, products) <= 0
    closes = ((index + 1) & ((1 << levels) - 1) == 0) & (levels <= depth)
    top = (levels == depth + 1) & (index + 1 == (1 << depth))
    halfway = (index + 1) & ((1 << levels) - 1) == (1 << levels) // 2
    lanes = lanes._replace(
        rho=rho[:, 0],
        start_r=start_r,
        start_rho=start_rho,
        end_r=pick(halfway & (levels <= depth), r, lanes.end_r),
    )
    return lanes, (turns & closes).any(1), (turns & top).any(1)
