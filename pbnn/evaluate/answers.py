"""The automatic answer to each row, and the probability that it is wrong, from any posterior."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from pyro import poutine
from torch import Tensor, distributions

from pbnn.checks import unwrapped
from pbnn.errors import DataError, ModelError
from pbnn.evaluate.arrays import Array
from pbnn.evaluate.outcomes import class_probabilities, outcome_of
from pbnn.evaluate.recalibration import TemperatureScaling
from pbnn.infer.posterior import Posterior
from pbnn.model import Data, Model, indexable, isolated, take
from pbnn.prediction import predict, predictive
from pbnn.prediction.runner import Runner

if TYPE_CHECKING:
    from pbnn.data import Units

__all__ = ["Answers", "answer"]

_BLOCK_ROWS = 512
# Samples of y behind an error probability, at least.
_SAMPLES = 1000


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What would be answered without a person, and how likely each answer is wrong.

    Attributes:
        answer: The most probable class, by its code, `(n,)`; or the predictive mean in the user's
            units, `(n,)` or `(n, outputs)`.
        error_probability: Posterior predictive probability that the answer is wrong, `(n,)`: that y
            is another class, or that some output is further than the tolerance from the mean.
        tolerance: The tolerance, in the user's units; None for classes.
        scale: Predictive standard deviations of numbers, shaped like `answer`, calibrated.
        probabilities: Class probabilities, `(n, classes)`, calibrated; None for numbers.
        discrete: Whether y are whole numbers, whose distribution cannot be widened.
    """

    answer: NDArray[Any]
    error_probability: Array
    tolerance: float | None = None
    scale: Array | None = None
    probabilities: Array | None = None
    discrete: bool = False

    def wrong(self, y: ArrayLike) -> NDArray[np.bool_]:
        """Return which answers are wrong, `(n,)`.

        Args:
            y: Class codes, or values in the user's units, shaped like `answer`.

        Raises:
            DataError: The shape is another, or a value is missing.
        """
        seen = np.asarray(y)
        if seen.shape != self.answer.shape:
            raise DataError(f"y has shape {seen.shape}; expected {self.answer.shape}, as answered")
        each = tuple(range(1, seen.ndim))
        missing = np.isnan(seen.astype(np.float64)).any(each)
        if missing.any():
            raise DataError(f"y is NaN in row {int(missing.argmax())}; leave those rows out")
        if self.tolerance is None:
            return np.asarray(seen != self.answer)
        return np.asarray((np.abs(seen - self.answer) > self.tolerance).any(each))


def answer(
    model: Model,
    posterior: Posterior,
    x: Data,
    *,
    tolerance: float | None = None,
    calibration: float = 1.0,
    units: "Units | None" = None,
    seed: int = 0,
    device: str | torch.device | None = None,
) -> Answers:
    """Answer each row, and say how likely the answer is wrong.

    Args:
        model: The model that was fitted.
        posterior: Its posterior, from any road.
        x: Input rows `(n, …)`, or a dict of inputs.
        tolerance: Distance from y, in the user's units, beyond which a number is wrong; classes
            have none.
        calibration: The temperature of the averaged class probabilities, or the factor by which the
            predictive distribution of a number is widened about its mean; 1 for whole numbers.
        units: How y was standardised.
        seed: Seed of the samples that stand in where the distribution of y has no cdf.
        device: Where to run.

    Raises:
        DataError: x cannot be used, the calibration is not positive or does not suit y, a number
            has no tolerance, or a class has one.
        ModelError: The posterior is not one of this model, or a row has several Bernoulli outputs.
    """
    if not 0 < calibration < np.inf:
        raise DataError(f"calibration {calibration}; expected a positive number")
    x = indexable(x)
    outcome = outcome_of(model, posterior, x, device=device)
    # Classes have no units.
    of_numbers = None if outcome in ("class", "binary") else units
    found = predict(model, posterior, x, quantiles=(), units=of_numbers, device=device)
    p = class_probabilities(found, outcome)
    if p is not None:
        if tolerance is not None:
            raise DataError(f"tolerance {tolerance} where y is a class; leave it out")
        if calibration != 1 and len(p):
            scaling = TemperatureScaling()
            scaling.temperature_ = calibration
            p = scaling.transform(p)
        # By subtraction a small error probability would be lost to rounding.
        best = p.argmax(1)
        others = np.where(np.arange(p.shape[1]) == best[:, None], 0.0, p).sum(1)
        return Answers(answer=best, error_probability=others, probabilities=p)
    if tolerance is None or not 0 < tolerance < np.inf:
        raise DataError(f"tolerance {tolerance} where y is a number; expected a positive number")
    assert found.mean is not None
    if outcome == "binary":
        raise ModelError(
            f"y is Bernoulli of shape {tuple(found.mean.shape)}, and no row of it is one class; "
            "fit one model for each output"
        )
    discrete = outcome == "whole number"
    if discrete and calibration != 1:
        raise DataError(
            f"calibration {calibration} where y are whole numbers, which a factor would leave; "
            "leave it at 1 (fit an older rule again)"
        )
    near = tolerance / calibration
    chance = _exact(model, posterior, x, found.mean, near, units, device)
    if chance is None:
        chance = _sampled(model, posterior, x, found.mean, near, units, seed, device)
    return Answers(
        answer=np.asarray(found.mean),
        error_probability=chance,
        tolerance=tolerance,
        scale=calibration * np.asarray(found.scale),
        discrete=discrete,
    )


def _exact(
    model: Model,
    posterior: Posterior,
    x: Data,
    centre: Tensor,
    near: float,
    units: "Units | None",
    device: str | torch.device | None,
) -> Array | None:
    """Return P(some output is further than `near` from the centre) by the cdf of y, if it has one.

    The outputs of a row are independent given a draw, or the distribution has no cdf.
    """
    loc, scale = (0.0, 1.0) if units is None else (units.loc, units.scale)
    reach = torch.as_tensor(near / np.asarray(scale))
    standard = torch.as_tensor((np.asarray(centre) - loc) / scale)
    try:
        runner = Runner(model, posterior, x, device, standard, scored=True)
    except DataError:  # a mean that y itself cannot be, such as that of a count
        return None
    name = runner.single_observed()

    def inside(trace: poutine.Trace) -> dict[str, Tensor]:
        fn, y = unwrapped(trace.nodes[name]["fn"]), trace.nodes[name]["value"]
        if type(fn).cdf is distributions.Distribution.cdf:
            raise NotImplementedError
        within = reach.to(y)
        share = fn.cdf(y + within) - fn.cdf(y - within)
        return {"inside": share.expand_as(y).reshape(y.shape[0], -1).prod(1)}

    parts = []
    try:
        with isolated(0, runner.device), torch.no_grad():
            for rows in runner.row_blocks(progress=False):
                share = runner.gather(inside, rows)["inside"].double().mean(0)
                parts.append(share[: runner.rows])
    except NotImplementedError:
        return None
    return np.asarray((1.0 - torch.cat(parts)).clamp(0.0, 1.0))


def _sampled(
    model: Model,
    posterior: Posterior,
    x: Data,
    centre: Tensor,
    near: float,
    units: "Units | None",
    seed: int,
    device: str | torch.device | None,
) -> Array:
    """Return the share of samples of y, one or more for each draw, further than `near`."""
    posterior = posterior.repeated(_SAMPLES)
    name = Runner(model, posterior, x, device).single_observed()
    parts = [np.zeros(0)]
    for block, start in enumerate(range(0, len(centre), _BLOCK_ROWS)):
        rows = slice(start, min(start + _BLOCK_ROWS, len(centre)))
        options: Any = {"units": units, "seed": seed + block, "device": device}
        y = predictive(model, posterior, take(x, rows), **options)[name]
        far = (y - centre[rows]).abs() > near
        # A row of several outputs is wrong where one of them is.
        far = far.reshape(*far.shape[:3], -1).any(-1)
        parts.append(np.asarray(far.double().mean((0, 1))))
    return np.concatenate(parts)
