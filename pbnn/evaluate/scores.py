"""Uncertainty scores of rows, whatever road made the posterior: each is high where it is unsure."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from pyro import poutine
from torch import Tensor

from pbnn.errors import DataError
from pbnn.evaluate.arrays import Array
from pbnn.evaluate.features import FeatureDensity
from pbnn.infer.posterior import Posterior
from pbnn.model import Data, Model, isolated
from pbnn.prediction import Prediction, predict
from pbnn.prediction.runner import Runner

if TYPE_CHECKING:
    from pbnn.data import Units

__all__ = ["combined", "uncertainty_scores"]


def uncertainty_scores(
    model: Model,
    posterior: Posterior,
    x: Data,
    *,
    prediction: Prediction | None = None,
    units: "Units | None" = None,
    density: FeatureDensity | None = None,
    device: str | torch.device | None = None,
    progress: bool = False,
) -> dict[str, Array]:
    """Return all scores that a model has for some rows, each `(n,)`.

    For numbers: `epistemic`, the scale over draws of E[y given draw and x], and `total`, the scale
    of the posterior predictive; the root mean square over outputs. For classes: `epistemic`, the
    scale over draws of f(x), its logits centred, the root mean square over classes; `total`, the
    same of the posterior predictive, sqrt(Σ_k p_k (1 − p_k)); `entropy` and `mutual_information`,
    in nats; `max_probability`, 1 less the largest probability (Hendrycks & Gimpel 2017); `energy`,
    the mean over draws of −log Σ_k exp f_k (Liu et al. 2020, eq. 4), of f as the model returns it:
    likelihoods do not see its level. With a density, `density`: −log of it.

    Args:
        model: The model that was fitted.
        posterior: Its posterior, from any road.
        x: Input rows `(n, …)`, or a dict of inputs.
        prediction: What `pbnn.predict` returned for these rows, where it is at hand.
        units: What it was asked to return it in; scores are in the model's own, so that no output
            counts for more because its unit is smaller.
        density: Density of a layer's features, fitted on training rows.
        device: Where to run.
        progress: Whether to show progress bars on stderr.

    Raises:
        DataError: x cannot be used as it is.
        ModelError: The posterior is not one of this model.
    """
    if prediction is None:
        units = None
        prediction = predict(model, posterior, x, quantiles=(), device=device, progress=progress)
    scores: dict[str, Array] = {}
    if prediction.probabilities is None:
        assert prediction.epistemic_scale is not None
        assert prediction.scale is not None
        scores["epistemic"] = _over_outputs(prediction.epistemic_scale, units)
        scores["total"] = _over_outputs(prediction.scale, units)
    else:
        assert prediction.entropy is not None
        assert prediction.mutual_information is not None
        p = prediction.probabilities.double()
        spread, energy = _of_logits(model, posterior, x, device, progress=progress)
        scores["epistemic"] = spread
        scores["total"] = (p * (1 - p)).sum(1).sqrt().numpy()
        scores["entropy"] = prediction.entropy.double().numpy()
        scores["mutual_information"] = prediction.mutual_information.double().numpy()
        scores["max_probability"] = 1 - p.amax(1).numpy()
        scores["energy"] = energy
    if density is not None:
        scores["density"] = density.score(x)
    return scores


def _over_outputs(scale: Tensor, units: "Units | None") -> Array:
    own = scale.double().numpy() / (1.0 if units is None else units.scale)
    root: Array = np.sqrt(np.square(own).reshape(len(own), -1).mean(1))
    return root


def _of_logits(
    model: Model,
    posterior: Posterior,
    x: Data,
    device: str | torch.device | None,
    *,
    progress: bool,
) -> tuple[Array, Array]:
    """Return the scale over draws of the centred logits, and the mean energy, by row."""
    runner = Runner(model, posterior, x, device)

    def read(trace: poutine.Trace) -> dict[str, Tensor]:
        f: Tensor = trace.nodes["_RETURN"]["value"]
        return {"f": f.reshape(f.shape[0], -1)}

    spreads, energies = [], []
    with isolated(0, runner.device), torch.no_grad():
        for rows in runner.row_blocks(progress=progress):
            f = runner.gather(read, rows)["f"].double()
            energies.append(-f.logsumexp(-1).mean(0))
            centred = f - f.mean(-1, keepdim=True)
            spreads.append(centred.var(0, correction=0).mean(-1).sqrt())
    return torch.cat(spreads).numpy(), torch.cat(energies).numpy()


def combined(
    scores: Mapping[str, Array], names: Sequence[str], reference: Mapping[str, Array]
) -> Array:
    """Return the sum of several scores, each standardised by its values on reference rows.

    Args:
        scores: Scores by name, each `(n,)`.
        names: Those to add up.
        reference: The same scores on rows in distribution, such as training rows: they alone give
            means and scales, so that no number of the rows that are judged leaks into the score.

    Raises:
        DataError: There is no score of a name.
    """
    missing = [name for name in names if name not in scores or name not in reference]
    if missing:
        raise DataError(f"no score {missing[0]!r}; expected some of {list(scores)}")
    total = np.zeros(len(scores[names[0]]))
    for name in names:
        scale = reference[name].std()
        # What is constant on reference rows keeps its own unit.
        total += (scores[name] - reference[name].mean()) / (scale if scale > 0 else 1.0)
    return total
