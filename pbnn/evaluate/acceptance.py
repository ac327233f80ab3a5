"""Everything that is asked of a posterior before its use, and one checklist at the end."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pbnn.errors import DataError
from pbnn.evaluate.bootstrap import Interval
from pbnn.evaluate.costs import Costs
from pbnn.evaluate.decision import DecisionRule, fit_decision_rule
from pbnn.evaluate.decision_report import DecisionReport, Requirement, report_decisions
from pbnn.evaluate.features import FeatureDensity
from pbnn.evaluate.ood import ID, OodReport, check_ood
from pbnn.evaluate.shift_series import shift_table
from pbnn.evaluate.verdict import FEW_ROWS
from pbnn.infer.posterior import Posterior
from pbnn.model import Data, Model

if TYPE_CHECKING:
    import pandas as pd

    from pbnn.data import Units

__all__ = ["Check", "check_posterior"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """What was found, and whether all of it is good enough.

    Attributes:
        ood: The three criteria of collapse; None where no set out of distribution was given.
        rule: The decision rule, fitted on the validation rows; None without costs.
        decisions: The rule on the test rows; None without costs.
        shifts: Metrics against severity, by name of the shift.
        checklist: One line for each requirement.
    """

    ood: OodReport | None
    rule: DecisionRule | None
    decisions: DecisionReport | None
    shifts: Mapping[str, "pd.DataFrame"]
    checklist: tuple[Requirement, ...]

    @property
    def passed(self) -> bool:
        """Whether every requirement holds."""
        return all(line.passed for line in self.checklist)

    def __str__(self) -> str:
        parts = [] if self.ood is None else [f"out of distribution: {self.ood}"]
        parts += [] if self.decisions is None else [f"decisions: {self.decisions.summary}"]
        parts += [f"shift {name}:\n{by_severity(table)}" for name, table in self.shifts.items()]
        failed = sum(not line.passed for line in self.checklist)
        verdict = "all pass" if not failed else f"{failed} of {len(self.checklist)} fail"
        checklist = "\n".join([f"acceptance checklist: {verdict}", *map(str, self.checklist)])
        return "\n\n".join([*parts, checklist])


def by_severity(table: "pd.DataFrame") -> str:
    """Return the values of a shift's metrics as text, one row for each severity."""
    wide = table["value"].unstack("number")
    return str(wide.to_string(float_format=lambda v: f"{v:.3f}"))


def check_posterior(
    model: Model,
    posterior: Posterior,
    validation: tuple[Data, Data],
    test: tuple[Data, Data],
    *,
    x_train: Data,
    ood: Mapping[str, Data] | None = None,
    costs: Costs | None = None,
    tolerance: float | None = None,
    two_stages: bool = False,
    layer: str | None = None,
    shifts: Mapping[str, Mapping[float, Data]] | None = None,
    units: "Units | None" = None,
    seed: int = 0,
    device: str | torch.device | None = None,
) -> Check:
    """Check ranking, direction, mass and decisions on rows that the fit has not seen.

    The checklist holds, for each set out of distribution, that the epistemic spread ranks its rows
    above the test rows (criterion A) and is larger there (B); that probabilities hold on the test
    rows (C); and the gate of `pbnn.evaluate.decision_report.report_decisions`.

    Args:
        model: The model that was fitted.
        posterior: Its posterior, from any road.
        validation: Rows and observations that calibrate the error probability.
        test: Rows and observations that everything is judged on.
        x_train: The training rows, for distances and densities.
        ood: Rows out of distribution by name; see `pbnn.evaluate.ood.check_ood`.
        costs: What errors and reviews cost; None leaves decisions out.
        tolerance: Distance from y, in the user's units, beyond which a number is wrong.
        two_stages: Whether the rule first asks whether a row is like the training rows.
        layer: Module whose features the density is of; None takes x itself.
        shifts: Shift series of the test rows by name; see `pbnn.data.shifts.shift_series`.
        units: How y was standardised.
        seed: Seed of predictive samples and resampling.
        device: Where to run.

    Raises:
        DataError: Data cannot be used as they are, or there is nothing to check.
        ModelError: The posterior is not one of this model.
    """
    if not ood and costs is None:
        raise DataError("nothing to check; expected rows out of distribution, costs, or both")
    options: dict[str, Any] = {"units": units, "seed": seed, "device": device}
    lines: list[Requirement] = []
    report, rule, decisions = None, None, None
    if ood:
        report = check_ood(model, posterior, *test, ood, x_train=x_train, layer=layer, **options)
        lines += _criteria(report, list(ood))
    if costs is not None:
        density = None
        if two_stages:
            density = FeatureDensity(layer).fit(model, posterior, x_train, device=device)
        rule = fit_decision_rule(
            model,
            posterior,
            *validation,
            costs=costs,
            tolerance=tolerance,
            density=density,
            **options,
        )
        decisions = report_decisions(rule, model, posterior, *test, **options)
        lines += decisions.checklist
    tables = {
        name: shift_table(model, posterior, series, test[1], **options)
        for name, series in (shifts or {}).items()
    }
    return Check(ood=report, rule=rule, decisions=decisions, shifts=tables, checklist=tuple(lines))


def _criteria(report: OodReport, sets: list[str]) -> list[Requirement]:
    """Return what the criteria of collapse require, a line each."""

    def number_of(value: Interval, rows: int) -> str:
        return f"{value}" if rows >= FEW_ROWS else f"{value}, of too few rows ({rows})"

    lines = []
    for name in sets:
        rows = report.rows(name)
        signal = report.interval("A", name, "auroc_epistemic")
        direction = report.interval("B", name, "log_ratio")
        lines += [
            Requirement(
                f"A, epistemic spread ranks {name!r} above test rows, AUROC",
                number_of(signal, rows),
                "lower end above 0.5",
                signal.low > 0.5 and rows >= FEW_ROWS,
            ),
            Requirement(
                f"B, log ratio of its mean square on {name!r} to that on test rows",
                number_of(direction, rows),
                "lower end above 0",
                direction.low > 0 and rows >= FEW_ROWS,
            ),
        ]
    number = "ece" if ("C", ID, "ece") in report.table.index else "coverage_90"
    lines.append(
        Requirement(
            f"C, {number} on test rows",
            number_of(report.interval("C", ID, number), report.rows(ID)),
            "not wholly above 0.1" if number == "ece" else "not wholly outside 0.85 to 0.95",
            ID not in report.faults and report.rows(ID) >= FEW_ROWS,
        )
    )
    return lines
