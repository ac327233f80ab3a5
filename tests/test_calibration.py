"""Scores against hand-made values, and their edges."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import brier_score_loss, log_loss

from pbnn.errors import DataError
from pbnn.evaluate.calibration import (
    CalibrationError,
    CoverageCurve,
    brier_score,
    coverage_curve,
    expected_calibration_error,
    interval_coverage,
    interval_score,
    log_predictive_density,
    negative_log_likelihood,
    sharpness,
)


def test_density_is_averaged_over_draws_not_its_logarithm():  # fault 33
    draws = torch.tensor([0.1, 0.9]).log()
    for shape in ((1, 2, 1), (2, 1, 1)):
        found = log_predictive_density(draws.reshape(shape))
        assert found.shape == (1,)
        assert found.item() == pytest.approx(math.log(0.5), abs=1e-6)


def test_density_neither_underflows_nor_overflows():
    far = torch.tensor([-1e4, -1e4 + math.log(3)]).double().reshape(1, 2, 1)
    assert log_predictive_density(far).item() == pytest.approx(-1e4 + math.log(2))
    assert log_predictive_density(torch.full((2, 3, 4), -math.inf)).tolist() == [-math.inf] * 4


def test_density_of_another_shape():
    with pytest.raises(DataError, match=r"shape \(2, 3\); expected \(chain, draw, n\)"):
        log_predictive_density(torch.zeros(2, 3))


def test_coverage_counts_both_ends_and_leaves_missing_rows_out():
    lower, upper = torch.zeros(5), torch.ones(5)
    y = torch.tensor([0.0, 1.0, 1.1, -0.1, torch.nan])
    assert interval_coverage(lower, upper, y) == 0.5
    both = torch.stack([y, torch.full((5,), 0.5)], 1)
    pair = (torch.zeros(5, 2), torch.ones(5, 2))
    assert interval_coverage(*pair, both) == pytest.approx(7 / 9)


def test_coverage_refuses_shapes_that_would_be_broadcast_and_no_rows():
    with pytest.raises(DataError, match=r"shapes \(5,\) and \(5,\) for y of shape \(5, 1\)"):
        interval_coverage(torch.zeros(5), torch.ones(5), torch.zeros(5, 1))
    with pytest.raises(DataError, match="coverage of no observations"):
        interval_coverage(torch.zeros(1), torch.ones(1), torch.tensor([torch.nan]))


def test_coverage_refuses_an_end_that_is_nan_where_y_is_seen():
    lower, upper = torch.zeros(3, 2), torch.ones(3, 2)
    y = torch.full((3, 2), 0.5)
    lower[1, 1] = torch.nan
    with pytest.raises(DataError, match=r"lower is NaN in row 1 \(1 of 3 rows\)"):
        interval_coverage(lower, upper, y)
    with pytest.raises(DataError, match=r"upper is NaN in row 1 \(1 of 3 rows\)"):
        interval_coverage(upper, lower, y)
    y[1, 1] = torch.nan
    assert interval_coverage(lower, upper, y) == 1.0


def test_calibration_error_of_full_confidence_and_empty_bins():  # fault 35
    """Ten rows of confidence exactly 1, seven right: |0.7 − 1|; nine bins are empty."""
    probabilities = torch.eye(2)[torch.zeros(10, dtype=torch.int64)]
    y = torch.tensor([0] * 7 + [1] * 3)
    assert expected_calibration_error(probabilities, y) == pytest.approx(0.3)


def test_calibration_error_by_hand():
    """Bins [0.5, 0.6): confidences 0.5 and 0.55, one right; [0.9, 1]: 0.9, wrong."""
    confidence = torch.tensor([0.5, 0.55, 0.9]).double()
    probabilities = torch.stack([confidence, 1 - confidence], 1)
    y = torch.tensor([0, 1, 1])
    expected = (abs(1 - (0.5 + 0.55)) + 0.9) / 3
    assert expected_calibration_error(probabilities, y) == pytest.approx(expected)
    whole = abs(1 - (0.5 + 0.55 + 0.9)) / 3
    assert expected_calibration_error(probabilities, y, bins=1) == pytest.approx(whole)


def test_calibrated_probabilities_have_a_small_error():
    """Classes drawn from the probabilities themselves: the error is Monte Carlo alone.

    A bin of n rows is off by at most 0.5 / sqrt(n) in the mean; summed over 10 bins of N rows that
    is 0.5 sqrt(10 / N) at most.
    """
    probabilities = torch.randn(20_000, 3).mul(2).softmax(-1)
    y = torch.distributions.Categorical(probabilities).sample()
    assert expected_calibration_error(probabilities, y) < 0.5 * (10 / 20_000) ** 0.5
    sharper = probabilities.log().mul(3).softmax(-1)
    assert expected_calibration_error(sharper, y) > 0.1


@pytest.mark.parametrize(("shape", "rows"), [((3,), 3), ((3, 2), 4), ((0, 2), 0), ((3, 2, 2), 3)])
def test_calibration_error_of_other_shapes(shape, rows):
    with pytest.raises(
        DataError, match=r"expected \(n, classes\) and \(n,\) with at least one row"
    ):
        expected_calibration_error(torch.full(shape, 0.5), torch.zeros(rows, dtype=torch.int64))


def test_bins_are_half_open_and_no_row_vanishes():
    """Confidences on every edge: each in the bin that it opens, 1 in the last one."""
    edges = torch.arange(11).double() / 10
    probabilities = torch.stack([edges, 1 - edges], 1)[6:]
    y = torch.ones(5, dtype=torch.int64)
    # Each edge alone in its bin, but 0.9 and 1.0 together: all wrong.
    assert expected_calibration_error(probabilities, y) == pytest.approx(0.8)
    right = torch.tensor([0, 1, 1, 0, 1])  # 0.6, 0.9: what shares a bin cancels
    expected = (0.4 + 0.7 + 0.8 + abs(1 - 0.9 - 1.0)) / 5
    assert expected_calibration_error(probabilities, right) == pytest.approx(expected)
    # 0.29 is below 29 / 100 after a product with 100, but not beside the edge itself.
    on_edge = np.array([[0.29, 0.71], [0.29, 0.71]])
    error = CalibrationError(on_edge, [0, 1], bins=100, classwise=True)
    assert error._bin.tolist() == [[29, 29], [71, 71]]


def test_bins_of_equal_mass_hold_as_many_rows():
    generator = np.random.default_rng(0)
    confidence = 0.5 + 0.5 * generator.random(1_000) ** 3
    p = np.stack([confidence, 1 - confidence], 1)
    error = CalibrationError(p, np.zeros(1_000), binning="mass")
    assert np.bincount(error._bin[0]).tolist() == [100] * 10
    # By hand: two bins of two rows, each row 0.1 or 0.3 off, once above and once below.
    p = np.array([[0.6, 0.4], [0.7, 0.3], [0.8, 0.2], [0.9, 0.1]])
    mass = expected_calibration_error(p, [0, 1, 0, 0], bins=2, binning="mass")
    assert mass == pytest.approx((abs(1 - 1.3) + abs(2 - 1.7)) / 4)


@pytest.mark.parametrize("binning", ["width", "mass"])
def test_confidence_of_exactly_1_in_all_rows(binning):  # fault 35
    p = np.eye(2)[np.zeros(10, dtype=int)]
    y = [0] * 7 + [1] * 3
    assert expected_calibration_error(p, y, binning=binning) == pytest.approx(0.3)
    assert expected_calibration_error(p, y, binning=binning, classwise=True) == pytest.approx(0.3)


def test_classwise_error_by_hand():
    """One bin: |frequency − mean probability| of each class, averaged."""
    p = np.array([[0.5, 0.3, 0.2], [0.7, 0.2, 0.1]])
    expected = (abs(0.5 - 0.6) + abs(0.5 - 0.25) + abs(0 - 0.15)) / 3
    found = expected_calibration_error(p, [0, 1], bins=1, classwise=True)
    assert found == pytest.approx(expected)


def test_scores_of_classes_are_those_of_scikit_learn():
    generator = np.random.default_rng(0)
    p = generator.dirichlet([1.0, 2.0, 0.5], size=200)
    y = generator.integers(3, size=200)
    assert negative_log_likelihood(p, y).mean() == pytest.approx(log_loss(y, p))
    two = np.stack([1 - p[:, 0], p[:, 0]], 1)
    one = brier_score_loss(y == 0, p[:, 0])
    assert brier_score(two, y == 0).mean() == pytest.approx(2 * one)
    np.testing.assert_allclose(brier_score([[0.2, 0.3, 0.5]], [2]), 0.04 + 0.09 + 0.25)
    assert negative_log_likelihood([[1.0, 0.0]], [1]).tolist() == [math.inf]


@pytest.mark.parametrize(
    ("p", "y", "message"),
    [
        ([[0.5, 0.5]], [2], "expected classes from 0 to 1"),
        ([[0.5, 0.5]], [0.5], "expected classes from 0 to 1"),
        ([[0.5, 0.5]], [math.nan], "expected classes from 0 to 1"),
        ([[2.0, -1.0]], [0], "pass probabilities, not logits"),
        ([[math.nan, 1.0]], [0], "pass probabilities, not logits"),
        ([[3.0, 1.0]], [0], "pass probabilities, not logits"),
    ],
)
def test_what_is_no_probability_or_class(p, y, message):
    for score in (negative_log_likelihood, brier_score, expected_calibration_error):
        with pytest.raises(DataError, match=message):
            score(p, y)


def test_bins_that_are_none():
    with pytest.raises(DataError, match="bins 0"):
        expected_calibration_error([[0.5, 0.5]], [0], bins=0)
    with pytest.raises(DataError, match="'width' or 'mass'"):
        expected_calibration_error([[0.5, 0.5]], [0], binning="equal")


def test_interval_score_by_hand():
    lower, upper, y = [0.0, 0.0, 0.0], [2.0, 2.0, 2.0], [1.0, -0.5, 4.0]
    # α = 0.1: the width, and 20 times what y lies outside.
    np.testing.assert_allclose(interval_score(lower, upper, y, level=0.9), [2.0, 12.0, 42.0])
    assert sharpness(lower, upper).tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(DataError, match="level 90"):
        interval_score(lower, upper, y, level=90)


def test_coverage_of_all_levels():
    """PIT 0.5 lies in every central interval, 0.05 in those of probability 0.9 and more."""
    pit = np.array([0.5, 0.05, 0.95, 0.25])
    levels, coverage = coverage_curve(pit, [0.0, 0.5, 0.89, 0.91])
    assert levels.tolist() == [0.0, 0.5, 0.89, 0.91]
    assert coverage.tolist() == [0.25, 0.5, 0.5, 1.0]
    uniform = (np.arange(4_000) + 0.5) / 4_000
    assert CoverageCurve(uniform).error()[0] < 1e-3
    narrow = np.r_[np.zeros(10), np.ones(10)]  # no interval covers
    assert CoverageCurve(narrow).error()[0] == pytest.approx(0.5)
    twice = np.stack([pit, np.full(4, np.nan)], 1)
    np.testing.assert_allclose(CoverageCurve(twice).error(), CoverageCurve(pit).error())
    counts = np.array([[2.0, 1.0, 0.0, 1.0]])
    expected = CoverageCurve(pit[[0, 0, 1, 3]]).error()
    np.testing.assert_allclose(CoverageCurve(pit).error(counts), expected)
    with pytest.raises(DataError, match="outside 0 to 1"):
        CoverageCurve([1.5])
    with pytest.raises(DataError, match="a row without a value"):
        CoverageCurve([0.5, np.nan])


def test_resampled_calibration_error_is_that_of_the_rows():
    generator = np.random.default_rng(0)
    p, y = generator.dirichlet([1.0, 2.0], size=100), generator.integers(2, size=100)
    rows = generator.integers(100, size=100)
    counts = np.bincount(rows, minlength=100).astype(float)[None]
    for options in ({}, {"classwise": True}):
        found = CalibrationError(p, y, **options)(counts)
        expected = expected_calibration_error(p[rows], y[rows], **options)
        assert found[0] == pytest.approx(expected)
