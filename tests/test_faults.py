"""Faults that users of this field meet, on the whole road: what no single module's tests cover."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

import pbnn
from pbnn.errors import ModelError


def triangle(x, y=None):
    """Two sites, the support of the second depends on the first: 0 < b < 1 − a."""
    a = pyro.sample("a", dist.Uniform(0.0, 1.0))
    b = pyro.sample("b", dist.Uniform(0.0, 1.0 - a))
    f = (a + b).expand(x.shape[0])
    with pyro.plate("data", x.shape[0]):
        pyro.sample("y", dist.Normal(f, 1000.0), obs=y)
    return f


def test_a_support_that_depends_on_another_site_is_right_under_nuts():
    x = torch.zeros(2, 1)
    posterior = pbnn.fit_nuts(
        triangle, x, x[:, 0], chains=4, warmup=300, draws=500, seed=1, compile=False, progress=False
    )
    a, b = posterior.draws["a"], posterior.draws["b"]
    assert ((a + b) <= 1.0).all()
    # The data say nothing, so b has its prior mean E[(1 − a) / 2] = 1/4, and scale sqrt(7) / 12.
    error = math.sqrt(7) / 12 / math.sqrt(500)  # at least 500 effective of 2,000 draws
    assert abs(float(b.mean()) - 0.25) < 4 * error


def test_a_support_that_depends_on_another_site_is_refused_under_svi():
    x = torch.zeros(2, 1)
    with pytest.raises(ModelError, match="site 'b' has a support that depends on another site"):
        pbnn.fit_svi(triangle, x, x[:, 0], steps=5, progress=False)
