"""What y is, by the distribution of its site: a class, one of two, a whole number or a number."""

from typing import Literal

import numpy as np
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import Bernoulli

from pbnn.checks import support_of, unwrapped
from pbnn.evaluate.arrays import Array
from pbnn.infer.posterior import Posterior
from pbnn.model import Data, Model, isolated
from pbnn.prediction import Prediction
from pbnn.prediction.runner import Runner

__all__ = ["Outcome", "class_probabilities", "outcome_of"]

Outcome = Literal["class", "binary", "whole number", "number"]


def outcome_of(
    model: Model,
    posterior: Posterior,
    x: Data,
    *,
    device: str | torch.device | None = None,
) -> Outcome:
    """Return what the model's y is: by the type of its distribution, whatever the values.

    Args:
        model: The model that was fitted.
        posterior: Its posterior; one draw of it is used.
        x: Input rows, of which one is used.
        device: Where to run.

    Raises:
        DataError: x cannot be used as it is.
        ModelError: The posterior is not one of this model, or it observes several sites.
    """
    runner = Runner(model, posterior.select(draws=slice(0, 1)), x, device)
    name = runner.single_observed()
    if runner.classes:
        return "class"
    found: Outcome = "number"

    def read(trace: poutine.Trace) -> dict[str, Tensor]:
        nonlocal found
        fn, f = trace.nodes[name]["fn"], trace.nodes["_RETURN"]["value"]
        if isinstance(unwrapped(fn), Bernoulli):
            found = "binary"
        elif support_of(fn).is_discrete:
            found = "whole number"
        return {"f": f.reshape(f.shape[0], -1)}

    with isolated(0, runner.device), torch.no_grad():
        runner.gather(read, slice(0, 1))
    return found


def class_probabilities(prediction: Prediction, outcome: Outcome) -> Array | None:
    """Return class probabilities `(n, classes)` in float64; None where y is no class.

    The mean of a Bernoulli y is the probability of class 1; several outputs a row are no class.

    Args:
        prediction: What a posterior predicts, in the units of the model.
        outcome: What y is.
    """
    if prediction.probabilities is not None:
        return np.asarray(prediction.probabilities.double())
    assert prediction.mean is not None
    if outcome != "binary" or prediction.mean.ndim > 1:
        return None
    mean = np.asarray(prediction.mean.double())
    return np.stack([1 - mean, mean], 1).clip(0, 1)
