"""CRPS and PIT: against closed forms, integrals and sums over all pairs."""

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from pbnn.errors import DataError
from pbnn.evaluate.crps import crps_normal_mixture, crps_samples, pit_normal_mixture, pit_samples


def crps_by_quadrature(cdf, y, low, high):
    below = quad(lambda z: cdf(z) ** 2, low, y, limit=200)[0]
    return below + quad(lambda z: (1 - cdf(z)) ** 2, y, high, limit=200)[0]


def test_crps_of_a_normal_is_its_closed_form():
    """σ (z (2Φ(z) − 1) + 2φ(z) − 1/√π) (Gneiting & Raftery 2007, eq. 22)."""
    y = np.array([-1.0, 0.3, 4.0])
    z = (y - 0.5) / 2
    expected = 2 * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - np.pi**-0.5)
    np.testing.assert_allclose(crps_normal_mixture(np.full((1, 3), 0.5), [[2.0]], y), expected)
    # A mixture of equal components is one of them.
    np.testing.assert_allclose(crps_normal_mixture(np.full((4, 3), 0.5), [[2.0]] * 4, y), expected)


def test_crps_of_a_mixture_is_its_integral():
    mean, scale = np.array([[-1.0], [0.5], [2.0]]), np.array([[0.3], [1.0], [0.7]])
    for y in (-2.0, 0.4, 3.0):
        expected = crps_by_quadrature(lambda z: norm.cdf(z, mean, scale).mean(), y, -9.0, 9.0)
        assert crps_normal_mixture(mean, scale, [y])[0] == pytest.approx(expected, abs=1e-7)


def test_crps_of_point_masses_is_that_of_samples():
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(30, 4)), generator.normal(size=4)
    found = crps_samples(x, y)
    np.testing.assert_allclose(crps_normal_mixture(x, np.zeros((30, 1)), y), found)
    pairs = np.abs(x[:, None] - x).mean((0, 1))
    np.testing.assert_allclose(found, np.abs(x - y).mean(0) - pairs / 2)
    fair = crps_samples(x, y, fair=True)
    np.testing.assert_allclose(fair, np.abs(x - y).mean(0) - pairs / 2 * 30 / 29)
    # One sample: the absolute error.
    np.testing.assert_allclose(crps_samples(x[:1], y), np.abs(x[0] - y))
    with pytest.raises(DataError, match="at least 2 draws"):
        crps_samples(x[:1], y, fair=True)


def test_blocks_of_pairs_do_not_change_crps(monkeypatch):
    generator = np.random.default_rng(0)
    case = generator.normal(size=(25, 3)), generator.random((25, 3)), generator.normal(size=3)
    whole = crps_normal_mixture(*case)
    monkeypatch.setattr("pbnn.evaluate.crps._BLOCK_VALUES", 4 * 25)
    np.testing.assert_allclose(crps_normal_mixture(*case), whole)


def test_pit_by_hand_and_of_mixtures():
    x = np.array([[0.0, 0.0], [1.0, 0.0], [2.0, 1.0], [3.0, 1.0]])
    assert pit_samples(x, [1.5, 0.0]).tolist() == [0.5, 0.25]  # ties half
    assert pit_normal_mixture(x, np.zeros((4, 1)), [1.5, 0.0]).tolist() == [0.5, 0.25]
    found = pit_normal_mixture([[0.0], [2.0]], [[1.0], [3.0]], [1.0])
    assert found[0] == pytest.approx((norm.cdf(1.0) + norm.cdf(-1 / 3)) / 2)


def test_shapes_of_draws():
    with pytest.raises(DataError, match=r"draws have shape \(3, 2\) and y \(3,\)"):
        crps_samples(np.zeros((3, 2)), np.zeros(3))
    with pytest.raises(DataError, match="draws are NaN in row 1"):
        pit_samples([[0.0, np.nan]], [0.0, 0.0])
    with pytest.raises(DataError, match="no value below 0"):
        crps_normal_mixture([[0.0]], [[-1.0]], [0.0])
