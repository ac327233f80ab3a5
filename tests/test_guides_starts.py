"""Where guides begin: hidden units that differ, priors of every kind."""

import pyro.distributions as dist
import pytest
import torch
from guide_cases import (
    Network,
    clean,  # noqa: F401
    data,
)
from pyro.infer.autoguide import AutoNormal
from torch.distributions import constraints

from pbnn.infer.guides import init_to_fan_in, make_guide


def test_start_makes_hidden_units_differ_where_pyro_makes_them_equal():
    x, y = data()
    ours, pyros = make_guide("normal", Network()), AutoNormal(Network())
    ours(x, y), pyros(x, y)
    assert (pyros.median()["hidden.weight"] == 0).all()
    weight = ours.median()["hidden.weight"]
    assert torch.pdist(weight).min() > 0.1


def site(prior):
    return {"name": "w", "fn": prior}


def test_start_is_a_prior_draw_unless_the_prior_is_too_wide():
    narrow = dist.Normal(1.0, 0.05).expand([40, 200]).to_event(2)
    torch.manual_seed(3)
    expected = narrow.sample()
    torch.manual_seed(3)
    assert torch.equal(init_to_fan_in(site(narrow)), expected)
    wide = dist.Normal(1.0, 10.0).expand([40, 200]).to_event(2)
    start = init_to_fan_in(site(wide))
    # 8,000 draws of scale sqrt(2/200) = 0.1: the standard error of their scale is below 1%.
    assert (start - 1).std() == pytest.approx(0.1, rel=0.04)
    # Convolution: fan in is 4 × 5 × 5.
    start = init_to_fan_in(site(dist.Normal(0.0, 10.0).expand([90, 4, 5, 5]).to_event(4)))
    assert start.std() == pytest.approx(0.02**0.5, rel=0.04)
    assert init_to_fan_in(site(dist.Normal(0.0, 1e6))).abs() < 10


def test_start_of_priors_without_moments_or_samples():
    cauchy = init_to_fan_in(site(dist.Cauchy(0.0, 1.0).expand([50, 200]).to_event(2)))
    # Of 10,000 medians of 15 draws a few are beyond their quartiles' distance, and kept.
    assert cauchy.std() == pytest.approx(0.1, rel=0.2)
    shifted = dist.TransformedDistribution(
        dist.Normal(0.0, 1.0).expand([9]), dist.transforms.AffineTransform(100.0, 0.01)
    )  # torch knows no moments of it
    assert (init_to_fan_in(site(shifted.to_event(1))) - 100).abs().max() < 0.1
    flat = init_to_fan_in(site(dist.ImproperUniform(constraints.real, (), (50, 200))))
    assert flat.shape == (50, 200)
    assert 0 < flat.std() < 0.1
    positive = init_to_fan_in(site(dist.ImproperUniform(constraints.positive, (), (4,))))
    assert positive.shape == (4,)
    assert (positive > 0.5).all()
    assert (positive < 2).all()


def test_start_of_scales_is_the_prior_median():
    half = dist.HalfNormal(2.0).expand([3]).to_event(1)
    median = 2 * dist.Normal(0.0, 1.0).icdf(torch.tensor(0.75))
    torch.testing.assert_close(init_to_fan_in(site(half)), median.expand(3))
    gamma = init_to_fan_in(site(dist.Gamma(2.0, 1.0)))  # no quantile function: a median of draws
    assert 0.5 < gamma < 4
    simplex = init_to_fan_in(site(dist.Dirichlet(torch.ones(4))))
    assert simplex.sum() == pytest.approx(1)
    assert init_to_fan_in() is init_to_fan_in
