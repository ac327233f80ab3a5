"""Guides on linear models with known noise, where the posterior is Gaussian and known exactly.

The ELBO of a Gaussian guide is then exact too: it is the log evidence minus KL(guide ‖ posterior),
a function of the guide's mean and covariance. The tests minimise that KL itself, with no sampling
error, over the parameters of the guide; one test runs Pyro's SVI instead.
"""

from itertools import pairwise

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from guide_cases import clean  # noqa: F401
from pyro.infer import SVI, Trace_ELBO
from pyro.nn import PyroModule, PyroSample
from torch import nn

from pbnn.infer.guides import (
    AutoKronecker,
    AutoPatterns,
    approximation,
    dense_moments,
    log_prob_guide,
    make_guide,
)

WEIGHT_SCALES = (0.7, 1.3)  # of the prior, by input
BIAS_SCALE = 2.0


class Linear(PyroModule):
    """y = x Wᵀ + b with a known noise scale for each output, and priors that differ by input."""

    def __init__(self, noise, weight_scales=WEIGHT_SCALES, bias_scale=BIAS_SCALE):
        super().__init__()
        self.noise = torch.as_tensor(noise, dtype=torch.float64)
        out = len(self.noise)
        self.prior_scale = torch.tensor([*weight_scales, *[bias_scale] * bool(bias_scale)]).double()
        self.fc = PyroModule[nn.Linear](len(weight_scales), out, bias=bool(bias_scale))
        weights = self.prior_scale[: len(weight_scales)].expand(out, -1)
        self.fc.weight = PyroSample(dist.Normal(0 * weights, weights).to_event(2))
        if bias_scale:
            biases = self.prior_scale[-1].expand(out)
            self.fc.bias = PyroSample(dist.Normal(0 * biases, biases).to_event(1))

    def forward(self, x, y=None):
        # Not self.fc(x): batched weights of vectorised particles are (particles, 1, out, in).
        f = (x.unsqueeze(-2) * self.fc.weight).sum(-1)
        if self.fc.bias is not None:
            f = f + self.fc.bias
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, self.noise).to_event(1), obs=y)
        return f


def linear_data(out, rows=30):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 2, generator=generator, dtype=torch.float64)
    x[:, 1] += 0.8 * x[:, 0]  # correlated inputs: the posterior is not diagonal
    y = torch.randn(rows, out, generator=generator, dtype=torch.float64)
    return x, y


def posterior(model, x, y):
    """Return mean and precision over (weight row by row, bias), from the normal equations."""
    inputs = x.shape[1]
    design = torch.cat([x, torch.ones_like(x[:, :1])], 1)[:, : len(model.prior_scale)]
    out = len(model.noise)
    precision = torch.block_diag(
        *[design.T @ design / s**2 + model.prior_scale.pow(-2).diag() for s in model.noise]
    )
    shift = torch.cat([design.T @ y[:, k] / model.noise[k] ** 2 for k in range(out)])
    # From (output, input and bias) to all weights first, all biases after them.
    index = torch.arange(len(shift)).reshape(out, -1)
    order = torch.cat([index[:, :inputs].flatten(), index[:, inputs:].flatten()])
    precision, shift = precision[order[:, None], order], shift[order]
    return torch.linalg.solve(precision, shift), precision


def moments(guide):
    """Return mean and covariance over (weight row by row, bias), with their gradients."""
    if not hasattr(guide, "named_blocks"):
        if hasattr(guide, "locs"):
            loc = torch.cat([guide.locs.fc.weight.flatten(), guide.locs.fc.bias])
            scale = torch.cat([guide.scales.fc.weight.flatten(), guide.scales.fc.bias])
            return loc, scale.square().diag()
        scaled = guide.scale[:, None] * guide.cov_factor
        return guide.loc, scaled @ scaled.T + guide.scale.square().diag()
    means, covariances, orders = [], [], []
    shapes = dict(approximation(guide)["sites"])
    start, positions = 0, {}
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        positions[name] = torch.arange(start, start + size).reshape(shape)
        start += size
    for block in guide.named_blocks().values():
        gaussian = block.gaussian()
        means.append(gaussian.loc.flatten())
        covariances.append(gaussian.covariance())
        orders.append(block.layout.pack(positions).flatten())
    back = torch.cat(orders).argsort()
    return torch.cat(means)[back], torch.block_diag(*covariances)[back[:, None], back]


def kl_to_posterior(guide, mean, precision):
    """Return KL(guide ‖ posterior): the gap between the guide's ELBO and the log evidence."""
    loc, covariance = moments(guide)
    gap = loc - mean
    trace = (precision * covariance).sum()
    log_det = torch.linalg.slogdet(precision @ covariance).logabsdet
    return 0.5 * (trace + gap @ precision @ gap - len(mean) - log_det)


def minimise(guide, mean, precision):
    """Bring a guide to the optimum of its exact ELBO; return KL(guide ‖ posterior) there."""
    optimiser = torch.optim.LBFGS(
        guide.parameters(),
        max_iter=400,
        max_eval=1000,
        tolerance_grad=1e-10,
        tolerance_change=1e-15,
        line_search_fn="strong_wolfe",
    )

    def closure():
        optimiser.zero_grad()
        loss = kl_to_posterior(guide, mean, precision)
        loss.backward()
        return loss

    optimiser.step(closure)
    return kl_to_posterior(guide, mean, precision).item()


def optimum(kind, noise, *, rank=None, **model_options):
    """Return a guide at the optimum of its exact ELBO, the KL there, and the posterior."""
    x, y = linear_data(len(noise))
    model = Linear(noise, **model_options)
    guide = kind(model) if callable(kind) else make_guide(kind, model, rank=rank, init_scale=0.1)
    guide(x, y)
    mean, precision = posterior(model, x, y)
    return guide, minimise(guide, mean, precision), mean, precision


EXACT = {
    "kronecker": "kronecker",
    "kronecker, low-rank factors of full rank": lambda model: AutoKronecker(
        model, factors=("lowrank", 2), init_scale=0.1
    ),
    "full": {"*": "full"},
    "low rank at full rank": "lowrank",
}


@pytest.mark.parametrize("name", EXACT)
def test_exact_families_hit_mean_and_covariance(name):
    # Two outputs of equal noise, priors that differ by input only, bias a homogeneous coordinate.
    rank = 6 if name == "low rank at full rank" else None
    guide, kl, mean, precision = optimum(EXACT[name], (0.5, 0.5), rank=rank)
    got_mean, got_covariance, names = dense_moments(approximation(guide))
    assert names == ["fc.weight", "fc.bias"]
    covariance = torch.linalg.inv(precision)
    # KL is quadratic around its minimum: 1e-8 there means relative errors of about 1e-4.
    assert 0 <= kl + 1e-12 < 1e-8
    scale = covariance.diagonal().sqrt()
    assert ((got_mean - mean).abs() / scale).max() < 1e-3
    assert ((got_covariance - covariance).abs() / torch.outer(scale, scale)).max() < 1e-3


def test_one_output_is_exact_for_kronecker_and_not_with_a_separate_bias():
    _, kl, _, _ = optimum("kronecker", (0.5,))
    assert kl < 1e-8

    def separate(model):
        return AutoKronecker(model, bias="separate", init_scale=0.1)

    guide, kl, _, precision = optimum(separate, (0.5,))
    # What is lost is the mutual information between weights and bias, at its reverse-KL optimum:
    # each block has the covariance of the posterior given the other.
    lost = torch.linalg.slogdet(precision[:2, :2]).logabsdet + precision[2, 2].log()
    lost = 0.5 * (lost - torch.linalg.slogdet(precision).logabsdet)
    assert kl == pytest.approx(lost.item(), abs=1e-7)
    _, covariance, _ = dense_moments(approximation(guide))
    torch.testing.assert_close(
        covariance[:2, :2], torch.linalg.inv(precision[:2, :2]), rtol=1e-3, atol=1e-6
    )


def test_mean_field_has_the_scales_of_the_precision():
    guide, _, mean, precision = optimum("normal", (0.5, 1.5))
    got, covariance, _ = dense_moments(approximation(guide))
    torch.testing.assert_close(got, mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        covariance.diagonal().sqrt(), precision.diagonal().rsqrt(), rtol=1e-4, atol=0
    )


def test_elbo_orders_diagonal_low_rank_and_full():
    noise = (0.5, 1.5)
    gaps = [optimum("normal", noise)[1]]
    gaps += [optimum("lowrank", noise, rank=rank)[1] for rank in (1, 2, 6)]
    gaps.append(optimum({"*": "full"}, noise)[1])
    assert all(wider <= narrower + 1e-8 for narrower, wider in pairwise(gaps))
    assert gaps[0] > 0.4
    assert 0.2 < gaps[1] < 0.3
    # Low rank at full rank, and layer by layer where there is one layer, are the full family.
    assert max(gaps[-2:]) < 1e-8
    assert optimum("layer_lowrank", noise, rank=6)[1] < 1e-8


def test_outputs_of_unequal_noise_are_exact_for_the_diagonal_and_not_for_kronecker():
    # Orthogonal inputs with squared norms 30 and 0.08, noise 0.1 and 1, N(0, 1) priors, no bias:
    # the posterior precision is diagonal, norm²/noise² + 1, and no product of a factor for the
    # output and one for the input.
    norms, noise = np.array([30.0, 0.08]), np.array([0.1, 1.0])
    x = torch.linalg.qr(torch.randn(20, 2, dtype=torch.float64)).Q * torch.tensor(norms).sqrt()
    y = torch.randn(20, 2, dtype=torch.float64)
    precision = norms / noise[:, None] ** 2 + 1
    # The best product u_k v_j, by coordinate descent on KL = ½ Σ (λ u v − 1 − log λ u v).
    u, v = np.ones(2), np.ones(2)
    for _ in range(10_000):
        u = 2 / (precision @ v)
        v = 2 / (u @ precision)
    ratio = precision * np.outer(u, v)
    expected = 0.5 * (ratio - 1 - np.log(ratio)).sum()
    assert expected == pytest.approx(0.35, abs=0.005)

    model = Linear(noise, weight_scales=(1.0, 1.0), bias_scale=None)
    mean, exact = posterior(model, x, y)
    torch.testing.assert_close(exact.diagonal(), torch.tensor(precision).flatten())
    gaps = {}
    for name in ("diagonal", "kronecker"):
        if name == "diagonal":
            guide = AutoPatterns(model, {"*": "normal"}, init_scale=0.1)
        else:
            guide = AutoKronecker(model, init_scale=0.1)
        guide(x, y)
        gaps[name] = minimise(guide, mean, exact)
    assert gaps["diagonal"] == pytest.approx(0, abs=1e-8)
    assert gaps["kronecker"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", ["normal", "lowrank", "kronecker"])
def test_pyro_svi_reaches_the_optimum(kind):
    x, y = linear_data(2)
    model = Linear((0.5, 0.5))
    mean, precision = posterior(model, x, y)
    guide = make_guide(kind, model, rank=6 if kind == "lowrank" else None, init_scale=0.1)
    optimiser = pyro.optim.ClippedAdam({"lr": 0.05, "lrd": 0.01 ** (1 / 500)})
    elbo = Trace_ELBO(num_particles=32, vectorize_particles=True, max_plate_nesting=1)
    svi = SVI(model, guide, optimiser, elbo)
    for _ in range(500):
        svi.step(x, y)
    got, covariance, _ = dense_moments(approximation(guide))
    exact = torch.linalg.inv(precision)
    if kind == "normal":
        exact = precision.diagonal().reciprocal().diag()
    # The last 100 of the 500 steps average 3,200 draws at learning rates of 1e-3 or less: entries
    # are within about 1/sqrt(2·3,200) = 0.012 of the optimum, the largest of 36 within four times.
    scale = exact.diagonal().sqrt()
    assert ((got - mean).abs() / scale).max() < 0.05
    assert ((covariance - exact).abs() / torch.outer(scale, scale)).max() < 0.05


def test_density_at_given_values_equals_the_exact_posterior():
    guide, _, mean, precision = optimum("kronecker", (0.5, 0.5))
    exact = torch.distributions.MultivariateNormal(mean, precision_matrix=precision)
    values = exact.sample((50,))
    log_q = log_prob_guide(
        guide, {"fc.weight": values[:, :4].reshape(50, 2, 2), "fc.bias": values[:, 4:]}
    )
    torch.testing.assert_close(log_q.detach(), exact.log_prob(values), rtol=0, atol=2e-3)
