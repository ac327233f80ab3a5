"""NUTS against the exact posterior of a linear model with known noise."""

import pyro
import pyro.distributions as dist
import pytest
import torch

import pbnn

NOISE = 0.5


def linear(x, y=None):
    """y ~ Normal(x w + b, NOISE), w ~ Normal(0, 1), b ~ Normal(0, 2)."""
    w = pyro.sample("w", dist.Normal(0.0, x.new_ones(x.shape[1])).to_event(1))
    b = pyro.sample("b", dist.Normal(x.new_zeros(()), 2.0))
    f = x @ w + b
    with pyro.plate("data", x.shape[0]):
        pyro.sample("y", dist.Normal(f, NOISE), obs=y)
    return f


def problem(rows, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 2, generator=generator, dtype=torch.float64)
    x[:, 1] += 0.8 * x[:, 0]  # so that the posterior is correlated
    y = x @ torch.tensor([1.0, -2.0], dtype=torch.float64) + 0.5
    y = y + NOISE * torch.randn(rows, generator=generator, dtype=torch.float64)
    design = torch.cat([x, torch.ones(rows, 1, dtype=torch.float64)], 1)
    prior = torch.diag(torch.tensor([1.0, 1.0, 0.25], dtype=torch.float64))
    precision = design.T @ design / NOISE**2 + prior
    covariance = precision.inverse()
    mean = covariance @ design.T @ y / NOISE**2
    return x.to(dtype), y.to(dtype), mean, covariance


@pytest.mark.parametrize(("dtype", "dense_mass"), [(torch.float32, False), (torch.float64, True)])
def test_moments_are_those_of_the_exact_posterior(dtype, dense_mass):
    """Means over chains are independent: each moment within 4 standard errors of their mean."""
    x, y, mean, covariance = problem(30, dtype)
    posterior = pbnn.fit_nuts(
        linear, x, y, chains=100, warmup=80, draws=25, seed=2, dense_mass=dense_mass,
        dtype=dtype, compile=False, progress=False,
    )  # fmt: skip
    draws = torch.cat([posterior.draws["w"], posterior.draws["b"][..., None]], -1).double()
    apart = draws - mean
    products = apart[..., :, None] * apart[..., None, :]
    for values, exact in ((draws, mean), (products, covariance)):
        by_chain = values.mean(1)
        error = by_chain.std(0) / 100**0.5
        assert bool(((by_chain.mean(0) - exact).abs() < 4 * error).all())
