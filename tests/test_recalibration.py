"""Temperature and scale calibration: known factors are found, and what one factor cannot change."""

import numpy as np
import pytest

from pbnn.errors import DataError, ModelError, PbnnWarning
from pbnn.evaluate.calibration import expected_calibration_error, negative_log_likelihood
from pbnn.evaluate.recalibration import ScaleCalibration, TemperatureScaling


def softmax(logits):
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def test_a_known_temperature_is_found():  # fault 34
    """Logits three times too large, 20,000 rows, 5 classes: T = 3 ± 0.1."""
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(20_000, 5))
    y = (generator.random((20_000, 1)) > softmax(logits).cumsum(1)).sum(1)
    sharp = softmax(3 * logits)
    scaling = TemperatureScaling()
    tempered = scaling.fit_transform(sharp, y)
    assert scaling.temperature_ == pytest.approx(3.0, abs=0.1)
    np.testing.assert_allclose(
        tempered, softmax(3 * logits / scaling.temperature_), rtol=1e-9, atol=1e-12
    )
    before, after = (negative_log_likelihood(p, y).mean() for p in (sharp, tempered))
    assert after < before
    assert (tempered.argmax(1) == sharp.argmax(1)).all()
    assert expected_calibration_error(tempered, y) < expected_calibration_error(sharp, y)


def test_a_mixture_is_tempered_as_the_averaged_probability():  # fault 34
    """Two draws that disagree: of their mean (½, ½), any temperature makes (½, ½)."""
    draws = np.array([[[0.99, 0.01]], [[0.01, 0.99]]]).repeat(40, axis=1)
    for shape in (draws, draws[:, None]):
        mean = TemperatureScaling()
        mean.temperature_ = 5.0
        np.testing.assert_allclose(mean.transform(shape), 0.5)
    each = TemperatureScaling(by_draw=True)
    each.temperature_ = 2.0
    # sqrt(0.99) against sqrt(0.01), in both orders: still ½; one-sided draws tell the two apart.
    np.testing.assert_allclose(each.transform(draws), 0.5)
    sided = np.array([[[0.9, 0.1]], [[0.5, 0.5]]]).repeat(40, axis=1)
    first = 0.5 * (0.9**0.5 / (0.9**0.5 + 0.1**0.5)) + 0.25
    np.testing.assert_allclose(each.transform(sided)[:, 0], first)
    both = 0.7**0.5 / (0.7**0.5 + 0.3**0.5)
    mean.temperature_ = 2.0
    np.testing.assert_allclose(mean.transform(sided)[:, 0], both)
    # 26 of 40 rows are of class 0: the mean must become 0.65, for which b with 0.7^b / 0.3^b =
    # 0.65 / 0.35; or the first draw 0.8 beside the other's ½, for which 9^b = 4.
    y = np.arange(40) >= 26
    mean.fit(sided, y)
    assert mean.temperature_ == pytest.approx(np.log(7 / 3) / np.log(0.65 / 0.35), rel=1e-4)
    assert each.fit(sided, y).temperature_ == pytest.approx(np.log(9) / np.log(4), rel=1e-4)


def test_a_probability_of_zero_does_not_decide_alone():
    p = np.array([[1.0, 0.0]] * 50 + [[0.8, 0.2]] * 50)
    y = np.r_[np.zeros(49), 1, np.zeros(40), np.ones(10)]
    scaling = TemperatureScaling().fit(p, y)
    assert np.isfinite(scaling.temperature_)
    assert scaling.temperature_ > 1
    assert (scaling.transform(p)[:50, 1] > 0).all()


def test_rows_that_are_all_right_do_not_determine_the_temperature():
    p = np.array([[0.9, 0.1]] * 5)
    with pytest.warns(PbnnWarning, match="5 rows do not determine the temperature"):
        TemperatureScaling().fit(p, np.zeros(5))


def test_a_known_factor_is_found():
    """The square of the factor is a mean of n squares of Normals: relative error sqrt(2 / n)."""
    generator = np.random.default_rng(0)
    scale = generator.uniform(0.5, 2.0, size=5_000)
    mean = generator.normal(size=5_000)
    y = mean + 2.5 * scale * generator.normal(size=5_000)
    calibration = ScaleCalibration()
    wider = calibration.fit_transform(mean, scale, y)
    assert calibration.factor_ == pytest.approx(2.5, rel=4 * 0.5 * (2 / 5_000) ** 0.5)
    np.testing.assert_allclose(wider, calibration.factor_ * scale)
    by_hand = ScaleCalibration().fit([0.0, 0.0], [1.0, 2.0], [3.0, 2.0])
    assert by_hand.factor_ == pytest.approx(5**0.5)  # (9 + 1) / 2


def test_what_is_refused():
    with pytest.raises(ModelError, match="temperature is not fitted"):
        TemperatureScaling().transform([[0.5, 0.5]])
    with pytest.raises(ModelError, match="factor is not fitted"):
        ScaleCalibration().transform([1.0])
    with pytest.raises(DataError, match="expected classes from 0 to 1"):
        TemperatureScaling().fit([[0.5, 0.5]], [2])
    with pytest.raises(DataError, match="numbers from 0"):
        TemperatureScaling().fit([[-1.0, 2.0]], [0])
    with pytest.raises(DataError, match="scale is 0 in some row"):
        ScaleCalibration().fit([0.0], [0.0], [1.0])
    with pytest.raises(DataError, match="y is NaN in row 1"):
        ScaleCalibration().fit([0.0, 0.0], [1.0, 1.0], [1.0, np.nan])
    with pytest.raises(DataError, match=r"mean \(2,\), scale \(1,\), y \(2,\)"):
        ScaleCalibration().fit([0.0, 0.0], [1.0], [1.0, 1.0])
