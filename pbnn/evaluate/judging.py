"""Posteriors judged side by side on the same rows: ranking, likelihood, accuracy, latency.

A is the AUROC of the epistemic spread for the set out of distribution where it is least.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pbnn.errors import DataError
from pbnn.evaluate.arrays import Array
from pbnn.evaluate.bootstrap import Interval, Mean, Statistic, bootstrap
from pbnn.evaluate.outcomes import class_probabilities, outcome_of
from pbnn.evaluate.ranking import Detection
from pbnn.evaluate.scores import uncertainty_scores
from pbnn.infer.posterior import Posterior
from pbnn.model import Data, Model, indexable, take
from pbnn.prediction import Prediction, predict
from pbnn.prediction.runner import rows_of

__all__ = ["Judge", "Judged", "judge_on"]

# Predictions are timed this often; the fastest counts.
TIMINGS = 3


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A posterior on the validation rows, and its spread on the sets out of distribution.

    Attributes:
        posterior: The posterior.
        prediction: What it predicts for the validation rows, in the units of the model.
        nll: −log predictive density of each of them, `(n,)`, in the same units.
        probabilities: Class probabilities, `(n, classes)`, of a Bernoulli y, too; None for numbers.
        discrete: Whether y are whole numbers.
        right: Whether each class is right, as 0 or 1, `(n,)`; None for numbers.
        spread: Epistemic spread of each of them, `(n,)`.
        outside: Epistemic spread by set out of distribution.
        latency: Time of a prediction, in ms a row: the fastest of three.
    """

    posterior: Posterior
    prediction: Prediction
    nll: Array
    probabilities: Array | None
    discrete: bool
    right: Array | None
    spread: Array
    outside: Mapping[str, Array]
    latency: float

    def least_auroc(self) -> Statistic:
        """Return the AUROC of the set that is ranked worst, as a function of counts.

        The counts are those of the validation rows, then of each set.
        """
        home, ends = len(self.spread), np.cumsum([len(v) for v in self.outside.values()])
        detections = [
            Detection(np.concatenate([self.spread, v]), np.repeat([0.0, 1.0], [home, len(v)]))
            for v in self.outside.values()
        ]

        def least(counts: Array) -> Array:
            inside, *sets = np.split(counts, [home, *(home + ends[:-1])], axis=1)
            areas = [
                detection.auroc(np.concatenate([inside, of_set], 1))
                for detection, of_set in zip(detections, sets, strict=True)
            ]
            worst: Array = np.min(areas, axis=0)
            return worst

        return least


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Where posteriors are judged, and how.

    Attributes:
        model: The model that was fitted.
        x: Validation rows.
        y: Their observations.
        ood: Rows out of distribution by name.
        seed: Seed of the bootstrap.
        device: Where to run.
    """

    model: Model
    x: Data
    y: Data
    ood: Mapping[str, Data]
    seed: int
    device: str | torch.device | None

    def of(self, posterior: Posterior) -> Judged:
        """Predict, score and time one posterior."""
        options: dict[str, Any] = {"quantiles": (), "device": self.device}
        prediction = predict(self.model, posterior, self.x, self.y, **options)
        assert prediction.log_predictive_density is not None
        seconds = []
        for _ in range(TIMINGS):
            started = time.perf_counter()
            predict(self.model, posterior, self.x, **options)
            seconds.append(time.perf_counter() - started)
        scores = {
            name: uncertainty_scores(self.model, posterior, rows, device=self.device)["epistemic"]
            for name, rows in self.ood.items()
        }
        own = uncertainty_scores(
            self.model, posterior, self.x, prediction=prediction, device=self.device
        )
        outcome = outcome_of(self.model, posterior, self.x, device=self.device)
        p = class_probabilities(prediction, outcome)
        right = None if p is None else np.equal(p.argmax(1), self.y).astype(float)
        nll = -prediction.log_predictive_density.double().numpy()
        return Judged(
            posterior=posterior,
            prediction=prediction,
            nll=nll,
            probabilities=p,
            discrete=p is None and outcome != "number",
            right=right,
            spread=own["epistemic"],
            outside=scores,
            latency=1000 * min(seconds) / len(nll),
        )

    def auroc(self, judged: Judged, less: Judged | None = None) -> Interval:
        """Return the AUROC of the set that is ranked worst, or what it is more than another's."""
        statistic = judged.least_auroc()
        if less is not None:
            first, second = statistic, less.least_auroc()

            def statistic(counts: Array) -> Array:
                return first(counts) - second(counts)

        sizes = [len(judged.spread), *(len(values) for values in judged.outside.values())]
        return bootstrap(statistic, sizes, seed=self.seed)

    def mean(self, values: Array) -> Interval:
        """Return a mean over the validation rows."""
        statistic: Statistic = Mean(values)
        return bootstrap(statistic, len(values), seed=self.seed)

    def numbers(self, judged: Judged, auroc: Interval) -> dict[str, float]:
        """Return the numbers of a table."""
        nll = self.mean(judged.nll)
        accuracy = {} if judged.right is None else {"accuracy": float(judged.right.mean())}
        return {
            "auroc": auroc.value,
            "auroc_low": auroc.low,
            "auroc_high": auroc.high,
            "nll": nll.value,
            "nll_low": nll.low,
            "nll_high": nll.high,
            **accuracy,
            "latency": judged.latency,
            "seconds": judged.posterior.seconds,
        }


def judge_on(
    model: Model,
    validation: tuple[Data, Data],
    ood: Mapping[str, Data],
    seed: int,
    device: str | torch.device | None,
) -> Judge:
    """Check the rows that posteriors are judged on; see `Judge`. Rows without y are left out.

    Raises:
        DataError: There are no sets out of distribution, a set is empty, or no row has y.
    """
    if not ood:
        raise DataError("no rows out of distribution; expected {name: rows, …}")
    x, y = (indexable(part) for part in validation)
    sets = {name: indexable(rows) for name, rows in ood.items()}
    empty = [name for name, rows in {"validation": x, **sets}.items() if not rows_of(rows)]
    if empty:
        raise DataError(f"the set {empty[0]!r} has no rows; expected at least one")
    y = y.detach().cpu().numpy() if isinstance(y, torch.Tensor) else y
    if isinstance(y, np.ndarray) and y.dtype.kind == "f":
        seen = ~np.isnan(y.reshape(len(y), -1)).all(1)
        if not seen.any():
            raise DataError("y is NaN in every validation row; expected rows with y")
        if not seen.all():
            x, y = take(x, torch.as_tensor(np.flatnonzero(seen))), y[seen]
    return Judge(model=model, x=x, y=y, ood=sets, seed=seed, device=device)
