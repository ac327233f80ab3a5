"""The density on the six reference posteriors, against log densities written by hand."""

from functools import cache

import pytest
import torch
from posteriordb_models import NAMES, Problem, available, problem

from pbnn.front_door import bind
from pbnn.infer.density import Density

pytestmark = pytest.mark.skipif(not available(), reason="shared/data/posteriordb is not here")


@cache
def _prepared(name: str) -> tuple[Problem, Density]:
    """Tracing a loop of 200 steps takes seconds, so the tests share it."""
    given = problem(name)
    return given, Density(bind(given.model, given.x, given.y, dtype=torch.float64), chains=3)


@pytest.mark.parametrize("name", NAMES)
def test_log_density_and_gradient_equal_the_hand_written_ones(name: str) -> None:
    given, density = _prepared(name)
    z = density.initial_prior(3, seed=1)
    value, grad = density.value_and_grad(z)
    for chain in range(3):
        leaf = z[chain].clone().requires_grad_()
        expected = given.log_density(
            {
                site.name: leaf[site.slice].reshape(site.unconstrained_shape)
                for site in density.sites
            }
        )
        (slope,) = torch.autograd.grad(expected, leaf)
        # Both are sums of up to 1,000 terms in float64: rounding is 1e-12 of the largest.
        torch.testing.assert_close(value[chain], expected.detach(), rtol=1e-10, atol=1e-9)
        torch.testing.assert_close(grad[chain], slope, rtol=1e-9, atol=1e-8)
    assert density.slow_because is None


@pytest.mark.parametrize("name", NAMES)
def test_values_go_to_the_unconstrained_space_and_back(name: str) -> None:
    given, density = _prepared(name)
    z = torch.randn(2, 3, density.dim, dtype=torch.float64)
    values = density.constrain(z)
    assert given.reported(values).keys() == given.reference.keys()
    torch.testing.assert_close(density.unconstrain(values), z, rtol=1e-9, atol=1e-9)
