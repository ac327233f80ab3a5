"""Reports in one file, and the pictures in them: what they show is what was computed."""

import base64
import re

import numpy as np
import pandas as pd
import pytest

from pbnn.errors import DataError, FileError
from pbnn.evaluate.answers import Answers
from pbnn.evaluate.costs import Costs
from pbnn.evaluate.decision import DecisionRule, Decisions
from pbnn.evaluate.decision_report import judge_decisions
from pbnn.plots import (
    Section,
    plot_cost_curve,
    plot_rejection,
    plot_scores,
    plot_shift,
    write_report,
)
from pbnn.plots.figures import new_axes


@pytest.fixture(scope="module")
def report():
    p = np.array([0.05, 0.05, 0.2, 0.3, 0.02, 0.6])
    costs = Costs(error=10.0, review=1.0)
    decisions = Decisions(
        answers=Answers(answer=np.zeros(6, int), error_probability=p),
        unlikeness=None,
        reason=np.where(p > 0.1, "hard", "accept"),
        error_probability=p,
    )
    rule = DecisionRule(costs=costs, threshold=costs.threshold)
    return judge_decisions(rule, decisions, np.array([0, 1, 0, 1, 0, 1], bool))


def test_cost_curve_shows_the_curve_and_both_thresholds(report):
    axes = plot_cost_curve(report)
    line, best, chosen = axes.get_lines()
    assert line.get_xdata()[[0, -1]].tolist() == [0.0, 1.0]
    assert line.get_ydata()[[0, -1]].tolist() == [5.0, 1.0]
    assert best.get_ydata()[0] == pytest.approx(5 / 6)
    assert chosen.get_xdata()[0] == pytest.approx(0.5)


def test_rejection_starts_at_the_accuracy_of_all(report):
    line, random = plot_rejection(report).get_lines()
    assert line.get_xdata()[0] == 0
    assert line.get_ydata()[0] == random.get_ydata()[0] == 0.5
    assert line.get_ydata()[-1] == 1.0


def test_scores_are_fractions_of_their_sets():
    axes = plot_scores({"id": np.array([1.0, 1.0, 2.0]), "far": np.array([8.0])})
    heights = [patch.get_data().values.sum() for patch in axes.patches]
    assert heights == pytest.approx([1.0, 1.0])
    assert plot_scores({"id": np.ones(3)}).patches
    with pytest.raises(DataError, match="0 in all rows"):
        plot_scores({"id": np.zeros(3)})


def test_shift_shows_one_number():
    index = pd.MultiIndex.from_product([[0, 5], ["nll", "ece"]], names=["severity", "number"])
    table = pd.DataFrame({"value": [1.0, 0.1, 2.0, 0.2], "low": 0.0, "high": 3.0}, index=index)
    (line,) = plot_shift(table, "nll").get_lines()
    assert line.get_ydata().tolist() == [1.0, 2.0]
    with pytest.raises(DataError, match="nll, ece"):
        plot_shift(table, "accuracy")


@pytest.fixture
def sections():
    axes = new_axes((2.0, 1.0))
    axes.plot([0, 1], [0, 1])
    table = pd.DataFrame({"cost": [0.123456, 2.0]}, index=pd.Index(["a|b", "<c>"], name="policy"))
    return [Section("First & only", ["x < y"], [table], [(axes, "A line")])]


@pytest.mark.parametrize("ending", ["html", "md"])
def test_a_report_needs_no_other_file(ending, sections, tmp_path):
    path = write_report(tmp_path / f"r.{ending}", "All of it", sections)
    page = path.read_text(encoding="utf-8")
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    (picture,) = re.findall(r"data:image/png;base64,([A-Za-z0-9+/=]+)", page)
    assert base64.b64decode(picture).startswith(b"\x89PNG")
    assert "0.1235" in page
    if ending == "html":
        assert "x &lt; y" in page
        assert "&lt;c&gt;" in page
        assert "First &amp; only" in page
    else:
        assert "| a\\|b | 0.1235 |" in page


def test_other_endings_are_refused(sections, tmp_path):
    with pytest.raises(FileError, match=r"\.html or \.md"):
        write_report(tmp_path / "r.pdf", "no", sections)
