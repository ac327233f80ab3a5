"""Scores against hand-made values, and their edges."""

import math

import pytest
import torch

from pbnn.errors import DataError
from pbnn.evaluate.calibration import (
    expected_calibration_error,
    interval_coverage,
    log_predictive_density,
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
