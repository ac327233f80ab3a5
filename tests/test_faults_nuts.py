"""Faults that NUTS must not have, on the whole road; others lie with their modules.

Faults 3, 10 and 36 (dependent supports): test_faults; 11 and 12: test_nuts; 26: test_nuts and
test_inference_data_roads; the front door's verdicts, which every road shares: test_front_door.
"""

import pyro
import pyro.distributions as dist
import pytest
import torch
from model_cases import Toy, set_priors
from pyro import poutine
from pyro.distributions import constraints
from pyro.nn import PyroModule
from torch import nn

import pbnn
from pbnn.errors import ModelError
from pbnn.front_door import bind
from pbnn.infer.density import Density

# Runs too short to converge, which say so: what is tested here shows all the same.
pytestmark = pytest.mark.filterwarnings("ignore::pbnn.errors.ConvergenceWarning")

SHORT = {"chains": 2, "warmup": 5, "draws": 5, "max_tree_depth": 2}


def fit(model, x, y, **options):
    return pbnn.fit_nuts(model, x, y, compile=False, progress=False, **options)


@pytest.mark.parametrize(
    ("doubled", "dtype"),
    [("model", torch.float32), ("x and y", torch.float64), ("y", torch.float32)],
)
def test_one_type_throughout(toy, doubled, dtype):  # fault 7
    model, (x, y) = Toy(), toy
    if doubled == "model":
        model = model.double()
    x = x.double() if doubled == "x and y" else x
    y = y if doubled == "model" else y.double()
    posterior = fit(model, x, y, dtype=dtype, **SHORT)
    assert {value.dtype for value in posterior.draws.values()} == {dtype}
    assert posterior.stats["lp"].dtype == dtype


class Normalised(PyroModule):
    """Network with BatchNorm."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = PyroModule[nn.Linear](2, 5), PyroModule[nn.Linear](5, 1)
        for layer in (self.fc1, self.fc2):
            set_priors(layer)
        self.norm = nn.BatchNorm1d(5, affine=False)

    def forward(self, x, y=None):
        f = self.fc2(self.norm(self.fc1(x)).tanh()).squeeze(-1)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, 0.5), obs=y)
        return f


def test_a_run_moves_neither_running_statistics_nor_the_density(toy, unchanged):  # fault 8
    model = Normalised()
    bound = bind(model, *toy)
    z = torch.randn(1, Density(bound).dim)
    before = Density(bound).log_density(z)
    with unchanged(model):
        posterior = fit(model, *toy, **SHORT)
    assert torch.equal(Density(bind(model, *toy)).log_density(z), before)
    assert torch.equal(posterior.buffers["norm.running_mean"], torch.zeros(5))


def test_a_discrete_latent_is_refused(toy):  # fault 9
    def model(x, y=None):
        switch = pyro.sample("switch", dist.Bernoulli(0.5))
        f = x[:, 0] * switch
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, 1.0), obs=y)
        return f

    with pytest.raises(ModelError, match="site 'switch' is discrete"):
        fit(model, *toy, **SHORT)


def test_flat_priors_and_missing_rows_are_right():  # fault 36
    def model(x, y=None):
        mean = pyro.sample("mean", dist.ImproperUniform(constraints.real, (), ()))
        f = mean.expand(x.shape[0])
        seen = torch.ones(len(x), dtype=torch.bool) if y is None else ~y.isnan()
        with pyro.plate("data", x.shape[0]), poutine.mask(mask=seen):
            pyro.sample("y", dist.Normal(f, 2.0), obs=y)
        return f

    x = torch.zeros(40, 1)
    y = 3.0 + 2.0 * torch.randn(40)
    y[::4] = torch.nan
    posterior = fit(model, x, y, chains=100, warmup=60, draws=10)
    # Exact: Normal(mean of the 30 rows, 2 / √30). Means over chains are independent.
    exact, scale = y[~y.isnan()].mean(), 2.0 / 30**0.5
    means = posterior.draws["mean"].mean(1)
    assert abs(means.mean() - exact) < 4 * means.std() / 10
    squares = ((posterior.draws["mean"] - exact) ** 2).mean(1)
    assert abs(squares.mean() - scale**2) < 4 * squares.std() / 10
