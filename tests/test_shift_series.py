"""Metrics against severity: 0 is the test rows, and what grows with the shift does grow."""

import numpy as np
import pytest
import torch
from model_cases import Linear, linear_data, prior_posterior

from pbnn.errors import DataError
from pbnn.evaluate.mass import mass_of
from pbnn.evaluate.shift_series import shift_table


@pytest.fixture(scope="module")
def rows():
    model = Linear(2)
    x, y = linear_data(40, 2)
    return model, prior_posterior(model, x, y, draws=30), x, y


def test_a_linear_model_is_wider_further_out(rows):
    model, posterior, x, y = rows
    table = shift_table(model, posterior, {s: x * (1 + s) for s in range(6)}, y, replicates=50)
    spread = table.xs("epistemic", level="number")["value"]
    # f is linear, so is its spread over draws: exactly 1 + severity times as wide.
    np.testing.assert_allclose(spread / spread[0], 1 + np.arange(6), rtol=1e-4)
    auroc = table.xs("auroc_epistemic", level="number")
    assert auroc["value"][0] == 0.5
    assert auroc["value"].is_monotonic_increasing
    assert (auroc["low"] <= auroc["value"]).all()
    mass = mass_of(model, posterior, x, y)
    assert table.loc[(0, "nll"), "value"] == pytest.approx(
        float(mass.statistics["nll"](np.ones((1, 40)))[0])
    )


def test_no_severities_and_nan_are_named(rows):
    model, posterior, x, y = rows
    with pytest.raises(DataError, match="no severities"):
        shift_table(model, posterior, {}, y)
    with pytest.raises(DataError, match="row 0"):
        shift_table(model, posterior, {0: torch.full_like(x, torch.nan)}, y, replicates=5)
