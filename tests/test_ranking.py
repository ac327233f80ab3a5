"""Rankings by hand, against scikit-learn and SciPy, on resampled rows, and at their edges."""

import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from pbnn.errors import DataError
from pbnn.evaluate.ranking import (
    Detection,
    RankCorrelation,
    RiskCoverage,
    area_under_risk_coverage,
    auroc,
    average_precision,
    fpr_at_tpr,
    risk_coverage,
    spearman,
)


@pytest.fixture(params=[None, 1, 0], ids=["no ties", "some ties", "many ties"])
def case(request):
    """Scores with ties or without, labels, a loss, and one resample as counts and as rows."""
    generator = np.random.default_rng(0)
    positive = generator.random(300) < 0.3
    scores = generator.normal(size=300) + positive
    if request.param is not None:
        scores = scores.round(request.param)
    rows = generator.integers(300, size=300)
    counts = np.bincount(rows, minlength=300).astype(float)[None]
    return scores, positive, generator.random(300), counts, rows


def test_detection_is_that_of_scikit_learn(case):
    scores, positive, _, counts, rows = case
    detection = Detection(scores, positive)
    for c, s, p in ((None, scores, positive), (counts, scores[rows], positive[rows])):
        assert detection.auroc(c)[0] == pytest.approx(roc_auc_score(p, s), abs=1e-12)
        precision = average_precision_score(p, s)
        assert detection.average_precision(c)[0] == pytest.approx(precision, abs=1e-12)
        for tpr in (0.5, 0.95, 1.0):
            false, true, _ = roc_curve(p, s, drop_intermediate=False)
            assert detection.fpr(c, tpr=tpr)[0] == pytest.approx(false[true >= tpr].min())


def test_correlation_is_that_of_scipy(case):
    scores, _, loss, counts, rows = case
    correlation = RankCorrelation(scores, loss)
    assert correlation()[0] == pytest.approx(spearmanr(scores, loss).statistic, abs=1e-12)
    expected = spearmanr(scores[rows], loss[rows]).statistic
    assert correlation(counts)[0] == pytest.approx(expected, abs=1e-12)


def test_risk_and_coverage_of_a_resample_are_those_of_its_rows(case):
    scores, _, loss, counts, rows = case
    area = RiskCoverage(scores, loss).area(counts)[0]
    assert area == pytest.approx(area_under_risk_coverage(scores[rows], loss[rows]), abs=1e-12)
    coverage, risk = risk_coverage(scores, loss)
    assert area_under_risk_coverage(scores, loss) == pytest.approx(risk.mean(), abs=1e-12)
    assert risk[-1] == pytest.approx(loss.mean())
    assert (coverage[0], coverage[-1]) == (1 / 300, 1.0)


def test_ties_count_as_the_mean_over_their_orders():
    generator = np.random.default_rng(1)
    scores, loss = np.array([0.0, 1.0, 1.0, 1.0, 2.0]), generator.random(5)
    from itertools import permutations

    areas = []
    for order in permutations([1, 2, 3]):
        kept = loss[[0, *order, 4]]
        areas.append((kept.cumsum() / np.arange(1, 6)).mean())
    assert area_under_risk_coverage(scores, loss) == pytest.approx(np.mean(areas))


def test_by_hand():
    """Of the four pairs one is in order, one tied, two in the wrong order: (1 + ½) / 4."""
    scores, positive = [0.1, 0.4, 0.4, 0.05], [0, 0, 1, 1]
    assert auroc(scores, positive) == 0.375
    # At 0.4 one of two found, half of the rows right; at 0.05 the other, again half.
    assert average_precision(scores, positive) == 0.5
    assert fpr_at_tpr(scores, positive) == 1.0
    assert fpr_at_tpr(scores, positive, tpr=0.5) == 0.5
    # Errors 1, 0, 0, 1 in rising order of uncertainty.
    coverage, risk = risk_coverage([1, 2, 3, 4], [1, 0, 0, 1])
    assert coverage.tolist() == [0.25, 0.5, 0.75, 1.0]
    np.testing.assert_allclose(risk, [1, 1 / 2, 1 / 3, 1 / 2])
    assert area_under_risk_coverage([1, 2, 3, 4], [1, 0, 0, 1]) == pytest.approx(7 / 12)
    assert spearman([1, 2, 3], [30, 20, 10]) == -1.0


def test_a_constant_score_ranks_nothing():
    positive = np.arange(10) < 3
    constant = np.full(10, 0.7)
    assert auroc(constant, positive) == 0.5
    assert average_precision(constant, positive) == pytest.approx(0.3)
    assert fpr_at_tpr(constant, positive) == 1.0
    assert area_under_risk_coverage(constant, positive) == pytest.approx(0.3)
    assert spearman(constant, np.arange(10)) == 0.0


def test_95_percent_is_a_count_that_does_not_round():
    """Of 20, 40, 60 or 100 positives 95% is a whole number: one may stay below the threshold."""
    for rows in (20, 40, 60, 100):
        missed = rows // 20
        positives = np.r_[np.full(missed, 0.0), np.full(rows - missed, 2.0)]
        scores, positive = np.r_[positives, 1.0], np.r_[np.ones(rows), 0.0]
        assert fpr_at_tpr(scores, positive) == 0.0
        assert fpr_at_tpr(scores, positive, tpr=0.951) == 1.0


def test_infinite_scores_have_a_place():
    assert auroc([-np.inf, 0.0, np.inf], [0, 0, 1]) == 1.0
    assert auroc([np.inf, 0.0, np.inf], [0, 0, 1]) == 0.75


def test_a_resample_of_one_kind_has_no_number():
    detection = Detection([0.0, 1.0], [0, 1])
    counts = np.array([[2.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    for number in (detection.auroc, detection.average_precision, detection.fpr):
        found = number(counts)
        assert np.isnan(found[0])
        assert not np.isnan(found[2])
    assert np.isnan(detection.auroc(counts)[1])
    assert np.isnan(detection.fpr(counts)[1])


def test_what_is_refused():
    with pytest.raises(DataError, match="all 2 rows are positive; a ranking needs rows of both"):
        auroc([1.0, 2.0], [1, 1])
    with pytest.raises(DataError, match="all 2 rows are negative"):
        average_precision([1.0, 2.0], [0, 0])
    with pytest.raises(DataError, match=r"scores is NaN in row 1 \(1 of 2 rows\)"):
        auroc([1.0, np.nan], [0, 1])
    with pytest.raises(DataError, match=r"scores has shape \(0,\); expected \(n,\)"):
        auroc([], [])
    with pytest.raises(DataError, match=r"scores \(2,\), positive \(3,\)"):
        auroc([1.0, 2.0], [0, 1, 1])
    with pytest.raises(DataError, match="positive has the value 2"):
        auroc([1.0, 2.0], [0, 2])
    with pytest.raises(DataError, match="loss is NaN"):
        risk_coverage([1.0], [np.nan])
