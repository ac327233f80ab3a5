"""MC dropout: moments in closed form, what varies and what does not, files, refusals."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from model_cases import Linear, Toy, set_priors
from pyro.nn import PyroModule
from torch import nn
from torch.nn import functional

import pbnn
from pbnn.errors import FitError, ModelError
from pbnn.prediction import mapping

OPTIONS = {"compile": False, "progress": False}


class Dropped(Linear):
    """A linear model with known noise, whose inputs are dropped: in eval mode not, by its code."""

    p = 0.4

    def forward(self, x, y=None):
        f = functional.dropout(x, self.p, self.training) @ self.w
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, self.noise), obs=y)
        return f


class ByModule(Toy):
    def __init__(self, p=0.3):
        super().__init__(hidden=8)
        self.drop = nn.Dropout(p)

    def network(self, x):
        return self.fc2(self.drop(torch.tanh(self.fc1(x)))).squeeze(-1)


class ByFunction(Toy):
    """Its dropout is on whatever its mode."""

    def network(self, x):
        return self.fc2(functional.dropout(torch.tanh(self.fc1(x)), 0.3)).squeeze(-1)


class Normed(Toy):
    def __init__(self):
        super().__init__(hidden=8)
        self.norm = PyroModule[nn.BatchNorm1d](8)
        set_priors(self.norm)
        self.drop = nn.Dropout(0.3)

    def network(self, x):
        return self.fc2(self.drop(torch.tanh(self.norm(self.fc1(x))))).squeeze(-1)


MODELS = [ByModule, ByFunction, Normed]


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 2, generator=generator)
    return x, x[:, 0] - x[:, 1]


@pytest.fixture(scope="module", params=MODELS, ids=lambda m: m.__name__)
def fitted(request, data):
    torch.manual_seed(0)
    model = request.param()
    return model, pbnn.fit_dropout(model, *data, steps=30, draws=40, seed=2, **OPTIONS)


def test_every_dropout_varies_between_draws_and_rows(fitted, data):
    model, posterior = fitted
    same_row = data[0][:1].expand(12, 2)
    f = pbnn.predictive(model, posterior, same_row)["f"][0]
    assert bool((f.std(0) > 0).all())
    assert bool((f.std(1) > 0).any())
    # Rows have masks of their own: f at two equal rows is uncorrelated over draws.
    first = torch.corrcoef(f.T)[0, 1:]
    assert abs(float(first.mean())) < 4 / math.sqrt(40)


def test_same_posterior_gives_the_same_masks_whatever_else_is_random(fitted, data, monkeypatch):
    model, posterior = fitted
    x, y = data
    whole = pbnn.predictive(model, posterior, x)["f"]
    assert torch.equal(whole, pbnn.predictive(model, posterior, x)["f"])
    torch.testing.assert_close(whole, pbnn.predictive(model, posterior, x, seed=9)["f"])
    parts = posterior.select(draws=slice(10, 15))
    torch.testing.assert_close(pbnn.predictive(model, parts, x)["f"], whole[:, 10:15])
    loader = [x[:7], x[7:]]
    torch.testing.assert_close(pbnn.predictive(model, posterior, loader)["f"], whole)
    monkeypatch.setattr(mapping, "BLOCK_VALUES", 2000)
    torch.testing.assert_close(pbnn.predictive(model, posterior, x)["f"], whole)
    # The statistic is the log joint under the same masks, up to the prior, which draws share.
    rest = posterior.stats["lp"] - pbnn.log_likelihood(model, posterior, x, y).sum(-1)
    torch.testing.assert_close(rest, rest[:, :1].expand_as(rest), rtol=0, atol=1e-3)


def test_one_row_and_no_row_can_be_predicted(fitted, data):
    model, posterior = fitted
    x, _ = data
    whole = pbnn.predictive(model, posterior, x)["f"]
    torch.testing.assert_close(pbnn.predictive(model, posterior, x[:1])["f"], whole[:, :, :1])
    assert pbnn.predictive(model, posterior, x[:0])["f"].shape == (1, 40, 0)
    assert pbnn.predict(model, posterior, x[:1]).mean.isfinite().all()


def test_batch_norm_keeps_the_statistics_of_the_training_rows(data, unchanged):
    model = Normed()
    with unchanged(model):
        posterior = pbnn.fit_dropout(model, *data, steps=30, draws=20, **OPTIONS)
        pbnn.predict(model, posterior, data[0] + 5)
    assert not posterior.per_draw
    mean = posterior.buffers["norm.running_mean"]
    inner = data[0] @ posterior.draws["fc1.weight"][0, 0].T + posterior.draws["fc1.bias"][0, 0]
    torch.testing.assert_close(mean, inner.mean(0), rtol=1e-4, atol=1e-5)


def test_moments_of_f_are_those_of_the_masks():
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    weights = torch.tensor([1.0, -2.0, 0.5])
    draws = 4000
    posterior = pbnn.fit_dropout(
        Dropped(3), x, x @ weights, start={"w": weights}, draws=draws, **OPTIONS
    )
    f = pbnn.predictive(Dropped(3), posterior, x)["f"][0].double()
    variance = Dropped.p / (1 - Dropped.p) * (x * weights).square().sum(1).double()
    error = (variance / draws).sqrt()
    assert bool(((f.mean(0) - x @ weights).abs() < 4 * error).all())
    square = (f - (x @ weights)).square()
    assert bool(((square.mean(0) - variance).abs() < 4 * square.std(0) / draws**0.5).all())


def test_training_ends_where_the_marginalised_loss_has_its_minimum():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(200, 3, generator=generator) + 0.5
    y = x @ torch.tensor([1.0, -2.0, 0.5]) + 0.5 * torch.randn(200, generator=generator)
    posterior = pbnn.fit_dropout(Dropped(3), x, y, steps=800, draws=2, seed=1, **OPTIONS)
    # Srivastava et al. 2014, section 9.1, with a Gaussian prior.
    gram = x.T @ x
    ridge = Dropped.p / (1 - Dropped.p) * gram.diag().diag() + 0.25 * torch.eye(3)
    expected = torch.linalg.solve(gram + ridge, x.T @ y)
    # The gradient of one step has a relative noise of about 1 / sqrt(rows); the last hundred steps,
    # which the falling rate averages over, bring it below a hundredth of the weights.
    scale = float(expected.norm())
    assert float((posterior.draws["w"][0, 0] - expected).norm()) < 0.03 * scale


def test_same_seed_gives_the_same_bits_and_another_seed_does_not(data):
    first, again, other = (
        pbnn.fit_dropout(ByModule(), *data, steps=5, draws=3, seed=s, batch_size=10, **OPTIONS)
        for s in (1, 1, 2)
    )
    for name, value in first.draws.items():
        assert torch.equal(value, again.draws[name])
    assert torch.equal(first.stats["lp"], again.stats["lp"])
    assert not torch.equal(first.stats["lp"], other.stats["lp"])
    assert not torch.equal(first.draws["fc1.weight"], other.draws["fc1.weight"])


def test_what_has_no_dropout_that_acts_is_refused(data):
    with pytest.raises(FitError, match=r"no dropout; write `self\.drop = nn\.Dropout"):
        pbnn.fit_dropout(Toy(), *data, **OPTIONS)
    with pytest.raises(FitError, match="change nothing"):
        pbnn.fit_dropout(ByModule(p=0.0), *data, steps=2, draws=3, **OPTIONS)
    model = ByModule()
    model.attention = nn.MultiheadAttention(4, 2, dropout=0.1)
    with pytest.raises(ModelError, match=r"`self\.attention\.dropout = 0\.0`"):
        pbnn.fit_dropout(model, *data, **OPTIONS)


def test_loss_that_is_not_finite_stops_the_fit_and_names_the_step(data):
    with pytest.raises(FitError, match=r"at step \d+"):
        pbnn.fit_dropout(ByModule(), *data, lr=1e30, steps=20, **OPTIONS)


def test_a_plain_function_has_dropout_too(data):
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, x.new_ones(2)).to_event(1))
        f = functional.dropout(x, 0.2) @ w
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, 0.5), obs=y)
        return f

    posterior = pbnn.fit_dropout(model, *data, steps=5, draws=10, **OPTIONS)
    assert bool((pbnn.predictive(model, posterior, data[0])["f"].std(1) > 0).any())
