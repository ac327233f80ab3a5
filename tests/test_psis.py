"""Pareto k of importance weights, against tails whose shape is known."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from pbnn.evaluate.psis import pareto_k

ROOT = Path(__file__).parents[1]
OTHER_PYTHON = os.environ.get("PBNN_ARVIZ1_PYTHON")


def pareto_weights(k, draws=20_000, seed=0):
    """Return logarithms of Pareto weights: w = u^(−k) has a tail of shape k."""
    return np.random.default_rng(seed).exponential(size=draws) * k


@pytest.mark.parametrize("k", [0.3, 0.7, 1.2])
def test_shape_of_a_pareto_tail(k):
    """3 sqrt(20,000) = 424 weights are fitted: the standard error is (1 + k) / sqrt(424)."""
    assert abs(pareto_k(pareto_weights(k)) - k) < 4 * (1 + k) / 424**0.5


def test_input_is_left_alone_and_may_be_shifted():
    weights = pareto_weights(0.5, 1000)
    before = weights.copy()
    k = pareto_k(weights)
    assert np.array_equal(weights, before)
    assert pareto_k(weights + 1234.5) == pytest.approx(k, abs=1e-6)


@pytest.mark.parametrize("weights", [np.zeros(10), np.full(100, np.nan), np.full(100, np.inf)])
def test_no_tail_no_shape(weights):
    assert np.isnan(pareto_k(weights))


@pytest.mark.skipif(not OTHER_PYTHON, reason="PBNN_ARVIZ1_PYTHON names no Python with ArviZ 1.x")
def test_arviz_1_says_the_same():
    """Both versions fit the same tail; 1.x breaks ties and priors a little differently."""
    program = (
        "import numpy as np; from pbnn.evaluate.psis import pareto_k;"
        "print(pareto_k(np.random.default_rng(0).exponential(size=20_000) * 0.7))"
    )
    done = subprocess.run(
        [OTHER_PYTHON, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert float(done.stdout) == pytest.approx(pareto_k(pareto_weights(0.7)), abs=0.01)
