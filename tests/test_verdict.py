"""The verdict: each branch, its order, and the edges between them."""

from functools import partial

import numpy as np
import pytest

from pbnn.evaluate import verdict
from pbnn.evaluate.bootstrap import Interval
from pbnn.evaluate.verdict import FEW_ROWS, ORDER

BELOW, HOLDS, ABOVE = Interval(0.3, 0.2, 0.49), Interval(0.5, 0.4, 0.6), Interval(0.8, 0.7, 0.9)
UP, DOWN, LEVEL = Interval(0.4, -0.1, 0.9), Interval(-0.4, -0.9, 0.1), Interval(0.0, 0.0, 0.0)
judge = partial(verdict.judge, rows=FEW_ROWS, draws=2)
BAD = "90% intervals cover 0.5"


@pytest.mark.parametrize(
    ("signal", "direction", "bad", "name", "remedies"),
    [
        (BELOW, UP, None, verdict.INVERTED, ("structure", "mean")),
        (BELOW, DOWN, BAD, verdict.INVERTED, ("structure", "mean")),
        (HOLDS, UP, None, verdict.UNRANKED, ("structure",)),
        (HOLDS, UP, BAD, verdict.UNRANKED, ("structure",)),
        (HOLDS, DOWN, None, verdict.NO_SIGNAL, ("mean",)),
        (HOLDS, LEVEL, BAD, verdict.NO_SIGNAL, ("mean",)),
        (ABOVE, UP, BAD, verdict.MISCALIBRATED, ("scale",)),
        (ABOVE, DOWN, BAD, verdict.MISCALIBRATED, ("scale",)),
        (ABOVE, UP, None, verdict.SOUND, ()),
    ],
)
def test_the_first_match_decides(signal, direction, bad, name, remedies):
    found = judge(signal, direction, bad)
    assert found.name == name
    assert found.remedies == remedies
    assert str(signal) in found.reason
    assert (BAD in found.reason) == (name == verdict.MISCALIBRATED)


def test_an_interval_that_touches_one_half_holds_it():
    assert judge(Interval(0.4, 0.3, 0.5), DOWN, None).name == verdict.NO_SIGNAL
    assert judge(Interval(0.6, 0.5, 0.7), UP, None).name == verdict.UNRANKED
    assert judge(Interval(0.4, 0.3, np.nextafter(0.5, 0)), UP, None).name == verdict.INVERTED


@pytest.mark.parametrize("signal", [BELOW, HOLDS, ABOVE])
def test_few_rows_and_one_draw_come_before_the_numbers(signal):
    few = judge(signal, UP, None, rows=FEW_ROWS - 1)
    assert few.name == verdict.TOO_FEW
    assert few.reason.startswith("9 row(s)")
    assert "10 rows or more" in few.next_step
    single = judge(signal, UP, BAD, rows=1, draws=1)
    assert single.name == verdict.NO_SPREAD
    assert "one draw has no epistemic spread" in single.reason
    assert single.next_step.startswith("try a fit with draws")


def test_next_steps_in_words():
    steps = {name: verdict.Verdict(name, "").next_step for name in ORDER}
    assert steps[verdict.INVERTED].startswith("try covariances between weights")
    assert steps[verdict.INVERTED].index("covariances") < steps[verdict.INVERTED].index("averaging")
    assert "lowrank" in steps[verdict.UNRANKED]
    assert "weight averaging" in steps[verdict.NO_SIGNAL]
    assert "temperature" in steps[verdict.MISCALIBRATED]
    assert steps[verdict.SOUND].startswith("nothing to mend")
