"""Kernels of wide networks against quadrature, and networks against kernels."""

import math
from pathlib import Path

import pytest
import torch
from scipy import integrate, special

from pbnn import load_model
from pbnn.errors import DataError, ModelError
from pbnn.evaluate.kernels import (
    arccosine_kernel,
    arcsine_kernel,
    check_kernel,
    limit_kernel,
)

REGRESSION = Path(__file__).parents[1] / "models" / "regression.py"
X = torch.tensor([[-1.0, 0.5], [0.0, 0.0], [0.3, 2.0], [2.0, -1.0]])


@pytest.mark.parametrize(
    ("kernel", "activation"),
    [(arcsine_kernel, special.erf), (arccosine_kernel, lambda u: max(u, 0.0))],
)
def test_closed_form_is_the_integral(kernel, activation):
    covariance = torch.tensor([[1.3, 0.4], [0.4, 0.6]]).double()
    found = kernel(covariance)
    slope, rest = 0.4 / 1.3, math.sqrt(0.6 - 0.4**2 / 1.3)

    def density(t):
        return math.exp(-0.5 * t * t) / math.sqrt(2 * math.pi)

    def integrand(s, t):
        u = math.sqrt(1.3) * t
        return activation(u) * activation(slope * u + rest * s) * density(s) * density(t)

    ends = [-7.0, 7.0]
    expected, _ = integrate.nquad(
        integrand, [ends, ends], opts={"epsabs": 1e-7, "epsrel": 1e-6, "limit": 80}
    )
    assert float(found[0, 1]) == pytest.approx(expected, abs=1e-5)
    assert torch.equal(found, found.T)


def test_relu_at_equal_inputs_is_half_the_variance():
    found = arccosine_kernel(torch.tensor([[2.0, 0.0], [0.0, 0.0]]).double())
    torch.testing.assert_close(found, torch.tensor([[1.0, 0.0], [0.0, 0.0]]).double())


def network(activation, **options):
    model = load_model(REGRESSION, in_features=2, hidden=100, **options)
    model.activation = {"erf": torch.erf, "relu": torch.relu}[activation]
    return model


@pytest.mark.parametrize("activation", ["erf", "relu"])
def test_wide_network_agrees_and_another_scale_does_not(activation):
    """Ten entries within 4 Monte Carlo errors; a weight scale of 1.5 is told from one of 1."""
    check = check_kernel(
        network(activation, weight_scale=1.5, bias_scale=0.5),
        X,
        limit_kernel(X, activation=activation, weight_scale=1.5, bias_scale=0.5),
    )
    assert len(check.table) == 10
    assert check.agrees, str(check)
    assert "agrees with" in str(check)
    other = limit_kernel(X, activation=activation, weight_scale=1.0, bias_scale=0.5)
    wrong = check_kernel(network(activation, weight_scale=1.5, bias_scale=0.5), X, other)
    assert not wrong.agrees
    assert "is not that of" in str(wrong)


def test_refusals():
    with pytest.raises(ModelError, match="activation='tanh'; expected one of erf, relu"):
        limit_kernel(X, activation="tanh")
    with pytest.raises(DataError, match=r"x has shape \(2,\)"):
        limit_kernel(X[0], activation="erf")
    with pytest.raises(DataError, match=r"the kernel has shape \(2, 2\); expected \(4, 4\)"):
        check_kernel(network("erf"), X, torch.eye(2), draws=4)
    with pytest.raises(DataError, match="draws is 1"):
        check_kernel(network("erf"), X, torch.eye(4), draws=1)
    with pytest.raises(ModelError, match="2 outputs; expected one"):
        check_kernel(network("erf", out_features=2), X, torch.eye(4), draws=4)
