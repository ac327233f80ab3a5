"""MAP: the trained network, whose weight decay is its priors, as a posterior of one draw."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import pyro
import torch
from torch import Tensor

from pbnn.front_door import bind
from pbnn.infer.descent import Descent, Optimiser, StepOptions, rate_of
from pbnn.infer.log_joint import LogJoint
from pbnn.infer.options import whole_number
from pbnn.infer.points import Space
from pbnn.infer.posterior import Posterior, provenance
from pbnn.model import Data, Model, isolated

__all__ = ["fit_map"]

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

    Statistics of BatchNorm layers are constants in each step; from the training rows they are
    recomputed at the start, every 10 steps (or pass over the rows), and for the final point.

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
    seed, steps = whole_number("seed", seed, least=0), whole_number("steps", steps)
    schedule = schedule or ("constant" if average else "cosine")
    options = StepOptions(
        optimiser=optimiser, lr=lr, batch_size=batch_size, sharpness=sharpness, jacobian=jacobian
    )
    rates = rate_of(schedule, lr, steps)
    started = time.perf_counter()
    bound = bind(model, x, y, device=device, dtype=dtype)
    with isolated(seed, bound.device), pyro.validation_enabled(False):
        space = Space(bound)
        start = space.start(1, seed, init)
        joint = LogJoint(space, start, batch_size=batch_size, seed=seed, jacobian=jacobian)
        descent = Descent(joint, start, options, compile=compile, steps=steps)
        mean = _Average(descent, steps) if average else None
        descent.run(rates, label="MAP", progress=progress, each=mean)
        points = descent.points if mean is None else space.points(mean.values)
        fields = space.fields(points)
    settings: dict[str, Any] = {
        "init": init if isinstance(init, str) else "state_dict",
        "steps": steps,
        "schedule": schedule if isinstance(schedule, str) else schedule.__qualname__,
        "average": average,
        **vars(options),
    }
    return Posterior(
        **fields,
        method="map",
        markov=False,
        seconds=time.perf_counter() - started,
        history={"log_joint": descent.history()[:, 0]},
        provenance={
            **provenance(bound, seed=seed, **settings),
            "compiled": descent.compiled,
            "compile_rule": descent.rule,
        },
    )


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
