"""NUTS on the six reference posteriors: ordered, positive, unit-interval and dependent supports."""

import warnings

import arviz as az
import pytest
import torch
from posteriordb_models import NAMES, available, problem

import pbnn
from pbnn.errors import ConvergenceWarning

pytestmark = pytest.mark.skipif(not available(), reason="shared/data/posteriordb is not here")


@pytest.mark.parametrize(
    ("name", "chains", "warmup", "draws", "compile"),
    [
        ("eight_schools", 100, 80, 25, False),
        *(pytest.param(name, 20, 300, 250, True, marks=pytest.mark.slow) for name in NAMES),
    ],
)
def test_means_and_mean_squares_are_those_of_the_reference(name, chains, warmup, draws, compile):
    given = problem(name)
    with warnings.catch_warnings():
        # Few draws of many short chains may diverge now and then.
        warnings.simplefilter("error" if compile else "ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        posterior = pbnn.fit_nuts(
            given.model,
            given.x,
            given.y,
            chains=chains,
            warmup=warmup,
            draws=draws,
            target_accept=0.95 if compile else 0.9,
            dtype=torch.float64,
            compile=compile,
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
