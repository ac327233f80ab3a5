"""The state of a run between two looks at it: lanes, ring of new draws, windows, kept draws."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pbnn.errors import FitError
from pbnn.infer.adaptation import MassEstimate, warmup_schedule
from pbnn.infer.checkpoint import Store
from pbnn.infer.lanes import STATS, UNIFORMS, Density, Lanes, Outcome, Rule
from pbnn.infer.noise import lane_keys, uniforms
from pbnn.infer.options import Options
from pbnn.infer.transition import begin, step

__all__ = ["Engine", "Ring", "Stepper", "eager", "record"]

BLOCK = 32
"""Largest number of leapfrogs between two looks at the lanes."""
_RING_VALUES = 2**25
"""Bound on the values that the ring holds, for networks with very many weights."""
_STEP_SIZE, _DIVERGING, _N_STEPS, _DEPTH = (
    STATS.index(name) for name in ("step_size", "diverging", "n_steps", "tree_depth")
)


class Ring(NamedTuple):
    """Transitions that ended since the last look; the last slot takes what nobody wants.

    Attributes:
        z: Draws `(lanes, slots, dim)`.
        stats: Statistics `(lanes, slots, len(STATS))`.
        used: Slots in use, `(lanes,)`.
    """

    z: Tensor
    stats: Tensor
    used: Tensor


Stepper = Callable[[Lanes, Ring, int], tuple[Lanes, Ring]]
"""Takes a number of leapfrogs; what it was given may be written in place."""


def eager(density: Density, rule: Rule) -> Stepper:
    """Return a stepper that runs `step` call by call."""

    def take(lanes: Lanes, ring: Ring, steps: int) -> tuple[Lanes, Ring]:
        # Random numbers by the block: their many small calls cost as much for one leapfrog.
        counter = torch.arange(steps, device=ring.used.device)[:, None] + lanes.leapfrogs
        for row in uniforms(lanes.keys, counter, UNIFORMS, lanes.z.dtype):
            lanes, outcome = step(lanes, row, density, rule)
            ring = ring if outcome is None else record(ring, outcome)
        return lanes, ring

    return take


def record(ring: Ring, outcome: Outcome) -> Ring:
    """Put the transitions that ended in a step into the ring."""
    lane = torch.arange(len(ring.used), device=ring.used.device)
    slot = torch.where(outcome.finished, ring.used, torch.full_like(ring.used, ring.z.shape[1] - 1))
    return Ring(
        ring.z.index_put((lane, slot), outcome.z),
        ring.stats.index_put((lane, slot), outcome.stats),
        ring.used + outcome.finished,
    )


class Engine:
    """All that a run knows; `advance` takes one block of leapfrogs and looks at what came.

    Warm-up is counted by each lane for itself: a lane pauses where one of its windows closes, until
    the next look, so that its draws do not depend on when that is.

    Args:
        options: How to sample.
        lanes: State of the lanes.
        folder: Folder of the mapped draws; None keeps them in memory.
    """

    def __init__(self, options: Options, lanes: Lanes, folder: Path | None = None) -> None:
        chains, dim = lanes.z.shape
        self.options, self.lanes = options, lanes
        self.schedule = warmup_schedule(options.warmup)
        stops = (*self.schedule.ends, options.warmup, options.transitions)
        self.stops = np.array(sorted({stop for stop in stops if stop > 0}))
        self.stop = lanes.stop.cpu().numpy().copy()
        slots = max(1, min(BLOCK, _RING_VALUES // (chains * dim)))
        self.ring = Ring(
            lanes.z.new_zeros(chains, slots + 1, dim),
            lanes.z.new_zeros(chains, slots + 1, len(STATS)),
            torch.zeros_like(lanes.leaf),
        )
        self.mass = MassEstimate(chains, dim, dense=options.dense_mass, pool=options.pool_mass)
        self.store = Store(chains, options.draws, dim, lanes.z.dtype, folder)
        count = options.warmup if options.keep_warmup else 0
        self.warmup = Store(chains, count, dim, lanes.z.dtype, folder, "warmup_")
        self.lengths = np.zeros((chains, options.transitions), dtype=np.int32)
        self.done = np.zeros(chains, dtype=np.int64)
        self.divergences = np.zeros((chains, 2), dtype=np.int64)
        self.calls = 0

    @classmethod
    def start(
        cls,
        density: Density,
        z: Tensor,
        options: Options,
        numbers: Sequence[int] | None = None,
        folder: Path | None = None,
    ) -> "Engine":
        """Return an engine with its lanes at the start.

        Args:
            density: Log density and gradient.
            z: Starts `(chains, dim)`.
            options: How to sample.
            numbers: Number of each chain in its run; 0, 1, 2, … by default.
            folder: Folder of the mapped draws.

        Raises:
            FitError: A start has no finite log density or gradient.
        """
        chains, dim = z.shape
        lp, g = density(z)
        bad = (~(lp.isfinite() & g.isfinite().all(1))).nonzero()[:, 0].tolist()
        if bad:
            raise FitError(
                f"the log density or its gradient is not finite at the start of chain {bad[0]} "
                f"(log density {float(lp[bad[0]]):.6g}); pass other values as init="
            )
        keys = lane_keys(options.seed, list(range(chains) if numbers is None else numbers))
        lanes = begin(
            z,
            lp,
            g,
            keys.to(z.device),
            options.rule,
            scale=torch.eye(dim).repeat(chains, 1, 1).to(z)
            if options.dense_mass
            else torch.ones_like(z),
            step_size=torch.full_like(lp, options.step_size or 1.0),
            target_accept=options.target_accept,
        )
        lanes.searching.fill_(options.step_size is None)
        lanes.adapting.fill_(options.warmup > 0)
        engine = cls(options, lanes, folder)
        lanes.stop.fill_(int(engine.stops[0]))
        engine.stop[:] = engine.stops[0]
        return engine

    @property
    def complete(self) -> bool:
        """Whether all chains have all their draws."""
        return bool((self.done == self.options.transitions).all())

    @property
    def kept(self) -> int:
        """Number of draws that every chain has."""
        return max(0, int(self.done.min() - self.options.warmup) // self.options.thin)

    def advance(self, take: Stepper) -> None:
        """Take one block of leapfrogs, then keep the draws and turn the corners of the warm-up."""
        steps = self.ring.z.shape[1] - 1
        self.lanes, self.ring = take(self.lanes, self.ring, steps)
        self.calls += steps
        self._drain()
        for lane in np.flatnonzero(self.done == self.stop):
            self._turn(int(lane))

    def _drain(self) -> None:
        count = self.ring.used.cpu().numpy().copy()
        most = int(count.max())
        if most == 0:
            return
        z, stats = self.ring.z[:, :most].cpu(), self.ring.stats[:, :most].cpu()
        self.ring.used.zero_()
        new = np.arange(most) < count[:, None]
        iteration = self.done[:, None] + np.arange(most)
        lane, slot = np.nonzero(new)
        self.lengths[lane, iteration[new]] = stats[lane, slot, _N_STEPS].numpy()
        warm = iteration < self.options.warmup
        diverging = stats[:, :, _DIVERGING].numpy() > 0
        self.divergences += np.stack([(diverging & new & w).sum(1) for w in (warm, ~warm)], 1)
        self._learn(z, new, iteration)
        after = iteration - self.options.warmup + 1
        kept = new & (after > 0) & (after % self.options.thin == 0)
        self.store.put(kept, after // self.options.thin - 1, z, stats)
        if self.options.keep_warmup:
            self.warmup.put(new & warm, iteration, z, stats)
        # Last, so that an interrupt before it leaves a state that counts whole draws only.
        self.done = self.done + count

    def _learn(self, z: Tensor, new: np.ndarray[Any, Any], iteration: np.ndarray[Any, Any]) -> None:
        if not self.schedule.ends or self.done.min() >= self.schedule.ends[-1]:
            return
        inside = (self.schedule.start <= iteration) & (iteration < self.schedule.ends[-1]) & new
        for slot in range(z.shape[1]):
            lanes = torch.from_numpy(np.flatnonzero(inside[:, slot]))
            if len(lanes):
                self.mass.add(z[lanes, slot], lanes)

    def _turn(self, lane: int) -> None:
        """Let a paused lane go on behind the end of its window or warm-up; at its end it stays."""
        done, lanes = int(self.done[lane]), self.lanes
        if done == self.options.transitions:
            return
        if done in self.schedule.ends:
            lanes.scale[lane] = self.mass.scale(lane).to(lanes.scale)
            self.mass.clear(lane)
            lanes.searching[lane] = True
            lanes.search_way[lane] = 0
        if done == self.options.warmup:
            lanes.step_size[lane] = lanes.average_mean[lane].exp()
            lanes.adapting[lane] = False
        self.stop[lane] = lanes.stop[lane] = int(self.stops[self.stops > done][0])
        lanes.paused[lane] = False

    def summary(self) -> dict[str, str]:
        """Return what the progress bar shows."""
        lengths = [row[max(0, n - 50) : n] for row, n in zip(self.lengths, self.done, strict=True)]
        recent = np.concatenate(lengths) if self.done.any() else np.ones(1)
        size = self.lanes.step_size.mean()
        return {
            "draws": f"{self.kept}/{self.options.draws}",
            "step": f"{float(size):.2g}",
            "depth": f"{np.log2(recent + 1).mean():.1f}",
            "divergences": str(int(self.divergences[:, 1].sum())),
        }

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {
            "lanes": self.lanes._asdict(),
            "mass": self.mass.state(),
            "lengths": torch.from_numpy(self.lengths),
            "done": torch.from_numpy(self.done),
            "divergences": torch.from_numpy(self.divergences),
            "calls": self.calls,
        }

    @classmethod
    def restore(
        cls, state: dict[str, Any], options: Options, folder: Path | None = None
    ) -> "Engine":
        """Return an engine at a state that `state` returned."""
        engine = cls(options, Lanes(**state["lanes"]), folder)
        engine.mass.restore(state["mass"])
        engine.lengths = state["lengths"].numpy()
        engine.done = state["done"].numpy()
        engine.divergences = state["divergences"].numpy()
        engine.calls = state["calls"]
        return engine
