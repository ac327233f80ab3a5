"""Prediction against loops and formulas: moments, samples, likelihoods, memory, refusals."""

import itertools
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from model_cases import Linear, Toy, prior_posterior
from pyro import poutine
from pyro.nn import PyroModule, PyroSample
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pbnn import log_likelihood, predict, predictive
from pbnn.data import Units
from pbnn.errors import DataError, ModelError
from pbnn.infer.posterior import Posterior
from pbnn.model import run
from pbnn.prediction import function_draws, mapping, runner
from pbnn.prediction.runner import Runner


def given(chains=1, **values):
    """Return a posterior with these draws, each `(draws, …)`."""
    shaped = {name: v.reshape(chains, -1, *v.shape[1:]) for name, v in values.items()}
    count = next(iter(shaped.values())).shape[1]
    return Posterior(
        draws=shaped,
        stats={"lp": torch.zeros(chains, count)},
        method="given",
        markov=False,
        seconds=0.0,
        provenance={"observed": ["y"]},
    )


def observing(build, outputs=1):
    """Return a model that observes what `build` makes of f(x) = x @ w."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2, outputs]).to_event(2))
        f = (x @ w).squeeze(-1)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", build(f), obs=y)
        return f

    return model


def by_hand(posterior, x):
    """Return f(x) and the noise scale of each draw of the toy, by a loop."""
    d = posterior.flat()
    f = []
    for k in range(len(d["sigma"])):
        hidden = torch.tanh(x @ d["fc1.weight"][k].T + d["fc1.bias"][k])
        f.append(hidden @ d["fc2.weight"][k][0] + d["fc2.bias"][k])
    return torch.stack(f), d["sigma"]


# Against loops (fault 19), whatever road made the draws.


@pytest.fixture(params=[1, 4], ids=["one chain", "four chains"])
def drawn(request, toy):
    chains = request.param
    return prior_posterior(Toy(), *toy, draws=40 // chains, chains=chains, markov=chains > 1)


def test_equals_a_loop_over_draws(drawn, toy):
    x, y = toy
    f, sigma = by_hand(drawn, x)
    prediction = predict(Toy(), drawn, x)
    tight = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(prediction.mean.float(), f.mean(0), **tight)
    torch.testing.assert_close(prediction.epistemic_scale.float(), f.std(0, correction=0), **tight)
    noise = sigma.square().mean().sqrt().expand(30)
    torch.testing.assert_close(prediction.aleatoric_scale.float(), noise, **tight)
    shape = (drawn.chains, drawn.draws_per_chain, 30)
    found = log_likelihood(Toy(), drawn, x, y)
    expected = dist.Normal(f, sigma[:, None]).log_prob(y).reshape(shape)
    torch.testing.assert_close(found, expected, **tight)
    sampled = predictive(Toy(), drawn, x)
    torch.testing.assert_close(sampled["f"], f.reshape(shape), **tight)
    assert sampled["y"].shape == shape
    torch.testing.assert_close(function_draws(Toy(), drawn, x), f.reshape(*shape, 1), **tight)


@pytest.mark.parametrize("n", [7, 1, 0])  # fault 5
def test_any_number_of_rows(drawn, n):
    x, y = torch.randn(n, 2), torch.randn(n)
    prediction = predict(Toy(), drawn, x)
    assert prediction.mean.shape == prediction.scale.shape == (n,)
    assert all(q.shape == (n,) for q in prediction.quantiles.values())
    shape = (drawn.chains, drawn.draws_per_chain, n)
    assert log_likelihood(Toy(), drawn, x, y).shape == shape
    assert {v.shape for v in predictive(Toy(), drawn, x).values()} == {shape}
    assert function_draws(Toy(), drawn, x).shape == (*shape, 1)
    assert len(prediction.to_frame()) == n


def test_no_rows_of_positive_y_and_of_classes():
    """A row of zeros stands in for none: its y may lie outside the support."""
    w = given(w=torch.randn(3, 2, 1))
    positive = observing(lambda f: dist.LogNormal(f, 1.0))
    assert log_likelihood(positive, w, torch.ones(0, 2), torch.ones(0)).shape == (1, 3, 0)
    classes = observing(lambda f: dist.Categorical(logits=f), 3)
    posterior = given(w=torch.randn(3, 2, 3))
    assert predict(classes, posterior, np.ones((0, 2))).probabilities.shape == (0, 3)
    empty = torch.zeros(0, dtype=torch.int64)
    assert log_likelihood(classes, posterior, torch.ones(0, 2), empty).shape == (1, 3, 0)


def test_nothing_of_the_caller_changes(drawn, toy, unchanged):
    x, y = toy
    model = Toy().train()
    with unchanged(model):
        predict(model, drawn, x)
        predictive(model, drawn, x)
        log_likelihood(model, drawn, x, y)


def test_draws_are_mapped_not_looped_over(drawn, toy, monkeypatch):
    x, y = toy
    runs = []
    monkeypatch.setattr(runner, "run", lambda *a, **k: runs.append(1) or run(*a, **k))
    for call in (predict, predictive, function_draws):
        call(Toy(), drawn, x)
    log_likelihood(Toy(), drawn, x, y)
    assert len(runs) < 40  # the number of draws; a few runs look at the model first


class Branching(Toy):
    """Control flow that depends on a draw, which cannot be mapped."""

    def network(self, x):
        f = super().network(x)
        return f if self.fc2.bias > 0 else -f


def test_models_that_cannot_be_mapped_run_in_a_loop(toy):
    x, y = toy
    posterior = prior_posterior(Branching(), x, y)
    f, sigma = by_hand(posterior, x)
    f = torch.where(posterior.flat()["fc2.bias"] > 0, f, -f)
    found = predictive(Branching(), posterior, x)
    torch.testing.assert_close(found["f"][0], f, rtol=1e-5, atol=1e-5)
    expected = dist.Normal(f, sigma[:, None]).log_prob(y)
    torch.testing.assert_close(log_likelihood(Branching(), posterior, x, y)[0], expected)
    assert len(found["y"].unique()) == found["y"].numel()


def test_x_and_y_as_dicts(toy):
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        f = x["a"] * w + x["b"].sum(-1)
        with pyro.plate("data", f.shape[0]):
            pyro.sample("first", dist.Normal(f, 1.0), obs=None if y is None else y["first"])
            pyro.sample("second", dist.Normal(-f, 2.0), obs=None if y is None else y["second"])
        return f

    x, y = toy
    inputs, outputs = {"a": x[:, 0], "b": x.double().numpy()}, {"first": y, "second": 2 * y}
    posterior = prior_posterior(model, inputs, outputs)
    f = x[:, 0] * posterior.flat()["w"][:, None] + x.sum(-1)
    expected = dist.Normal(f, 1.0).log_prob(y) + dist.Normal(-f, 2.0).log_prob(2 * y)
    torch.testing.assert_close(log_likelihood(model, posterior, inputs, outputs)[0], expected)
    assert set(predictive(model, posterior, inputs)) == {"first", "second", "f"}
    with pytest.raises(ModelError, match="predict gives moments of one site: use predictive"):
        predict(model, posterior, inputs)
    nothing = {name: value[:0] for name, value in inputs.items()}
    assert predictive(model, posterior, nothing)["second"].shape == (1, 20, 0)
    with pytest.raises(DataError, match="y has no values for site 'second'"):
        log_likelihood(
            lambda x, y=None: model(x, y and {**y, "second": None}), posterior, inputs, {"first": y}
        )


# Moments by formula (fault 22).


def test_two_outputs_of_unequal_noise():
    noise = torch.tensor([0.1, 1.0])
    model = observing(lambda f: dist.Normal(f, noise).to_event(1), 2)
    w = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[-1.0, 2.0], [0.0, 1.0]]])
    prediction = predict(model, given(w=w), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    expected = torch.tensor([[0.0, 1.0], [0.0, 1.0]]), torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    torch.testing.assert_close(prediction.mean.float(), expected[0])
    torch.testing.assert_close(prediction.epistemic_scale.float(), expected[1])
    torch.testing.assert_close(prediction.aleatoric_scale.float(), noise.expand(2, 2))
    frame = prediction.to_frame()
    assert list(frame.columns[:4]) == ["mean_0", "mean_1", "scale_0", "scale_1"]
    assert frame["scale_0"].tolist() == pytest.approx([math.hypot(1.0, 0.1), 0.1])


def test_parts_add_up_to_the_total_for_uneven_noise():
    """Against the variance of the mixture itself, E[y²] − E[y]², over draws by hand."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        f = x[:, 0] * w[0]
        scale = 0.05 + 0.2 * x[:, 0].abs() * w[1].exp()
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, scale), obs=y)
        return f

    w, x = torch.randn(200, 2).double(), torch.linspace(-3, 3, 9).double()[:, None]
    prediction = predict(model, given(w=w), x)
    loc, scale = x[:, 0] * w[:, :1], 0.05 + 0.2 * x[:, 0].abs() * w[:, 1:].exp()
    total = (loc.square() + scale.square()).mean(0) - loc.mean(0).square()
    torch.testing.assert_close(prediction.scale.square(), total, rtol=1e-6, atol=1e-9)
    parts = prediction.epistemic_scale.square() + prediction.aleatoric_scale.square()
    torch.testing.assert_close(parts, total, rtol=1e-6, atol=1e-9)


def test_large_offsets_do_not_swallow_the_epistemic_part():
    model = observing(lambda f: dist.Normal(f, 0.1))
    w = 1e4 + torch.tensor([-1.0, 0.0, 1.0])
    prediction = predict(model, given(w=w.reshape(3, 1, 1).expand(3, 2, 1)), torch.ones(1, 2))
    assert prediction.epistemic_scale.item() == pytest.approx(2 * (2 / 3) ** 0.5, rel=1e-4)


def test_classes_average_probabilities():
    model = observing(lambda f: dist.Categorical(logits=f), 2)
    sure = torch.tensor([[[4.0, 0.0], [0.0, 0.0]], [[0.0, 2.0], [0.0, 0.0]]])
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    prediction = predict(model, given(w=sure), x)
    p = torch.tensor([[4.0, 0.0], [0.0, 2.0]]).softmax(-1)
    mean = p.mean(0)
    torch.testing.assert_close(prediction.probabilities[0].float(), mean)
    entropy = float(-(mean * mean.log()).sum())
    inner = float(-(p * p.log()).sum(-1).mean())
    assert prediction.entropy.tolist() == pytest.approx([entropy, math.log(2)], rel=1e-5)
    assert prediction.mutual_information[0].item() == pytest.approx(entropy - inner, rel=1e-5)
    assert prediction.mutual_information[1].item() == pytest.approx(0.0, abs=1e-6)
    assert prediction.mean is prediction.scale is prediction.quantiles is None
    frame = prediction.to_frame(["no", "yes"])
    columns = ["prediction", "probability_no", "probability_yes", "entropy", "mutual_information"]
    assert list(frame.columns) == columns
    assert frame["prediction"][0] == "no"
    centred = function_draws(model, given(w=sure), x)
    torch.testing.assert_close(centred[0, :, 0], torch.tensor([[2.0, -2.0], [-1.0, 1.0]]))


FAMILIES = {
    "Bernoulli": lambda f: dist.Bernoulli(logits=f),
    "Poisson": lambda f: dist.Poisson(f.exp()),
    "NegativeBinomial": lambda f: dist.NegativeBinomial(5.0, logits=f),
    "ZeroInflatedPoisson": lambda f: dist.ZeroInflatedPoisson(f.exp(), gate=torch.tensor(0.3)),
    "Binomial": lambda f: dist.Binomial(10, logits=f),
    "Gamma": lambda f: dist.Gamma(2.0, f.exp()),
    "Beta": lambda f: dist.Beta(1 + f.exp(), 2.0),
    "LogNormal": lambda f: dist.LogNormal(f, 0.5),
    "StudentT": lambda f: dist.StudentT(7.0, f, 1.0),
    "Mixture": lambda f: dist.MixtureSameFamily(
        dist.Categorical(torch.tensor([0.3, 0.7])), dist.Normal(torch.stack([f, -f], -1), 0.5)
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_moments_agree_with_samples(name):
    """Mean and scale of sampled y within 5 Monte Carlo errors; no warning escapes."""
    model, n = observing(FAMILIES[name]), 20_000
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    posterior = given(w=0.3 * torch.randn(n, 2, 1))
    prediction = predict(model, posterior, x, quantiles=())
    y = predictive(model, posterior, x)["y"][0].double()
    error = prediction.scale / n**0.5
    assert bool(((y.mean(0) - prediction.mean).abs() < 5 * error).all())
    squares = (y - prediction.mean).square()
    off = (squares.mean(0) - prediction.scale.square()).abs()
    assert bool((off < 5 * squares.std(0) / n**0.5).all())
    assert len(y[:, 0].unique()) > 1


def test_quantiles_and_their_seed(toy):
    """Each within 4 standard errors, sqrt(p (1 − p) / S) / density, of the exact quantile."""
    x = torch.zeros(2, 2)
    posterior = given(w=torch.zeros(4_000, 2))
    model, noise = Linear(2, noise=2.0), dist.Normal(0.0, 2.0)
    prediction = predict(model, posterior, x, quantiles=(0.05, 0.5, 0.9), seed=1)
    for p, found in prediction.quantiles.items():
        exact = noise.icdf(torch.tensor(p))
        error = (p * (1 - p) / 4_000) ** 0.5 / noise.log_prob(exact).exp()
        assert bool(((found - exact).abs() < 4 * error).all())
    assert not torch.equal(prediction.quantiles[0.5][0], prediction.quantiles[0.5][1])
    again = predict(model, posterior, x, quantiles=(0.5,), seed=1)
    other = predict(model, posterior, x, quantiles=(0.5,), seed=2)
    assert torch.equal(again.quantiles[0.5], prediction.quantiles[0.5])
    assert not torch.equal(other.quantiles[0.5], prediction.quantiles[0.5])
    assert predict(model, posterior, x, quantiles=()).quantiles == {}
    with pytest.raises(DataError, match=r"quantile 1.5; expected a probability from 0 to 1"):
        predict(model, posterior, x, quantiles=(1.5,))


# Units.


def test_results_in_the_users_units(drawn, toy):
    x, y = toy
    units = Units(np.array(10.0), np.array(4.0))
    plain, scaled = predict(Toy(), drawn, x), predict(Toy(), drawn, x, units=units)
    torch.testing.assert_close(scaled.mean, 10 + 4 * plain.mean)
    torch.testing.assert_close(scaled.scale, 4 * plain.scale)
    torch.testing.assert_close(scaled.quantiles[0.95], 10 + 4 * plain.quantiles[0.95])
    density = log_likelihood(Toy(), drawn, x, y, units=units)
    torch.testing.assert_close(density, log_likelihood(Toy(), drawn, x, y) - math.log(4))
    f, sigma = by_hand(drawn, x)
    expected = dist.Normal(10 + 4 * f, 4 * sigma[:, None]).log_prob(10 + 4 * y)
    torch.testing.assert_close(density.flatten(0, 1), expected, rtol=1e-4, atol=1e-4)
    sampled = predictive(Toy(), drawn, x, units=units)
    torch.testing.assert_close(sampled["f"], 10 + 4 * predictive(Toy(), drawn, x)["f"])


@pytest.mark.parametrize("scale", [np.array(4.0), np.array([4.0, 0.5])])
def test_units_of_several_outputs(scale):
    model = observing(lambda f: dist.Normal(f, 1.0).to_event(1), 2)
    posterior, x, y = given(w=torch.randn(5, 2, 2)), torch.randn(3, 2), torch.randn(3, 2)
    found = log_likelihood(model, posterior, x, y, units=Units(np.zeros_like(scale), scale))
    jacobian = float(np.log(np.broadcast_to(scale, 2)).sum())
    torch.testing.assert_close(found, log_likelihood(model, posterior, x, y) - jacobian)
    prediction = predict(model, posterior, x, units=Units(np.zeros_like(scale), scale))
    torch.testing.assert_close(
        prediction.scale, predict(model, posterior, x).scale * torch.as_tensor(scale)
    )


# Missing y.


def masked(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with pyro.plate("data", x.shape[0]), poutine.mask(mask=y is None or ~y.isnan()):
        pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)
    return x @ w


def test_likelihood_of_missing_y(toy):
    x, y = toy
    posterior = given(w=torch.randn(4, 2))
    gaps = y.masked_fill(torch.arange(30) == 4, torch.nan)
    found = log_likelihood(masked, posterior, x, gaps)
    expected = log_likelihood(masked, posterior, x, y)
    expected[..., 4] = torch.nan
    torch.testing.assert_close(found, expected, equal_nan=True)
    density = predict(masked, posterior, x, gaps).log_predictive_density
    assert density.isnan().nonzero().flatten().tolist() == [4]
    loader = log_likelihood(masked, posterior, [(x[:3], gaps[:3]), (x[3:], gaps[3:])])
    torch.testing.assert_close(loader, expected, equal_nan=True)
    with pytest.raises(DataError, match="y is NaN in row 4 and the model does not mask it"):
        log_likelihood(Linear(2), posterior, x, gaps)


# Refused.


def test_y_that_would_be_scored_in_another_shape(drawn, toy):  # fault 1, in prediction
    x, y = toy
    with pytest.raises(ModelError, match=r"would score 30 values for y of shape \(30, 1\)"):
        log_likelihood(Toy(), drawn, x, y[:, None])
    with pytest.raises(DataError, match="y is None; expected the observations"):
        log_likelihood(Toy(), drawn, x, None)
    with pytest.raises(DataError, match="rows differ: x has 30, y has 5"):
        log_likelihood(Toy(), drawn, x, y[:5])
    classes = observing(lambda f: dist.Categorical(logits=f), 3)
    with pytest.raises(DataError, match="y at site 'y' is 3 in row 0"):
        log_likelihood(classes, given(w=torch.randn(4, 2, 3)), x, torch.full((30,), 3))


def test_posterior_of_another_model(drawn, toy):
    x, _ = toy
    with pytest.raises(ModelError, match="predict with the model that was fitted"):
        predict(Linear(2), drawn, x)
    with pytest.raises(
        ModelError,
        match=r"site 'fc1.weight' has shape \(5, 2\) in the posterior "
        r"and \(6, 2\) in the model; build it with the same options",
    ):
        predict(Toy(hidden=6), drawn, x)
    with pytest.raises(ModelError, match=r"cannot predict for x of shape \(30, 1\)"):
        predict(Toy(), drawn, x[:, :1])
    other = replace(drawn, draws={k: v for k, v in drawn.draws.items() if k != "sigma"})
    with pytest.raises(ModelError, match="the posterior has sites"):
        predict(Toy(), other, x)  # sigma would be sampled from its prior, quietly
    stranger = replace(drawn, constants={"shift": torch.zeros(1)})
    with pytest.raises(ModelError, match="constant 'shift'"):
        predict(Toy(), stranger, x)


def test_models_without_rows(toy):
    x, _ = toy

    def process(x, y=None):
        width = pyro.sample("w", dist.LogNormal(0.0, 1.0))
        covariance = torch.exp(-torch.cdist(x, x) / width) + 1e-3 * torch.eye(len(x))
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(len(x)), covariance), obs=y)
        return torch.zeros(len(x))

    def local(x, y=None):
        with pyro.plate("data", x.shape[0]):
            w = pyro.sample("w", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(w, 1.0), obs=y)
        return w

    with pytest.raises(ModelError, match="site 'y' lies outside plate 'data'"):
        predict(process, given(w=torch.ones(3)), x)
    with pytest.raises(ModelError, match="site 'w' has one value for each row of the data that"):
        predict(local, given(w=torch.ones(3, 30)), x)
    with pytest.raises(ModelError, match="x is None: a model without input has no rows"):
        predict(Linear(2), given(w=torch.ones(3, 2)), None)


def test_distributions_without_moments(toy):
    with pytest.raises(ModelError, match="the mean of y is NaN in row 0"):
        predict(observing(lambda f: dist.Cauchy(f, 1.0)), given(w=torch.ones(3, 2, 1)), toy[0])


# Layers (fault 8).


class Normed(PyroModule):
    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(2), nn.Dropout(0.5)
        self.fc = PyroModule[nn.Linear](2, 1, bias=False)
        self.fc.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 2]).to_event(2))

    def forward(self, x, y=None):
        f = self.fc(self.drop(self.norm(x))).squeeze(-1)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, 1.0), obs=y)
        return f


def test_one_row_alone_is_that_row_of_a_batch(toy, unchanged):
    x, y = toy
    model = Normed().train()
    model(x)  # running statistics that are not those of one row
    pyro.clear_param_store()
    posterior = prior_posterior(model, x, y)
    with unchanged(model):
        whole, single = predict(model, posterior, x), predict(model, posterior, x[3:4])
    torch.testing.assert_close(single.mean, whole.mean[3:4], rtol=0.0, atol=1e-4)
    torch.testing.assert_close(single.scale, whole.scale[3:4], rtol=0.0, atol=1e-4)


# Blocks and memory (fault 20).


def test_blocks_do_not_change_the_numbers(drawn, toy, monkeypatch):
    x, y = toy
    whole, density = predict(Toy(), drawn, x), log_likelihood(Toy(), drawn, x, y)
    monkeypatch.setattr(runner, "BLOCK_ROWS", 7)
    monkeypatch.setattr(mapping, "BLOCK_VALUES", 150)
    parts = predict(Toy(), drawn, x)
    torch.testing.assert_close(parts.mean, whole.mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(parts.epistemic_scale, whole.epistemic_scale, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(log_likelihood(Toy(), drawn, x, y), density, rtol=1e-5, atol=1e-5)


class Largest(TorchDispatchMode):
    """Keeps the number of values of the largest tensor that any operation gives."""

    values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.values = max(self.values, out.numel())
        return out


class Convolution(PyroModule):
    def __init__(self):
        super().__init__()
        self.conv = PyroModule[nn.Conv2d](1, 4, 3, bias=False)
        prior = dist.Normal(0.0, 1.0).expand(self.conv.weight.shape)
        self.conv.weight = PyroSample(prior.to_event(4))

    def forward(self, x, y=None):
        f = torch.relu(self.conv(x)).mean((1, 2, 3))
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, 1.0), obs=y)
        return f


@pytest.mark.parametrize(
    ("model", "x", "width"),
    [
        (Toy(hidden=200), torch.randn(2_000, 2), 200),
        (Convolution(), torch.randn(40, 1, 20, 20), 4 * 18 * 18),
    ],
)
def test_no_tensor_is_larger_than_a_block(model, x, width, monkeypatch):
    """100 draws at once would hold 100 × rows × width values."""
    monkeypatch.setattr(mapping, "BLOCK_VALUES", 2**18)
    posterior = prior_posterior(model, x[:5], torch.randn(5), draws=100)
    assert Runner(model, posterior, x, None).width == width
    with Largest() as largest:
        predict(model, posterior, x, quantiles=())  # what is held for these has a bound of its own
    assert largest.values <= 2**18 < 100 * min(len(x), runner.BLOCK_ROWS) * width


@pytest.mark.parametrize("name", ["Normal", "Bernoulli", "Gamma", "Categorical"])
def test_a_graph_gives_what_mapping_gives(name, monkeypatch):
    """Traced where blocks are many; noise is drawn anew for each of them, not frozen."""
    families = {
        "Normal": lambda f: dist.Normal(f[..., 0], 0.1),
        "Bernoulli": lambda f: dist.Bernoulli(logits=f[..., 0]),
        "Gamma": lambda f: dist.Gamma(2.0, f[..., 0].exp()),  # its noise cannot be given: mapped
        "Categorical": lambda f: dist.Categorical(logits=f),
    }
    model = observing(families[name], 3)
    posterior, x = given(w=0.1 * torch.randn(1200, 2, 3)), torch.randn(5, 2)
    monkeypatch.setattr(mapping, "BLOCK_VALUES", 21 * 20)  # 20 draws of 5 × 3 + 6 values
    graphs = []
    build = mapping._Graph
    monkeypatch.setattr(mapping, "_Graph", lambda *a: graphs.append(build(*a)) or graphs[-1])
    found = predictive(model, posterior, x, seed=1)
    assert len(graphs) == (name != "Gamma")
    monkeypatch.setattr(mapping, "TRACED_BLOCKS", 10**9)
    expected = predictive(model, posterior, x, seed=1)
    torch.testing.assert_close(found["f"], expected["f"])
    blocks = found["y"][0].reshape(60, 20, 5).double()
    assert all(not torch.equal(one, two) for one, two in itertools.pairwise(blocks))
    y, again = found["y"][0].double(), expected["y"][0].double()
    error = (y.var(0) / 1200 + again.var(0) / 1200).sqrt()
    assert bool(((y.mean(0) - again.mean(0)).abs() < 5 * error).all())


def test_a_model_that_reads_its_rows_is_not_frozen(monkeypatch):
    """The branch that the first block of rows takes is not that of the second."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        f = x @ w if x.sum() > 0 else -(x @ w)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, 1.0), obs=y)
        return f

    monkeypatch.setattr(mapping, "BLOCK_VALUES", 20)
    monkeypatch.setattr(runner, "BLOCK_ROWS", 3)
    w, x = torch.randn(200, 2), torch.cat([torch.ones(3, 2), -torch.ones(3, 2)])
    found = predictive(model, given(w=w), x)["f"][0]
    torch.testing.assert_close(found, (w.sum(-1)[:, None]).expand(200, 6))


@pytest.mark.parametrize("name", ["Beta", "Dirichlet"])
def test_beta_and_dirichlet_are_mapped(name, monkeypatch):
    families = {
        "Beta": lambda f: dist.Beta(f.exp(), 2.0).to_event(1),
        "Dirichlet": lambda f: dist.Dirichlet(f.exp()),
    }
    model = observing(families[name], 3)
    posterior, x = given(w=0.3 * torch.randn(4000, 2, 3)), torch.randn(4, 2)
    monkeypatch.setattr(mapping.DrawMap, "_untraced", _mapped_only)
    sampled = predictive(model, posterior, x)["y"][0].double()
    prediction = predict(model, posterior, x, quantiles=())
    error = prediction.scale / 4000**0.5
    assert bool(((sampled.mean(0) - prediction.mean).abs() < 5 * error).all())


def _mapped_only(self, function, block, leaves):
    return mapping._over_draws(function, block, leaves, mapping._FreshNoise())


def test_large_draws_by_rows_equal_a_loop():
    """Fault 19: 1,000 draws × 5,000 rows."""
    x = torch.randn(5_000, 2)
    posterior = prior_posterior(Toy(), x[:5], torch.randn(5), draws=1_000)
    f, _ = by_hand(posterior, x)
    torch.testing.assert_close(predictive(Toy(), posterior, x)["f"][0], f, rtol=1e-5, atol=1e-5)


PEAK = """
import resource, sys, torch
sys.path[:0] = sys.argv[3:]
from model_cases import Toy, prior_posterior
import pbnn

torch.set_num_threads(1)
rows, draws, hidden, calls = (int(n) for n in sys.argv[1].split(","))
model, x = Toy(hidden=hidden), torch.randn(rows, 2)
posterior = prior_posterior(model, x[:5], torch.randn(5), draws=draws)
{warm}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
{call}
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((peak - before) / 1024, peak / 1024)
"""


def peak(rows, draws, hidden, call="pbnn.predict(model, posterior, x)", out=""):
    """Return by how many MB a fresh process grows, beyond a small prediction, and its peak."""
    here = Path(__file__).parent
    code = PEAK.format(warm="pbnn.predict(model, posterior, x[:600])", call=call)
    sizes = f"{rows},{draws},{hidden},1"
    command = [sys.executable, "-W", "ignore", "-c", code, sizes, str(out), str(here)]
    command.append(str(here.parent))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, whole = map(float, done.stdout.split())
    return grown, whole


def growth(*sizes, **options):
    return peak(*sizes, **options)[0]


def test_memory_does_not_grow_with_rows():
    """10,000 rows × 1,000 draws: 80 MB for each number read, all at once, and as much for sums."""
    assert growth(10_000, 1_000, 5) < 120


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "draws", "hidden", "call", "most"),
    [
        (20_000, 300, 200, "pbnn.predict(model, posterior, x)", 1_000),
        (20_000, 300, 200, "pbnn.prior_predictive(model, x, draws=draws)", 1_000),
        (100_000, 1_000, 5, "pbnn.predict(model, posterior, x)", 1_000),
        (1_000_000, 1_000, 5, "pbnn.predict(model, posterior, x)", 1_500),
    ],
)
def test_peak_memory_of_a_large_prediction(rows, draws, hidden, call, most):
    """Fault 20; at once they would hold 5 to 20 GB. The peak is that of the whole process."""
    grown, whole = peak(rows, draws, hidden, call)
    assert grown < 300
    assert whole < most


@pytest.mark.slow
def test_log_likelihood_of_many_rows_goes_to_disk(tmp_path):
    """Fault 27: 4,000 draws × 50,000 rows, 800 MB on disk; what is mapped is not held."""
    call = "pbnn.log_likelihood(model, posterior, x, torch.randn(rows), out=sys.argv[2])"
    assert growth(50_000, 4_000, 5, call=call, out=tmp_path / "scores.nc") < 300


@pytest.mark.cuda
def test_cuda_gives_what_the_cpu_gives(drawn, toy):
    x, y = toy
    here, there = predict(Toy(), drawn, x), predict(Toy(), drawn, x, device="cuda")
    torch.testing.assert_close(there.mean, here.mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(there.scale, here.scale, rtol=1e-4, atol=1e-4)
    found = log_likelihood(Toy(), drawn, x, y, device="cuda")
    torch.testing.assert_close(found, log_likelihood(Toy(), drawn, x, y), rtol=1e-4, atol=1e-3)


def test_a_scaled_likelihood_is_scored_unscaled():
    """A tempered likelihood weighs rows in the fit; a held-out density is a density."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", x.shape[0]), poutine.scale(scale=10.0), poutine.mask(mask=x < 1):
            pyro.sample("y", dist.Normal(w * x, 0.5), obs=y)
        return w * x

    x, y = torch.tensor([0.5, -1.0, 2.0]), torch.tensor([0.1, 0.2, 0.3])
    w = torch.tensor([0.3, -0.7])
    found = log_likelihood(model, given(w=w), x, y)[0]
    expected = dist.Normal(w[:, None] * x, 0.5).log_prob(y)
    expected[:, 2] = 0.0  # masked
    torch.testing.assert_close(found, expected)
