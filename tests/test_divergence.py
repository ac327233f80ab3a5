"""The KL divergence in closed form: against Monte Carlo, and where it exists."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from model_cases import Toy, linear_data
from pyro.nn import PyroSample
from torch.func import grad, vmap
from torch.nn import functional as F

from pbnn.front_door import bind
from pbnn.infer.divergence import expected_log_prob
from pbnn.infer.eager_step import learned
from pbnn.infer.guides import AutoKronecker, make_guide
from pbnn.infer.objective import Objective
from pbnn.infer.step import make_step
from pbnn.model import isolated

GUIDES = {
    "normal": "normal",
    "lowrank": "lowrank",
    "kronecker": "kronecker",
    "low-rank factors": lambda m: AutoKronecker(m, factors=("lowrank", 2), bias="separate"),
    "layer_lowrank": "layer_lowrank",
    "patterns": {"fc2.*": "kronecker", "*": "full"},
}
WEIGHTS = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")


@pytest.fixture
def inside():
    with isolated(0), pyro.validation_enabled(False):
        yield


class Fixed(Toy):
    """Known noise: all priors are Normal."""

    def __init__(self):
        super().__init__()
        self.sigma = 0.5


class Hierarchical(Toy):
    """The scale of one layer's weights is a site."""

    def __init__(self):
        super().__init__()
        self.width = PyroSample(dist.HalfNormal(1.0))
        self.first = PyroSample(
            lambda self: dist.Normal(0.0, self.width).expand([5, 2]).to_event(2)
        )

    def network(self, x):
        return self.fc2(torch.tanh(F.linear(x, self.first, self.fc1.bias))).squeeze(-1)


def estimates(bound, guide, divergence, draws=2000):
    """Return gradient `(draws, P)` and KL `(draws,)` of many draws, and the objective."""
    parameters = learned(bound, guide)
    objective = Objective(bound, guide, parameters, divergence=divergence)
    vector = torch.cat([p.detach().reshape(-1) for p in parameters])
    data = (*objective.terms.rows(*objective.example), *objective.terms.state())
    function = grad(objective.loss, has_aux=True)
    noise = torch.randn(draws, *objective.noise_shape, dtype=bound.dtype)
    # No likelihood: what is left is the KL divergence alone.
    control = vector.new_tensor([0.0, 1.0])
    found, terms = vmap(lambda n: function(vector, n, control, *data))(noise)
    return found, terms[:, 1], objective


def scrambled(guide, bound, size=0.3):
    guide(bound.x, bound.y)
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.add_(size * torch.randn_like(parameter))
    return guide


@pytest.mark.parametrize("model", [Fixed, Toy, Hierarchical])
@pytest.mark.parametrize("kind", GUIDES)
def test_closed_form_equals_monte_carlo(inside, model, kind):
    """Value and gradient, each entry within 5 Monte Carlo errors of the difference."""
    bound = bind(model(), *linear_data(10, 2), dtype=torch.float64)
    guide = scrambled(make_guide(GUIDES[kind], bound.model, init_scale=0.3), bound)
    one = estimates(bound, guide, "closed form")
    other = estimates(bound, guide, "Monte Carlo")
    assert set(other[2].kl.values()) == {"Monte Carlo"}
    for a, b in zip(one[:2], other[:2], strict=True):
        error = ((a.var(0) + b.var(0)) / len(a)).sqrt()
        assert bool(((a.mean(0) - b.mean(0)).abs() <= 5 * error + 1e-12).all())
    if model is Fixed:
        assert set(one[2].kl.values()) == {"closed form"}
        assert float(one[1].std()) < 1e-12
        assert float(one[0].std(0).max()) < 1e-12


def test_which_sites_have_a_closed_form(inside):
    """Normal priors that do not depend on values of the same block of the guide."""
    data = linear_data(10, 2)

    def closed(model, guide):
        pyro.clear_param_store()
        bound = bind(model, *data)
        guide = make_guide(guide, bound.model)
        guide(bound.x, bound.y)
        objective = Objective(bound, guide, learned(bound, guide), divergence="closed form")
        return {site for site, how in objective.kl.items() if how == "closed form"}

    others = {"fc1.bias", "fc2.weight", "fc2.bias"}
    assert closed(Toy(), "normal") == set(WEIGHTS)
    assert closed(Toy(), "kronecker") == set(WEIGHTS)
    assert closed(Toy(), "lowrank") == set()  # one block, with sigma in it
    assert closed(Fixed(), "lowrank") == set(WEIGHTS)
    # The weights' scale is in another block, and then in the same one.
    assert closed(Hierarchical(), "normal") == {"first", *others}
    assert closed(Hierarchical(), {"first": "full", "*": "normal"}) == {"first", *others}
    assert closed(Hierarchical(), {"fc*": "full", "*": "lowrank"}) == others

    class Heavy(Toy):
        def __init__(self):
            super().__init__()
            self.fc1.weight = PyroSample(dist.StudentT(3.0).expand([5, 2]).to_event(2))
            self.fc1.bias = PyroSample(dist.Normal(0.0, 1.0).expand([5]).mask(False).to_event(1))

    assert closed(Heavy(), "normal") == {"fc2.weight", "fc2.bias"}


def test_a_learned_prior_scale_has_its_gradient(inside):
    class Learned(Fixed):
        def __init__(self):
            super().__init__()
            self.log_width = torch.nn.Parameter(torch.tensor(-0.5))
            self.first = PyroSample(
                lambda self: dist.Normal(0.0, self.log_width.exp()).expand([5, 2]).to_event(2)
            )

        def network(self, x):
            return self.fc2(torch.tanh(F.linear(x, self.first, self.fc1.bias))).squeeze(-1)

    bound = bind(Learned(), *linear_data(10, 2), dtype=torch.float64)
    guide = scrambled(make_guide("normal", bound.model), bound)
    found, _, objective = estimates(bound, guide, "closed form", draws=2)
    assert objective.kl["first"] == "closed form"
    assert float(found[0, -1].abs()) > 1e-3
    expected = estimates(bound, guide, "Monte Carlo")[0][:, -1]
    assert abs(float(found[0, -1] - expected.mean())) <= 5 * float(expected.std()) / 2000**0.5


def test_expected_log_prob():
    """E log N(w; m, s) by quadrature over the marginal."""
    prior = dist.Normal(torch.tensor([0.3, -1.0]), torch.tensor([0.5, 2.0]))
    mean, scale = torch.tensor([[1.0, 0.0], [0.5, 2.0]]), torch.tensor([[0.1, 1.0], [0.7, 0.2]])
    points = torch.linspace(-8, 8, 4001)
    weights = torch.softmax(-0.5 * points.square(), 0)
    values = mean + scale * points[:, None, None]
    expected = (weights[:, None, None] * prior.log_prob(values)).sum()
    found = expected_log_prob(prior.expand([2, 2]).to_event(2), mean, scale.square())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_step_says_which(inside):
    bound = bind(Toy(), *linear_data(10, 2))
    for options, expected in (
        ({}, "Monte Carlo"),
        ({"divergence": "closed form"}, "closed form"),
        ({"estimator": "local"}, "closed form"),
        ({"estimator": "flipout"}, "closed form"),
        ({"steps": 10}, "Monte Carlo"),
    ):
        pyro.clear_param_store()
        step = make_step(bound, make_guide("normal", bound.model), **options)
        assert step.kl == {**dict.fromkeys(WEIGHTS, expected), "sigma": "Monte Carlo"}
