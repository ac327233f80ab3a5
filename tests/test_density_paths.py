"""Models that cannot be mapped over chains as they are: told so, and right all the same."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from model_cases import set_priors
from pyro.infer.mcmc.util import initialize_model
from pyro.nn import PyroModule
from pyro.nn.module import to_pyro_module_
from torch import nn
from torch.nn import functional

from pbnn.errors import ModelError, PbnnWarning
from pbnn.front_door import bind
from pbnn.infer.density import Density
from pbnn.model import isolated

X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(6, 2)
Y = torch.tensor([0.0, 1.0, 2.0, 1.0, 0.0, 2.0]).double()


def _model(likelihood):
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
        f = x @ w
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", likelihood(f, w, y), obs=y)
        return f

    return model


def branch(f, w, _):
    if w.sum() > 0:
        return dist.Normal(f, 1.0)
    return dist.Normal(f, 2.0)


def read(f, w, _):
    return dist.Normal(f * w[0].item(), 1.0 + w[1].abs())


def write(f, w, _):
    scale = torch.ones(len(f), dtype=f.dtype)
    scale[0] = 1 + w[0] ** 2
    return dist.Normal(f, scale)


def ordinal(f, w, _):
    return dist.OrderedLogistic(f, torch.stack([-w[0].exp(), w[1].exp()]))


@pytest.mark.parametrize(
    ("likelihood", "line"),
    [
        (branch, "`if w.sum() > 0:`"),
        (read, "w[0].item()"),
        (write, "`scale[0] = 1 + w[0] ** 2`"),
        (ordinal, "dist.OrderedLogistic"),
    ],
)
def test_the_line_is_named_and_the_slower_path_has_the_same_numbers(likelihood, line):
    bound = bind(_model(likelihood), X, Y, dtype=torch.float64)
    with pytest.warns(PbnnWarning, match="chains run through Python one by one") as caught:
        density = Density(bound, chains=3, draws=10_000)
    message = str(caught[0].message)
    assert "test_density_paths.py:" in message
    assert line in message
    assert density.slow_because is not None
    assert not density.compiled
    z = torch.tensor([[0.5, 1.0], [-1.0, 0.2], [0.1, -0.3]]).double()
    value, grad = density.value_and_grad(z)
    with isolated(0):
        _, potential, _, _ = initialize_model(bound.model, (X, Y))
    for chain in range(3):
        leaf = z[chain].clone().requires_grad_()
        expected = -potential({"w": leaf})
        (slope,) = torch.autograd.grad(expected, leaf)
        torch.testing.assert_close(value[chain], expected.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grad[chain], slope, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(density.log_density(z), value)
    torch.testing.assert_close(density.unconstrain(density.constrain(z)), z)
    assert density.initial_prior(2, 0).shape == (2, 2)


def test_an_error_in_one_chain_of_the_slower_path_stays_there():
    def raising(f, w, _):
        if w.sum() > 1:
            raise ArithmeticError("out of range")
        return dist.Normal(f, 1.0)

    with pytest.warns(PbnnWarning, match="one by one"):
        density = Density(bind(_model(raising), X, Y, dtype=torch.float64), chains=2)
    value, grad = density.value_and_grad(torch.tensor([[0.1, 0.2], [1.0, 1.0]]).double())
    assert value.isfinite().tolist() == [True, False]
    assert grad.isfinite().all(1).tolist() == [True, False]


def test_what_the_data_decide_may_be_read():
    def by_data(f, w, y):
        classes = 3 if y is None else int(y.max()) + 1
        steps = w[0] * torch.arange(classes, dtype=f.dtype)
        return dist.Categorical(logits=f[:, None] * steps)

    density = Density(bind(_model(by_data), X, Y, dtype=torch.float64), chains=2)
    assert density.slow_because is None
    z = torch.tensor([[0.3, 1.0], [1.0, -1.0]]).double()
    logits = ((z @ X.T)[..., None] * z[:, :1, None] * torch.arange(3)).log_softmax(-1)
    expected = logits.gather(-1, Y.long().expand(2, 6)[..., None]).sum((1, 2))
    expected = expected + dist.Normal(0.0, 1.0).log_prob(z).sum(1)
    torch.testing.assert_close(density.value_and_grad(z)[0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "noise",
    [lambda f: functional.dropout(f, 0.5), lambda f: f + float(torch.randn(())) * f.sum().item()],
)
def test_a_density_that_is_random_is_refused(noise):
    """The front door looks for it too; here it begins behind the door."""
    random = []

    def later(f, w, _):
        return dist.Normal(noise(f) if random else f, 1.0)

    bound = bind(_model(later), X, Y, dtype=torch.float64)
    random.append(True)
    with pytest.raises(ModelError, match=r"random beyond its sites \(test_density_paths.py"):
        Density(bound)


def test_sites_that_come_and_go_are_refused():
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(x.new_zeros(2), 0.1).to_event(1))
        extra = pyro.sample("extra", dist.Normal(w[0], 1.0)) if w[0] > 1 else w[1]
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(x @ w + extra, 1.0), obs=y)
        return x @ w

    with pytest.warns(PbnnWarning, match="one by one"):
        density = Density(bind(model, X, Y, dtype=torch.float64))
    with pytest.raises(ModelError, match=r"site 'extra' is met here but was not at the first run"):
        density.value_and_grad(torch.tensor([[2.0, 0.0]]).double())


def test_a_random_subsample_is_refused():
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
        with pyro.plate("some", 6, subsample_size=3) as rows:
            pyro.factor("pull", -(x[rows] @ w).square())
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)
        return x @ w

    with pytest.raises(ModelError, match="plate 'some' takes 3 of its 6 rows at random"):
        Density(bind(model, X, Y, dtype=torch.float64))


def test_a_support_without_a_bijection_is_refused():
    def model(x, y=None):
        sphere = dist.ProjectedNormal(x.new_ones(2))
        direction = pyro.sample("direction", sphere)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(x @ direction, 1.0), obs=y)
        return x @ direction

    with pytest.raises(ModelError, match=r"site 'direction' has support .* no bijection"):
        Density(bind(model, X, Y, dtype=torch.float64))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(2, 4, batch_first=True)

    def forward(self, x):
        return self.gru(x.reshape(-1, 3, 2))[0][:, -1].sum(-1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(2, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

    def forward(self, x):
        return self.layer(self.lift(x.reshape(-1, 3, 2)))[:, 0, 0]


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4), nn.GELU(), nn.MaxPool1d(2), nn.Flatten()
        )
        self.last = nn.Linear(4, 1)

    def forward(self, x):
        return self.last(self.body(x.reshape(-1, 2, 3))).squeeze(-1)


@pytest.mark.parametrize("body", [Recurrent, Attention, Convolution])
def test_layers_that_vmap_knows_only_in_parts_are_mapped(body):
    network = body()
    to_pyro_module_(network)
    for layer in network.modules():
        set_priors(layer, 0.5)

    class Model(PyroModule):
        def __init__(self):
            super().__init__()
            self.network = network

        def forward(self, x, y=None):
            f = self.network(x)
            with pyro.plate("data", x.shape[0]):
                pyro.sample("y", dist.Normal(f, 0.5), obs=y)
            return f

    x = torch.randn(6, 6, dtype=torch.float64)
    density = Density(bind(Model(), x, Y, dtype=torch.float64), chains=2)
    assert density.slow_because is None
    z = density.initial_prior(2, 0)
    value, grad = density.value_and_grad(z)
    assert all((grad[:, site.slice] != 0).any() for site in density.sites)
    by_site = [sum(density.site_log_densities(point).values()) for point in z]
    torch.testing.assert_close(
        value, torch.tensor(by_site, dtype=torch.float64), rtol=1e-9, atol=1e-9
    )
