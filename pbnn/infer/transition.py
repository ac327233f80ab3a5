"""One step of every lane: a leapfrog, the end of a transition, the start of the next.

Each lane is a state machine, always in the middle of a trajectory; a lane whose trajectory ends
begins the next one in the same step, so no lane waits for another. A step is a pure function of
tensors without a branch on their values, so that it can be traced and compiled with the density.
"""

import torch
from torch import Tensor

from pbnn.infer.adaptation import average_step_size, search_step_size
from pbnn.infer.lanes import STATS, Density, Lanes, Outcome, Rule, pick
from pbnn.infer.noise import normals
from pbnn.infer.trajectory import Leaf, Tree, extend_path, extend_tree, leapfrog

__all__ = ["begin", "next_momentum", "step"]

_GOLDEN = 0.6180339887498949


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
    dense = torch.contiguous_format
    state = Lanes(**{name: value.clone(memory_format=dense) for name, value in fields.items()})
    fresh = ~no
    return _renew(state, fresh, no, no, normals(keys, whole, dim, z.dtype), rule)


def step(
    lanes: Lanes,
    uniforms: Tensor,
    density: Density,
    rule: Rule,
    momentum: Tensor | None = None,
) -> tuple[Lanes, Outcome | None]:
    """Make one leapfrog in every lane, with all that follows from it.

    Args:
        lanes: State of the lanes.
        uniforms: Uniform numbers `(lanes, UNIFORMS)`, row `leapfrogs` of each lane.
        density: Log density and gradient.
        rule: What makes a trajectory.
        momentum: Normal vectors `(lanes, dim)` of number `next_momentum` of each lane. Without them
            the step draws them when they are needed, and leaves out what changes no lane: many
            calls less, but it reads values, so that it cannot be traced.

    Returns:
        The new state, and what the transitions that ended leave behind (None without `momentum`
        where none ended).
    """

    def some(mask: Tensor) -> bool:
        return momentum is not None or bool(mask.any())

    leaf = leapfrog(lanes, density)
    extend = extend_tree if rule.algorithm == "nuts" else extend_path
    sampling = ~(lanes.searching | lanes.paused)
    tree = extend(lanes, leaf, uniforms, sampling, rule)
    finished = tree.ended & sampling
    fresh = tree.ended | ~sampling
    grown = tree.merged & ~fresh
    outcome = _outcome(tree, finished) if some(finished) else None
    state = _adapt(tree.lanes, leaf, finished) if some(finished | ~sampling) else tree.lanes
    state = _count(lanes, state, fresh, finished)
    if not some(fresh | grown):
        return state._replace(leaf=lanes.leaf + 1), outcome
    if momentum is None:
        momentum = state.r
        if some(fresh):
            momentum = normals(state.keys, state.momenta, leaf.z.shape[1], leaf.z.dtype)
    turned = grown & ((uniforms[:, 2] < 0.5) != (lanes.direction > 0))
    return _renew(state, fresh, grown, turned, momentum, rule), outcome


def next_momentum(lanes: Lanes) -> Tensor:
    """Return the number of the momentum with which each lane would begin a trajectory now."""
    return lanes.momenta + ~lanes.paused


def _outcome(tree: Tree, finished: Tensor) -> Outcome:
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


def _adapt(lanes: Lanes, leaf: Leaf, finished: Tensor) -> Lanes:
    """Give each lane the step size of its next leapfrog or trajectory."""
    log_step, count, error, mean = average_step_size(
        lanes.accept_sum / lanes.n_steps,
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
    """Advance the counters of lanes that run; a lane at its stop pauses until it is let go on."""
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
            pick(turned, getattr(lanes, f"far_{name}"), getattr(lanes, name)),
            pick(turned, getattr(lanes, name), getattr(lanes, f"far_{name}")),
        )
        for name in ("z", "r", "g")
    }
    begun = {"z": lanes.sample_z, "r": momentum, "g": lanes.sample_g}
    new = {name: pick(fresh, begun[name], near) for name, (near, _) in ends.items()}
    new |= {f"far_{name}": pick(fresh, begun[name], far) for name, (_, far) in ends.items()}
    energy = 0.5 * (momentum * momentum).sum(1) - lanes.sample_lp
    zero, none = torch.zeros_like(lanes.leaf), torch.zeros_like(lanes.direction)
    started = fresh | grown
    depth = torch.where(fresh, zero, lanes.depth)
    if rule.algorithm == "nuts":
        # The old tree and the sub-tree to come are the halves of one tree of level depth + 1.
        slots = torch.arange(lanes.start_r.shape[1], device=depth.device)
        top = started[:, None] & (slots == depth[:, None] + 1)
        new["start_r"] = pick(top, new["far_r"][:, None], lanes.start_r)
        new["start_rho"] = pick(top, torch.zeros_like(lanes.start_rho), lanes.start_rho)
        new["end_r"] = pick(top[:, 1:], new["r"][:, None], lanes.end_r)
        new["rho"] = pick(fresh, momentum, lanes.rho)
    else:
        phase = (lanes.momenta.to(energy.dtype) + 0.5) * _GOLDEN
        goal = (2 * rule.path_length * (phase - phase.floor()) / lanes.step_size).ceil()
        goal = goal.clamp(1, 1 << rule.max_tree_depth).to(zero.dtype)
        new["goal"] = pick(fresh, goal, lanes.goal)
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
