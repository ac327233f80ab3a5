"""Which tumours a person should look at: from a posterior to a saved decision rule.

Breast cancer, where an automatic error costs 50 reviews. Half of the rows train a network, a
quarter calibrates its error probability, and the rest judges the rule; over several splits, for the
trained network alone (MAP) and for posteriors.

python examples/reject.py --out runs/reject       minutes
python examples/reject.py --smoke                 seconds, for tests
"""

import argparse
import warnings
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from scipy.stats import t as student  # type: ignore[import-untyped]

import pbnn
from pbnn.data import prepare, split_rows
from pbnn.errors import ConvergenceWarning
from pbnn.evaluate.decision_report import DecisionReport
from pbnn.infer.posterior import Posterior
from pbnn.plots import plot_cost_curve, plot_rejection, save
from pbnn.plots.figures import grid

MODEL = Path(__file__).parents[1] / "models" / "classification.py"
COSTS = pbnn.Costs(error=50.0, review=1.0)
ROADS = ("map", "normal", "lowrank")


def fit(road: str, model: Any, x: Any, y: Any, seed: int, *, smoke: bool) -> Posterior:
    """Return a posterior of one road."""
    plain: dict[str, Any] = {"seed": seed, "compile": False, "progress": False}
    if road == "map":
        return pbnn.fit_map(model, x, y, steps=20 if smoke else 1000, **plain)
    steps = 20 if smoke else 2000
    return pbnn.fit_svi(model, x, y, guide=road, steps=steps, draws=20 if smoke else 500, **plain)


def judge(road: str, seed: int, rule_file: Path, *, smoke: bool) -> DecisionReport:
    """Fit, choose a rule on validation rows, save it, and judge what was saved on test rows."""
    data = prepare("breast_cancer", target_kind="class", test_fraction=0.5, seed=seed)
    validation, test = split_rows(
        len(data.x_test), test_fraction=0.5, seed=seed, stratify=data.y_test
    )
    model = pbnn.load_model(MODEL, in_features=data.x_train.shape[1], hidden=2 if smoke else 20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        posterior = fit(road, model, data.x_train, data.y_train, seed, smoke=smoke)
    rule = pbnn.fit_decision_rule(
        model, posterior, data.x_test[validation], data.y_test[validation], costs=COSTS
    )
    rule = pbnn.DecisionRule.load(rule.save(rule_file))
    return pbnn.report_decisions(
        rule, model, posterior, data.x_test[test], data.y_test[test], seed=seed
    )


def interval(values: "pd.Series[float]") -> str:
    """Return mean and 95% interval over splits (Student's t)."""
    half = student.ppf(0.975, len(values) - 1) * values.std() / len(values) ** 0.5
    return f"{values.mean():.2f} ± {half:.2f}"


def numbers(report: DecisionReport) -> dict[str, float]:
    """Return what the table shows of one report."""
    return {
        **{str(k): cost for k, cost in report.costs["cost"].to_dict().items()},
        "reviewed": report.costs["reviewed"].to_dict()["chosen threshold"],
        "good among reviewed": report.good_among_reviewed,
        "accuracy of the rest": report.accuracy,
        "ECE": report.ece.value,
        "error AUROC": report.auroc.value,
        "temperature": report.rule.calibration,
    }


def main() -> None:
    """Judge each road over the splits; print one table, draw one figure, keep the rules."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/reject"))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    arguments = parser.parse_args()
    seeds = 2 if arguments.smoke else arguments.seeds
    rows: list[dict[str, Any]] = []
    first: dict[str, DecisionReport] = {}
    for road in ROADS[:2] if arguments.smoke else ROADS:
        for seed in range(seeds):
            rule_file = arguments.out / f"rule_{road}_{seed}.json"
            report = judge(road, seed, rule_file, smoke=arguments.smoke)
            first.setdefault(road, report)
            rows.append({"road": road, **numbers(report), "verdict": report.verdict})
    table = pd.DataFrame(rows)
    passed = table.pop("verdict").eq("fit for decisions")
    shown = table.groupby("road", sort=False).agg(interval).T
    counts = [int(passed[table["road"] == road].sum()) for road in first]
    shown.loc["passes the gate"] = [f"{count} of {seeds}" for count in counts]
    print(f"mean over {seeds} splits, with 95% intervals; costs are those of a row\n")
    print(shown.to_string(), "\n")
    print(f"first split of {ROADS[1]}: {first[ROADS[1]]}\n")

    for name, draw in (("costs", plot_cost_curve), ("rejection", plot_rejection)):
        panels = grid(len(first))
        for axes, (road, report) in zip(panels, first.items(), strict=True):
            draw(report, ax=axes)
            axes.set_title(road)
            axes.label_outer()
        print(save(panels, arguments.out / f"{name}.png"))


if __name__ == "__main__":
    matplotlib.use("Agg")
    main()
