"""Numbers of the criteria by hand, and where a spread is 0."""

import numpy as np
import pytest

from pbnn.evaluate.bootstrap import bootstrap
from pbnn.evaluate.criteria import direction, signal
from pbnn.evaluate.ranking import Detection

FEW = {"replicates": 50, "seed": 0}


def test_direction_by_hand():
    home, away = np.array([1.0, 1.0, 2.0]), np.array([2.0, 4.0])
    found = direction(home, away, (np.zeros(3), np.array([1.0, 3.0])), **FEW)
    assert found["log_ratio"].value == pytest.approx(np.log(10 / 2))
    assert found["log_median_ratio"].value == pytest.approx(np.log(3.0))
    slope = np.polyfit([0, 0, 0, 1, 3], np.r_[home, away] / 2**0.5, 1)[0]
    assert found["slope"].value == pytest.approx(slope)
    assert list(direction(home, away, None, **FEW)) == ["log_ratio", "log_median_ratio"]


@pytest.mark.parametrize(
    ("home", "away", "value"), [(0.0, 0.0, 0.0), (0.0, 1.0, np.inf), (1.0, 0.0, -np.inf)]
)
def test_where_there_is_no_spread(home, away, value):
    found = direction(np.full(4, home), np.full(3, away), None, **FEW)
    for interval in found.values():
        assert (interval.value, interval.low, interval.high) == (value, value, value)


def test_each_score_has_its_numbers():
    home = {"a": np.array([1.0, 2.0, 3.0]), "b": np.zeros(3)}
    away = {"a": np.array([2.5, 4.0]), "b": np.zeros(2)}
    found = signal(home, away, **FEW)
    assert found["auroc_a"].value == pytest.approx(5 / 6)
    assert found["auroc_b"].value == 0.5
    assert found["fpr95_a"].value == pytest.approx(1 / 3)
    assert found["aupr_b"].value == pytest.approx(0.4)
    detection = Detection([1.0, 2.0, 3.0, 2.5, 4.0], [0, 0, 0, 1, 1])
    assert found["auroc_a"] == bootstrap(detection.auroc, [3, 2], **FEW)
