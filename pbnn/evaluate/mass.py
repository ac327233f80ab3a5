"""What a posterior's spread is worth as probability on some rows: the numbers of criterion C."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pbnn.evaluate.arrays import Array
from pbnn.evaluate.bootstrap import Interval, Mean, Statistic
from pbnn.evaluate.calibration import (
    CalibrationError,
    CoverageCurve,
    brier_score,
    negative_log_likelihood,
)
from pbnn.evaluate.crps import crps_samples, pit_samples
from pbnn.evaluate.outcomes import class_probabilities, outcome_of
from pbnn.infer.posterior import Posterior
from pbnn.model import Data, Model
from pbnn.prediction import Prediction, predict, predictive

if TYPE_CHECKING:
    from pbnn.data import Units

__all__ = ["LEVEL", "Mass", "mass_of", "miscalibrated"]

LEVEL = 0.9
QUANTILES = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
# Draws of the predictive samples behind PIT and CRPS, at most; moments take all draws.
SAMPLED_DRAWS = 400
# Data sets drawn from the predictive itself.
REPLICATED = 200
# Bad is what lies beyond these by its whole interval: coverage this far from its level, and the
# calibration error up to which probabilities may be decided on.
COVERAGE_TOLERANCE = 0.05
LARGEST_ECE = 0.1


@dataclass(frozen=True, kw_only=True)
class Mass:
    """A posterior on some rows: what it predicts, and its scores as statistics to resample.

    Attributes:
        prediction: What it predicts, in the user's units.
        rows: Numbers of the rows that are scored: those with y, all where there is no y.
        statistics: By name, for the scored rows. With y, for numbers `nll`, `coverage_90` (of
            central intervals), `coverage_error` (mean distance of the coverage from its level, over
            levels), `crps` and `interval_score_90`; for classes `accuracy`, `nll`, `brier`, `ece`,
            `ece_mass` and `ece_classwise`. Always `sharpness_90`, the width of the interval, or
            `confidence`, the largest probability.
        error: |y − mean| of the scored rows (root mean square over outputs), or 1 less the
            probability of their class, `(rows,)`; None without y.
        replicated: The same for data sets drawn from the predictive itself, `(sets, rows)`.
        floor: What `ece` is on such data sets: value is their mean, low and high hold 95%.
        discrete: Whether y are whole numbers, whose intervals cover more than their level.
    """

    prediction: Prediction
    rows: NDArray[np.int64]
    statistics: Mapping[str, Statistic]
    error: Array | None = None
    replicated: Array | None = None
    floor: Mapping[str, Interval] = field(default_factory=dict)
    discrete: bool = False


def mass_of(
    model: Model,
    posterior: Posterior,
    x: Data,
    y: Tensor | None = None,
    *,
    units: "Units | None" = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    progress: bool = False,
) -> Mass:
    """Score a posterior on some rows.

    Args:
        model: The model that was fitted.
        posterior: Its posterior, from any road.
        x: Input rows.
        y: Their observations, as the fit took them; NaN is left out. None leaves what needs them.
        units: How y was standardised; scores are in the user's units.
        seed: Seed of the predictive samples.
        device: Where to run.
        progress: Whether to show progress bars on stderr.

    Raises:
        DataError: x or y cannot be used as they are.
        ModelError: The posterior is not one of this model.
    """
    outcome = outcome_of(model, posterior, x, device=device)
    units = None if outcome in ("class", "binary") else units  # classes have none
    options: dict[str, Any] = {
        "units": units,
        "seed": seed,
        "device": device,
        "progress": progress,
    }
    prediction = predict(model, posterior, x, y, quantiles=QUANTILES, **options)
    probabilities = class_probabilities(prediction, outcome)
    if probabilities is not None:
        return _of_classes(prediction, probabilities, y, np.random.default_rng(seed))
    if y is None:
        return _of_numbers(prediction, None, None)
    step = -(-posterior.draws_per_chain * posterior.chains // SAMPLED_DRAWS)
    some = posterior.select(draws=slice(None, None, step)).repeated(SAMPLED_DRAWS)
    found = predictive(model, some, x, **options)
    samples = next(value for name, value in found.items() if name != "f")
    seen = _double(y) if units is None else units.restore(_double(y))
    return _of_numbers(prediction, _double(samples.flatten(0, 1)), seen)


def _double(value: Tensor) -> Array:
    return np.asarray(value.detach().cpu().double().numpy())


def _of_numbers(prediction: Prediction, samples: Array | None, y: Array | None) -> Mass:
    assert prediction.mean is not None
    assert prediction.quantiles is not None
    rows = len(prediction.mean)
    mean, low, high = (
        _double(value).reshape(rows, -1)
        for value in (prediction.mean, *(prediction.quantiles[q] for q in QUANTILES))
    )
    width = (high - low).mean(1)
    if y is None or samples is None:
        statistics = {"sharpness_90": Mean(width)}
        return Mass(prediction=prediction, rows=np.arange(rows), statistics=statistics)
    y, samples = y.reshape(rows, -1), samples.reshape(len(samples), rows, -1)
    kept = np.flatnonzero(~np.isnan(y).all(1))
    y, mean, low, high, samples = y[kept], mean[kept], low[kept], high[kept], samples[:, kept]
    assert prediction.log_predictive_density is not None
    # What is missing counts as the mean, and is then taken out of every mean over outputs.
    there = ~np.isnan(y)
    filled = np.where(there, y, mean).ravel()
    drawn = samples.reshape(len(samples), -1)

    def by_row(values: Array) -> Array:
        return np.asarray(np.where(there, values.reshape(y.shape), 0.0).sum(1) / there.sum(1))

    outside = np.maximum(low - y, 0) + np.maximum(y - high, 0)
    pit = np.where(there, pit_samples(drawn, filled).reshape(y.shape), np.nan)
    sets = samples[np.linspace(0, len(samples) - 1, min(REPLICATED, len(samples))).astype(int)]
    return Mass(
        prediction=prediction,
        rows=kept,
        statistics={
            "nll": Mean(-_double(prediction.log_predictive_density)[kept]),
            "coverage_90": Mean(by_row(((low <= y) & (y <= high)).astype(np.float64))),
            "coverage_error": CoverageCurve(pit).error,
            "crps": Mean(by_row(crps_samples(drawn, filled, fair=len(drawn) > 1))),
            "interval_score_90": Mean(by_row(high - low + 2 / (1 - LEVEL) * outside)),
            "sharpness_90": Mean(width[kept]),
        },
        error=by_row((filled.reshape(y.shape) - mean) ** 2) ** 0.5,
        replicated=np.stack([by_row((one - mean) ** 2) ** 0.5 for one in sets]),
        discrete=bool((samples == np.round(samples)).all()),
    )


def _of_classes(
    prediction: Prediction, p: Array, y: Tensor | None, generator: np.random.Generator
) -> Mass:
    if y is None:
        statistics = {"confidence": Mean(p.max(1))}
        return Mass(prediction=prediction, rows=np.arange(len(p)), statistics=statistics)
    given = y.double().numpy()
    kept = np.flatnonzero(~np.isnan(given))
    p, classes = p[kept], given[kept].astype(np.int64)
    each = np.arange(len(p))
    # A class is where a uniform number falls among the sums of probabilities.
    sets = [
        np.minimum((generator.random((len(p), 1)) > p.cumsum(1)).sum(1), p.shape[1] - 1)
        for _ in range(REPLICATED)
    ]
    floor = np.array([CalibrationError(p, one)()[0] for one in sets])
    return Mass(
        prediction=prediction,
        rows=kept,
        statistics={
            "accuracy": Mean(p.argmax(1) == classes),
            "nll": Mean(negative_log_likelihood(p, classes)),
            "brier": Mean(brier_score(p, classes)),
            "ece": CalibrationError(p, classes),
            "ece_mass": CalibrationError(p, classes, binning="mass"),
            "ece_classwise": CalibrationError(p, classes, classwise=True),
            "confidence": Mean(p.max(1)),
        },
        error=1 - p[each, classes],
        replicated=np.stack([1 - p[each, one] for one in sets]),
        floor={"ece": Interval(floor.mean(), *np.quantile(floor, [0.025, 0.975]))},
    )


def miscalibrated(
    scores: Mapping[str, Interval],
    floor: Mapping[str, Interval],
    *,
    away: bool,
    discrete: bool = False,
) -> str | None:
    """Say what is bad about the probabilities of some rows; None where nothing is.

    Central 90% intervals cover less than 0.85 or, in distribution, more than 0.95; or the expected
    calibration error is above 0.1, and above what classes drawn from the probabilities themselves
    give. Each by its whole bootstrap interval.

    Args:
        scores: Numbers of criterion C by name.
        floor: As in `Mass`.
        away: Whether the rows are out of distribution, where wide intervals are no fault.
        discrete: Whether y are whole numbers, where they are none either.
    """
    coverage, ece = scores.get("coverage_90"), scores.get("ece")
    if coverage is not None:
        least = LEVEL - COVERAGE_TOLERANCE
        most = 1.0 if away or discrete else LEVEL + COVERAGE_TOLERANCE
        if coverage.high < least or coverage.low > most:
            return f"90% intervals cover {coverage}"
    if ece is not None and ece.low > max(LARGEST_ECE, floor["ece"].high):
        return f"the calibration error is {ece}"
    return None
