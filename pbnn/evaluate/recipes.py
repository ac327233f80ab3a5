"""Recipes for uncertainty that does not rank: a sweep of ranks, and mends tried one at a time.

Everything is judged on validation rows and rows out of distribution that no fit has seen: A, the
AUROC of the epistemic spread, of the set where it is least; and the negative log-likelihood.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pbnn.errors import DataError, PbnnWarning
from pbnn.evaluate.arrays import Array
from pbnn.evaluate.calibration import negative_log_likelihood
from pbnn.evaluate.judging import Judge, Judged, judge_on
from pbnn.evaluate.recalibration import ScaleCalibration, TemperatureScaling
from pbnn.infer.posterior import Posterior
from pbnn.infer.schedule import SCHEDULES
from pbnn.infer.svi import fit_svi
from pbnn.infer.swag import fit_swag
from pbnn.model import Data, Model, take
from pbnn.prediction import predict

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Attempt", "Fit", "Mending", "RankSweep", "mend", "rank_sweep"]

RANKS = (2, 4, 8, 16)
# What a mend may cost in distribution: points of accuracy, or a share of the log density.
ACCURACY_COST = 0.005
DENSITY_SHARE = 0.01

Fit = Callable[[bool], Posterior]
"""Fits one posterior, whatever road it takes; given whether the weights are averaged on the way."""

_GUIDES = ("normal", "lowrank", "kronecker", "layer_lowrank")


@dataclass(frozen=True, kw_only=True)
class RankSweep:
    """Low-rank posteriors of several ranks.

    Attributes:
        table: By rank `auroc` and `nll` with the ends of their 95% bootstrap intervals, `accuracy`
            (classes only), `latency` of a prediction in ms a row, and `seconds` of the fit.
        best: The rank to take: of those whose AUROC lies within the interval of the highest one,
            that of least negative log-likelihood.
        posteriors: The posteriors by rank.
    """

    table: "pd.DataFrame"
    best: int
    posteriors: Mapping[int, Posterior]

    def __str__(self) -> str:
        table = self.table.to_string(float_format=lambda v: f"{v:.3f}")
        return f"{table}\nrank {self.best}: least NLL of those that rank as well as the best"


def rank_sweep(
    model: Model,
    train: tuple[Data, Data],
    validation: tuple[Data, Data],
    ood: Mapping[str, Data],
    *,
    ranks: Sequence[int] = RANKS,
    fit: Callable[[int], Posterior] | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    **options: Any,
) -> RankSweep:
    """Fit low-rank posteriors of several ranks, and choose one by validation AUROC and NLL.

    Args:
        model: A Pyro model `(x, y=None)`.
        train: Training rows and their observations.
        validation: Rows in distribution that no fit has seen, and their observations.
        ood: Rows out of distribution by name; the set that is ranked worst counts.
        ranks: Ranks to fit.
        fit: Fits one posterior of a rank; by default `pbnn.fit_svi(…, guide="lowrank")`.
        seed: Seed of the fits and of the bootstrap.
        device: Where to run.
        **options: Further options of `pbnn.fit_svi`, such as steps.

    Raises:
        DataError: There are no ranks or sets, or a set is empty.
        FitError: A rank is larger than the number of latent values.
    """
    import pandas as pd

    if not ranks:
        raise DataError("no ranks; expected some, such as (2, 4, 8, 16)")
    judge = judge_on(model, validation, ood, seed, device)

    def low_rank(rank: int) -> Posterior:
        return fit_svi(
            model, *train, guide="lowrank", rank=rank, seed=seed, device=device, **options
        )

    judged = {rank: judge.of((fit or low_rank)(rank)) for rank in ranks}
    auroc = {rank: judge.auroc(value) for rank, value in judged.items()}
    table = pd.DataFrame(
        {rank: judge.numbers(value, auroc[rank]) for rank, value in judged.items()}
    ).T.rename_axis("rank")
    highest = max(auroc.values(), key=lambda interval: interval.value)
    as_good = [rank for rank in judged if auroc[rank].value >= highest.low]
    best = min(as_good, key=lambda rank: float(judged[rank].nll.mean()))
    return RankSweep(
        table=table, best=best, posteriors={rank: v.posterior for rank, v in judged.items()}
    )


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One mend that was tried.

    Attributes:
        step: "start", "structure", "mean" or "temperature".
        name: What was tried.
        outcome: "start", "kept", "no better" or "rolled back".
        why: The numbers that decided, in words.
        numbers: As in the table of `RankSweep`.
        posterior: The posterior.
        calibration: Temperature, or factor on predictive scales; 1 before the last step.
    """

    step: str
    name: str
    outcome: str
    why: str
    numbers: Mapping[str, float]
    posterior: Posterior
    calibration: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Mending:
    """The trail of attempts, and where it ended.

    Attributes:
        attempts: All attempts in order.
    """

    attempts: tuple[Attempt, ...]

    @property
    def best(self) -> Attempt:
        """The last attempt that was kept."""
        return [a for a in self.attempts if a.outcome in ("start", "kept")][-1]

    @property
    def table(self) -> "pd.DataFrame":
        """One row for each attempt, with its numbers and what came of it."""
        import pandas as pd

        rows = [
            {"step": a.step, "attempt": a.name, **a.numbers, "outcome": a.outcome, "why": a.why}
            for a in self.attempts
        ]
        return pd.DataFrame(rows).set_index(["step", "attempt"])

    def __str__(self) -> str:
        shown = self.table.drop(columns=["why"])
        shown = shown.loc[:, ~shown.columns.str.endswith(("_low", "_high"))]
        lines = [f"{a.step}, {a.name}: {a.outcome}; {a.why}" for a in self.attempts[1:]]
        best = self.best
        table = shown.to_string(float_format=lambda v: f"{v:.3f}")
        end = f"ends with {best.name}, calibration {best.calibration:.3g}"
        return "\n".join([table, *lines, end])


def mend(
    model: Model,
    posterior: Posterior,
    train: tuple[Data, Data],
    validation: tuple[Data, Data],
    ood: Mapping[str, Data],
    *,
    structures: Mapping[str, Fit] | None = None,
    base: Fit | None = None,
    accuracy_cost: float = ACCURACY_COST,
    density_share: float = DENSITY_SHARE,
    seed: int = 0,
    device: str | torch.device | None = None,
    **options: Any,
) -> Mending:
    """Try to mend a posterior: its structure, then its mean, then its scale, one at a time.

    Structures are the low-rank and the Kronecker guide, and SWAG, which is low rank after the fact.
    Then the best so far is fitted again with its weights averaged, where its road can. Last comes
    one factor: the temperature of classes, or that of predictive scales, which cannot change A.

    An attempt is kept where the AUROC of the set that is ranked worst rises by more than the 95%
    interval of the difference, or neither rises nor falls by that and the negative log-likelihood
    falls by more than its own; intervals are over the same resampled rows. What costs more accuracy
    than `accuracy_cost`, or more of the log density of a number than `density_share` of it, against
    the start, is rolled back whatever it brings. The factor is fitted on one half of the validation
    rows and judged on the other, both ways, and then fitted on all of them.

    Args:
        model: The model that was fitted.
        posterior: Its posterior, from any road.
        train: Training rows and their observations.
        validation: Rows in distribution that no fit has seen, and their observations.
        ood: Rows out of distribution by name.
        structures: Fits to try instead, by name.
        base: Fits the given posterior again; by default known for the guides of `pbnn.fit_svi`,
            with the options of the posterior, so that `average` alone changes.
        accuracy_cost: Accuracy that an attempt may cost; 0.005 is half a point.
        density_share: Share of the mean log density that an attempt may cost, for numbers.
        seed: Seed of the fits and of the bootstrap.
        device: Where to run.
        **options: Further options of `pbnn.fit_svi`, such as steps; they come before those of the
            posterior.

    Raises:
        DataError: There are no sets out of distribution, or a set is empty.
        ModelError: The posterior is not one of this model.
    """
    judge = judge_on(model, validation, ood, seed, device)
    plain: dict[str, Any] = {"seed": seed, "device": device}

    def guided(guide: str, **own: Any) -> Fit:
        return lambda average: fit_svi(
            model, *train, **{**own, **options, **plain, "guide": guide, "average": average}
        )

    def swag(average: bool) -> Posterior:
        shared = {k: options[k] for k in ("draws", "compile", "progress") if k in options}
        return fit_swag(model, train[0], train[1], **shared, **plain)

    own = _own_options(posterior)
    given = own.pop("guide", None)
    if base is None and posterior.method == "svi" and given in _GUIDES:
        base = guided(given, **own)
    if structures is None:
        names = {"low rank": "lowrank", "Kronecker": "kronecker"}
        structures = {name: guided(guide) for name, guide in names.items() if guide != given}
        structures = {**structures, "post-hoc low rank": swag}
    trail = _Trail(judge, judge.of(posterior), accuracy_cost, density_share)
    averaged = base
    for name, fit in structures.items():
        if trail.attempt("structure", name, fit(False)):
            averaged = None if fit is swag else fit
    if averaged is not None:
        trail.attempt("mean", f"{trail.name}, weights averaged", averaged(True))
    trail.scale()
    return Mending(attempts=tuple(trail.attempts))


def _own_options(posterior: Posterior) -> dict[str, Any]:
    """Return the options that a posterior was fitted with, as far as its record can give them.

    A start from a `state_dict` and a schedule that is a function are recorded by name alone.
    """
    own = dict(posterior.provenance.get("options", {}))
    if own.get("init") == "state_dict":
        del own["init"]
    if own.get("schedule") not in SCHEDULES:
        own.pop("schedule", None)
    return own


class _Trail:
    """The attempts so far, and the best of them.

    Args:
        judge: Where posteriors are judged.
        start: The posterior to mend.
        accuracy_cost: Accuracy that an attempt may cost against it.
        density_share: Share of the log density that an attempt may cost against it.
    """

    def __init__(
        self, judge: Judge, start: Judged, accuracy_cost: float, density_share: float
    ) -> None:
        self._judge, self._start, self._best = judge, start, start
        self._accuracy_cost, self._density_share = accuracy_cost, density_share
        self.name = start.posterior.method
        self.attempts: list[Attempt] = []
        self._keep("start", self.name, "start", "as it was given", start)

    def attempt(self, step: str, name: str, posterior: Posterior) -> bool:
        """Judge one attempt; return whether it is kept."""
        judged = self._judge.of(posterior)
        cost = self._cost(judged)
        signal = self._judge.auroc(judged, self._best)
        loss = self._judge.mean(judged.nll - self._best.nll)
        changes = f"AUROC {signal.value:+.3f} [{signal.low:+.3f}, {signal.high:+.3f}], "
        changes += f"NLL {loss.value:+.3f} [{loss.low:+.3f}, {loss.high:+.3f}] against {self.name}"
        better = signal.low > 0 or (signal.holds(0.0) and loss.high < 0)
        outcome = "rolled back" if cost else "kept" if better else "no better"
        self._keep(step, name, outcome, f"{cost}; {changes}" if cost else changes, judged)
        if outcome == "kept":
            self._best, self.name = judged, name
        return outcome == "kept"

    def _cost(self, judged: Judged) -> str:
        """Say what an attempt costs in distribution, where that is too much."""
        if judged.right is not None and self._start.right is not None:
            lost = float(self._start.right.mean() - judged.right.mean())
            # Accuracies are ratios of counts; a difference of theirs rounds.
            if lost > self._accuracy_cost + 1e-12:
                return f"costs {100 * lost:.1f} points of accuracy"
            return ""
        before = -float(self._start.nll.mean())
        lost = float(judged.nll.mean()) + before
        if lost > self._density_share * abs(before):
            return f"costs {lost:.3f} of the log density {before:.3f}"
        return ""

    def _keep(
        self, step: str, name: str, outcome: str, why: str, judged: Judged, factor: float = 1.0
    ) -> None:
        self.attempts.append(
            Attempt(
                step=step,
                name=name,
                outcome=outcome,
                why=why,
                numbers=self._judge.numbers(judged, self._judge.auroc(judged)),
                posterior=judged.posterior,
                calibration=factor,
            )
        )

    def scale(self) -> None:
        """Try one factor on the best so far, judged on rows that it was not fitted on."""
        best, count = self._best, len(self._best.nll)
        name = f"{self.name}, " + ("scales" if best.right is None else "temperature")
        if best.discrete:
            why = "y are whole numbers, which no factor can stretch"
            self._keep("temperature", name, "no better", why, best)
            return
        if count < 2 or (best.right is not None and best.right.all()):
            why = "no validation row is wrong, or there is one alone: nothing determines a factor"
            self._keep("temperature", name, "no better", why, best)
            return
        halves = np.random.default_rng(self._judge.seed).permutation(count) % 2
        nll = np.empty(count)
        for half in (0, 1):
            judged = np.flatnonzero(halves == half)
            factor = self._factor(np.flatnonzero(halves != half))
            nll[judged] = self._scaled_nll(factor, judged)
        loss = self._judge.mean(nll - best.nll)
        factor = self._factor(np.arange(count))
        kept = loss.high < 0
        why = f"factor {factor:.3g}, NLL {loss.value:+.3f} [{loss.low:+.3f}, {loss.high:+.3f}]"
        scaled = replace(best, nll=nll)
        self._keep("temperature", name, "kept" if kept else "no better", why, scaled, factor)

    def _factor(self, rows: Any) -> float:
        found, y = self._best.prediction, np.asarray(self._judge.y)[rows]
        if self._best.probabilities is not None:
            with warnings.catch_warnings():
                # A half without errors has no temperature; how it is judged says so.
                warnings.simplefilter("ignore", PbnnWarning)
                return TemperatureScaling().fit(self._best.probabilities[rows], y).temperature_
        assert found.mean is not None
        assert found.scale is not None
        seen = ~np.isnan(y)
        mean, scale = (np.asarray(v)[rows][seen] for v in (found.mean, found.scale))
        return ScaleCalibration().fit(mean, scale, y[seen]).factor_

    def _scaled_nll(self, factor: float, rows: Any) -> Array:
        """Return the negative log-likelihood of some rows, scaled by a factor."""
        found, y = self._best.prediction, np.asarray(self._judge.y)[rows]
        if self._best.probabilities is not None:
            scaling = TemperatureScaling()
            scaling.temperature_ = factor
            return negative_log_likelihood(scaling.transform(self._best.probabilities[rows]), y)
        # The density of m + c (y − m) at a point is that of y at the point brought back, over c.
        mean = np.asarray(found.mean)[rows]
        back = predict(
            self._judge.model,
            self._best.posterior,
            take(self._judge.x, torch.as_tensor(rows)),
            mean + (y - mean) / factor,
            quantiles=(),
            device=self._judge.device,
        ).log_predictive_density
        assert back is not None
        outputs = (~np.isnan(y)).reshape(len(y), -1).sum(1)
        return np.asarray(outputs * np.log(factor) - back.double().numpy())
