"""One leapfrog of every chain at once: each lane is a state machine, and `step` turns all of them.

A lane is always in the middle of a trajectory; a lane whose trajectory ends begins the next one in
the same step, so no lane waits for another. Momenta are whitened: with position scale `S`
(inverse mass matrix S Sᵀ) the momentum is S times Stan's, so that its law is N(0, 1), the kinetic
energy is half its square, and the products of the U-turn test are plain dot products.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pbnn.infer.adaptation import average_step_size, search_step_size
from pbnn.infer.noise import normals

__all__ = ["STATS", "UNIFORMS", "Density", "Lanes", "Outcome", "Rule", "begin", "step"]

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

_MAX_ENERGY_ERROR = 1000.0
_GOLDEN = 0.6180339887498949


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
    is built next to the old tree, which has as many leaves, both together are one of level depth + 1.
    `start_*[:, k]` hold the first leaf of the open sub-tree of level k, `end_r[:, k − 1]` the last
    leaf of its first half. Partial sums of momenta take the place of each sub-tree's own sum.
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


class _Leaf(NamedTuple):
    """A point that a leapfrog reached; `delta` is the initial energy minus its own."""

    z: Tensor
    r: Tensor
    g: Tensor
    lp: Tensor
    energy: Tensor
    delta: Tensor
    diverging: Tensor


class _Tree(NamedTuple):
    """The lanes with a leaf added, and what became of their trajectories."""

    lanes: Lanes
    merged: Tensor
    ended: Tensor
    diverging: Tensor
    saturated: Tensor


def begin(
    z: Tensor,
    lp: Tensor,
    g: Tensor,
    keys: Tensor,
    rule: Rule,
    *,
    scale: Tensor,
    step_size: Tensor,
    target_accept: float,
) -> Lanes:
    """Return lanes at the start of their first trajectory.

    Args:
        z: Positions `(lanes, dim)`, with finite log density.
        lp: Their log densities `(lanes,)`.
        g: Their gradients `(lanes, dim)`.
        keys: Keys of the lanes, from `lane_keys`.
        rule: What makes a trajectory.
        scale: Scales of the positions `(lanes, dim)`, or Cholesky factors `(lanes, dim, dim)`.
        step_size: Step sizes `(lanes,)`.
        target_accept: Acceptance statistic that the warm-up aims at.
    """
    lanes, dim = z.shape
    levels = rule.max_tree_depth if rule.algorithm == "nuts" else 0
    real = z.new_zeros(lanes)
    whole = torch.zeros(lanes, dtype=torch.int64, device=z.device)
    no = torch.zeros(lanes, dtype=torch.bool, device=z.device)
    fields: dict[str, Tensor] = dict.fromkeys(Lanes._fields, real)
    fields |= dict.fromkeys(("depth", "leaf", "n_steps", "goal", "momenta"), whole)
    fields |= dict.fromkeys(("leapfrogs", "iteration", "stop"), whole)
    fields |= dict.fromkeys(("searching", "adapting", "paused"), no)
    fields |= dict.fromkeys(("z", "far_z", "proposal_z", "sample_z"), z)
    fields |= dict.fromkeys(("g", "far_g", "proposal_g", "sample_g"), g)
    fields |= dict.fromkeys(("r", "far_r", "rho"), torch.zeros_like(z))
    fields |= dict.fromkeys(("start_r", "start_rho"), z.new_zeros(lanes, levels + 1, dim))
    fields |= {
        "keys": keys,
        "proposal_lp": lp,
        "sample_lp": lp,
        "end_r": z.new_zeros(lanes, levels, dim),
        "scale": scale,
        "step_size": step_size,
        "target_accept": real + target_accept,
        "average_center": (10 * step_size).log(),
    }
    # Lanes are written in place later, so no two fields may share memory.
    state = Lanes(**{name: value.clone() for name, value in fields.items()})
    fresh = ~no
    return _renew(state, fresh, no, no, normals(keys, whole, dim, z.dtype), rule)


def step(
    lanes: Lanes,
    uniforms: Tensor,
    density: Density,
    rule: Rule,
    *,
    lazy: bool = False,
) -> tuple[Lanes, Outcome]:
    """Make one leapfrog in every lane, with all that follows from it.

    Args:
        lanes: State of the lanes.
        uniforms: Uniform numbers `(lanes, UNIFORMS)`, row `leapfrogs` of each lane.
        density: Log density and gradient.
        rule: What makes a trajectory.
        lazy: Draw momenta only where some lane needs one: cheaper, but it reads values, so that the
            step cannot be traced.

    Returns:
        The new state, and what the transitions that ended leave behind.
    """
    leaf = _leapfrog(lanes, density)
    extend = _extend_tree if rule.algorithm == "nuts" else _extend_path
    sampling = ~(lanes.searching | lanes.paused)
    tree = extend(lanes, leaf, uniforms, sampling, rule)
    finished = tree.ended & sampling
    outcome = _outcome(tree, finished)
    fresh = tree.ended | ~sampling
    state = _adapt(tree.lanes, leaf, finished, outcome)
    state = _count(lanes, state, fresh, finished)
    momentum = state.r
    if not lazy or bool(fresh.any()):
        momentum = normals(state.keys, state.momenta, leaf.z.shape[1], leaf.z.dtype)
    grown = tree.merged & ~fresh
    turned = grown & ((uniforms[:, 2] < 0.5) != (lanes.direction > 0))
    return _renew(state, fresh, grown, turned, momentum, rule), outcome


def _pick(mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """Choose by lane (or by lane and level)."""
    return torch.where(mask.reshape(mask.shape + (1,) * (no.ndim - mask.ndim)), yes, no)


def _apply(scale: Tensor, vector: Tensor, *, transpose: bool = False) -> Tensor:
    if scale.ndim == 2:
        return scale * vector
    return ((scale.mT if transpose else scale) @ vector[:, :, None]).squeeze(-1)


def _leapfrog(lanes: Lanes, density: Density) -> _Leaf:
    stride = (lanes.direction * lanes.step_size)[:, None]
    r = lanes.r + 0.5 * stride * _apply(lanes.scale, lanes.g, transpose=True)
    z = lanes.z + stride * _apply(lanes.scale, r)
    lp, g = density(z)
    r = r + 0.5 * stride * _apply(lanes.scale, g, transpose=True)
    energy = 0.5 * (r * r).sum(1) - lp
    delta = lanes.start_energy - energy
    delta = torch.where(delta.isfinite(), delta, torch.full_like(delta, -torch.inf))
    return _Leaf(z, r, g, lp, energy, delta, delta < -_MAX_ENERGY_ERROR)


def _extend_tree(
    lanes: Lanes, leaf: _Leaf, uniforms: Tensor, sampling: Tensor, rule: Rule
) -> _Tree:
    """Add a leaf: multinomial choice within the sub-tree, biased progressive choice between trees.

    Betancourt (2017), appendices A.3 and A.4; reservoir sampling gives each leaf of a sub-tree the
    probability that Stan's recursion gives it.
    """
    weight = torch.logaddexp(lanes.subtree_log_weight, leaf.delta)
    chosen = uniforms[:, 0].log() < leaf.delta - weight
    lanes = lanes._replace(
        proposal_z=_pick(chosen, leaf.z, lanes.proposal_z),
        proposal_g=_pick(chosen, leaf.g, lanes.proposal_g),
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
        log_weight=torch.where(
            merged, torch.logaddexp(lanes.log_weight, weight), lanes.log_weight
        ),
        depth=lanes.depth + merged,
    )
    return _Tree(lanes, merged, ended, leaf.diverging, merged & deep & ~top_turning)


def _extend_path(
    lanes: Lanes, leaf: _Leaf, uniforms: Tensor, sampling: Tensor, rule: Rule
) -> _Tree:
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
    return _Tree(lanes, torch.zeros_like(reached), ended, leaf.diverging, saturated)


def _moved(lanes: Lanes, leaf: _Leaf, moved: Tensor) -> dict[str, Tensor]:
    """Return the fields of the sample after its move to the proposal, and the leaf's counts."""
    return {
        "sample_z": _pick(moved, lanes.proposal_z, lanes.sample_z),
        "sample_g": _pick(moved, lanes.proposal_g, lanes.sample_g),
        "sample_lp": torch.where(moved, lanes.proposal_lp, lanes.sample_lp),
        "sample_energy": torch.where(moved, lanes.proposal_energy, lanes.sample_energy),
        "accept_sum": lanes.accept_sum + leaf.delta.clamp(max=0).exp(),
        "n_steps": lanes.n_steps + 1,
    }


def _check_turns(lanes: Lanes, leaf: _Leaf) -> tuple[Lanes, Tensor, Tensor]:
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
    start_r = _pick(opens, r, lanes.start_r)
    start_rho = _pick(opens, before, lanes.start_rho)
    first_r, first_rho = start_r[:, 1:], start_rho[:, 1:]
    middle_r, middle_rho = start_r[:, :-1], start_rho[:, :-1]
    last_r, rho = lanes.end_r, before + r
    whole = rho - first_rho
    left = middle_rho + middle_r - first_rho
    right = rho - middle_rho + last_r
    turns = torch.zeros_like(levels[None] > index)
    for total, one, other in (
        (whole, first_r, r),
        (left, first_r, middle_r),
        (right, last_r, r),
    ):
        turns = turns | ((total * one).sum(-1) <= 0) | ((total * other).sum(-1) <= 0)
    closes = ((index + 1) & ((1 << levels) - 1) == 0) & (levels <= depth)
    top = (levels == depth + 1) & (index + 1 == (1 << depth))
    halfway = (index + 1) & ((1 << levels) - 1) == (1 << (levels - 1))
    lanes = lanes._replace(
        rho=rho[:, 0],
        start_r=start_r,
        start_rho=start_rho,
        end_r=_pick(halfway & (levels <= depth), r, lanes.end_r),
    )
    return lanes, (turns & closes).any(1), (turns & top).any(1)


def _outcome(tree: _Tree, finished: Tensor) -> Outcome:
    lanes = tree.lanes
    stats = {
        "lp": lanes.sample_lp,
        "energy": lanes.sample_energy,
        "energy_error": lanes.sample_energy - lanes.start_energy,
        "acceptance_rate": lanes.accept_sum / lanes.n_steps,
        "step_size": lanes.step_size,
        "tree_depth": lanes.depth,
        "n_steps": lanes.n_steps,
        "diverging": tree.diverging,
        "reached_max_treedepth": tree.saturated,
    }
    row = torch.stack([stats[name].to(lanes.z.dtype) for name in STATS], 1)
    return Outcome(finished, lanes.sample_z, row)


def _adapt(lanes: Lanes, leaf: _Leaf, finished: Tensor, outcome: Outcome) -> Lanes:
    """Give each lane the step size of its next leapfrog or trajectory."""
    accept = outcome.stats[:, STATS.index("acceptance_rate")]
    log_step, count, error, mean = average_step_size(
        accept,
        lanes.target_accept,
        lanes.average_center,
        lanes.average_count,
        lanes.average_error,
        lanes.average_mean,
    )
    averaged = finished & lanes.adapting
    tried, way = search_step_size(leaf.delta, lanes.step_size, lanes.search_way)
    trying = lanes.searching & ~lanes.paused
    found = trying & (way == 0)
    zero = torch.zeros_like(error)
    step_size = torch.where(averaged, log_step.exp(), lanes.step_size)
    step_size = torch.where(trying, tried, step_size)
    return lanes._replace(
        step_size=step_size,
        search_way=torch.where(trying, way, lanes.search_way),
        searching=lanes.searching & ~found,
        average_center=torch.where(found, (10 * step_size).log(), lanes.average_center),
        average_count=torch.where(found, zero, torch.where(averaged, count, lanes.average_count)),
        average_error=torch.where(found, zero, torch.where(averaged, error, lanes.average_error)),
        average_mean=torch.where(found, zero, torch.where(averaged, mean, lanes.average_mean)),
    )


def _count(before: Lanes, lanes: Lanes, fresh: Tensor, finished: Tensor) -> Lanes:
    """Advance the counters of the lanes that run; a lane at its stop pauses until it is let go on."""
    running = ~before.paused
    iteration = lanes.iteration + finished
    return lanes._replace(
        momenta=lanes.momenta + (fresh & running),
        leapfrogs=lanes.leapfrogs + running,
        iteration=iteration,
        paused=lanes.paused | (finished & (iteration == lanes.stop)),
    )


def _renew(
    lanes: Lanes,
    fresh: Tensor,
    grown: Tensor,
    turned: Tensor,
    momentum: Tensor,
    rule: Rule,
) -> Lanes:
    """Begin a trajectory in fresh lanes, and the next sub-tree in those that have grown.

    A paused lane is fresh in every step: it begins the same trajectory again, and so stands still.
    The first doubling always goes forward: momenta are symmetric, so its direction is free.
    """
    ends = {
        name: (
            _pick(turned, getattr(lanes, f"far_{name}"), getattr(lanes, name)),
            _pick(turned, getattr(lanes, name), getattr(lanes, f"far_{name}")),
        )
        for name in ("z", "r", "g")
    }
    begun = {"z": lanes.sample_z, "r": momentum, "g": lanes.sample_g}
    new = {name: _pick(fresh, begun[name], near) for name, (near, _) in ends.items()}
    new |= {f"far_{name}": _pick(fresh, begun[name], far) for name, (_, far) in ends.items()}
    energy = 0.5 * (momentum * momentum).sum(1) - lanes.sample_lp
    zero, none = torch.zeros_like(lanes.leaf), torch.zeros_like(lanes.direction)
    started = fresh | grown
    depth = torch.where(fresh, zero, lanes.depth)
    if rule.algorithm == "nuts":
        # The old tree and the sub-tree to come are the halves of one tree of level depth + 1.
        slots = torch.arange(lanes.start_r.shape[1], device=depth.device)
        top = started[:, None] & (slots == depth[:, None] + 1)
        new["start_r"] = _pick(top, new["far_r"][:, None], lanes.start_r)
        new["start_rho"] = _pick(top, torch.zeros_like(lanes.start_rho), lanes.start_rho)
        new["end_r"] = _pick(top[:, 1:], new["r"][:, None], lanes.end_r)
        new["rho"] = _pick(fresh, momentum, lanes.rho)
    else:
        phase = (lanes.momenta.to(energy.dtype) + 0.5) * _GOLDEN
        goal = (2 * rule.path_length * (phase - phase.floor()) / lanes.step_size).ceil()
        goal = goal.clamp(1, 1 << rule.max_tree_depth).to(zero.dtype)
        new["goal"] = _pick(fresh, goal, lanes.goal)
    direction = torch.where(turned, -lanes.direction, lanes.direction)
    return lanes._replace(
        **new,
        direction=torch.where(fresh, torch.ones_like(direction), direction),
        depth=depth,
        leaf=torch.where(started, zero, lanes.leaf + 1),
        n_steps=torch.where(fresh, zero, lanes.n_steps),
        accept_sum=torch.where(fresh, none, lanes.accept_sum),
        start_energy=torch.where(fresh, energy, lanes.start_energy),
        sample_energy=torch.where(fresh, energy, lanes.sample_energy),
        log_weight=torch.where(fresh, none, lanes.log_weight),
        subtree_log_weight=torch.where(started, none - torch.inf, lanes.subtree_log_weight),
    )
