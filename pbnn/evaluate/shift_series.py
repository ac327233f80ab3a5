"""What a posterior is worth as rows move away from the training rows, step by step."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pbnn.errors import DataError
from pbnn.evaluate.bootstrap import Interval, Mean, Statistic, bootstrap_all
from pbnn.evaluate.mass import mass_of
from pbnn.evaluate.ranking import Detection
from pbnn.evaluate.scores import uncertainty_scores
from pbnn.infer.posterior import Posterior
from pbnn.model import Data, Model, indexable

if TYPE_CHECKING:
    import pandas as pd

    from pbnn.data import Units

__all__ = ["shift_table"]


def shift_table(
    model: Model,
    posterior: Posterior,
    series: Mapping[float, Data],
    y: Data,
    *,
    units: "Units | None" = None,
    replicates: int = 1000,
    seed: int = 0,
    device: str | torch.device | None = None,
) -> "pd.DataFrame":
    """Return metrics by severity of a shift, with bootstrap intervals over rows.

    Numbers: those of `pbnn.evaluate.mass.Mass` (such as `nll`, `accuracy` and `ece`, or
    `coverage_90`); `epistemic`, the mean epistemic spread; and `auroc_epistemic`, its AUROC for the
    shifted rows against the same rows at the least severity, where it is 0.5.

    Args:
        model: The model that was fitted.
        posterior: Its posterior, from any road.
        series: The same rows at each severity; see `pbnn.data.shifts.shift_series`.
        y: Observations of the rows, as the fit took them: a shift does not change them.
        units: How y was standardised; scores are in the user's units.
        replicates: Bootstrap resamples.
        seed: Seed of predictive samples and resampling.
        device: Where to run.

    Returns:
        One row for each severity and number; columns `value`, `low`, `high`.

    Raises:
        DataError: The series is empty, or x or y cannot be used.
        ModelError: The posterior is not one of this model.
    """
    import pandas as pd

    if not series:
        raise DataError("no severities; expected {severity: rows, …}")
    seen = torch.as_tensor(np.asarray(indexable(y)))
    place: dict[str, Any] = {"device": device}
    at_first = None
    out: dict[tuple[float, str], Interval] = {}
    for severity, x in sorted(series.items()):
        rows = indexable(x)
        mass = mass_of(model, posterior, rows, seen, units=units, seed=seed, **place)
        scores = uncertainty_scores(
            model, posterior, rows, prediction=mass.prediction, units=units, **place
        )
        spread = scores["epistemic"]
        at_first = spread if at_first is None else at_first
        numbers = bootstrap_all(mass.statistics, len(mass.rows), replicates=replicates, seed=seed)
        moved = np.repeat([0.0, 1.0], len(spread))
        both: dict[str, Statistic] = {
            "auroc_epistemic": Detection(np.concatenate([at_first, spread]), moved).auroc
        }
        numbers |= bootstrap_all(both, [len(spread)] * 2, replicates=replicates, seed=seed)
        mean: dict[str, Statistic] = {"epistemic": Mean(spread)}
        numbers |= bootstrap_all(mean, len(spread), replicates=replicates, seed=seed)
        out |= {(severity, name): interval for name, interval in numbers.items()}
    frame = pd.DataFrame({key: vars(interval) for key, interval in out.items()}).T
    return frame.rename_axis(["severity", "number"])
