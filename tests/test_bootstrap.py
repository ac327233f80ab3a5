"""Bootstrap intervals: against resampled rows, their exact law, and in time."""

import time

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from pbnn.errors import DataError
from pbnn.evaluate.bootstrap import Interval, Mean, Median, bootstrap, bootstrap_all
from pbnn.evaluate.calibration import CalibrationError
from pbnn.evaluate.ranking import Detection, RankCorrelation, RiskCoverage


def resampled(rows, replicates, seed=0):
    """Return the rows that the same generator draws, one resample after another."""
    generator = np.random.default_rng(seed)
    return [generator.integers(rows, size=rows) for _ in range(replicates)]


def test_interval_is_that_of_resampled_rows():
    generator = np.random.default_rng(1)
    positive = generator.random(120) < 0.4
    scores = (generator.normal(size=120) + positive).round(1)
    found = bootstrap(Detection(scores, positive).auroc, 120, replicates=200)
    each = [roc_auc_score(positive[rows], scores[rows]) for rows in resampled(120, 200)]
    assert found.value == pytest.approx(roc_auc_score(positive, scores))
    low, high = np.quantile(each, [0.025, 0.975], method="nearest")
    assert (found.low, found.high) == pytest.approx((low, high))


def test_means_and_medians_are_those_of_resampled_rows():
    values = np.random.default_rng(2).normal(size=31).round(1)
    counts = np.stack([np.bincount(rows, minlength=31) for rows in resampled(31, 50)]).astype(float)
    rows = [values[rows] for rows in resampled(31, 50)]
    np.testing.assert_allclose(Mean(values)(counts), [v.mean() for v in rows], atol=1e-14)
    np.testing.assert_allclose(Median(values)(counts), [np.median(v) for v in rows], atol=1e-14)
    even = np.ones((1, 30))
    assert Median(values[:30])(even)[0] == pytest.approx(np.median(values[:30]))


def test_interval_of_a_mean_has_the_width_of_its_law():
    """± 1.96 s / sqrt(n); an end of 4,000 replicates is uncertain by 2.7% of s / sqrt(n)."""
    values = np.random.default_rng(3).normal(size=400)
    found = bootstrap(Mean(values), 400, replicates=4000)
    error = values.std() / 20
    spread = (0.025 * 0.975 / 4000) ** 0.5 / 0.0584  # of a quantile: density 0.0584 at ± 1.96
    for end, sign in ((found.low, -1), (found.high, 1)):
        assert end == pytest.approx(values.mean() + sign * 1.96 * error, abs=4 * spread * error)


def test_samples_of_fixed_size_are_resampled_by_themselves():
    def shares(counts):
        assert (counts[:, :3].sum(1) == 3).all()
        assert (counts[:, 3:].sum(1) == 5).all()
        return counts[:, 0]

    found = bootstrap(shares, [3, 5], replicates=50)
    assert found.value == 1.0
    assert found.low == 0.0
    assert 1.0 < found.high <= 3.0


def test_numbers_share_their_resamples_and_repeat():
    values = np.arange(20.0)
    first = bootstrap_all({"a": Mean(values), "b": Mean(-values)}, 20, seed=3)
    assert (first["a"].low, first["a"].high) == (-first["b"].high, -first["b"].low)
    assert bootstrap(Mean(values), 20, seed=3) == first["a"]
    assert bootstrap(Mean(values), 20, seed=4) != first["a"]


def test_blocks_do_not_change_the_resamples(monkeypatch):
    values = np.random.default_rng(4).normal(size=50)
    whole = bootstrap(Median(values), 50, replicates=100)
    monkeypatch.setattr("pbnn.evaluate.bootstrap._BLOCK_VALUES", 7 * 50)
    assert bootstrap(Median(values), 50, replicates=100) == whole


def test_infinities_and_numbers_that_do_not_exist():
    found = bootstrap(Mean([0.0, 1.0, np.inf]), 3)
    assert (found.value, found.high) == (np.inf, np.inf)
    assert found.low < 1  # resamples without the infinite row
    nothing = bootstrap(lambda counts: np.full(len(counts), np.nan), 3)
    assert np.isnan([nothing.value, nothing.low, nothing.high]).all()
    # One positive among 8 rows: a third of the resamples lack it, and are left out.
    rare = bootstrap(Detection(np.arange(8), np.arange(8) == 7).auroc, 8)
    assert (rare.value, rare.low, rare.high) == (1.0, 1.0, 1.0)


def test_interval_in_words():
    interval = Interval(0.5, 0.25, 0.75)
    assert str(interval) == "0.500 [0.250, 0.750]"
    assert interval.holds(0.25)
    assert not interval.holds(0.76)


def test_what_is_refused():
    with pytest.raises(DataError, match=r"samples of \[3, 0\] rows; expected at least one"):
        bootstrap(Mean([1.0]), [3, 0])
    for wrong in ({"replicates": 0}, {"level": 1.0}):
        with pytest.raises(DataError, match="expected at least 1, and between 0 and 1"):
            bootstrap(Mean([1.0]), 1, **wrong)


def test_ten_thousand_rows_and_1000_replicates_of_every_number_take_under_5_seconds():
    generator = np.random.default_rng(0)
    positive = generator.random(10_000) < 0.3
    scores = generator.normal(size=10_000) + positive
    p = 1 / (1 + np.exp(-scores))
    detection = Detection(scores, positive)
    numbers = {
        "auroc": detection.auroc,
        "aupr": detection.average_precision,
        "fpr95": detection.fpr,
        "area": RiskCoverage(scores, positive).area,
        "spearman": RankCorrelation(scores, generator.random(10_000)),
        "ece": CalibrationError(np.stack([1 - p, p], 1), positive),
        "median": Median(scores),
    }
    for name, number in numbers.items():
        start = time.process_time()  # of this process: others may share the machine
        bootstrap(number, 10_000, replicates=100)
        assert 10 * (time.process_time() - start) < 5, name
