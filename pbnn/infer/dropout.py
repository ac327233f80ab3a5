"""MC dropout: a network trained with dropout, whose masks are its draws."""

import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pyro
import torch
from torch import Tensor
from torch.func import vmap

from pbnn.errors import FitError
from pbnn.front_door import bind
from pbnn.infer.descent import Descent, Optimiser, StepOptions, rate_of
from pbnn.infer.lane import Lane
from pbnn.infer.log_joint import LogJoint
from pbnn.infer.map import start_word
from pbnn.infer.masks import Masks, check_dropout
from pbnn.infer.options import whole_number
from pbnn.infer.points import Points, Space
from pbnn.infer.posterior import Posterior, provenance
from pbnn.model import BoundModel, Data, Model, isolated

__all__ = ["fit_dropout"]

# Rows times draws whose log joint is taken at once.
_HELD = 2**16


def fit_dropout(
    model: Model,
    x: Data,
    y: Data = None,
    *,
    start: Posterior | Mapping[str, Tensor] | None = None,
    init: str | Mapping[str, Tensor] = "fan_in",
    steps: int = 2_000,
    lr: float = 0.01,
    schedule: str | Callable[[float], float] = "cosine",
    optimiser: Optimiser = "adam",
    batch_size: int | None = None,
    draws: int = 1000,
    seed: int = 0,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    compile: bool | None = None,
    progress: bool = True,
) -> Posterior:
    """Train a network with dropout and keep its dropout on (Gal & Ghahramani 2016).

    All draws have the same weights, those that maximise log p(y | θ, x) + log p(θ) under masks that
    change from step to step; they differ in their masks, which prediction draws from `mask_seed`,
    one for each draw and row. So a draw is not one function: its values at two rows have masks that
    are independent. Every dropout is on: `nn.Dropout` and its kin, and `F.dropout` in the model's
    own code, whatever its `training` says. All else is in eval mode, BatchNorm with the statistics
    of the training rows.

    The rate is the one that the model states. Rules that change it for prediction, such as
    p' = 1 − (1 − p)^(T / L) for T passes through L layers, do not follow from the derivation: the
    variational distribution is that of training, and T is only how often it is sampled.

    Args:
        model: A Pyro model `(x, y=None)` with its rows in plate `data`, and a dropout.
        x: Input `(n, …)`, a dict of inputs, or None.
        y: Observations `(n,)` or `(n, outputs)`, or a dict by site.
        start: A network that was trained with dropout: a posterior of one draw, or a `state_dict`;
            it is not trained further. None trains one.
        init: Where latent sites start; see `pbnn.fit_map`.
        steps: Number of optimiser steps.
        lr: Learning rate at the start.
        schedule: "cosine", "constant" or a function; see `pbnn.fit_map`.
        optimiser: "adam", or "sgd" with momentum 0.9.
        batch_size: Rows in each step; all by default.
        draws: Number of draws.
        seed: Seed of start, batches and masks; the global random state stays untouched.
        device: Where to run; see `pbnn.front_door.bind`.
        dtype: `torch.float32` or `torch.float64`; see `pbnn.front_door.bind`.
        compile: Whether to compile the step; None decides by a rule of its size.
        progress: Whether to show a progress bar on stderr.

    Returns:
        One chain of `draws` draws; `stats` hold `lp` under each draw's masks on the training rows,
        and `mask`, the number of its masks; `history` holds `log_joint` before each step.

    Raises:
        DataError: The data cannot be used as they are.
        ModelError: The front door refuses the model, or a layer has a dropout that cannot be given
            masks.
        FitError: An option is out of range, the model has no dropout, or the log joint is not
            finite at a step.
    """
    seed, draws = whole_number("seed", seed, least=0), whole_number("draws", draws)
    options = StepOptions(optimiser=optimiser, lr=lr, batch_size=batch_size)
    rates = rate_of(schedule, lr, whole_number("steps", steps))
    started = time.perf_counter()
    with Masks(seed, 0) as masks:
        with masks.in_each_run_of(model) as masked:
            bound = bind(masked, x, y, device=device, dtype=dtype)
        _check_has_dropout(bound, masks)
        with isolated(seed, bound.device), pyro.validation_enabled(False):
            space = Space(bound)
            history: dict[str, Tensor] = {}
            account: dict[str, Any] = {}
            if start is not None:
                points = space.start_at(start)
                if len(points) != 1:
                    raise FitError(f"start has {len(points)} draws; expected one trained network")
            else:
                first = space.start(1, seed, init)
                joint = _MaskedJoint(space, first, seed=seed, batch_size=batch_size)
                descent = Descent(joint, first, options, compile=compile, steps=steps)
                descent.run(rates, label="dropout", progress=progress)
                points = descent.points
                history = {"log_joint": descent.history()[:, 0]}
                account = {"compiled": descent.compiled, "compile_rule": descent.rule}
            fields = space.fields(points)
            lp, deterministic = _under_masks(space, points, seed, draws)
    if draws > 1 and bool((lp == lp[0]).all()):
        raise FitError("the masks change nothing: the dropout acts on no row; set its p above 0")
    fields["draws"] = {k: v.expand(1, draws, *v.shape[2:]) for k, v in fields["draws"].items()}
    fields["deterministic"] = deterministic
    fields["stats"] = {"lp": lp[None], "mask": torch.arange(draws)[None]}
    settings = {
        "init": start_word(init),
        "start": None if start is None else start_word(start),
        "steps": steps,
        "schedule": schedule,
        **vars(options),
        "draws": draws,
    }
    return Posterior(
        **fields,
        method="dropout",
        markov=False,
        seconds=time.perf_counter() - started,
        history=history,
        mask_seed=seed,
        provenance={**provenance(bound, seed=seed, **settings), **account},
    )


class _MaskedJoint(LogJoint):
    """The log joint under masks that are new in each evaluation.

    They are numbered −1, −2, …, so that none of them is a mask of a draw.

    Args:
        space: The vectors.
        points: The point to begin with.
        seed: Seed of the order of rows, and of the masks.
        batch_size: Rows in each evaluation; None takes all.
    """

    def __init__(self, space: Space, points: Points, *, seed: int, batch_size: int | None) -> None:
        self._seed = seed
        self._mask = torch.zeros((), dtype=torch.int64, device=space.bound.device)
        super().__init__(space, points, batch_size=batch_size, seed=seed, jacobian=False)

    def advance(self) -> None:
        """Take the next rows, and the next masks."""
        self._mask.sub_(1)
        super().advance()

    def _state(self) -> tuple[Tensor, ...]:
        return (*super()._state(), self._mask)

    def _dims(self) -> tuple[int | None, ...]:
        return (*super()._dims(), None)

    def _one(self, point: Tensor, *data: Tensor) -> Tensor:
        with Masks(self._seed, data[-1]):
            return super()._one(point, *data[:-1])


def _check_has_dropout(bound: BoundModel, masks: Masks) -> None:
    check_dropout(bound.model)
    if not masks.calls:
        raise FitError(
            "the model has no dropout; write `self.drop = nn.Dropout(0.1)`, and "
            "`self.drop(torch.relu(…))` after an activation"
        )


def _under_masks(
    space: Space, points: Points, seed: int, draws: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return log joint `(draws,)` and deterministic sites `(1, draws, …)` under each draw's masks.

    The bound model has the constants and buffers of the point.
    """
    lane = Lane(space.bound)
    z, _ = space.split(points.values[0])

    def one(draw: Tensor) -> tuple[Tensor, ...]:
        with Masks(seed, draw):
            found: tuple[Tensor, ...] = (lane.log_density(z, *lane.data),)
        if lane.deterministic:
            with Masks(seed, draw):
                found += lane.deterministic_values(z, *lane.data)
        return found

    numbers = torch.arange(draws, device=z.device)
    size = max(1, min(draws, _HELD // (space.bound.rows or 1)))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(batching rule|resized).*", UserWarning)
        try:
            outputs = vmap(one, chunk_size=size)(numbers)
        except (RuntimeError, NotImplementedError, ValueError):
            # A model that reads its own values cannot be mapped; a loop gives the same numbers.
            outputs = tuple(torch.stack(parts) for parts in zip(*map(one, numbers), strict=True))
    lp, *values = (output.cpu() for output in outputs)
    pairs = zip(lane.deterministic, values, strict=True)
    return lp, {name: value[None] for name, value in pairs}
