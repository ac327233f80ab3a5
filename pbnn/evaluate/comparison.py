"""SVI against MCMC: several posteriors beside a reference, near the data and away from them."""

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
from pbnn.evaluate.distance import Distance, thinned
from pbnn.evaluate.loo import Loo, leave_one_out
from pbnn.infer.posterior import Posterior
from pbnn.model import Data, Model, indexable, leaves
from pbnn.prediction import Prediction, function_draws, log_likelihood, predict

if TYPE_CHECKING:
    import pandas as pd

    from pbnn.data import Units

__all__ = ["Comparison", "compare"]

HELD_OUT = "held out"
HALF, OTHER_SEED = " (half)", " (other seed)"  # the rows that are noise floors
INTERVAL = 0.9
QUANTILES = ((1 - INTERVAL) / 2, (1 + INTERVAL) / 2)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Posteriors beside a reference, and whether the reference deserves to be one.

    Attributes:
        table: Scores on the held-out rows, one row a posterior; columns as in `compare`.
        distances: Distances to the reference with their bootstrap intervals, by inputs and
            posterior; columns as in `pbnn.evaluate.distance.Distance.summary`. Empty without a
            reference.
        reference: Name of the reference; None without one.
        convergence: What the reference's chains say about themselves; None without chains.
        predictions: What each posterior predicts for the held-out rows, by name.
        notes: What a reader must know before the numbers, a line each.
    """

    table: "pd.DataFrame"
    distances: "pd.DataFrame"
    reference: str | None
    convergence: Convergence | None
    predictions: Mapping[str, Prediction]
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """One line on the reference, to be read before any number."""
        if self.reference is None:
            return "no MCMC reference: scores are comparable, scale ratios are not available"
        if self.convergence is None:
            return f"reference {self.reference!r} is an approximation itself, not Markov chains"
        return f"reference {self.reference!r} {self.convergence}"

    @property
    def ranking(self) -> list[str] | None:
        """The compared posteriors, closest first, by `wasserstein` on the held-out rows.

        None where there is nothing to rank by: the reference is not made of Markov chains that are
        at least usable.
        """
        if self.convergence is None or self.convergence.verdict == "not converged":
            return None
        near = self._near()
        return sorted(
            (name for name in self.predictions if name != self.reference), key=near.__getitem__
        )

    def _near(self) -> dict[str, float]:
        """Return the distances on the held-out rows, floors among them."""
        return dict(self.distances.xs(HELD_OUT)["wasserstein"])

    def _ranked(self) -> str:
        """Return the ranking in words; what lies within the noise floor shares a place with it."""
        ranking = self.ranking
        if ranking == []:
            return "nothing to rank beside the reference"
        if ranking is None:
            return (
                "no ranking: it needs a reference of Markov chains that have converged (chains "
                "that do not mix can be stacked: pbnn.evaluate.stacking.stack_chains)"
            )
        near = self._near()
        floor = near.get(f"{self.reference}{HALF}")
        words = []
        for name in ranking:
            within = floor is not None and near[name] <= floor
            seed = f"{name}{OTHER_SEED}"
            words.append(
                f"{name} {near[name]:.3f}{' (within noise)' if within else ''}"
                f"{f' (other seed {near[seed]:.3f})' if seed in near else ''}"
            )
        return (
            f"distance to {self.reference} in its scales, closest first: {', '.join(words)}"
            f"{'' if floor is None else f'; noise floor {floor:.3f}, its own halves'}"
        )

    def __str__(self) -> str:
        def text(table: "pd.DataFrame") -> str:
            return str(table.to_string(float_format=lambda v: f"{v:.3f}", na_rep="n/a"))

        parts = [self.verdict, *self.notes, text(self.table)]
        if self.reference is not None and len(self.distances):
            parts.append(self._ranked())
            away = self.distances.drop(index=HELD_OUT, level=0).drop(index=self.reference, level=1)
            if len(away):
                spread = away.columns.str.endswith(("_5", "_95"))
                parts += ["away from the data:", text(away.loc[:, ~spread])]
        return "\n".join(parts)


def compare(
    posteriors: Mapping[str, Posterior],
    model: Model,
    x: Data,
    y: Data,
    *,
    reference: str | None = None,
    repeats: Mapping[str, Posterior] | None = None,
    elsewhere: Mapping[str, Data] | None = None,
    train: tuple[Data, Data] | None = None,
    units: "Units | None" = None,
    seed: int = 0,
    device: str | None = None,
    progress: bool = False,
) -> Comparison:
    """Compare posteriors of one model on held-out rows, and on inputs elsewhere.

    Columns of the table: `lpd`, the mean log predictive density of a row, and `lpd_se`, its
    standard error over rows; `rmse` and `coverage_90` of central intervals, or `accuracy` and `ece`
    for classes; with `train`, `loo` and `loo_se`, the same as `lpd` for the rows of the fit, each
    under the posterior of all others, and NaN where importance sampling cannot give it (see
    `pbnn.evaluate.loo`); `scale_ratio`, the median over rows of the posterior predictive's scale
    over the reference's (numbers only); `epistemic_ratio`, the same of the scale of f(x) (logits
    centred over classes), with `epistemic_ratio_5` and `epistemic_ratio_95`, its quantiles over
    rows; `wasserstein`, the median distance between draws of f(x) in reference scales; `draws`;
    `seconds`. Rows whose y is missing are left out of scores.

    Two rows are noise floors. "NAME (half)": half of the reference's chains, judged against the
    other half. "NAME (other seed)": a posterior judged against another run of the same road, for
    those in `repeats`. Distances take equally many draws of all: as many as half of the reference,
    or the smallest posterior, has.

    Args:
        posteriors: Posteriors by name.
        model: The model that was fitted.
        x: Held-out rows.
        y: Their observations, as the fit took them (standardised, if it did).
        reference: Name of the reference; by default the first posterior made of Markov chains.
        repeats: By name, the same road with another seed.
        elsewhere: Further inputs by name, without observations, such as shifted rows; see
            `pbnn.evaluate.probes.away`.
        train: x and y of the fit, to estimate leave-one-out densities with.
        units: How y was standardised; scores are in the user's units.
        seed: Seed of the sampled predictives and of the bootstrap.
        device: Where to run.
        progress: Whether to show progress bars on stderr.

    Raises:
        DataError: There are no posteriors or no rows, the reference or a repeat is none of the
            posteriors, or `train` is not as long as the data of a fit.
        ModelError: A posterior is not one of this model.
    """
    import pandas as pd

    x, y, repeats = indexable(x), indexable(y), repeats or {}
    elsewhere = {name: indexable(rows) for name, rows in (elsewhere or {}).items()}
    if len(leaves(x)[0][1]) == 0:
        raise DataError("x has no rows; expected held-out rows to compare on")
    _check_names(posteriors, reference, repeats, elsewhere)
    if reference is None:
        reference = next((name for name, p in posteriors.items() if p.markov), None)
    options: dict[str, Any] = {"units": units, "device": device, "progress": progress}

    def scored(posterior: Posterior) -> _Scored:
        return _Scored.of(model, posterior, x, y, elsewhere, seed=seed, **options)

    of = {name: scored(posterior) for name, posterior in posteriors.items()}
    pairs = {name: (s, of.get(reference or "")) for name, s in of.items()}
    convergence, halves = None, None
    if reference is not None:
        chains = posteriors[reference]
        if chains.markov:
            convergence = check_convergence(model, chains, x, device=device)
        if chains.chains > 1:
            cut = chains.chains // 2
            halves = [
                scored(chains.select(chains=part)) for part in (range(cut), range(cut, 2 * cut))
            ]
            pairs[f"{reference}{HALF}"] = (halves[0], halves[1])
    for name, posterior in repeats.items():
        pairs[f"{name}{OTHER_SEED}"] = (scored(posterior), of[name])
    count = min(s.draws for pair in pairs.values() for s in pair if s is not None)
    left_out = (
        {}
        if train is None
        else {
            name: leave_one_out(model, s.posterior, *train, **options)
            for name, (s, _) in pairs.items()
            if halves is None or s is not halves[0]
        }
    )
    rows: dict[str, dict[str, float]] = {}
    distances: dict[tuple[str, str], dict[str, float]] = {}
    for name, (one, other) in pairs.items():
        rows[name] = one.scores(y, units)
        if name in left_out:
            rows[name] |= {"loo": left_out[name].mean, "loo_se": left_out[name].error}
        if other is not None:
            apart = {where: one.distance(other, where, count, seed) for where in one.f}
            distances |= {(where, name): value for where, value in apart.items()}
            rows[name] |= one.ratio(other) | {k: apart[HELD_OUT][k] for k in _IN_TABLE}
        # The halves ran in one batch: how long one of them took alone is not known.
        known = halves is None or one is not halves[0]
        rows[name] |= {
            "draws": float(one.draws),
            "seconds": one.posterior.seconds if known else float("nan"),
        }
    by_inputs = pd.DataFrame(distances).T
    if len(by_inputs):
        order = [HELD_OUT, *elsewhere]
        by_inputs = by_inputs.rename_axis(["inputs", "posterior"]).loc[order]
    return Comparison(
        table=pd.DataFrame(rows).T.rename_axis("posterior"),
        distances=by_inputs,
        reference=reference,
        convergence=convergence,
        predictions={name: s.prediction for name, s in of.items()},
        notes=_notes(posteriors, count, left_out),
    )


_IN_TABLE = ("epistemic_ratio", "epistemic_ratio_5", "epistemic_ratio_95", "wasserstein")


def _check_names(
    posteriors: Mapping[str, Posterior],
    reference: str | None,
    repeats: Mapping[str, Posterior],
    elsewhere: Mapping[str, Data],
) -> None:
    if not posteriors:
        raise DataError("no posteriors to compare; expected {name: Posterior, …}")
    for what, name in [("reference", reference), *(("repeat", name) for name in repeats)]:
        if name is not None and name not in posteriors:
            raise DataError(f"{what} {name!r}; expected one of {list(posteriors)}")
    if HELD_OUT in elsewhere:
        raise DataError(f"inputs {HELD_OUT!r} are the rows of x; choose another name")


def _notes(
    posteriors: Mapping[str, Posterior], count: int, left_out: Mapping[str, Loo]
) -> tuple[str, ...]:
    """Return what a reader must know: what the fits say of themselves, and draws left out."""
    notes = [
        f"{name!r}: {note}"
        for name, posterior in posteriors.items()
        for note in posterior.provenance.get("notes", [])
    ]
    notes += [
        f"{name!r}: PSIS-LOO is not available: {loo.unavailable}"
        for name, loo in left_out.items()
        if loo.unavailable
    ]
    if any(p.chains * p.draws_per_chain > count for p in posteriors.values()):
        notes.append(f"distances are between {count} draws of each posterior, evenly thinned")
    return tuple(notes)


@dataclass(frozen=True)
class _Scored:
    """One posterior evaluated on the held-out rows, and its f(x) elsewhere, too."""

    posterior: Posterior
    prediction: Prediction
    lpd: Tensor
    f: Mapping[str, Tensor]
    probabilities: Mapping[str, Tensor]

    @classmethod
    def of(
        cls,
        model: Model,
        posterior: Posterior,
        x: Data,
        y: Data,
        elsewhere: Mapping[str, Data],
        *,
        seed: int,
        **options: Any,
    ) -> "_Scored":
        prediction = predict(model, posterior, x, quantiles=QUANTILES, seed=seed, **options)
        lpd = log_predictive_density(log_likelihood(model, posterior, x, y, **options))
        around = {name: value for name, value in options.items() if name != "units"}
        inputs = {HELD_OUT: x, **elsewhere}
        f = {k: function_draws(model, posterior, v, **around).double() for k, v in inputs.items()}
        probabilities = {}
        if prediction.probabilities is not None:
            probabilities[HELD_OUT] = prediction.probabilities
            for where, rows in elsewhere.items():
                away = predict(model, posterior, rows, **around).probabilities
                assert away is not None
                probabilities[where] = away
        return cls(posterior, prediction, lpd, f, probabilities)

    @property
    def draws(self) -> int:
        """Number of draws, over all chains."""
        return self.posterior.chains * self.posterior.draws_per_chain

    def distance(self, other: "_Scored", where: str, count: int, seed: int) -> dict[str, float]:
        """Return the distance to another posterior at some inputs, in numbers."""
        return Distance.between(
            thinned(self.f[where], count),
            thinned(other.f[where], count),
            self.probabilities.get(where),
            other.probabilities.get(where),
        ).summary(seed)

    def scores(self, y: Data, units: "Units | None") -> dict[str, float]:
        """Return this posterior's scores on the held-out rows."""
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
            return out
        assert prediction.mean is not None
        assert prediction.quantiles is not None
        observed = y.double() if units is None else torch.as_tensor(units.restore(y))
        residual = (prediction.mean - observed)[~observed.isnan()]
        out["rmse"] = float(residual.square().mean().sqrt())
        lower, upper = (prediction.quantiles[p] for p in QUANTILES)
        out["coverage_90"] = interval_coverage(lower, upper, observed)
        return out

    def ratio(self, other: "_Scored") -> dict[str, float]:
        """Return the median ratio of the posterior predictive scales, for numbers."""
        scale, scale_of_other = self.prediction.scale, other.prediction.scale
        if scale is None or scale_of_other is None:
            return {}
        return {"scale_ratio": float((scale / scale_of_other).median())}
