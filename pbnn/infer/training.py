"""The training run of SVI: step after step, what is kept on the way, and how it ends."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pbnn.errors import FitError
from pbnn.infer.batches import Batches
from pbnn.infer.checkpoint import Checkpoint
from pbnn.infer.schedule import Plan, is_flat
from pbnn.infer.step import Step
from pbnn.progress import progress_bar

__all__ = ["Training", "shrinking"]

# The ELBO is looked at, and the parameters are kept, once in this many steps.
WINDOW = 100
# A checkpoint is written once in this many windows, and at the end.
CHECKPOINT_WINDOWS = 10
# One in this many parameter values goes into the average.
AVERAGE_EVERY = 10
# A scale that is below this, and fell by this share over the last quarter of the steps before the
# last phase, collapses.
COLLAPSED = 1e-3
FALL = 0.1


@dataclass
class _Best:
    """The parameters of the window with the highest mean ELBO so far."""

    value: float
    done: int
    parameters: list[Tensor]


class Training:
    """One training run: its state, what it recorded, and how it ended.

    Everything that the next step depends on is in `state`, so that a run that is loaded gives the
    same bits as one that never stopped.

    Args:
        step: What takes one optimiser step.
        batches: Where its rows come from.
        plan: Learning rates, KL weights, when to end.
        scales: Returns the typical scale of the guide by site at the present parameters; empty
            where the guide has none.

    Attributes:
        done: Steps that are done.
        ended: "steps", "plateau", "not finite" or "interrupted".
        messages: What the user should be warned of.
        best_step: Step of the parameters that are returned, where the run had to go back.
        averaged: Number of parameter values in the average that is returned.
        scales: Typical scale by site at the end of each window.
    """

    def __init__(
        self, step: Step, batches: Batches, plan: Plan, scales: Callable[[], dict[str, float]]
    ) -> None:
        self.step = step
        self.batches = batches
        self.plan = plan
        self.ended = "steps"
        self.messages: list[str] = []
        self.best_step: int | None = None
        self.averaged = 0
        self.scales: dict[str, list[float]] = {}
        self._measure = scales
        self._last_phase, self._end = plan.last_phase, plan.steps
        self._terms: list[Tensor] = []
        self._windows: list[float] = []
        self._average: list[Tensor] = []
        self._best: _Best | None = None
        self._kept = self._position()
        # On a CPU each step is looked at; elsewhere that would wait for the device.
        self._at_once = step.parameters[0].device.type == "cpu"

    @property
    def done(self) -> int:
        """Number of steps that are done."""
        return len(self._terms)

    def run(self, *, progress: bool, checkpoint: Checkpoint | None = None) -> None:
        """Take steps until the plan or the ELBO ends the run.

        Args:
            progress: Whether to show a progress bar.
            checkpoint: Where the state is written on the way.

        Raises:
            FitError: The ELBO is not finite before anything good could be kept.
            KeyboardInterrupt: Before the first step is done.
        """
        bar = progress_bar(
            total=self.plan.steps, initial=self.done, label="SVI", unit="step", show=progress
        )
        try:
            with bar:
                while self.done < self._end:
                    if not self._advance():
                        self._go_back()
                        break
                    if not self._window_is_over():
                        continue
                    if not self._close_window():
                        self._go_back()
                        break
                    bar.update(self.done - bar.n)
                    bar.set_postfix(elbo=f"{self._elbo(WINDOW):.4g}", refresh=False)
                    if checkpoint is not None and self._checkpoint_is_due():
                        checkpoint.save(self.state())
        except KeyboardInterrupt:
            if not self.done:
                raise
            self._interrupted()
        if self.averaged and self.ended != "not finite":
            self._set(self._average)
        self.messages += [
            f"the typical scale of site {name!r} is {scale:.2g} and was still falling: the guide "
            "collapses; check the likelihood's scale, or raise steps"
            for name, scale in shrinking(self.scales).items()
        ]
        if self.ended == "steps" and self.plan.early_stopping and not is_flat(self._windows):
            self.messages.append(
                f"the ELBO had not levelled off after {self.plan.steps} steps; raise steps (or lr)"
            )

    def history(self) -> dict[str, Tensor]:
        """Return the ELBO and its two parts, one value a step; the KL is without its weight."""
        likelihood, kl = torch.stack(self._terms).cpu().unbind(1)
        history = {"elbo": likelihood - kl, "expected_log_likelihood": likelihood, "kl": kl}
        if self.plan.kl_weight != 1 or self.plan.kl_annealing:
            weights = [self.plan.weight(k) for k in range(self.done)]
            history["kl_weight"] = torch.tensor(weights, dtype=kl.dtype)
        return history

    @property
    def notes(self) -> list[str]:
        """What every report of this fit has to say: its messages, and a KL weight that is not 1."""
        weight = self.plan.weight(max(self.done - 1, 0))
        tempered = (
            f"the KL divergence has weight {weight:g}, not 1: this is no approximation of the "
            "posterior but of a tempered one"
        )
        return [*([tempered] if weight != 1 else []), *self.messages]

    def account(self) -> dict[str, Any]:
        """Return how the run went, as plain JSON values, for the provenance."""
        account: dict[str, Any] = {
            "steps_taken": self.done,
            "ended": self.ended,
            "kl_weight": self.plan.weight(max(self.done - 1, 0)),
            "scales": self.scales,
            "compiled": self.step.compiled,
            "compile_rule": self.step.rule,
            "kl": self.step.kl,
            "estimator": self.step.estimator,
        }
        if self.notes:
            account["notes"] = self.notes
        if self.best_step is not None:
            account["best_step"] = self.best_step
        if self.averaged:
            account["averaged"] = self.averaged
        return account

    def state(self) -> dict[str, Any]:
        """Return the run at the end of the last window, as tensors and plain values."""
        best = self._best
        return {
            **self._kept,
            "terms": torch.stack(self._terms[: self._kept["done"]]).cpu(),
            "windows": list(self._windows),
            "scales": {name: list(values) for name, values in self.scales.items()},
            "plan": {"last_phase": self._last_phase, "end": self._end, "ended": self.ended},
            "average": {
                "count": self.averaged,
                "parameters": [mean.clone() for mean in self._average],
            },
            "best": None if best is None else vars(best),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned."""
        self._return_to(state)
        self._kept = {name: state[name] for name in self._kept}
        device = self.step.parameters[0].device
        self._terms = list(state["terms"].to(device).unbind(0))
        self._windows = list(state["windows"])
        self.scales = {name: list(values) for name, values in state["scales"].items()}
        self._last_phase, self._end = state["plan"]["last_phase"], state["plan"]["end"]
        self.ended = state["plan"]["ended"]
        self.averaged, self._average = state["average"]["count"], state["average"]["parameters"]
        self._best = None if state["best"] is None else _Best(**state["best"])

    def _advance(self) -> bool:
        """Take one step; return whether its terms are known to be finite, where that is asked."""
        terms = self._take_step(self.done)
        self._terms.append(terms)
        if self._at_once and not all(map(math.isfinite, terms.tolist())):
            return False
        if self.plan.average and self.done > self._last_phase and self.done % AVERAGE_EVERY == 0:
            self._add_to_average()
        return True

    def _take_step(self, done: int) -> Tensor:
        x, y, factor = next(self.batches)
        rate = self.plan.rate(done, self._last_phase, self._end)
        return self.step(x, y, factor, kl_weight=self.plan.weight(done), lr=rate)

    def _add_to_average(self) -> None:
        """Take the unconstrained parameters into their running mean."""
        with torch.no_grad():
            if not self.averaged:
                self._average = [p.detach().clone() for p in self.step.parameters]
            self.averaged += 1
            for mean, parameter in zip(self._average, self.step.parameters, strict=True):
                mean.lerp_(parameter, 1 / self.averaged)

    def _window_is_over(self) -> bool:
        """Whether to keep the parameters: at each window's end, and in the first one more often.

        A run that breaks does so early as a rule, where the start was too wide or the rate high.
        """
        early = self.done < WINDOW and self.done.bit_count() == 1
        return early or self.done % WINDOW == 0 or self.done >= self._end

    def _close_window(self) -> bool:
        """Take in the steps since the last window; return whether they and their end are finite."""
        recent = torch.stack(self._terms[self._kept["done"] :])
        finite = recent.isfinite().all() and all(
            bool(p.isfinite().all()) for p in self.step.parameters
        )
        if not finite:
            return False
        annealed = self._kept["done"] >= self.plan.kl_annealing
        value = self._elbo(len(recent)) if annealed else -math.inf
        self._kept = self._position()
        if self._best is None or value >= self._best.value:
            self._best = _Best(value, self.done, self._kept["parameters"])
        if self.done < WINDOW:
            return True
        for name, scale in self._measure().items():
            self.scales.setdefault(name, []).append(scale)
        if annealed:
            self._windows.append(value)
        plan = self.plan
        if plan.early_stopping and self.done < self._last_phase and is_flat(self._windows):
            self._last_phase, self._end = self.done, plan.end_after(self.done)
            self.ended = "plateau"
        return True

    def _elbo(self, steps: int) -> float:
        """Return the mean over the last steps of what is maximised once annealing is over."""
        likelihood, kl = torch.stack(self._terms[-steps:]).mean(0).tolist()
        return float(likelihood - self.plan.kl_weight * kl)

    def _position(self) -> dict[str, Any]:
        """Return copies of all that the next step depends on."""
        return {
            "done": self.done,
            "parameters": [p.detach().clone() for p in self.step.parameters],
            "step": self.step.state(),
            "batches": self.batches.state(),
        }

    def _return_to(self, position: dict[str, Any]) -> None:
        self._set(position["parameters"])
        self.step.load(position["step"])
        self.batches.load(position["batches"])

    def _set(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.step.parameters, values, strict=True):
                parameter.copy_(value)

    def _checkpoint_is_due(self) -> bool:
        return self.done >= self._end or self.done % (CHECKPOINT_WINDOWS * WINDOW) == 0

    def _go_back(self) -> None:
        """Find the first bad step and its culprit, and return to the best parameters so far."""
        bad = ~torch.stack(self._terms).isfinite().all(1)
        first = int(bad.nonzero()[0]) if bad.any() else self.done
        # Take the steps since the last window once more, up to the bad one: the same bits lead to
        # the parameters, and to the noise, at which it went wrong.
        self._return_to(self._kept)
        for done in range(self._kept["done"], first):
            self._take_step(done)
        reason = f"the ELBO was not finite at step {first}{self.step.culprit()}"
        self.ended = "not finite"
        del self._terms[first:]
        if self._best is None:
            raise FitError(f"{reason}, before any good state; lower lr or init_scale")
        self._set(self._best.parameters)
        self.best_step = self._best.done
        self.messages.append(
            f"{reason}; the draws are those of the best state so far, after "
            f"{self.best_step} steps; lower lr or init_scale"
        )

    def _interrupted(self) -> None:
        held = [torch.stack(self._terms), *self.step.parameters]
        if not all(bool(value.isfinite().all()) for value in held):
            self._go_back()
        self.ended = "interrupted"
        self.messages.append(
            f"SVI was interrupted after {self.done} of {self.plan.steps} steps; the draws are "
            "those of the guide as it stood"
        )


def shrinking(scales: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the sites whose typical scale is below 1e-3 and was still falling.

    That is judged before the last phase, whose small steps would hide it.

    Args:
        scales: Typical scale by site at the end of each window.

    Returns:
        The last scale of each such site.
    """
    found = {}
    for name, values in scales.items():
        before = values[: len(values) // 2]
        if len(values) < 4 or values[-1] > COLLAPSED:
            continue
        if before[-1] < (1 - FALL) * before[3 * len(before) // 4 - 1]:
            found[name] = values[-1]
    return found
