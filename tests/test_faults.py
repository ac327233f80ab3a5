"""Faults that users of this field meet, on the whole road: what no single module's tests cover."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule, PyroSample
from torch import nn

import pbnn
from pbnn.errors import ModelError

# Runs too short to converge, which say so: what is tested here shows all the same.
SHORT = pytest.mark.filterwarnings("ignore::pbnn.errors.ConvergenceWarning")


def triangle(x, y=None):
    """Two sites, the support of the second depends on the first: 0 < b < 1 − a."""
    a = pyro.sample("a", dist.Uniform(0.0, 1.0))
    b = pyro.sample("b", dist.Uniform(0.0, 1.0 - a))
    f = (a + b).expand(x.shape[0])
    with pyro.plate("data", x.shape[0]):
        pyro.sample("y", dist.Normal(f, 1000.0), obs=y)
    return f


@SHORT
def test_a_support_that_depends_on_another_site_is_right_under_nuts():
    x = torch.zeros(2, 1)
    posterior = pbnn.fit_nuts(
        triangle, x, x[:, 0], chains=100, warmup=80, draws=20, seed=1, compile=False, progress=False
    )
    a, b = posterior.draws["a"], posterior.draws["b"]
    assert ((a + b) <= 1.0).all()
    # The data say nothing, so b has its prior moments: mean E[(1 − a) / 2] = 1/4, scale
    # sqrt(7) / 12. Means over chains are independent.
    for values, exact in ((b, 0.25), ((b - 0.25) ** 2, 7 / 144)):
        by_chain = values.mean(1)
        assert abs(float(by_chain.mean()) - exact) < 4 * float(by_chain.std()) / 10


def test_a_support_that_depends_on_another_site_is_refused_under_svi():
    x = torch.zeros(2, 1)
    with pytest.raises(ModelError, match="site 'b' has a support that depends on another site"):
        pbnn.fit_svi(triangle, x, x[:, 0], steps=5, progress=False)


@SHORT
def test_per_layer_priors_in_a_dict_act_under_nuts():
    """Fault 3: on a sine, the posterior predicts at less than half the prior's error."""
    priors = {"fc1": 2.0, "fc2": 0.5}

    class Model(PyroModule):
        def __init__(self):
            super().__init__()
            self.fc1 = PyroModule[nn.Linear](1, 16)
            self.fc2 = PyroModule[nn.Linear](16, 1)
            for name, scale in priors.items():
                layer = getattr(self, name)
                for part in ("weight", "bias"):
                    shape = getattr(layer, part).shape
                    prior = dist.Normal(0.0, scale).expand(shape).to_event(len(shape))
                    setattr(layer, part, PyroSample(prior))

        def forward(self, x, y=None):
            f = self.fc2(self.fc1(x).tanh()).squeeze(-1)
            with pyro.plate("data", x.shape[0]):
                pyro.sample("y", dist.Normal(f, 0.1), obs=y)
            return f

    x = torch.linspace(-3.0, 3.0, 60)[:, None]
    y = torch.sin(x[:, 0])
    model = Model()
    posterior = pbnn.fit_nuts(
        model, x, y, chains=2, warmup=40, draws=20, max_tree_depth=5, seed=0, compile=False,
        progress=False,
    )  # fmt: skip
    error = (pbnn.predict(model, posterior, x).mean - y).square().mean().sqrt()
    prior_error = y.square().mean().sqrt()  # the prior predictive mean is 0
    assert error < prior_error / 2
    assert (posterior.stats["tree_depth"] > 0).any()
    assert all(value.std(dim=(0, 1)).min() > 0 for value in posterior.draws.values())


@SHORT
def test_chains_of_a_local_model_with_a_lambda_prior_finish_differ_and_repeat():
    """Fault 10: a class in a function, a lambda as prior, after other torch work."""
    torch.randn(100, 100) @ torch.randn(100, 100)

    class Model(PyroModule):
        def __init__(self):
            super().__init__()
            self.w = PyroSample(lambda self: dist.Normal(0.0, 1.0))

        def forward(self, x, y=None):
            f = self.w * x[:, 0]
            with pyro.plate("data", x.shape[0]):
                pyro.sample("y", dist.Normal(f, 1.0), obs=y)
            return f

    x = torch.linspace(-1.0, 1.0, 10)[:, None]
    first, second = (
        pbnn.fit_nuts(
            Model(), x, x[:, 0], chains=3, warmup=20, draws=10, compile=False, progress=False
        ).draws["w"]
        for _ in range(2)
    )
    assert torch.equal(first, second)
    assert len({tuple(chain.tolist()) for chain in first}) == 3
