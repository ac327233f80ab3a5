"""Costs, thresholds, rules and the gate: hand-computed cases, files, and what must not pass."""

import json
import warnings

import numpy as np
import pytest
import test_answers
import torch
from model_cases import Linear, linear_data, prior_posterior

from pbnn.errors import DataError, FileError
from pbnn.evaluate.answers import Answers, answer
from pbnn.evaluate.costs import CostCurve, Costs
from pbnn.evaluate.decision import DecisionRule, Decisions, fit_decision_rule
from pbnn.evaluate.decision_report import judge_decisions, report_decisions
from pbnn.evaluate.features import FeatureDensity
from pbnn.evaluate.saved_density import SavedDensity

COSTS = Costs(error=10.0, review=1.0)


def decided(p, threshold=0.1, reason=None):
    """Return decisions of a rule of one stage on classes, from error probabilities alone."""
    p = np.asarray(p, dtype=float)
    answers = Answers(answer=np.zeros(len(p), int), error_probability=p)
    reason = np.where(p > threshold, "hard", "accept") if reason is None else np.asarray(reason)
    return Decisions(answers=answers, unlikeness=None, reason=reason, error_probability=p)


def judged(p, wrong, costs=COSTS):
    rule = DecisionRule(costs=costs, threshold=costs.threshold)
    return judge_decisions(rule, decided(p), np.asarray(wrong, dtype=bool))


def test_threshold_is_review_over_error():
    assert COSTS.threshold == 0.1
    assert Costs(error=50.0, review=1.0).threshold == 0.02


@pytest.mark.parametrize(("error", "review"), [(1.0, 1.0), (1.0, 2.0), (0.0, -1.0), (np.nan, 1.0)])
def test_costs_that_no_review_pays_are_refused(error, review):
    with pytest.raises(DataError, match="0 < review < error"):
        Costs(error=error, review=review)


def test_cost_curve_by_hand():
    """Five rows; at each threshold the reviews above it, and the errors at and below it."""
    curve = CostCurve([0.5, 0.01, 0.2, 0.2, 0.05], [1, 0, 0, 1, 0], COSTS)
    assert curve.thresholds.tolist() == [-np.inf, 0.01, 0.05, 0.2, 0.5]
    np.testing.assert_allclose(curve.reviewed, [1.0, 0.8, 0.6, 0.2, 0.0])
    np.testing.assert_allclose(curve.cost, [1.0, 0.8, 0.6, (1 + 10) / 5, 20 / 5])
    assert curve.best == 0.05
    # A threshold between two probabilities costs what the lower one does.
    assert curve.costs_at(0.1).tolist() == [1.0, 0.0, 1.0, 1.0, 0.0]
    assert curve.costs_at(np.inf).mean() == 4.0
    assert float(curve.saved(0.05, -np.inf)(np.ones((1, 5)))[0]) == pytest.approx(0.4)
    # In a resample without the last three rows: 1 for the first, 0 for the second.
    assert float(curve.mean_at(0.05)(np.array([[2.0, 1, 0, 0, 0]]))[0]) == pytest.approx(2 / 3)


def test_the_threshold_of_least_expected_cost_is_review_over_error():
    """With calibrated probabilities the curve's minimum lies at m / a, up to its noise."""
    rng = np.random.default_rng(0)
    p = rng.uniform(0, 0.5, 20_000)
    curve = CostCurve(p, rng.uniform(size=20_000) < p, COSTS)
    chosen, best = curve.costs_at(COSTS.threshold).mean(), curve.cost.min()
    expected = np.where(p > 0.1, 1.0, 10 * p).mean()
    scale = curve.costs_at(0.1).std() / np.sqrt(20_000)
    assert abs(chosen - expected) < 4 * scale
    assert chosen - best < 4 * scale


def test_report_by_hand():
    p = [0.05, 0.05, 0.2, 0.3, 0.02, 0.6]
    wrong = [0, 1, 0, 1, 0, 1]
    report = judged(p, wrong)
    costs = report.costs["cost"]
    assert costs["accept all"] == pytest.approx(30 / 6)
    assert costs["review all"] == pytest.approx(1.0)
    assert costs["chosen threshold"] == pytest.approx((3 + 10) / 6)
    assert costs["best in hindsight"] == pytest.approx(5 / 6)
    assert report.costs.loc["best in hindsight", "threshold"] == 0.02
    assert report.good_among_reviewed == pytest.approx(1 / 3)
    assert report.accuracy == pytest.approx(2 / 3)
    assert report.auroc.value == pytest.approx((1.5 + 2 * 3) / 9)
    assert report.rejection["accuracy"].iloc[0] == pytest.approx(0.5)
    assert report.rejection["rejected"].iloc[0] == pytest.approx(0.0)
    # Keeping the surest row alone, then the two of 0.05, of which one is wrong.
    assert report.rejection["accuracy"].tolist()[::-1] == pytest.approx(
        [1.0, 3 / 4, 2 / 3, 3 / 4, 3 / 5, 1 / 2]
    )


def calibrated(rows=1000, seed=0):
    rng = np.random.default_rng(seed)
    p = rng.beta(0.3, 3.0, rows)
    return p, rng.uniform(size=rows) < p


def test_a_calibrated_probability_that_ranks_is_fit():
    report = judged(*calibrated())
    assert report.fit_for_decisions
    assert report.verdict == "fit for decisions"
    assert all(line.passed for line in report.checklist)
    costs = report.costs["cost"]
    assert costs["best in hindsight"] <= costs["chosen threshold"] < costs["review all"]


def test_a_constant_never_passes():
    """Even one that is calibrated: nothing is ranked, and no threshold is cheaper than the ends."""
    for share in (0.02, 0.1, 0.5):
        wrong = np.arange(2000) < share * 2000
        report = judged(np.full(2000, share), wrong)
        assert report.ece.value == pytest.approx(0.0, abs=1e-12)
        assert report.auroc.value == 0.5
        assert not report.fit_for_decisions
        assert "AUROC" in report.verdict
        assert report.verdict.startswith("not fit for decisions, because ")


def test_noise_does_not_pass():
    rng = np.random.default_rng(1)
    report = judged(rng.uniform(0, 0.2, 2000), rng.uniform(size=2000) < 0.1)
    assert not report.fit_for_decisions


def test_ranks_without_calibration_are_not_fit():
    p, wrong = calibrated()
    report = judged(np.sqrt(p), wrong)
    assert report.auroc.low > 0.5
    assert not report.fit_for_decisions
    assert "ECE" in report.verdict


@pytest.mark.parametrize(("wrong", "named"), [(False, "no errors"), (True, "errors only")])
def test_without_both_kinds_of_answers_the_ranking_is_not_known(wrong, named):
    report = judged(np.linspace(0, 0.3, 40), np.full(40, wrong))
    assert np.isnan(report.auroc.value)
    assert not report.fit_for_decisions
    assert named in report.verdict


@pytest.mark.parametrize("p", [[], [0.1, np.nan]])
def test_no_rows_and_nan_are_named(p):
    with pytest.raises(DataError, match=r"no rows|NaN in row 1"):
        judged(p, [False] * len(p))


def test_a_row_never_seen_is_reviewed_whatever_its_answer():
    p = np.array([0.01, 0.01, 0.4])
    decisions = Decisions(
        answers=Answers(answer=np.array([0, 1, 1]), error_probability=p),
        unlikeness=np.array([9.0, 1.0, 1.0]),
        reason=np.array(["never seen", "accept", "hard"]),
        error_probability=np.array([1.0, 0.01, 0.4]),
    )
    frame = decisions.to_frame(["cat", "dog"])
    assert frame["decision"].tolist() == ["review", "accept", "review"]
    assert frame["reason"].tolist() == ["never seen", "", "hard"]
    assert frame["answer"].tolist() == ["cat", "dog", "dog"]
    rule = DecisionRule(costs=COSTS, threshold=0.1)
    report = judge_decisions(rule, decisions, np.array([True, False, True]))
    assert report.costs.loc["chosen threshold", "reviewed"] == pytest.approx(2 / 3)


@pytest.fixture(scope="module")
def fitted():
    """A linear model, prior draws as posterior, rows, and a rule of two stages on them."""
    model = Linear(2, noise=0.5)
    x, y = linear_data(60, 2, noise=0.5)
    posterior = prior_posterior(model, x, y, draws=50)
    density = FeatureDensity(components=1).fit(model, posterior, x)
    rule = fit_decision_rule(model, posterior, x, y, costs=COSTS, tolerance=1.0, density=density)
    return model, posterior, x, y, density, rule


def test_two_stages(fitted):
    model, posterior, x, _, density, rule = fitted
    far = torch.cat([x[:5], torch.full((1, 2), 40.0)])
    decisions = rule.apply(model, posterior, far)
    assert decisions.reason[-1] == "never seen"
    assert decisions.error_probability[-1] == 1.0
    np.testing.assert_allclose(decisions.unlikeness, density.score(far), rtol=1e-10)
    # At most 1% of the validation rows, all of them like the training rows, are never seen.
    assert (rule.apply(model, posterior, x).reason == "never seen").mean() <= 0.01


def test_a_saved_rule_decides_the_same_bits(fitted, tmp_path):
    model, posterior, x, *_, rule = fitted
    path = rule.save(tmp_path / "rule.json")
    assert json.loads(path.read_text())["format"] == 1
    again = DecisionRule.load(path)
    first, second = (r.apply(model, posterior, x) for r in (rule, again))
    assert (first.reason == second.reason).all()
    np.testing.assert_array_equal(first.error_probability, second.error_probability)
    np.testing.assert_array_equal(first.unlikeness, second.unlikeness)
    assert again.costs == rule.costs
    assert again.notes == rule.notes


@pytest.mark.parametrize("features", [3, 102])
def test_a_saved_density_is_that_of_the_mixture(features):
    """Of full covariances and of diagonal ones, which many features have; without constants."""
    model = Linear(features)
    x, y = linear_data(40, features)
    x[:, 0] = 7.0
    posterior = prior_posterior(model, x, y, draws=2)
    density = FeatureDensity(components=2 if features == 3 else None).fit(model, posterior, x)
    assert density.mixture.covariance_type == ("full" if features == 3 else "diag")
    saved = SavedDensity.from_json(json.loads(json.dumps(SavedDensity.of(density).to_json())))
    scores = saved.score(model, posterior, x)
    np.testing.assert_allclose(scores, density.score(x), rtol=1e-10)


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda r: {**r, "format": 99}, "format"),
        (lambda r: {**r, "threshold": 7}, "threshold 7"),
        (lambda r: {**r, "threshold": None}, "no decision rule"),
        (lambda r: {**r, "costs": {"error": 1, "review": 2}}, "review"),
        (lambda r: {**r, "unlike": None}, "density"),
        (lambda r: {k: v for k, v in r.items() if k != "costs"}, "costs"),
        (lambda r: {**r, "surprise": 1}, "surprise"),
        (lambda r: [1, 2], "no decision rule"),
    ],
)
def test_a_damaged_rule_is_refused(edit, named, fitted, tmp_path):
    path = fitted[-1].save(tmp_path / "rule.json")
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))
    with pytest.raises(FileError, match=named):
        DecisionRule.load(path)


def test_a_missing_rule_is_named(tmp_path):
    with pytest.raises(FileError, match=r"rule\.json"):
        DecisionRule.load(tmp_path / "rule.json")


def test_report_on_rows(fitted):
    model, posterior, x, y, _, rule = fitted
    report = report_decisions(rule, model, posterior, x, y)
    assert len(report.wrong) == 60
    assert report.verdict in str(report)
    assert rule.provenance["validation_rows"] == 60


def test_no_errors_in_validation_leaves_the_probability_as_it_is(fitted):
    model, posterior, x, y, *_ = fitted
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rule = fit_decision_rule(model, posterior, x, y, costs=COSTS, tolerance=1e3)
    assert rule.calibration == 1.0
    assert "not calibrated" in rule.notes[0]


def test_the_calibration_is_that_of_the_validation_rows(fitted):
    """A factor on the scales, whose square is the mean squared residual in scales."""
    model, posterior, x, y, _, rule = fitted
    raw = answer(model, posterior, x, tolerance=1.0)
    factor = float(np.sqrt(np.square((y.numpy() - raw.answer) / raw.scale).mean()))
    assert rule.calibration == pytest.approx(factor)
    wider = answer(model, posterior, x, tolerance=1.0, calibration=factor)
    narrower = answer(model, posterior, x, tolerance=1.0 / factor)
    np.testing.assert_array_equal(wider.error_probability, narrower.error_probability)


def test_missing_y_and_no_rows_are_named(fitted):
    model, posterior, x, y, *_ = fitted
    holes = y.clone()
    holes[3] = torch.nan
    with pytest.raises(DataError, match="row 3"):
        fit_decision_rule(model, posterior, x, holes, costs=COSTS, tolerance=1.0)
    with pytest.raises(DataError, match="no validation rows"):
        fit_decision_rule(model, posterior, x[:0], y[:0], costs=COSTS, tolerance=1.0)


@pytest.mark.parametrize("family", ["Coin", "Counts"])
def test_a_coin_has_a_temperature_and_a_count_no_factor(family):
    """Logits twice too large: temperature 2 for classes; counts are left as they are."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 1, generator=generator)
    posterior = test_answers.given(w=torch.full((4, 1), 2.0 if family == "Coin" else 1.0))
    model = getattr(test_answers, family)(1)
    if family == "Coin":
        y = torch.bernoulli(torch.sigmoid(x[:, 0]), generator=generator)
        rule = fit_decision_rule(model, posterior, x, y, costs=COSTS)
        # The slope's standard error is about 0.1 at 600 rows: 4 of them about 1, inverted.
        assert 2 / 1.4 < rule.calibration < 2 / 0.6
        assert rule.apply(model, posterior, x[:1] * 0).reason.tolist() == ["hard"]
    else:
        y = torch.poisson(3 * x[:, 0].exp(), generator=generator)
        rule = fit_decision_rule(model, posterior, x, y, costs=COSTS, tolerance=1.5)
        assert rule.calibration == 1.0
        assert any("whole numbers" in note for note in rule.notes)
