"""NUTS on the six reference posteriors: ordered, positive, unit-interval and dependent supports."""

import warnings

import arviz as az
import pytest
import torch
from posteriordb_models import NAMES, available, problem

import pbnn
from pbnn.errors import ConvergenceWarning

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not available(), reason="shared/data/posteriordb is not here"),
]


@pytest.mark.parametrize("name", NAMES)
def test_means_and_mean_squares_are_those_of_the_reference(name):
    given = problem(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        posterior = pbnn.fit_nuts(
            given.model,
            given.x,
            given.y,
            chains=20,
            warmup=300,
            draws=150,
            init="map",
            dtype=torch.float64,
            compile=True,
            progress=False,
        )
    for parameter, values in given.reported(posterior.draws).items():
        reference = given.reference[parameter]
        for quantity, expected in (
            (values, reference["mean"]),
            (values**2, reference["mean_of_square"]),
        ):
            sd, ess = float(quantity.std()), float(az.ess(quantity.numpy()))
            assert ess >= 1000, parameter
            # The reference has 10,000 draws of its own.
            error = (sd**2 / ess + (sd / 100) ** 2) ** 0.5
            assert abs(float(quantity.mean()) - expected) < 4 * error, parameter
