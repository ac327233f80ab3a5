"""One optimiser step of SVI: what every step offers, the step through Pyro, and which one to take.

The training loop makes a step by `make_step`, calls it once for each batch and never asks which
kind it has:

    step = make_step(bound, guide, particles=1, steps=10_000)
    terms = step(x, y, factor, kl_weight=1.0, lr=0.01)   # (expected log-likelihood, KL), detached

All calls are made inside `pbnn.model.isolated` and `pyro.validation_enabled(False)`: noise comes
from torch's global generator of the device. A step whose terms are not finite leaves the parameters
as they were; the caller sees it in the terms when it looks, asks `culprit`, and goes back to values
that it kept (`parameter.copy_(kept)`, in place). Adam's moments belong to the step: see `state`.
"""

import warnings
from typing import Protocol

import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor

from pbnn.errors import FitError, PbnnWarning
from pbnn.infer.eager_step import EagerStep, learned
from pbnn.infer.elbo import Elbo
from pbnn.infer.flat_step import FlatStep
from pbnn.infer.graph import FlatGraph
from pbnn.infer.objective import Divergence, Estimator, Objective
from pbnn.model import BoundModel, Data

__all__ = ["Divergence", "Estimator", "Step", "compile_where_it_pays", "make_step"]

# Steps from which a trace is repaid: it took as long as 31 to 52 steps through Pyro, for nine pairs
# of a model and a guide on one core.
_TRACED_FROM = 50
# Seconds, rounded from runs of four models of 220 to 430 calls on one core: a call of the traced
# step; a value that fusion saves to write; what inductor takes for its start, with its import, for
# each call, and for each of those that it does not fuse.
_CALL, _VALUE, _START, _LOWER, _PART = 5e-6, 1.5e-9, 8.0, 0.015, 0.1


class Step(Protocol):
    """One Adam step (Kingma & Ba 2015, algorithm 1) on the negative ELBO.

    Attributes:
        parameters: What is learned, the guide's parameters and the model's constants; they are
            written in place and may be, as long as they keep their shapes.
        compiled: Whether inductor compiled the step.
        rule: Why it is compiled, or traced, or neither, in words.
        kl: By latent site, how its KL divergence is had: "closed form" or "Monte Carlo".
        estimator: By latent site, how its noise enters: "pathwise", "local" or "flipout".
    """

    parameters: list[Tensor]
    compiled: bool
    rule: str
    kl: dict[str, str]
    estimator: dict[str, str]

    def __call__(
        self, x: Data, y: Data, factor: float, *, kl_weight: float = 1.0, lr: float
    ) -> Tensor:
        """Take one step on (kl_weight · KL − expected log-likelihood) / rows of the whole data.

        Args:
            x: Input rows; as many in each call.
            y: Their observations.
            factor: What the log-likelihood in plate `data` is scaled by, rows / batch size.
            kl_weight: Weight of the KL divergence in the loss; the returned KL is without it.
            lr: Learning rate of this step.

        Returns:
            Expected log-likelihood (scaled by `factor`) and KL divergence before the step,
            detached, `(2,)`. A tensor of its own, which later calls leave alone.
        """
        ...

    def culprit(self) -> str:
        """Name the first site whose draw or log density is not finite, in words for a message."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Return copies of what the next step depends on beside the parameters.

        Adam's moments and count, and the state of the global generator of the device.
        """
        ...

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state` returned, in a step of the same kind or of another one."""
        ...


def make_step(
    bound: BoundModel,
    guide: AutoGuide,
    *,
    particles: int = 1,
    batch_size: int | None = None,
    steps: int | None = None,
    compile: bool | None = None,
    estimator: Estimator = "pathwise",
    divergence: Divergence = "auto",
    clip: float | None = None,
) -> Step:
    """Return the quickest step that fits a model and a guide.

    Args:
        bound: The model and its data.
        guide: The guide; it is run once here, so that its parameters exist.
        particles: Draws of the guide in each step; an even number comes in mirrored pairs.
        batch_size: Rows in each call; all by default.
        steps: Steps that will be taken, which the rule on compiling counts on; None is few.
        compile: Whether inductor compiles the step; None decides by a rule of counts.
        estimator: How noise enters: "pathwise" by the weights; "local" (local reparameterization)
            or "flipout" by the outputs of layers, see `pbnn.infer.local`.
        divergence: How the KL divergence is had; see `pbnn.infer.objective.Divergence`.
        clip: Largest norm of the gradient of the loss; a longer one is cut to it.

    Raises:
        FitError: `compile` or `estimator` asks for what cannot be.
        ModelError: The guide draws other sites than the model's, or draws without a gradient.
    """
    elbo = Elbo(bound, guide, particles)  # runs the guide, and refuses those that cannot be fitted
    plain = estimator == "pathwise"
    if plain and compile is None and steps is not None and steps < _TRACED_FROM:
        rule = f"through Pyro: {steps} steps do not repay a trace, which {_TRACED_FROM} do"
        return EagerStep(bound, elbo, clip=clip, rule=rule)
    try:
        parameters = learned(bound, guide)
        objective = Objective(
            bound,
            guide,
            parameters,
            particles=particles,
            batch_size=batch_size,
            estimator=estimator,
            divergence=divergence,
        )
        step = FlatStep(objective, parameters, clip=clip)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if plain and not compile:
            return EagerStep(bound, elbo, clip=clip, rule=f"through Pyro: {_first_line(error)}")
        if not plain and isinstance(error, FitError):
            raise
        asked = "compile=True" if plain else f"estimator={estimator!r}"
        raise FitError(
            f"{asked}, but the step cannot be traced ({_first_line(error)}); leave it out"
        ) from error
    compile_where_it_pays(step, compile, steps)
    return step


class Compilable(Protocol):
    """A traced step that inductor can compile.

    Attributes:
        graph: Its graph.
        rule: Whether it is compiled and why, in words.
    """

    graph: FlatGraph
    rule: str

    def compile(self) -> None:
        """Compile it, or raise FitError."""
        ...


def compile_where_it_pays(step: Compilable, compile: bool | None, steps: int | None) -> None:
    """Compile a step where that is asked for, or saves more time than it takes, by counts alone.

    Args:
        step: The step; its `rule` then says what was decided, and why.
        compile: Whether to compile; None decides by the counts.
        steps: Steps that will be taken; None is few.

    Raises:
        FitError: It cannot be compiled as asked.
    """
    if compile is None:
        calls, values, parts = step.graph.calls, step.graph.values, step.graph.parts
        saved = (steps or 0) * (_CALL * calls + _VALUE * values)
        cost = _START + _LOWER * calls + _PART * parts
        worth, sign = saved > cost, ">" if saved > cost else "<="
        because = (
            f"{steps or 0} steps of a graph of {calls} calls and {values} values count "
            f"{saved:.1f} {sign} {cost:.1f}"
        )
    else:
        worth, because = compile, "as asked"
    if worth:
        try:
            step.compile()
        except FitError as error:
            if compile:
                raise
            worth, because = False, str(error)
            warnings.warn(f"{error}; going on uncompiled", PbnnWarning, stacklevel=4)
    step.rule = f"traced, {'compiled' if worth else 'not compiled'}: {because}"


def _first_line(error: Exception) -> str:
    message = str(error).strip()
    return message.splitlines()[0][:200] if message else type(error).__name__
