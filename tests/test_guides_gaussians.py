"""Roots and Gaussians on plain tensors against dense computations."""

import pyro.distributions as dist
import pytest
import torch
from guide_cases import clean  # noqa: F401
from torch.distributions import LowRankMultivariateNormal, MultivariateNormal
from torch.distributions.kl import kl_divergence

from pbnn.infer.guides.gaussians import MatrixNormal, VectorNormal
from pbnn.infer.guides.roots import DiagonalRoot, LowRankRoot, TriangularRoot


def roots(n, dtype=torch.float64):
    tril = torch.randn(n, n, dtype=dtype).tril(-1) + torch.rand(n, dtype=dtype).add(0.5).diag()
    scale = torch.rand(n, dtype=dtype) + 0.5
    factor = torch.randn(n, 2, dtype=dtype)
    return [DiagonalRoot(scale), LowRankRoot(scale, factor), TriangularRoot(tril)]


@pytest.mark.parametrize("index", range(3))
def test_root_is_a_square_root_of_its_covariance(index):
    root = roots(5)[index]
    a = root.multiply(torch.eye(5, dtype=torch.float64))
    torch.testing.assert_close(a @ a.T, root.covariance())
    torch.testing.assert_close(root.whiten(a), torch.eye(5, dtype=torch.float64))
    torch.testing.assert_close(root.log_det(), torch.linalg.slogdet(a).logabsdet)
    torch.testing.assert_close(root.variance(), root.covariance().diagonal())
    scaled = root.scaled(torch.tensor(3.0, dtype=torch.float64))
    torch.testing.assert_close(scaled.covariance(), 9 * root.covariance())


def test_low_rank_equals_torch_and_survives_extreme_scales():
    root = roots(5)[1]
    loc = torch.randn(5, dtype=torch.float64)
    gaussian = VectorNormal(loc, root)
    reference = LowRankMultivariateNormal(
        loc, root.scale[:, None] * root.factor, root.scale.square()
    )
    value, log_q = gaussian.transform(torch.randn(7, 5, dtype=torch.float64))
    torch.testing.assert_close(log_q, reference.log_prob(value))
    torch.testing.assert_close(gaussian.log_prob(value), log_q)
    # A diagonal of 1e-12, and of 1e-30 (whose square is 0), in float32.
    for scale in (1e-12, 1e-30):
        tiny = VectorNormal(torch.zeros(5), LowRankRoot(torch.full((5,), scale), torch.ones(5, 2)))
        value, log_q = tiny.transform(torch.randn(3, 5))
        torch.testing.assert_close(tiny.log_prob(value), log_q, rtol=1e-4, atol=1e-3)
    # A factor too large for its Cholesky is NaN, which a fit can see, and no error.
    huge = LowRankRoot(torch.ones(5), torch.full((5, 2), 1e30))
    assert huge.log_det().isnan()


@pytest.mark.parametrize("row", range(3))
@pytest.mark.parametrize("column", range(3))
def test_matrix_normal_equals_dense(row, column):
    scale = torch.tensor(0.3, dtype=torch.float64)
    loc = torch.randn(4, 3, dtype=torch.float64)
    gaussian = MatrixNormal(loc, scale, roots(4)[row], roots(3)[column])
    dense = MultivariateNormal(loc.flatten(), gaussian.covariance())
    value, log_q = gaussian.transform(torch.randn(5, 2, 4, 3, dtype=torch.float64))
    torch.testing.assert_close(log_q, dense.log_prob(value.flatten(-2)))
    torch.testing.assert_close(gaussian.log_prob(value), log_q)
    torch.testing.assert_close(gaussian.variance().flatten(), gaussian.covariance().diagonal())


@pytest.mark.parametrize("gaussian", ["vector", "matrix"])
def test_kl_to_normal_equals_dense_and_monte_carlo(gaussian):
    if gaussian == "vector":
        q = VectorNormal(torch.randn(12, dtype=torch.float64), roots(12)[1])
    else:
        scale = torch.tensor(0.4, dtype=torch.float64)
        q = MatrixNormal(torch.randn(4, 3, dtype=torch.float64), scale, roots(4)[2], roots(3)[2])
    loc, scale = torch.randn_like(q.loc), torch.rand_like(q.loc) + 0.5
    kl = q.kl_to_normal(loc, scale)
    dense = MultivariateNormal(q.loc.flatten(), q.covariance())
    prior = MultivariateNormal(loc.flatten(), scale.flatten().square().diag())
    torch.testing.assert_close(kl, kl_divergence(dense, prior))
    value, log_q = q.transform(torch.randn(20_000, *q.loc.shape, dtype=torch.float64))
    log_ratio = log_q - dist.Normal(loc, scale).log_prob(value).flatten(1).sum(1)
    error = log_ratio.std() / len(log_ratio) ** 0.5
    assert (log_ratio.mean() - kl).abs() < 4 * error


@pytest.mark.parametrize("index", range(3))
def test_descent_is_minus_the_gradient_of_the_density(index):
    loc = torch.randn(4, 3, dtype=torch.float64)
    scale = torch.tensor(0.3, dtype=torch.float64)
    for gaussian in (
        VectorNormal(loc[:, 0], roots(4)[index]),
        MatrixNormal(loc, scale, roots(4)[index], roots(3)[index - 1]),
    ):
        noise = torch.randn(2, *gaussian.loc.shape, dtype=torch.float64)
        value = gaussian.transform(noise)[0].requires_grad_()
        (gradient,) = torch.autograd.grad(gaussian.log_prob(value).sum(), value)
        torch.testing.assert_close(gaussian.descent(noise), -gradient)
        dense = MultivariateNormal(gaussian.loc.flatten(), gaussian.covariance())
        torch.testing.assert_close(gaussian.entropy(), dense.entropy())
