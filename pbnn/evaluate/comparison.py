"""SVI against MCMC: held-out scores of several posteriors beside a reference, in one table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pbnn.errors import DataError
from pbnn.evaluate.calibration import (
    expected_calibration_error,
    interval_coverage,
    log_predictive_density,
)
from pbnn.evaluate.convergence import Convergence, check_convergence
from pbnn.infer.posterior import Posterior
from pbnn.model import Data, Model, leaves
from pbnn.prediction import Prediction, function_draws, log_likelihood, predict

if TYPE_CHECKING:
    import pandas as pd

    from pbnn.data import Units

__all__ = ["Comparison", "compare"]

INTERVAL = 0.9
QUANTILES = ((1 - INTERVAL) / 2, (1 + INTERVAL) / 2)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A table of posteriors, and whether the reference deserves to be one.

    Attributes:
        table: One row a posterior; columns as in `compare`.
        reference: Name of the reference; None without one.
        convergence: What the reference's chains say about themselves; None without chains.
        predictions: What each posterior predicts for the held-out rows, by name.
    """

    table: "pd.DataFrame"
    reference: str | None
    convergence: Convergence | None
    predictions: Mapping[str, Prediction]

    @property
    def verdict(self) -> str:
        """One line on the reference, to be read before any number."""
        if self.reference is None:
            return "no MCMC reference: scores are comparable, scale ratios are not available"
        if self.convergence is None:
            return f"reference {self.reference!r} is an approximation itself, not Markov chains"
        return f"reference {self.reference!r} {self.convergence}"

    def __str__(self) -> str:
        return f"{self.verdict}\n{self.table.to_string(float_format=lambda v: f'{v:.3f}')}"


def compare(
    posteriors: Mapping[str, Posterior],
    model: Model,
    x: Data,
    y: Data,
    *,
    reference: str | None = None,
    units: "Units | None" = None,
    seed: int = 0,
    device: str | None = None,
    progress: bool = False,
) -> Comparison:
    """Compare posteriors of one model on held-out rows.

    Columns: `lpd`, the mean log predictive density of a row, and `lpd_se`, its standard error over
    rows; `rmse` and `coverage_90` of central intervals, or `accuracy` and `ece` for classes;
    `scale_ratio`, the median over rows of the posterior predictive's scale over the reference's
    (numbers only); `epistemic_ratio`, the same of the scale of f(x) (logits centred over
    classes), with `epistemic_ratio_5` and `epistemic_ratio_95`, its quantiles over rows;
    `draws`; `seconds`. Rows whose y is missing are left out of scores.

    The row "reference (half)" is a noise floor: half of the reference's chains, judged against the
    other half.

    Args:
        posteriors: Posteriors by name.
        model: The model that was fitted.
        x: Held-out rows.
        y: Their observations, as the fit took them (standardised, if it did).
        reference: Name of the reference; by default the first posterior made of Markov chains.
        units: How y was standardised; scores are in the user's units.
        seed: Seed of the sampled predictives.
        device: Where to run.
        progress: Whether to show progress bars on stderr.

    Raises:
        DataError: There are no posteriors, or the reference is none of them.
        ModelError: A posterior is not one of this model.
    """
    import pandas as pd

    if not posteriors:
        raise DataError("no posteriors to compare; expected {name: Posterior, …}")
    if reference is None:
        reference = next((name for name, p in posteriors.items() if p.markov), None)
    elif reference not in posteriors:
        raise DataError(f"reference {reference!r}; expected one of {list(posteriors)}")
    options: dict[str, Any] = {"units": units, "device": device, "progress": progress}
    scored = {
        name: _Scored.of(model, p, x, y, seed=seed, **options) for name, p in posteriors.items()
    }
    rows = {name: s.row(y, units, scored.get(reference or "")) for name, s in scored.items()}
    convergence = None
    if reference is not None:
        chains = posteriors[reference]
        if chains.markov:
            convergence = check_convergence(model, chains, x, device=device)
        if chains.chains > 1:
            cut = chains.chains // 2
            halves = [
                _Scored.of(model, chains.select(chains=part), x, y, seed=seed, **options)
                for part in (range(cut), range(cut, 2 * cut))
            ]
            # The halves ran in one batch: how long one of them took alone is not known.
            half = {**halves[0].row(y, units, halves[1]), "seconds": float("nan")}
            rows[f"{reference} (half)"] = half
    return Comparison(
        table=pd.DataFrame(rows).T.rename_axis("posterior"),
        reference=reference,
        convergence=convergence,
        predictions={name: s.prediction for name, s in scored.items()},
    )


@dataclass(frozen=True)
class _Scored:
    """One posterior evaluated on the held-out rows."""

    posterior: Posterior
    prediction: Prediction
    lpd: Tensor
    f_scale: Tensor

    @classmethod
    def of(
        cls, model: Model, posterior: Posterior, x: Data, y: Data, *, seed: int, **options: Any
    ) -> "_Scored":
        units = options["units"]
        prediction = predict(model, posterior, x, quantiles=QUANTILES, seed=seed, **options)
        lpd = log_predictive_density(log_likelihood(model, posterior, x, y, **options))
        around = {name: value for name, value in options.items() if name != "units"}
        f = function_draws(model, posterior, x, **around).double().flatten(0, 1)
        f_scale = f.std(0, correction=0)
        if units is not None:
            f_scale = f_scale * torch.as_tensor(np.asarray(units.scale))
        return cls(posterior, prediction, lpd, f_scale)

    def row(self, y: Data, units: "Units | None", reference: "_Scored | None") -> dict[str, float]:
        """Return this posterior's row of the table."""
        prediction = self.prediction
        given = leaves(y)[0][1]
        y = given.cpu() if isinstance(given, Tensor) else torch.as_tensor(np.asarray(given))
        seen = ~y.isnan().reshape(len(y), -1).all(1)
        lpd = self.lpd[seen]
        error = float(lpd.std()) / len(lpd) ** 0.5 if len(lpd) > 1 else float("nan")
        out = {"lpd": float(lpd.mean()), "lpd_se": error}
        if prediction.probabilities is not None:
            best = prediction.probabilities.argmax(1)
            out["accuracy"] = float((best == y).double().mean())
            out["ece"] = expected_calibration_error(prediction.probabilities, y)
        else:
            assert prediction.mean is not None
            assert prediction.quantiles is not None
            observed = y.double() if units is None else torch.as_tensor(units.restore(y))
            residual = (prediction.mean - observed)[~observed.isnan()]
            out["rmse"] = float(residual.square().mean().sqrt())
            lower, upper = (prediction.quantiles[p] for p in QUANTILES)
            out["coverage_90"] = interval_coverage(lower, upper, observed)
        return {
            **out,
            **self._ratios(reference),
            "draws": float(self.posterior.chains * self.posterior.draws_per_chain),
            "seconds": self.posterior.seconds,
        }

    def _ratios(self, reference: "_Scored | None") -> dict[str, float]:
        """Return scales over the reference's: medians over rows, and the spread of f's."""
        if reference is None:
            return {}
        out = {}
        scale, scale_of_reference = self.prediction.scale, reference.prediction.scale
        if scale is not None and scale_of_reference is not None:
            out["scale_ratio"] = float((scale / scale_of_reference).median())
        ratio = self.f_scale / reference.f_scale
        levels = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
        low, middle, high = torch.quantile(ratio.flatten(), levels).tolist()
        return {
            **out,
            "epistemic_ratio": middle,
            "epistemic_ratio_5": low,
            "epistemic_ratio_95": high,
        }
