"""Grids, rays and distances: where inputs lie, and how far they are from the training rows."""

import numpy as np
import pytest
import torch

from pbnn.errors import DataError
from pbnn.evaluate.bootstrap import bootstrap
from pbnn.evaluate.field import Slope, distance_to_training, grid_rows, ray_rows

TRAINING = np.array([[0.0, 10.0, 5.0], [2.0, 30.0, 5.0], [1.0, 20.0, 5.0]])


def test_a_grid_covers_the_data_and_beyond():
    line = grid_rows(TRAINING, reach=2.0, points=5)
    np.testing.assert_allclose(line[:, 0], [-1.0, 0.0, 1.0, 2.0, 3.0])
    np.testing.assert_allclose(line[:, 1:], [[20.0, 5.0]] * 5)
    plane = grid_rows(TRAINING, features=(0, 1), reach=1.0, points=3)
    assert plane.shape == (9, 3)
    np.testing.assert_allclose(plane[:, 0], np.repeat([0.0, 1.0, 2.0], 3))
    np.testing.assert_allclose(plane[:, 1], np.tile([10.0, 20.0, 30.0], 3))
    for wrong in ((), (3,), (0, 1, 2)):
        with pytest.raises(DataError, match="one or two columns from 0 to 2"):
            grid_rows(TRAINING, features=wrong)
    with pytest.raises(DataError, match=r"shape \(3,\); expected \(n, features\)"):
        grid_rows(TRAINING[:, 0])


def test_rays_leave_the_mean_in_training_scales():
    rows, away = ray_rows(TRAINING, rays=4, reach=3.0, points=7)
    assert rows.shape == (4, 7, 3)
    np.testing.assert_allclose(away, np.linspace(0, 3, 7))
    np.testing.assert_allclose(rows[:, 0], np.tile(TRAINING.mean(0), (4, 1)))
    assert (rows[..., 2] == 5.0).all()  # constant in training
    step = rows[:, :, :2] - TRAINING.mean(0)[:2]
    np.testing.assert_allclose(step[:, 6], 6 * step[:, 1], rtol=1e-12)  # straight
    wide = np.random.default_rng(0).normal(size=(500, 50)) * np.arange(1, 51)
    far, at = ray_rows(wide, rays=3)
    size = np.sqrt(np.square((far - wide.mean(0)) / wide.std(0)).mean(-1))
    np.testing.assert_allclose(size, np.tile(at, (3, 1)), atol=1e-12)


def test_distance_is_to_the_nearest_row_in_training_scales():
    scale = TRAINING[:, :2].std(0)
    rows = TRAINING[:1] + np.r_[scale, 0.0] * [[-1.0], [0.0], [-2.0]]
    # Both varying features are off by one scale, the constant one by nothing.
    np.testing.assert_allclose(
        distance_to_training(rows, TRAINING), [(2 / 3) ** 0.5, 0.0, 2 * (2 / 3) ** 0.5]
    )
    as_dict, training = (
        {"a": torch.tensor(v[:, :2]), "b": torch.tensor(v[:, 2]), "k": torch.ones(3).int()}
        for v in (rows, TRAINING)
    )
    np.testing.assert_allclose(
        distance_to_training(as_dict, training), distance_to_training(rows, TRAINING)
    )
    with pytest.raises(DataError, match="rows have 2 values and training rows 3"):
        distance_to_training(rows[:, :2], TRAINING)
    with pytest.raises(DataError, match="no input is floating-point"):
        distance_to_training(torch.ones(2).int(), torch.ones(2).int())


def test_a_constant_whose_scale_is_rounding_error_keeps_its_unit():
    training = np.c_[np.linspace(0.0, 1.0, 10), np.full(10, 0.3)]
    assert 0 < training[:, 1].std() < 1e-15
    found = distance_to_training(np.array([[0.0, 0.4]]), training)
    np.testing.assert_allclose(found, 0.1 / 2**0.5)


def test_distance_in_many_dimensions():
    generator = np.random.default_rng(0)
    rows, data = generator.normal(size=(20, 40)), generator.normal(size=(30, 40))
    apart = (rows[:, None] - data) / data.std(0)
    expected = np.sqrt(np.square(apart).mean(-1)).min(1)
    np.testing.assert_allclose(distance_to_training(rows, data), expected)


def test_slope_is_that_of_least_squares():
    generator = np.random.default_rng(0)
    x = 1e6 + generator.normal(size=60)
    y = 3 * (x - 1e6) + generator.normal(size=60)
    rows = generator.integers(60, size=60)
    counts = np.bincount(rows, minlength=60).astype(float)[None]
    expected = np.polyfit(x[rows] - 1e6, y[rows], 1)[0]
    assert Slope(x, y)(counts)[0] == pytest.approx(expected, rel=1e-6)
    assert bootstrap(Slope(x, 2 * x), 60).value == pytest.approx(2.0)
    assert np.isnan(Slope(np.ones(5), np.arange(5))(np.ones((1, 5))))
