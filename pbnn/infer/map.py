"""MAP: the trained network, whose weight decay is its priors, as a posterior of one draw."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyro
import torch
from torch import Tensor

from pbnn.errors import FitError
from pbnn.front_door import bind
from pbnn.infer.descent import Descent, Optimiser, StepOptions, rate_of
from pbnn.infer.log_joint import LogJoint
from pbnn.infer.options import whole_number
from pbnn.infer.points import Points, Space
from pbnn.infer.posterior import Posterior, provenance
from pbnn.model import Data, Model, isolated

__all__ = ["MapPlan", "fit_map", "start_word", "trained_point"]

# One in this many points of the last phase goes into the average.
_AVERAGE_EVERY = 10


def fit_map(
    model: Model,
    x: Data,
    y: Data = None,
    *,
    init: str | Mapping[str, Tensor] = "fan_in",
    steps: int = 2_000,
    lr: float = 0.01,
    schedule: str | Callable[[float], float] | None = None,
    optimiser: Optimiser = "adam",
    batch_size: int | None = None,
    sharpness: float = 0.0,
    average: bool = False,
    jacobian: bool = False,
    seed: int = 0,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    compile: bool | None = None,
    progress: bool = True,
) -> Posterior:
    """Train the network: the maximum a posteriori point of the model.

    Maximises log p(y | θ, x) + log p(θ), the first scaled by rows / batch size. A Normal(0, s)
    prior is weight decay: on the loss -log joint / rows its coefficient is 1 / (rows s²).
    Parameters without a prior are learned too, without decay.

    Sites with a bounded support are trained on their unconstrained space, but the density that is
    maximised is that of the values themselves unless `jacobian` is set: the maximum then does not
    depend on the bijection, and is that of penalised maximum likelihood. With `jacobian` it is the
    maximum of `stats["lp"]`, about which a Gaussian on the unconstrained space would lie. They
    differ where a scale is learned: of a noise scale by the order of 1 / rows. The density of a
    hierarchical scale has no maximum either way, so a model with one ends wherever `steps` do.

    Statistics of BatchNorm layers are constants in each step; from the training rows (at most
    4,096, evenly spaced) they are recomputed at the start, every 10 steps or pass over the rows,
    and for the final point. Other roads take them as they find them; those of the point go on with
    `fit_nuts(…, constants=point.first_state())`.

    Args:
        model: A Pyro model `(x, y=None)` with its rows in plate `data`.
        x: Input `(n, …)`, a dict of inputs, or None.
        y: Observations `(n,)` or `(n, outputs)`, or a dict by site.
        init: Where latent sites start: "fan_in", "map", or a trained network's `state_dict`; see
            `pbnn.fit_svi`.
        steps: Number of optimiser steps.
        lr: Learning rate at the start.
        schedule: "cosine" lets the rate fall to 0; "constant"; or a function from the share of
            `steps` done to the factor of `lr`. By default "cosine", and "constant" with `average`.
        optimiser: "adam", or "sgd" with momentum 0.9.
        batch_size: Rows in each step; all by default.
        sharpness: Radius of sharpness-aware minimisation (Foret et al. 2021, "Sharpness-aware
            minimization for efficiently improving generalization", algorithm 1), in units of the
            weights: the gradient is taken at this distance uphill. 0 is plain training.
        average: Whether the point is the mean of every tenth one over the second half of the steps
            (stochastic weight averaging, Izmailov et al. 2018), in place of the last one.
        jacobian: Whether log |det J| belongs to the objective; see above.
        seed: Seed; the global random state and Pyro's param store stay untouched.
        device: Where to run; see `pbnn.front_door.bind`.
        dtype: `torch.float32` or `torch.float64`; see `pbnn.front_door.bind`.
        compile: Whether to compile the step; None decides by a rule of its size.
        progress: Whether to show a progress bar on stderr.

    Returns:
        One chain of one draw, with `lp`; `history` holds `log_joint`, what was maximised, before
        each step.

    Raises:
        DataError: The data cannot be used as they are.
        ModelError: The front door refuses the model.
        FitError: An option is out of range, or the log joint is not finite at the start or at a
            later step.
    """
    seed = whole_number("seed", seed, least=0)
    plan = MapPlan(
        steps=steps,
        schedule=schedule,
        average=average,
        options=StepOptions(
            optimiser=optimiser,
            lr=lr,
            batch_size=batch_size,
            sharpness=sharpness,
            jacobian=jacobian,
        ),
    )
    started = time.perf_counter()
    bound = bind(model, x, y, device=device, dtype=dtype)
    with isolated(seed, bound.device), pyro.validation_enabled(False):
        space = Space(bound)
        points, descent = plan.train(
            space, space.start(1, seed, init), seed=seed, compile=compile, progress=progress
        )
        fields = space.fields(points)
    return Posterior(
        **fields,
        method="map",
        markov=False,
        seconds=time.perf_counter() - started,
        history={"log_joint": descent.history()[:, 0]},
        provenance={
            **provenance(bound, seed=seed, init=start_word(init), **plan.plain()),
            **descent.account(),
        },
    )


@dataclass(frozen=True, kw_only=True)
class MapPlan:
    """How points are trained from start to end; see `fit_map`.

    Attributes:
        steps: Number of steps.
        schedule: Learning rates; None chooses by `average`.
        average: Whether a point is the mean over the second half of the steps.
        options: What one step is made of.

    Raises:
        FitError: An option is out of range.
    """

    steps: int = 2_000
    schedule: str | Callable[[float], float] | None = None
    average: bool = False
    options: StepOptions = field(default_factory=StepOptions)

    def __post_init__(self) -> None:
        """Check the ranges."""
        object.__setattr__(self, "steps", whole_number("steps", self.steps))
        if self.schedule is None:
            object.__setattr__(self, "schedule", "constant" if self.average else "cosine")
        self._rates()

    def train(
        self,
        space: Space,
        start: Points,
        *,
        seed: int,
        compile: bool | None,
        progress: bool,
        first: int = 0,
        shift: Mapping[str, Tensor] | None = None,
        label: str = "MAP",
    ) -> tuple[Points, Descent]:
        """Train points; return them, and the run that made them.

        Args:
            space: The vectors.
            start: Where the lanes start.
            seed: Seed of the order of rows.
            compile: Whether to compile the step; None decides.
            progress: Whether to show a progress bar.
            first: Number of the first lane, where others come before these.
            shift: By how many scales lanes shift priors and observations; see `LogJoint`.
            label: What is going on, for the progress bar.
        """
        joint = LogJoint(
            space,
            start,
            batch_size=self.options.batch_size,
            seed=seed,
            first=first,
            jacobian=self.options.jacobian,
            shift=shift,
        )
        descent = Descent(joint, start, self.options, compile=compile, steps=self.steps)
        mean = _Average(descent, self.steps) if self.average else None
        descent.run(self._rates(), label=label, progress=progress, each=mean)
        return descent.points if mean is None else space.points(mean.values), descent

    def plain(self) -> dict[str, Any]:
        """Return the options by name, as plain values."""
        schedule = self.schedule
        if callable(schedule):
            schedule = getattr(schedule, "__qualname__", type(schedule).__name__)
        own = {"steps": self.steps, "schedule": schedule, "average": self.average}
        return {**own, **vars(self.options)}

    def _rates(self) -> list[float]:
        return rate_of(self.schedule or "cosine", self.options.lr, self.steps)


def trained_point(
    space: Space,
    start: Posterior | Mapping[str, Tensor] | None,
    *,
    seed: int,
    steps: int,
    compile: bool | None,
    progress: bool,
) -> Points:
    """Return the one trained point that a post-hoc road sets out from.

    Args:
        space: The vectors.
        start: See `Space.start_at`; None trains a MAP on the unconstrained space.
        seed: Seed of that training.
        steps: Its number of steps.
        compile: Whether to compile its step; None decides.
        progress: Whether to show a progress bar.

    Raises:
        FitError: `start` is not one point of the model, or its log joint is not finite.
    """
    if start is None:
        plan = MapPlan(steps=steps, options=StepOptions(jacobian=True))
        points = space.start(1, seed)
        return plan.train(space, points, seed=seed, compile=compile, progress=progress)[0]
    points = space.start_at(start)
    if len(points) != 1:
        raise FitError(
            f"start has {len(points)} draws; expected one point: start.select(chains=[0], "
            "draws=slice(0, 1))"
        )
    if fault := space.culprit(points):
        raise FitError(f"the log joint at start is not finite{fault}; pass another start")
    return points


def start_word(start: Any) -> str:
    """Return what a start is, in a word for the provenance."""
    if isinstance(start, str):
        return start
    return f"posterior of {start.method}" if isinstance(start, Posterior) else "state_dict"


class _Average:
    """The running mean of every tenth point of the second half of a run."""

    def __init__(self, descent: Descent, steps: int) -> None:
        self._descent, self._steps = descent, steps
        self._count = 0
        self.values = descent.points.values

    def __call__(self, done: int) -> None:
        if (self._steps - done) % _AVERAGE_EVERY or done <= self._steps // 2:
            return
        self._count += 1
        self.values = torch.lerp(self.values, self._descent.points.values, 1 / self._count)
