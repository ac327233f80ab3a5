"""The probability that an automatic answer is wrong: against its exact value, for any posterior."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from model_cases import Linear, linear_data, prior_posterior
from pyro.nn import PyroModule, PyroSample
from scipy import stats

from pbnn.data import Units
from pbnn.errors import DataError, ModelError
from pbnn.evaluate.answers import answer
from pbnn.infer.posterior import Posterior

DRAWS = 4000


def given(**draws):
    """Return one chain of given draws, each `(draws, …)`."""
    count = len(next(iter(draws.values())))
    return Posterior(
        draws={name: value[None] for name, value in draws.items()},
        stats={"lp": torch.zeros(1, count)},
        method="given",
        markov=False,
        seconds=0.0,
    )


@pytest.fixture(scope="module")
def line():
    """A linear model with exact draws of its posterior, and the moments of y at new rows."""
    model = Linear(2, noise=0.5)
    x, y = linear_data(30, 2, noise=0.5)
    mean, covariance = model.exact(x, y)
    exact = torch.distributions.MultivariateNormal(mean, covariance)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        posterior = given(w=exact.sample((DRAWS,)).float())
    new = torch.tensor([[0.0, 0.0], [1.0, -1.0], [5.0, 4.0], [20.0, -30.0]])
    wide = (new.double() @ covariance * new.double()).sum(1).add(0.25).sqrt()
    return model, posterior, new, new.double() @ mean, wide.numpy()


@pytest.mark.parametrize("calibration", [1.0, 2.0])
def test_error_probability_of_a_linear_model_is_exact(line, calibration):
    model, posterior, x, mean, scale = line
    found = answer(model, posterior, x, tolerance=0.8, calibration=calibration)
    exact = 2 * stats.norm.sf(0.8 / calibration / scale)
    # Each draw's probability lies in [0, 1]: at most 0.5 / sqrt(draws) for its mean, four of them.
    np.testing.assert_allclose(found.error_probability, exact, atol=4 * 0.5 / math.sqrt(DRAWS))
    # Without epistemic spread (x = 0) nothing is random but the rounding of float32.
    np.testing.assert_allclose(found.error_probability[0], exact[0], atol=1e-6)
    np.testing.assert_allclose(found.answer, mean, atol=4 * scale.max() / math.sqrt(DRAWS))


def test_units_change_the_tolerance_and_nothing_else(line):
    model, posterior, x, *_ = line
    units = Units(np.array(100.0), np.array(10.0))
    plain = answer(model, posterior, x, tolerance=0.8)
    scaled = answer(model, posterior, x, tolerance=8.0, units=units)
    np.testing.assert_allclose(scaled.error_probability, plain.error_probability, atol=1e-5)
    np.testing.assert_allclose(scaled.answer, 100 + 10 * plain.answer, rtol=1e-5)
    assert scaled.wrong(scaled.answer + np.array([7.9, 8.1, -7.9, -8.1])).tolist() == [
        False, True, False, True,
    ]  # fmt: skip


class Heavy(Linear):
    """A linear model whose noise has no cdf in torch."""

    def forward(self, x, y=None):
        f = x @ self.w
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.StudentT(5.0, f, self.noise), obs=y)
        return f


class Counts(Linear):
    def forward(self, x, y=None):
        f = x @ self.w
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Poisson(f.exp()), obs=y)
        return f


def test_a_distribution_without_cdf_is_sampled(line):
    _, _, x, *_ = line
    posterior = given(w=torch.zeros(DRAWS, 2))
    found = answer(Heavy(2), posterior, x, tolerance=1.0)
    exact = 2 * stats.t.sf(2.0, 5)
    np.testing.assert_allclose(found.error_probability, exact, atol=4 * 0.5 / math.sqrt(DRAWS))
    counts = answer(Counts(2), posterior, x, tolerance=0.5)
    exact = 1 - stats.poisson.pmf(1, 1.0)
    np.testing.assert_allclose(counts.error_probability, exact, atol=4 * 0.5 / math.sqrt(DRAWS))


class Outputs(PyroModule):
    def __init__(self):
        super().__init__()
        self.b = PyroSample(dist.Normal(0.0, 1.0).expand([2]).to_event(1))

    def forward(self, x, y=None):
        f = self.b.expand(x.shape[0], 2)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, x.new_tensor([1.0, 2.0])).to_event(1), obs=y)
        return f


def test_a_row_of_several_outputs_is_wrong_where_one_is():
    found = answer(Outputs(), given(b=torch.zeros(3, 2)), torch.zeros(5, 1), tolerance=1.5)
    right = (1 - 2 * stats.norm.sf(1.5)) * (1 - 2 * stats.norm.sf(0.75))
    np.testing.assert_allclose(found.error_probability, 1 - right, atol=1e-6)
    y = np.array([[0, 0], [1.6, 0], [0, -1.6], [1.4, 1.4], [9, 9]])
    assert found.wrong(y).tolist() == [False, True, True, False, True]


class Classes(PyroModule):
    """Three classes with logits w, whatever x is."""

    def __init__(self):
        super().__init__()
        self.w = PyroSample(dist.Normal(0.0, 1.0).expand([3]).to_event(1))

    def forward(self, x, y=None):
        f = self.w.expand(x.shape[0], 3)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Categorical(logits=f), obs=y)
        return f


def test_classes_average_probabilities_and_temper_the_mixture():
    p = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]])
    found = answer(Classes(), given(w=p.log()), torch.zeros(2, 1))
    np.testing.assert_allclose(found.probabilities, [[0.4, 0.5, 0.1]] * 2, atol=1e-6)
    assert found.answer.tolist() == [1, 1]
    np.testing.assert_allclose(found.error_probability, 0.5, atol=1e-6)
    assert found.wrong([1, 2]).tolist() == [False, True]
    hot = answer(Classes(), given(w=p.log()), torch.zeros(2, 1), calibration=2.0)
    roots = np.sqrt([0.4, 0.5, 0.1])
    np.testing.assert_allclose(hot.probabilities[0], roots / roots.sum(), atol=1e-6)


def test_a_small_error_probability_survives_rounding():
    logits = torch.tensor([[[30.0, 0.0, 0.0]]])[0]
    found = answer(Classes(), given(w=logits), torch.zeros(1, 1))
    np.testing.assert_allclose(found.error_probability, 2 * math.exp(-30), rtol=1e-4)


def test_no_rows_have_no_answers(line):
    model, posterior, x, *_ = line
    assert answer(model, posterior, x[:0], tolerance=1.0).error_probability.shape == (0,)
    assert answer(Heavy(2), posterior, x[:0], tolerance=1.0).error_probability.shape == (0,)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda m, p, x: answer(m, p, x), "tolerance None"),
        (lambda m, p, x: answer(m, p, x, tolerance=-1.0), "tolerance -1.0"),
        (lambda m, p, x: answer(m, p, x, tolerance=1.0, calibration=0.0), "calibration 0.0"),
        (lambda m, p, x: answer(m, p, x, tolerance=1.0).wrong([1.0]), r"\(1,\)"),
        (lambda m, p, x: answer(m, p, x, tolerance=1.0).wrong([0, math.nan, 0, 0]), "row 1"),
        (
            lambda m, p, x: answer(Classes(), given(w=torch.zeros(2, 3)), x, tolerance=1.0),
            "leave it out",
        ),
    ],
)
def test_mistakes_are_named(call, named, line):
    model, posterior, x, *_ = line
    with pytest.raises(DataError, match=named):
        call(model, posterior, x)


def test_any_road_serves(toy):
    from model_cases import Toy

    x, y = toy
    posterior = prior_posterior(Toy(), x, y, draws=5, chains=2, markov=True)
    assert answer(Toy(), posterior, x, tolerance=1.0).error_probability.shape == (30,)


class Coin(Linear):
    """One of two classes by one logit."""

    def forward(self, x, y=None):
        f = x @ self.w
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Bernoulli(logits=f), obs=y)
        return f


class Coins(Outputs):
    """Two Bernoulli outputs a row."""

    def forward(self, x, y=None):
        f = self.b.expand(x.shape[0], 2)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Bernoulli(logits=f).to_event(1), obs=y)
        return f


def test_a_bernoulli_y_is_one_of_two_classes():
    x = torch.tensor([[0.0], [1.0], [-2.0]])
    posterior = given(w=torch.tensor([[1.0], [1.0]]))
    found = answer(Coin(1), posterior, x)
    chance = 1 / (1 + np.exp(-x[:, 0].numpy()))
    np.testing.assert_allclose(found.probabilities[:, 1], chance, rtol=1e-6)
    np.testing.assert_allclose(found.error_probability, np.minimum(chance, 1 - chance), rtol=1e-6)
    assert found.answer[1:].tolist() == [1, 0]
    assert found.wrong([0.0, 1.0, 1.0])[1:].tolist() == [False, True]
    # A temperature of 2 halves the logit of the mixture, here of one draw.
    hot = answer(Coin(1), posterior, x, calibration=2.0)
    np.testing.assert_allclose(
        hot.probabilities[:, 1], 1 / (1 + np.exp(-x[:, 0].numpy() / 2)), rtol=1e-6
    )
    with pytest.raises(DataError, match="leave it out"):
        answer(Coin(1), posterior, x, tolerance=0.5)
    with pytest.raises(ModelError, match="one model for each output"):
        answer(Coins(), given(b=torch.zeros(2, 2)), x, tolerance=0.5)


def test_counts_have_no_factor(line):
    _, _, x, *_ = line
    posterior = given(w=torch.zeros(10, 2))
    assert answer(Counts(2), posterior, x, tolerance=0.5).discrete
    with pytest.raises(DataError, match="whole numbers"):
        answer(Counts(2), posterior, x, tolerance=0.5, calibration=2.0)
