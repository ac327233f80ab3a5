"""Training of points: many lanes in one batch go up the log joint by an optimiser."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.func import functionalize

from pbnn.errors import FitError
from pbnn.infer.adam import Adam, update_
from pbnn.infer.graph import agree, compile_graph, disk_cache
from pbnn.infer.log_joint import LogJoint
from pbnn.infer.options import whole_number
from pbnn.infer.points import Points
from pbnn.infer.step import compile_where_it_pays
from pbnn.model import isolated
from pbnn.progress import progress_bar

__all__ = ["Descent", "Optimiser", "Schedule", "StepOptions", "rate_of"]

Optimiser = Literal["adam", "sgd"]
Schedule = Literal["cosine", "constant"]

# Heavy-ball momentum of "sgd", as in Maddox et al. 2019, "A simple baseline for Bayesian
# uncertainty in deep learning", appendix.
_MOMENTUM = 0.9
# Steps between two looks at the log joints where looking waits for the device.
_WINDOW = 100
# BatchNorm statistics follow the weights after so many steps, or after each pass over the rows.
_REFRESH = 10


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What one step is made of, checked.

    Attributes:
        optimiser: "adam" (Kingma & Ba 2015), or "sgd" with momentum 0.9.
        lr: Learning rate, on the loss -log joint / rows.
        batch_size: Rows in each step; None takes all.
        sharpness: Radius of sharpness-aware minimisation (Foret et al. 2021, eq. 2), in units of
            the weights on the unconstrained space; 0 is none.
        jacobian: Whether the density is that of the unconstrained values.
    """

    optimiser: Optimiser = "adam"
    lr: float = 0.01
    batch_size: int | None = None
    sharpness: float = 0.0
    jacobian: bool = False

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.optimiser not in get_args(Optimiser):
            known = ", ".join(map(repr, get_args(Optimiser)))
            raise FitError(f"optimiser={self.optimiser!r}; expected one of {known}")
        if not 0 < self.lr < math.inf:
            raise FitError(f"lr={self.lr}; expected a positive learning rate")
        if self.batch_size is not None:
            whole_number("batch_size", self.batch_size)
        if not 0 <= self.sharpness < math.inf:
            raise FitError(f"sharpness={self.sharpness}; expected a radius from 0 up")


def rate_of(schedule: str | Callable[[float], float], lr: float, steps: int) -> list[float]:
    """Return the learning rate of each step.

    Args:
        schedule: "cosine" (from `lr` down to 0), "constant", or a function from the share of the
            steps done, in [0, 1), to the factor of `lr`.
        lr: Learning rate.
        steps: Number of steps.

    Raises:
        FitError: The schedule is none of these, or returns no number from 0 up.
    """
    if callable(schedule):
        factors = [schedule(done / steps) for done in range(steps)]
    elif schedule == "cosine":
        factors = [0.5 * (1 + math.cos(math.pi * done / steps)) for done in range(steps)]
    elif schedule == "constant":
        factors = [1.0] * steps
    else:
        raise FitError(
            f"schedule={schedule!r}; expected one of {', '.join(map(repr, get_args(Schedule)))}, "
            "or a function from the share of the steps done to the factor of lr"
        )
    for done, factor in enumerate(factors):
        if not (isinstance(factor, float | int) and 0 <= factor < math.inf):
            raise FitError(
                f"schedule returned {factor!r} at share {done / steps:.3g} of the steps; expected "
                "a number from 0 up"
            )
    return [lr * factor for factor in factors]


class Descent:
    """Points that an optimiser takes up the log joint, all lanes in one step.

    The loss of a lane is -log joint / rows. Nothing that a lane does depends on other lanes, up to
    rounding. Statistics of BatchNorm layers are constants in each step, as in every density, and
    follow the weights between steps.

    Args:
        joint: The log joint, ready for these points.
        points: Where the lanes start.
        options: What one step is made of.
        compile: Whether inductor compiles the step; None decides by a rule of counts.
        steps: Steps that will be taken, which that rule counts on.

    Attributes:
        log_joints: That of each lane before each step, `(lanes,)` each.
        compiled: Whether inductor compiled the step.
        rule: Why it is compiled, or traced, or neither, in words.

    Raises:
        FitError: `compile` asks for what cannot be.
    """

    def __init__(
        self,
        joint: LogJoint,
        points: Points,
        options: StepOptions,
        *,
        compile: bool | None = None,
        steps: int,
    ) -> None:
        self.joint, self.options = joint, options
        self._adam = Adam([points.values.clone()])
        self._shape = points.values.shape
        self._buffers = points.buffers
        self._rows = joint.space.bound.rows or 1
        self._update: Callable[..., tuple[Tensor]] = self._eager
        self.log_joints: list[Tensor] = []
        self.compiled = False
        if joint.graph is not None:
            self.rule = "traced"
            self.graph = joint.graph
            compile_where_it_pays(self, compile, steps)
        elif compile:
            raise FitError(
                f"compile=True, but the step cannot be traced ({joint.slow_because}); leave it out"
            )
        else:
            self.rule = f"through Python: {joint.slow_because}"

    @property
    def points(self) -> Points:
        """The points as they stand; a copy that later steps leave alone."""
        values = self._adam.learned.view(self._shape).clone()
        return Points(values=values, buffers=self._buffers)

    def run(
        self,
        rates: list[float],
        *,
        label: str,
        progress: bool,
        each: Callable[[int], None] | None = None,
    ) -> None:
        """Take a step at each of some learning rates.

        Args:
            rates: Learning rates.
            label: What is going on, for the progress bar.
            progress: Whether to show a progress bar.
            each: Called with the number of steps done after each.

        Raises:
            FitError: A log joint is not finite; the message says in which step and lane.
        """
        looked = len(self.log_joints)
        window = 1 if self._adam.learned.device.type == "cpu" else _WINDOW
        every = max(_REFRESH, math.ceil(self.joint.factor))
        with progress_bar(total=len(rates), label=label, unit="step", show=progress) as bar:
            for done, rate in enumerate(rates, 1):
                self._step(rate)
                if done % window == 0 or done == len(rates):
                    self._look(looked)
                    looked = len(self.log_joints)
                if self._buffers and (done % every == 0 or done == len(rates)):
                    self._refresh()
                if each is not None:
                    each(done)
                bar.update()
        finite = self.points.values.isfinite().all(1)
        if not bool(finite.all()):
            raise FitError(self._fault(len(self.log_joints), finite))

    def history(self) -> Tensor:
        """Return the log joint before each step, `(steps, lanes)`."""
        return torch.stack(self.log_joints).cpu()

    def account(self) -> dict[str, object]:
        """Return how the steps ran, as plain JSON values, for the provenance."""
        return {"compiled": self.compiled, "compile_rule": self.rule}

    def compile(self) -> None:
        """Compile the step.

        Raises:
            FitError: Inductor cannot compile here, or gives other numbers.
        """
        adam = self._adam
        with isolated(0, adam.learned.device), torch.no_grad():
            control = adam.learned.new_tensor([0.01, 1.0])
            inputs = (adam.learned, adam.first, adam.second, control, *self.joint.data)
            with disk_cache():
                compiled = compile_graph(functionalize(self._eager), inputs)
            found, expected = ([v.clone() for v in inputs] for _ in range(2))
            found += compiled(*found)
            expected += self._eager(*expected)
        if not agree(found, expected):
            raise FitError("the compiled step gives other numbers; pass compile=False")
        self._update, self.compiled = compiled, True

    def _step(self, rate: float) -> None:
        adam = self._adam
        self.joint.advance()
        rates = adam.rates(rate) if self.options.optimiser == "adam" else (rate, 1.0)
        with torch.no_grad():
            control = adam.learned.new_tensor(rates)
            (value,) = self._update(
                adam.learned, adam.first, adam.second, control, *self.joint.data
            )
        self.log_joints.append(value)

    def _eager(
        self, learned: Tensor, first: Tensor, second: Tensor, control: Tensor, *data: Tensor
    ) -> tuple[Tensor]:
        """Take one step in place; return the log joint of each lane before it."""
        points = learned.view(self._shape)
        gradient, value = self.joint.function(points, *data)
        if self.options.sharpness:
            norm = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
            uphill = self.options.sharpness * gradient / (norm + 1e-12)
            gradient, _ = self.joint.function(points - uphill, *data)
        downhill = gradient.reshape(-1) / -self._rows
        if self.options.optimiser == "adam":
            update_(learned, first, second, downhill, value, control[0], control[1])
        else:
            finite = value.isfinite().all()
            first.mul_(_MOMENTUM).add_(torch.where(finite, downhill, 0))
            learned.sub_(first * torch.where(finite, control[0], 0))
        return (value,)

    def _look(self, start: int) -> None:
        """Refuse log joints that are not finite, from one step on."""
        finite = torch.stack(self.log_joints[start:]).isfinite()
        bad = finite.all(1).logical_not()
        if bool(bad.any()):
            step = int(bad.nonzero()[0])
            raise FitError(self._fault(start + step, finite[step]))

    def _fault(self, step: int, finite: Tensor) -> str:
        """Say which lane went wrong in which step; points stay where it was not finite."""
        lane = int(finite.logical_not().nonzero()[0])
        several = self.joint.first + len(finite) > 1
        member = f" in member {self.joint.first + lane}" if several else ""
        site = self.joint.space.culprit(self.points[lane : lane + 1])
        return f"the log joint was not finite at step {step}{member}{site}; lower lr"

    def _refresh(self) -> None:
        """Let the statistics of BatchNorm layers follow the weights."""
        self._buffers = self.joint.space.points(self._adam.learned.view(self._shape)).buffers
        self.joint.set_buffers(self._buffers)
