"""Draw from a density: run an engine to its end, with checkpoints, progress and Ctrl-C."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pbnn.errors import FileError
from pbnn.infer.checkpoint import Checkpoint
from pbnn.infer.engine import Engine, Stepper, eager
from pbnn.infer.lanes import STATS, Density
from pbnn.infer.options import Options
from pbnn.progress import progress_bar

__all__ = ["SamplerResult", "sample"]

_BOOLEAN = ("diverging", "reached_max_treedepth")
_WHOLE = ("tree_depth", "n_steps")


@dataclass(frozen=True, kw_only=True)
class SamplerResult:
    """Draws of all chains, and how they came about.

    Attributes:
        draws: Unconstrained draws `(chain, draw, dim)`, on the CPU.
        stats: Statistics `(chain, draw)`, under ArviZ's names.
        warmup_draws: The same of the warm-up, every transition; without draws where not asked for.
        warmup_stats: Their statistics.
        step_size: Step sizes after the warm-up, `(chain,)`.
        scale: Scales of the mass matrix `(chain, dim)`, or Cholesky factors `(chain, dim, dim)`.
        lengths: Leapfrogs of each transition, warm-up included, `(chain, transition)`.
        leapfrogs: Leapfrogs of each chain, searches for a step size included, `(chain,)`.
        calls: Leapfrogs that the batch made.
        warmup_divergences: Divergent transitions of the warm-up, `(chain,)`.
        interrupted: Whether Ctrl-C ended the run; chains are then cut to the shortest.
    """

    draws: Tensor
    stats: dict[str, Tensor]
    warmup_draws: Tensor
    warmup_stats: dict[str, Tensor]
    step_size: Tensor
    scale: Tensor
    lengths: Tensor
    leapfrogs: Tensor
    calls: int
    warmup_divergences: Tensor
    interrupted: bool

    @property
    def lockstep_calls(self) -> int:
        """Leapfrogs of the batch, had each transition waited for the longest of all chains."""
        return int(self.lengths.max(0).values.sum())


def sample(
    density: Density,
    init: Callable[[], Tensor],
    options: Options,
    *,
    numbers: Sequence[int] | None = None,
    stepper: Callable[[Engine], Stepper] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    resume: bool = False,
    identity: Mapping[str, Any] | None = None,
    every: float = 60.0,
    progress: bool = False,
) -> SamplerResult:
    """Draw from a density by NUTS or HMC, all chains in one batch.

    Args:
        density: Positions `(chains, dim)` to log densities `(chains,)` and gradients
            `(chains, dim)`. A chain whose value is not finite diverges; the others go on.
        init: Returns the starts `(chains, dim)`; dtype and device of the run are theirs. It is not
            called when a run goes on from a checkpoint.
        options: How to sample.
        numbers: Number of each chain in its run, on which its random numbers depend; 0, 1, 2, …
        stepper: Makes what takes the leapfrogs; by default they run eagerly.
        checkpoint: Folder of the draws and the state from which a killed run goes on; None keeps
            all in memory.
        resume: Go on from the checkpoint, if there is one.
        identity: What else makes the run what it is; a checkpoint with another one is refused.
        every: Seconds between two checkpoints.
        progress: Whether to show a progress bar.

    Returns:
        The draws; after Ctrl-C those that every chain has.

    Raises:
        FitError: A start has no finite density.
        FileError: The checkpoint belongs to another run, or is there and `resume` is False.
    """
    saved = Checkpoint(checkpoint, {**options.plain(), **(identity or {})}) if checkpoint else None
    folder = saved.folder if saved else None
    if saved is not None and saved.exists and not resume:
        raise FileError(
            f"{saved.folder}: holds a checkpoint; pass resume=True to go on from it, or another "
            "checkpoint="
        )
    if saved is not None and saved.exists:
        engine = Engine.restore(saved.load(), options, folder)
    else:
        engine = Engine.start(density, init(), options, numbers, folder)
    take = stepper(engine) if stepper else eager(density, options.rule)
    interrupted, last = False, time.monotonic()
    total = options.transitions * len(engine.done)
    bar = progress_bar(
        label=options.rule.algorithm.upper(),
        unit="transition",
        show=progress,
        total=total,
        initial=int(engine.done.sum()),
    )
    with bar:
        try:
            while not engine.complete:
                engine.advance(take)
                if progress:
                    bar.set_postfix(engine.summary(), refresh=False)
                    bar.update(int(engine.done.sum()) - bar.n)
                if saved and (engine.complete or time.monotonic() - last >= every):
                    saved.save(engine.state())
                    last = time.monotonic()
        except KeyboardInterrupt:
            interrupted = True
    return _result(engine, interrupted)


def _result(engine: Engine, interrupted: bool) -> SamplerResult:
    kept, lanes = engine.kept, engine.lanes
    return SamplerResult(
        draws=engine.store.draws[:, :kept],
        stats=_by_name(engine.store.stats[:, :kept], engine.options),
        warmup_draws=engine.warmup.draws,
        warmup_stats=_by_name(engine.warmup.stats, engine.options),
        step_size=lanes.step_size.cpu(),
        scale=lanes.scale.cpu(),
        lengths=torch.from_numpy(engine.lengths),
        leapfrogs=lanes.leapfrogs.cpu(),
        calls=engine.calls,
        warmup_divergences=torch.from_numpy(engine.divergences[:, 0].copy()),
        interrupted=interrupted,
    )


def _by_name(values: Tensor, options: Options) -> dict[str, Tensor]:
    """Return statistics `(chain, draw, len(STATS))` by name, each of its own kind."""
    stats = {name: values[:, :, i] for i, name in enumerate(STATS)}
    stats |= {name: stats[name] > 0 for name in _BOOLEAN}
    stats |= {name: stats[name].long() for name in _WHOLE}
    if options.rule.algorithm != "nuts":
        del stats["tree_depth"]
    return stats
