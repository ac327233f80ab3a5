"""A decision rule: which rows to answer automatically, and which to give to a person, and why.

Two stages. The density of a row's features decides "never seen"; among rows like the training rows
the calibrated error probability decides "hard". A rule is fitted on validation rows, saves to JSON,
and applies to new rows.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from pbnn._version import __version__
from pbnn.errors import DataError, FileError, ModelError
from pbnn.evaluate.answers import Answers, answer
from pbnn.evaluate.arrays import Array
from pbnn.evaluate.costs import Costs
from pbnn.evaluate.features import FeatureDensity
from pbnn.evaluate.recalibration import ScaleCalibration, TemperatureScaling
from pbnn.evaluate.saved_density import SavedDensity
from pbnn.files import writing
from pbnn.infer.posterior import Posterior
from pbnn.model import Data, Model, indexable

if TYPE_CHECKING:
    import pandas as pd

    from pbnn.data import Units

__all__ = [
    "ACCEPT",
    "HARD",
    "NEVER_SEEN",
    "DecisionRule",
    "Decisions",
    "fit_decision_rule",
    "observed",
]

FORMAT = 1
ACCEPT, HARD, NEVER_SEEN = "accept", "hard", "never seen"
# Below this many wrong answers a calibration is told to be rough.
FEW_ERRORS = 10
# Share of validation rows that may count as never seen: they are like the training rows.
UNSEEN_SHARE = 0.01


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """What a rule decides for some rows.

    Attributes:
        answers: The automatic answers, and their calibrated error probabilities.
        unlikeness: −log density of each row's features, `(n,)`; None for a rule of one stage.
        reason: "accept", or why a person should look: "never seen" or "hard"; `(n,)`.
        error_probability: What one threshold is compared with, `(n,)`: that of the answers, and 1
            for rows that were never seen.
    """

    answers: Answers
    unlikeness: Array | None
    reason: NDArray[np.str_]
    error_probability: Array

    def to_frame(self, classes: list[Any] | None = None) -> "pd.DataFrame":
        """Return a table with one row for each row: answer, error probability, decision, reason.

        Args:
            classes: Names of the classes, in the order of their codes.
        """
        import pandas as pd

        given = self.answers.answer
        if self.answers.tolerance is None and classes is not None:
            given = np.asarray(classes, dtype=object)[given]
        answered = given.reshape(len(given), int(np.prod(given.shape[1:])))
        names = ["answer"] if given.ndim == 1 else [f"answer_{i}" for i in range(given.shape[1])]
        frame = pd.DataFrame({name: answered[:, i] for i, name in enumerate(names)})
        frame["error_probability"] = self.answers.error_probability
        if self.unlikeness is not None:
            frame["unlikeness"] = self.unlikeness
        frame["decision"] = np.where(self.reason == ACCEPT, ACCEPT, "review")
        frame["reason"] = np.where(self.reason == ACCEPT, "", self.reason)
        return frame


@dataclass(frozen=True, kw_only=True)
class DecisionRule:
    """Review a row that is unlike the training rows, or whose answer is too likely to be wrong.

    Attributes:
        costs: What errors and reviews cost.
        threshold: Rows whose calibrated error probability is above it are reviewed.
        calibration: Temperature of the class probabilities, or the factor by which the predictive
            distribution of a number is widened, 1 for whole numbers; fitted on validation rows.
        tolerance: Distance beyond which a number is wrong, in the user's units; None for classes.
        density: Density of training features; None for a rule of one stage.
        unlike: Rows whose −log density is above it were never seen.
        notes: What to know about the fit, a line each.
        provenance: The rows of the validation, and which posterior it was; plain JSON values.
    """

    costs: Costs
    threshold: float
    calibration: float = 1.0
    tolerance: float | None = None
    density: SavedDensity | None = None
    unlike: float | None = None
    notes: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def apply(
        self,
        model: Model,
        posterior: Posterior,
        x: Data,
        *,
        units: "Units | None" = None,
        seed: int = 0,
        device: str | torch.device | None = None,
    ) -> Decisions:
        """Decide for each row.

        Args:
            model: The model that was fitted.
            posterior: The posterior that the rule was fitted with.
            x: Rows, encoded as in training.
            units: How y was standardised.
            seed: Seed of the samples where the distribution of y has no cdf.
            device: Where to run.

        Raises:
            DataError: x cannot be used as it is.
            ModelError: The posterior is not one of this model, or not that of the rule.
        """
        x = indexable(x)
        fitted = self.provenance.get("posterior", _identity(posterior))
        if fitted != _identity(posterior):
            raise ModelError(
                f"the rule was fitted with another posterior, {fitted}; got "
                f"{_identity(posterior)}: fit the rule again"
            )
        answers = answer(
            model,
            posterior,
            x,
            tolerance=self.tolerance,
            calibration=self.calibration,
            units=units,
            seed=seed,
            device=device,
        )
        p, unlikeness = answers.error_probability, None
        reason = np.where(p > self.threshold, HARD, ACCEPT)
        if self.density is not None and self.unlike is not None:
            unlikeness = self.density.score(model, posterior, x, device=device)
            unseen = unlikeness > self.unlike
            p, reason = np.where(unseen, 1.0, p), np.where(unseen, NEVER_SEEN, reason)
        return Decisions(answers=answers, unlikeness=unlikeness, reason=reason, error_probability=p)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the rule as JSON, with a format version; the file appears when it is complete."""
        record: dict[str, Any] = {
            "format": FORMAT,
            "pbnn": __version__,
            "costs": asdict(self.costs),
            "threshold": self.threshold,
            "calibration": self.calibration,
            "tolerance": self.tolerance,
            "density": None if self.density is None else self.density.to_json(),
            "unlike": self.unlike,
            "notes": list(self.notes),
            "provenance": dict(self.provenance),
        }
        path = Path(path)
        with writing(path) as temporary:
            temporary.write_text(json.dumps(record, indent=1, allow_nan=False), encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a rule that `save` wrote.

        Raises:
            FileError: The file is missing, damaged, no rule, or of another format.
        """
        path = Path(path)
        if not path.is_file():
            raise FileError(f"{path}: no such file; expected a rule written by DecisionRule.save")
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record.pop("format") != FORMAT:
                raise FileError(f"{path}: its format is not {FORMAT}; fit the rule again")
            del record["pbnn"]
            density = record.pop("density")
            rule = cls(
                costs=Costs(**record.pop("costs")),
                density=None if density is None else SavedDensity.from_json(density),
                notes=tuple(record.pop("notes")),
                **record,
            )
            rule._check()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, FileError):
                raise
            raise FileError(
                f"{path}: no decision rule ({type(error).__name__}: {error})"
            ) from error
        return rule

    def _check(self) -> None:
        """Refuse numbers that a rule cannot have, since a file may have been edited."""
        if not 0 <= self.threshold <= 1 or not 0 < self.calibration < np.inf:
            raise DataError(f"threshold {self.threshold} and calibration {self.calibration}")
        if self.tolerance is not None and not 0 < self.tolerance < np.inf:
            raise DataError(f"tolerance {self.tolerance}")
        if (self.density is None) != (self.unlike is None):
            raise DataError("density and unlike; expected both or none")


def fit_decision_rule(
    model: Model,
    posterior: Posterior,
    x: Data,
    y: Data,
    *,
    costs: Costs,
    tolerance: float | None = None,
    density: FeatureDensity | None = None,
    units: "Units | None" = None,
    seed: int = 0,
    device: str | torch.device | None = None,
) -> DecisionRule:
    """Calibrate the error probability on validation rows, and put the threshold at review / error.

    That threshold is the cheapest for probabilities that are calibrated, whatever the rows
    (Chow 1970, "On optimum recognition error and reject tradeoff"); `report_decisions` says what it
    costs on other rows, beside the best threshold in hindsight.

    Args:
        model: The model that was fitted.
        posterior: Its posterior, from any road.
        x: Validation rows, which the fit has not seen.
        y: Their observations, as the fit took them.
        costs: What errors and reviews cost.
        tolerance: Distance from y, in the user's units, beyond which a number is wrong; classes
            have none.
        density: A density fitted on training rows, for a rule of two stages; 1% of the validation
            rows, which are like them, lie outside of it.
        units: How y was standardised.
        seed: Seed of the samples where the distribution of y has no cdf.
        device: Where to run.

    Raises:
        DataError: There are no rows, y misses values, or the tolerance does not suit y.
        ModelError: The posterior is not one of this model.
    """
    x = indexable(x)
    seen = observed(y, units)
    raw = answer(model, posterior, x, tolerance=tolerance, units=units, seed=seed, device=device)
    wrong, notes = raw.wrong(seen), []
    calibration = 1.0
    if not len(wrong):
        raise DataError("no validation rows; expected rows that the fit has not seen")
    errors = int(wrong.sum())
    if raw.discrete:
        notes.append(
            "y are whole numbers, whose distribution no factor can widen: the error probability is "
            "that of the posterior, not calibrated"
        )
    elif errors:
        calibration = _calibration(raw, seen)
    if errors < FEW_ERRORS and not raw.discrete:
        notes.append(
            f"{errors} of the {len(wrong)} validation rows are answered wrong: the error "
            f"probability is {'calibrated on few' if errors else 'not calibrated'}; use more "
            "validation rows"
        )
    saved = None if density is None else SavedDensity.of(density)
    return DecisionRule(
        costs=costs,
        threshold=costs.threshold,
        calibration=calibration,
        tolerance=tolerance,
        density=saved,
        unlike=None if saved is None else _unlike(saved, model, posterior, x, device),
        notes=tuple(notes),
        provenance={
            "validation_rows": len(wrong),
            "validation_errors": errors,
            "posterior": _identity(posterior),
        },
    )


def _identity(posterior: Posterior) -> dict[str, Any]:
    """Return what tells one fit from another."""
    told = posterior.provenance
    return {"method": posterior.method, "seed": told.get("seed"), "created": told.get("created")}


def _calibration(raw: Answers, y: NDArray[Any]) -> float:
    """Return the temperature, or the factor on scales, of answers that are not calibrated."""
    if raw.probabilities is not None:
        return TemperatureScaling().fit(raw.probabilities, y).temperature_
    assert raw.scale is not None
    return ScaleCalibration().fit(raw.answer.ravel(), raw.scale.ravel(), y.ravel()).factor_


def observed(y: Data, units: "Units | None") -> NDArray[Any]:
    """Return observations in the user's units, from those that a fit takes."""
    values = np.asarray(y.detach().cpu() if isinstance(y, torch.Tensor) else y)
    return values if units is None else units.restore(values)


def _unlike(
    density: SavedDensity, model: Model, posterior: Posterior, x: Data, device: Any
) -> float:
    scores = density.score(model, posterior, x, device=device)
    return float(np.quantile(scores, 1 - UNSEEN_SHARE, method="higher"))
