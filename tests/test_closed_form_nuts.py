"""NUTS against the exact posterior of a linear model with known noise."""

import arviz as az
import numpy as np
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
    return x.to(dtype), y.to(dtype), mean.numpy(), covariance.numpy()


@pytest.mark.parametrize(("dtype", "dense_mass"), [(torch.float32, False), (torch.float64, True)])
def test_moments_are_those_of_the_exact_posterior(dtype, dense_mass):
    x, y, mean, covariance = problem(30, dtype)
    posterior = pbnn.fit_nuts(
        linear, x, y, chains=4, warmup=300, draws=700, seed=2, dense_mass=dense_mass,
        dtype=dtype, compile=False, progress=False,
    )  # fmt: skip
    draws = torch.cat([posterior.draws["w"], posterior.draws["b"][..., None]], -1).double().numpy()
    for k in range(3):
        value = draws[..., k]
        # Four Monte Carlo errors of the mean, with the effective sample size that ArviZ measures.
        error = np.sqrt(covariance[k, k] / az.ess(value))
        assert abs(value.mean() - mean[k]) < 4 * error
        for j in range(k + 1):
            product = (value - mean[k]) * (draws[..., j] - mean[j])
            error = product.std() / np.sqrt(az.ess(product))
            assert abs(product.mean() - covariance[k, j]) < 4 * error


@pytest.mark.filterwarnings("ignore::pbnn.errors.ConvergenceWarning")
def test_lp_is_the_log_joint_by_hand():
    x, y, _, _ = problem(30, torch.float64)
    posterior = pbnn.fit_nuts(
        linear, x, y, chains=2, warmup=20, draws=5, dtype=torch.float64, compile=False,
        progress=False,
    )  # fmt: skip
    flat = posterior.flat()
    f = flat["w"] @ x.T + flat["b"][:, None]
    by_hand = (
        torch.distributions.Normal(f, NOISE).log_prob(y).sum(-1)
        + torch.distributions.Normal(0.0, 1.0).log_prob(flat["w"]).sum(-1)
        + torch.distributions.Normal(0.0, 2.0).log_prob(flat["b"])
    )
    torch.testing.assert_close(posterior.stats["lp"].flatten(), by_hand)
