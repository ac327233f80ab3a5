"""What a decision rule does on rows that it was not fitted on, and whether it may be used."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from pbnn.errors import DataError
from pbnn.evaluate.arrays import Array
from pbnn.evaluate.bootstrap import Interval, Statistic, bootstrap_all
from pbnn.evaluate.calibration import CalibrationError
from pbnn.evaluate.costs import CostCurve
from pbnn.evaluate.decision import ACCEPT, DecisionRule, Decisions, observed
from pbnn.evaluate.ranking import Detection, RiskCoverage
from pbnn.infer.posterior import Posterior
from pbnn.model import Data, Model, indexable

if TYPE_CHECKING:
    import pandas as pd

    from pbnn.data import Units

__all__ = ["DecisionReport", "Requirement", "report_decisions"]

ECE_BOUND = 0.1
AUROC_BOUND = 0.5
# Thresholds at which the cost curve gets an interval.
CURVE_POINTS = 41


@dataclass(frozen=True)
class Requirement:
    """One line of a checklist.

    Attributes:
        text: What is required.
        number: The number found, in words.
        bound: What it is held against, in words.
        passed: Whether it holds.
    """

    text: str
    number: str
    bound: str
    passed: bool

    def __str__(self) -> str:
        return f"{'pass' if self.passed else 'FAIL'}  {self.text}: {self.number} ({self.bound})"


@dataclass(frozen=True, kw_only=True)
class DecisionReport:
    """A rule on held-out rows, and the gate before its use.

    Attributes:
        rule: The rule.
        decisions: What it decides for the rows.
        wrong: Whether each automatic answer is wrong, `(n,)`.
        costs: Mean cost of a row, by policy ("accept all", "review all", "chosen threshold", "best
            in hindsight"): `threshold`, `reviewed` (share of rows), `cost` with `low` and `high`.
        curve: The threshold-cost curve with its intervals: the same columns, by threshold.
        rejection: The accuracy-rejection curve: `rejected` (share of rows, the most uncertain
            first) and `accuracy` of the rest.
        ece: Expected calibration error of the error probability.
        auroc: AUROC of the error probability for errors; NaN where all answers are right, or wrong.
        good_among_reviewed: Share of right answers among the rows that are reviewed; NaN where none
            is.
        accuracy: Share of right answers among the rows that are accepted; NaN where none is.
        checklist: The gate: one line for each requirement.
    """

    rule: DecisionRule
    decisions: Decisions
    wrong: NDArray[np.bool_]
    costs: "pd.DataFrame"
    curve: "pd.DataFrame"
    rejection: "pd.DataFrame"
    ece: Interval
    auroc: Interval
    good_among_reviewed: float
    accuracy: float
    checklist: tuple[Requirement, ...]

    @property
    def fit_for_decisions(self) -> bool:
        """Whether the rule passes the gate."""
        return all(line.passed for line in self.checklist)

    @property
    def verdict(self) -> str:
        """One line: whether the rule may be used, or why not."""
        failed = [f"{r.text} is {r.number} ({r.bound})" for r in self.checklist if not r.passed]
        if not failed:
            return "fit for decisions"
        return f"not fit for decisions, because {'; '.join(failed)}"

    @property
    def account(self) -> str:
        """One line: rows, errors, reviews, and the accuracy of what is accepted."""
        reviewed = int((self.decisions.reason != ACCEPT).sum())
        good = f" ({self.good_among_reviewed:.0%} of those were right)" if reviewed else ""
        return (
            f"{len(self.wrong)} rows, {int(self.wrong.sum())} of them answered wrong; threshold "
            f"{self.rule.threshold:.4g}: {reviewed} reviewed{good}; accuracy of the rest "
            f"{self.accuracy:.3f}"
        )

    @property
    def summary(self) -> str:
        """The verdict, and what the rule does and costs, as text."""
        table = self.costs.to_string(float_format=lambda v: f"{v:.3f}")
        return "\n".join([self.verdict, *self.rule.notes, self.account, table])

    def __str__(self) -> str:
        return "\n".join([self.summary, *map(str, self.checklist)])


def report_decisions(
    rule: DecisionRule,
    model: Model,
    posterior: Posterior,
    x: Data,
    y: Data,
    *,
    units: "Units | None" = None,
    seed: int = 0,
    device: str | torch.device | None = None,
) -> DecisionReport:
    """Apply a rule to held-out rows, and hold it against the gate.

    A rule is fit for decisions when the expected calibration error of its error probability is
    below 0.1; the AUROC of that probability for errors is above 0.5 by more than its interval (a
    constant passes the first alone); the cost curve has a minimum below both of its ends by more
    than the interval of the difference; and the chosen threshold costs no more than either end.
    Intervals are bootstrap intervals over rows, at 95%.

    Args:
        rule: The rule.
        model: The model that was fitted.
        posterior: The posterior that the rule was fitted with.
        x: Rows that neither the fit nor the rule has seen.
        y: Their observations, as the fit took them.
        units: How y was standardised.
        seed: Seed of the bootstrap.
        device: Where to run.

    Raises:
        DataError: There are no rows, or y misses values.
        ModelError: The posterior is not one of this model.
    """
    decisions = rule.apply(model, posterior, indexable(x), units=units, seed=seed, device=device)
    return judge_decisions(rule, decisions, decisions.answers.wrong(observed(y, units)), seed=seed)


def judge_decisions(
    rule: DecisionRule, decisions: Decisions, wrong: NDArray[np.bool_], *, seed: int = 0
) -> DecisionReport:
    """Hold decisions against which answers are wrong; see `report_decisions`."""
    import pandas as pd

    if not len(wrong):
        raise DataError("no rows to judge the rule on; expected held-out rows with y")
    p, q = decisions.error_probability, decisions.answers.error_probability
    curve = CostCurve(p, wrong, rule.costs)
    policies = {
        "accept all": np.inf,
        "review all": -np.inf,
        "chosen threshold": rule.threshold,
        "best in hindsight": curve.best,
    }
    points = {f"{t:.17g}": t for t in _thinned(curve.thresholds)}
    statistics: dict[str, Statistic] = {
        name: curve.mean_at(t) for name, t in {**policies, **points}.items()
    }
    # Over both outcomes, whose bins mirror each other.
    statistics["ece"] = CalibrationError(np.stack([1 - q, q], 1), wrong.astype(int), classwise=True)
    for end, instead in (("accept all", np.inf), ("review all", -np.inf)):
        statistics[f"saved: {end}"] = curve.saved(curve.best, instead)
    mixed = bool(wrong.any() and not wrong.all())
    if mixed:
        statistics["auroc"] = Detection(q, wrong).auroc
    found = bootstrap_all(statistics, len(wrong), seed=seed)
    auroc = found.get("auroc", Interval(np.nan, np.nan, np.nan))
    coverage, risk = RiskCoverage(p, wrong).curve()
    reviewed = decisions.reason != ACCEPT
    return DecisionReport(
        rule=rule,
        decisions=decisions,
        wrong=wrong,
        costs=_table(policies, found, p).rename_axis("policy"),
        curve=_table(points, found, p).set_index("threshold"),
        rejection=pd.DataFrame({"rejected": 1 - coverage, "accuracy": 1 - risk})[::-1],
        ece=found["ece"],
        auroc=auroc,
        good_among_reviewed=_share(~wrong[reviewed]),
        accuracy=_share(~wrong[~reviewed]),
        checklist=_gate(found, auroc, int(wrong.sum()), len(wrong)),
    )


def _thinned(thresholds: Array) -> Array:
    """Return both ends and some thresholds between, evenly spaced among those there are."""
    at = np.linspace(0, len(thresholds) - 1, min(len(thresholds), CURVE_POINTS))
    kept: Array = thresholds[np.unique(at.round().astype(int))]
    return kept


def _table(thresholds: dict[str, float], found: dict[str, Interval], p: Array) -> "pd.DataFrame":
    import pandas as pd

    return pd.DataFrame(
        {
            name: {
                "threshold": threshold,
                "reviewed": float((p > threshold).mean()),
                "cost": found[name].value,
                "low": found[name].low,
                "high": found[name].high,
            }
            for name, threshold in thresholds.items()
        }
    ).T


def _share(which: NDArray[np.bool_]) -> float:
    return float(which.mean()) if len(which) else np.nan


def _gate(
    found: dict[str, Interval], auroc: Interval, errors: int, rows: int
) -> tuple[Requirement, ...]:
    ece = found["ece"].value
    one_kind = "no errors" if not errors else "errors only"
    lines = [
        Requirement(
            "calibration error (ECE) of the error probability",
            str(found["ece"]),
            f"below {ECE_BOUND}",
            bool(ece < ECE_BOUND),
        ),
        Requirement(
            "AUROC of the error probability for errors",
            str(auroc) if 0 < errors < rows else f"not known, {one_kind} among {rows} rows",
            f"lower end above {AUROC_BOUND}",
            bool(auroc.low > AUROC_BOUND),
        ),
    ]
    chosen = found["chosen threshold"].value
    for end in ("accept all", "review all"):
        saved = found[f"saved: {end}"]
        lines.append(
            Requirement(
                f"cost of a row that the best threshold saves against '{end}'",
                str(saved),
                "lower end above 0",
                bool(saved.low > 0),
            )
        )
    ends = min(found["accept all"].value, found["review all"].value)
    lines.append(
        Requirement(
            "cost of a row at the chosen threshold",
            f"{chosen:.3f}",
            f"at most {ends:.3f}, the cheaper of accepting all and reviewing all",
            bool(chosen <= ends),
        )
    )
    return tuple(lines)
