"""Numbers of criterion C for other kinds of y: two classes, counts, missing values."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from model_cases import Linear, linear_data
from pyro import poutine
from pyro.nn import PyroModule, PyroSample
from sklearn.metrics import log_loss
from test_ood import posterior
from test_scores import TwoOutputs

from pbnn.errors import DataError
from pbnn.evaluate.bootstrap import bootstrap, bootstrap_all
from pbnn.evaluate.mass import mass_of, miscalibrated


class Rate(PyroModule):
    """Counts or two classes: a distribution of one linear predictor."""

    def __init__(self, family):
        super().__init__()
        self.family = family
        self.w = PyroSample(dist.Normal(0.0, 1.0).expand([2]).to_event(1))

    def forward(self, x, y=None):
        f = x @ self.w
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", self.family(f), obs=y)
        return f


class Masked(TwoOutputs):
    """Two outputs, of which some are missing: rows of outputs, each value its own event."""

    def forward(self, x, y=None):
        f = x @ self.w
        seen = True if y is None else ~y.isnan()
        rows, outputs = pyro.plate("data", x.shape[0], dim=-2), pyro.plate("outputs", 2, dim=-1)
        with rows, outputs, poutine.mask(mask=seen):
            pyro.sample("y", dist.Normal(f, torch.tensor([0.1, 1.0])), obs=y)
        return f


def test_two_classes_of_one_logit_are_classes():
    torch.manual_seed(0)
    x, fit = torch.randn(300, 2), posterior(torch.tensor([2.0, -1.0]) + 0.5 * torch.randn(200, 2))
    p = torch.sigmoid(x @ fit.draws["w"][0].T).mean(1)
    y = torch.bernoulli(p)
    mass = mass_of(Rate(lambda f: dist.Bernoulli(logits=f)), fit, x, y)
    found = {name: bootstrap(s, 300, replicates=50) for name, s in mass.statistics.items()}
    assert found["nll"].value == pytest.approx(log_loss(y, p), rel=1e-4)
    assert found["accuracy"].value == pytest.approx(float(((p > 0.5) == y).double().mean()))
    assert miscalibrated(found, mass.floor, away=False, discrete=mass.discrete) is None
    unlabelled = mass_of(Rate(lambda f: dist.Bernoulli(logits=f)), fit, x)
    assert list(unlabelled.statistics) == ["confidence"]


def test_numbers_of_a_tiny_unit_are_numbers():
    """Where mean and variance lie within a rounding error of those of a rare class."""
    x, fit = torch.randn(50, 2), posterior(1e-8 * torch.randn(40, 2))
    mass = mass_of(Rate(lambda f: dist.Normal(f, 1e-7)), fit, x, 1e-7 * torch.randn(50))
    assert "coverage_90" in mass.statistics
    # And a class that is rarer than that is one.
    rare = posterior(torch.zeros(40, 2))
    mass = mass_of(Rate(lambda f: dist.Bernoulli(logits=f - 25.0)), rare, x, torch.zeros(50))
    assert mass.statistics.keys() >= {"accuracy", "ece"}


def test_intervals_of_counts_may_cover_more():
    torch.manual_seed(0)
    x, fit = torch.randn(300, 2), posterior(0.1 * torch.randn(400, 2))
    rate = torch.exp((x * 0.1 * torch.randn(300, 2)).sum(1))
    model = Rate(lambda f: dist.Poisson(f.exp()))
    mass = mass_of(model, fit, x, torch.poisson(rate))
    found = bootstrap_all(mass.statistics, 300, replicates=50)
    assert found["coverage_90"].low > 0.95  # 0, 1 and 2 are most of a count of mean 1
    assert miscalibrated(found, mass.floor, away=False, discrete=mass.discrete) is None
    few = mass_of(model, fit, x, torch.poisson(rate * 8))
    found = bootstrap_all(few.statistics, 300, replicates=50)
    assert "90% intervals cover" in miscalibrated(found, few.floor, away=True, discrete=True)


def test_missing_values_are_left_out():
    torch.manual_seed(0)
    x, fit = torch.randn(100, 2), posterior(torch.randn(300, 2, 2))
    y = x @ torch.randn(2, 2) + torch.randn(100, 2)
    y[:30, 0] = torch.nan
    y[10:20] = torch.nan
    mass = mass_of(Masked(), fit, x, y)
    assert mass.rows.tolist() == [*range(10), *range(20, 100)]
    assert len(mass.error) == 90
    assert np.isfinite(mass.replicated).all()
    error = (y - mass.prediction.mean)[mass.rows].abs()
    np.testing.assert_allclose(mass.error[:10], error[:10, 1], rtol=1e-5)
    low, high = mass.prediction.quantiles.values()
    inside = ((y > low) & (y < high)).double()
    inside[y.isnan()] = torch.nan
    coverage = bootstrap(mass.statistics["coverage_90"], 90).value
    assert coverage == pytest.approx(float(inside.nanmean(1)[mass.rows].mean()))
    with pytest.raises(DataError, match="NaN in every row"):
        mass_of(Masked(), fit, x, y * torch.nan)


def test_many_draws_are_thinned_for_samples_alone():
    x, y = linear_data(20, 2)
    fit = posterior(torch.randn(1_000, 2))
    mass = mass_of(Linear(2), fit, x, y)
    assert len(mass.replicated) == 200
    scale = (x @ fit.draws["w"][0].T).std(1, correction=0)
    np.testing.assert_allclose(mass.prediction.epistemic_scale, scale, rtol=1e-4)
