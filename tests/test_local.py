"""Local reparameterization and Flipout: the same marginals and gradient, less noise, refusals."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from model_cases import Toy, linear_data, set_priors
from pyro.nn import PyroModule, PyroSample
from torch import nn
from torch.func import grad, vmap
from torch.nn import functional as F

from pbnn.errors import FitError
from pbnn.front_door import bind
from pbnn.infer.eager_step import learned
from pbnn.infer.guides import make_guide
from pbnn.infer.local import Layer, LayerNoise
from pbnn.infer.objective import Objective
from pbnn.infer.step import make_step
from pbnn.model import isolated

DRAWS = 10_000


@pytest.fixture
def inside():
    with isolated(0), pyro.validation_enabled(False):
        yield


# Marginals of one layer.


def outputs(function, x, weight, bias, layer, draws):
    """Return the outputs of one layer `(DRAWS, *output)`; weight and bias are (mean, scale)."""
    means = {"w": weight[0], "b": bias[0]}
    variances = {"w": weight[1].square(), "b": bias[1].square()}

    def one(noise, eps):
        values = {"w": means["w"] + weight[1] * eps, "b": means["b"]}
        values = values if len(layer.shapes) == 2 else {name: v * 1 for name, v in means.items()}
        with LayerNoise([layer], values, means, variances, {"w": noise}):
            return function(x, values["w"], values["b"])

    noise = [torch.randn(draws, *shape) for shape in layer.shapes]
    return vmap(one)(noise, torch.randn(draws, *weight[0].shape))


def agree_with(samples, mean, variance):
    """Mean and variance of each entry within 5 Monte Carlo errors (of Normal-like samples)."""
    error = (variance / DRAWS).sqrt()
    assert bool(((samples.mean(0) - mean).abs() <= 5 * error).all())
    # The fourth moment is that of the samples: Flipout's outputs are Normal given the signs.
    spread = (samples - mean).square()
    assert bool(((spread.mean(0) - variance).abs() <= 5 * spread.std(0) / DRAWS**0.5).all())


def test_linear_outputs_have_the_moments_of_plain_sampling():  # fault 18
    x, x[0] = torch.randn(6, 3), 0.0
    weight = torch.randn(4, 3), torch.rand(4, 3)
    bias = torch.randn(4), torch.rand(4)
    mean = F.linear(x, weight[0], bias[0])
    around = F.linear(x.square(), weight[1].square())

    plain = torch.einsum("ni,dji->dnj", x, weight[1] * torch.randn(DRAWS, 4, 3)) + mean
    agree_with(plain[:, 1:], mean[1:], around[1:])

    local = outputs(F.linear, x, weight, bias, Layer("w", "b", ((6, 4),)), DRAWS)
    agree_with(local, mean, around + bias[1].square())

    flipped = outputs(F.linear, x, weight, bias, Layer("w", None, ((6, 3), (6, 4))), DRAWS)
    agree_with(flipped[:, 1:], mean[1:], around[1:])
    # Rows of one draw are uncorrelated, where plain sampling correlates them.
    for samples, related in ((plain, True), (local, False), (flipped, False)):
        first, second = (samples[:, n] - mean[n] for n in (1, 2))
        correlation = (first * second).mean(0) / (first.std(0) * second.std(0))
        assert bool((correlation.abs() > 5 / DRAWS**0.5).any()) == related


@pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": 1}, {"groups": 2}])
def test_flipout_of_a_convolution(options):
    x = torch.randn(3, 4, 5, 5)
    shape = (6, 4 // options.get("groups", 1), 2, 2)
    weight, bias = (torch.randn(shape), torch.rand(shape)), (torch.randn(6), torch.rand(6))
    layer = Layer("w", None, ((3, 4, 1, 1), (3, 6, 1, 1)))
    samples = outputs(lambda *a: F.conv2d(*a, **options), x, weight, bias, layer, DRAWS)
    mean = F.conv2d(x, weight[0], bias[0], **options)
    agree_with(samples, mean, F.conv2d(x.square(), weight[1].square(), **options))


def test_a_row_of_zeros_has_a_finite_gradient():
    """Its variance is 0, where the square root has an infinite slope."""

    def total(scale):
        known = {"w": torch.ones(2, 3)}
        noise = {"w": [torch.ones(4, 2)]}
        with LayerNoise([Layer("w", None, ((4, 2),))], known, known, {"w": scale**2}, noise):
            return F.linear(torch.zeros(4, 3), known["w"]).sum()

    assert grad(total)(torch.ones(2, 3)).isfinite().all()


# The gradient of a network.


def gradients(bound, guide, **options):
    """Return the gradient and terms of many draws, each `(draws, …)`."""
    parameters = learned(bound, guide)
    objective = Objective(bound, guide, parameters, divergence="closed form", **options)
    vector = torch.cat([p.detach().reshape(-1) for p in parameters])
    data = (*objective.terms.rows(*objective.example), *objective.terms.state())
    function = grad(objective.loss, has_aux=True)
    noise = torch.randn(2000, *objective.noise_shape)
    found, terms = vmap(lambda n: function(vector, n, torch.ones(2), *data))(noise)
    return found, terms


def test_same_gradient_with_less_noise(inside):
    """Means within 5 Monte Carlo errors; total variance pathwise > Flipout > local."""
    bound = bind(Toy(), *linear_data(40, 2))
    guide = make_guide("normal", bound.model, init_scale=0.2)
    guide(bound.x, bound.y)
    plain, plain_terms = gradients(bound, guide)
    before = plain.var(0).sum()
    for estimator in ("flipout", "local"):
        found, terms = gradients(bound, guide, estimator=estimator)
        for a, b in ((plain, found), (plain_terms, terms)):
            error = ((a.var(0) + b.var(0)) / len(a)).sqrt()
            assert bool(((a.mean(0) - b.mean(0)).abs() <= 5 * error).all())
        assert found.var(0).sum() < before
        before = found.var(0).sum()


def test_a_fit_by_each_estimator(inside):
    """Each climbs; each site says how its noise enters and how its KL divergence is had."""
    bound = bind(Toy(), *linear_data(40, 2))
    for estimator, bias in (("local", "local"), ("flipout", "pathwise")):
        pyro.clear_param_store()
        step = make_step(
            bound,
            make_guide("normal", bound.model),
            estimator=estimator,
            batch_size=20,
            particles=2,
        )
        weights = {"fc1.weight": estimator, "fc2.weight": estimator}
        biases = {"fc1.bias": bias, "fc2.bias": bias}
        assert step.estimator == {**weights, **biases, "sigma": "pathwise"}
        terms = torch.stack([step(bound.x[:20], bound.y[:20], 2.0, lr=0.03) for _ in range(200)])
        elbo = terms[:, 0] - terms[:, 1]
        assert elbo[-20:].mean() > elbo[:20].mean() + 10


# Refusals.


class Reused(Toy):
    """A network that uses its first layer in another way."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        if how == "laplace":
            prior = dist.Laplace(0.0, 1.0).expand([5, 2]).to_event(2)
            self.fc1.weight = PyroSample(prior)

    def network(self, x):
        match self.how:
            case "penalty":
                return super().network(x) + self.fc1.weight.square().mean()
            case "transposed":
                return self.fc2(torch.tanh(x @ self.fc1.weight.T)).squeeze(-1)
            case "twice":
                return self.fc2(torch.tanh(self.fc1(torch.tanh(self.fc1(x))[:, :2]))).squeeze(-1)
            case "positions":
                h = self.fc1(torch.stack([x, -x], 1))
                return self.fc2(torch.tanh(h)).sum((1, 2))
            case "flattened":
                h = self.fc1(torch.cat([x, -x]))
                return self.fc2(torch.tanh(h[: len(x)] + h[len(x) :])).squeeze(-1)
        return super().network(x)


class Single(Toy):
    def forward(self, x, y=None):
        f = self.network(x)
        cov = self.sigma * torch.eye(len(x))
        pyro.sample("y", dist.MultivariateNormal(f, cov), obs=y)
        return f


class NoLayer(PyroModule):
    def __init__(self):
        super().__init__()
        self.w = PyroSample(dist.Normal(0.0, 1.0).expand([2]).to_event(1))

    def forward(self, x, y=None):
        f = x @ self.w
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, 1.0), obs=y)
        return f


@pytest.mark.parametrize(
    ("model", "guide", "estimator", "message"),
    [
        (Reused("transposed"), "normal", "local", None),
        (Reused("twice"), "normal", "local", "'fc1.weight' is used in more than one call"),
        (Reused("twice"), "normal", "flipout", "'fc1.weight' is used in more than one call"),
        (Reused("positions"), "normal", "local", r"several positions in a row.*Flipout serves it"),
        (Reused("positions"), "normal", "flipout", None),
        (Reused("flattened"), "normal", "local", r"shape \(80, 2\) does not have the 40 rows"),
        (Reused("penalty"), "normal", "local", "'fc1.weight' is also used by square"),
        (Reused("laplace"), "normal", "local", "needs a Normal prior for site 'fc1.weight'"),
        (Reused("laplace"), "normal", "flipout", None),
        (Toy(), "kronecker", "local", "draws each entry of site 'fc1.weight' independently"),
        (Toy(), "lowrank", "flipout", "draws each entry of site 'fc1.weight' independently"),
        (NoLayer(), "normal", "local", "found no layer with a random weight in F.linear"),
        (Single(), "normal", "local", "the likelihood is not a sum over rows"),
    ],
)
@pytest.mark.filterwarnings("ignore:the model is")
def test_refusals(inside, model, guide, estimator, message):
    bound = bind(model, *linear_data(40, 2))
    guide = make_guide(guide, bound.model)
    if message is None:
        step = make_step(bound, guide, estimator=estimator, compile=False)
        assert estimator in step.estimator.values()
        assert step(bound.x, bound.y, 1.0, lr=0.01).isfinite().all()
        return
    with pytest.raises(FitError, match=message):
        make_step(bound, guide, estimator=estimator)


def test_flipout_of_one_row(inside):
    bound = bind(Toy(), *linear_data(40, 2))
    with pytest.raises(FitError, match="one row in a batch has no other to differ from"):
        make_step(bound, make_guide("normal", bound.model), estimator="flipout", batch_size=1)


def test_convolutions_by_flipout(inside):
    class Conv(PyroModule):
        def __init__(self):
            super().__init__()
            self.conv, self.out = PyroModule[nn.Conv1d](1, 3, 2), PyroModule[nn.Linear](6, 1)
            set_priors(self.conv)
            set_priors(self.out)

        def forward(self, x, y=None):
            f = self.out(torch.relu(self.conv(x[:, None])).flatten(1)).squeeze(-1)
            with pyro.plate("data", len(x)):
                pyro.sample("y", dist.Normal(f, 0.5), obs=y)
            return f

    bound = bind(Conv(), *linear_data(20, 3))
    guide = make_guide("normal", bound.model)
    step = make_step(bound, guide, estimator="flipout", particles=2)
    assert step.estimator["conv.weight"] == "flipout"
    assert step(bound.x, bound.y, 1.0, lr=0.01).isfinite().all()
    pyro.clear_param_store()
    step = make_step(bound, make_guide("normal", bound.model), estimator="local")
    assert step.estimator["conv.weight"] == "pathwise"
    assert step.estimator["out.weight"] == "local"
