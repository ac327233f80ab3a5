"""What draws of a model give at rows: f, y and its moments, and how saturated its units are."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from pyro import poutine
from torch import Tensor, nn
from torch.distributions import Bernoulli
from torch.overrides import TorchFunctionMode

from pbnn.checks import unwrapped
from pbnn.errors import ModelError
from pbnn.infer.posterior import Posterior
from pbnn.model import Data, Model, isolated
from pbnn.prediction.mapping import sampled
from pbnn.prediction.runner import Runner

__all__ = ["Functions", "functions_of"]

# Bounded activations by torch's name: middle and half width of their range.
_BOUNDED = {
    "tanh": (0.0, 1.0),
    "erf": (0.0, 1.0),
    "hardtanh": (0.0, 1.0),
    "sigmoid": (0.5, 0.5),
    "expit": (0.5, 0.5),
}
# Share of the half width beyond which a unit is saturated: tanh's slope is below 0.02 there.
SATURATED = 0.99
# Calls of bounded activations that are told apart; of more, those of one name are taken together.
_APART = 8


@dataclass(frozen=True, kw_only=True)
class Functions:
    """What draws of a model give at n rows, in float64.

    Attributes:
        f: Network outputs `(draws, n, outputs)`.
        y: One sampled y for each draw, `(draws, n, …)`.
        location: E[y given draw and x], `(draws, n, outputs)`; class probabilities of classes.
        variance: Var[y given draw and x], likewise; p (1 − p) of classes.
        certainty: Probability of the most probable class, `(draws, n)`; None where y is no class.
        log_density: Log density of the sampled y under its draw, over all rows, `(draws,)`.
        saturated: By bounded activation, in the order in which the model calls them, the share of
            values that are within a hundredth of their bounds; by name, where there are over eight.
    """

    f: Tensor
    y: Tensor
    location: Tensor
    variance: Tensor
    certainty: Tensor | None
    log_density: Tensor
    saturated: dict[str, float]


def functions_of(
    model: Model,
    posterior: Posterior,
    x: Data,
    y: Data = None,
    *,
    seed: int = 0,
    device: str | torch.device | None = None,
) -> Functions:
    """Evaluate a model at rows, for each draw of a posterior or of the prior.

    Args:
        model: A model with one observed site.
        posterior: Draws, of which all are used.
        x: Input rows.
        y: Their observations. Given, they keep the observed site from being sampled in `forward`,
            where a link function would count among the activations.
        seed: Seed of the sampled y.
        device: Where to run.

    Raises:
        DataError: x or y cannot be used as they are.
        ModelError: The draws are not of this model, or it observes several sites.
    """
    runner = Runner(model, posterior, x, device, y)
    name = runner.single_observed()
    parts: list[dict[str, Tensor]] = []
    totals: dict[str, Tensor] = {}
    with isolated(seed, runner.device), torch.no_grad(), _activations(runner.model) as calls:

        def read(trace: poutine.Trace) -> dict[str, Tensor]:
            f = trace.nodes["_RETURN"]["value"]
            counts = {
                f"saturated {label}": count for label, count in calls.shares(f.shape[0]).items()
            }
            fn = trace.nodes[name]["fn"]
            return {"f": _flat(f), **_moments(fn, classes=runner.classes), **counts}

        for rows in runner.row_blocks(progress=False):
            found = runner.gather(read, rows)
            for label in [label for label in found if label.startswith("saturated ")]:
                weighed = found.pop(label).double().mean() * (rows.stop - rows.start)
                totals[label] = totals.get(label, 0.0) + weighed
            totals["log_density"] = (
                totals.get("log_density", 0.0) + found.pop("log_density").double()
            )
            parts.append(found)
    whole = {key: torch.cat([part[key] for part in parts], 1) for key in parts[0]}
    return Functions(
        f=whole["f"].double(),
        y=whole["y"],
        location=whole["location"].double(),
        variance=whole["variance"].double(),
        certainty=whole["certainty"].double() if "certainty" in whole else None,
        log_density=totals.pop("log_density"),
        saturated={
            label.removeprefix("saturated "): float(total / runner.rows)
            for label, total in totals.items()
        },
    )


def _flat(value: Tensor) -> Tensor:
    return value.reshape(value.shape[0], -1)


def _moments(fn: Any, *, classes: bool) -> dict[str, Tensor]:
    """Return location, variance, certainty, a sample and its log density."""
    y = sampled(fn)
    out = {"y": y, "log_density": fn.log_prob(y).sum()}
    if classes:
        p = unwrapped(fn).probs
        return {**out, "location": p, "variance": p * (1 - p), "certainty": p.amax(-1)}
    try:
        out |= {"location": _flat(fn.mean), "variance": _flat(fn.variance)}
    except NotImplementedError as error:
        raise ModelError(
            f"the observed site is {type(unwrapped(fn)).__name__}, which has no mean and variance"
        ) from error
    if isinstance(unwrapped(fn), Bernoulli):
        out["certainty"] = torch.maximum(out["location"], 1 - out["location"]).amin(-1)
    return out


class _Calls(TorchFunctionMode):
    """Notes what bounded activations return; inside a fused GRU or LSTM they are not seen."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[tuple[str, Tensor]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "").rstrip("_")
        if name in _BOUNDED:
            self._found.append((name, out))
        return out

    def clear(self) -> None:
        """Forget what earlier runs returned."""
        self._found.clear()

    def shares(self, rows: int) -> dict[str, Tensor]:
        """Return by activation of hidden units, rows first, the share of its saturated values."""
        found = [(name, value) for name, value in self._found if value.shape[:1] == (rows,)]
        shares: dict[str, list[Tensor]] = {}
        for number, (name, value) in enumerate(found, 1):
            middle, half = _BOUNDED[name]
            beyond = (value - middle).abs() > SATURATED * half
            # A layer that runs once for each step of a sequence calls one for each gate and step.
            label = f"{name} {number}" if len(found) <= _APART else f"every {name}"
            shares.setdefault(label, []).append(beyond.to(value.dtype).mean())
        return {label: torch.stack(each).mean() for label, each in shares.items()}


@contextmanager
def _activations(model: nn.Module) -> Iterator[_Calls]:
    """Note the bounded activations of each run of a model, whether modules or functions."""
    calls = _Calls()
    handle = model.register_forward_pre_hook(lambda *_: calls.clear())
    try:
        with calls:
            yield calls
    finally:
        handle.remove()
