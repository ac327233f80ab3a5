"""What the tests of guides share: a small network with every kind of site, and its data."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal
from pyro.nn import PyroModule, PyroSample
from torch import nn
from torch.distributions import biject_to

from pbnn.infer.guides import GUIDES

PATTERNS = {"hidden.*": "kronecker", "out.weight": "lowrank", "out.bias": "full", "*": "normal"}
PYRO_GAUSSIANS = (AutoDiagonalNormal, AutoMultivariateNormal)
GAUSSIANS = (*GUIDES, PATTERNS, *PYRO_GAUSSIANS)


@pytest.fixture(autouse=True)
def clean():
    # Two guides of one class would share their parameters in Pyro's global store.
    with torch.random.fork_rng(), pyro.settings.context(module_local_params=True):
        torch.manual_seed(0)
        yield
    pyro.clear_param_store()


class Network(PyroModule):
    """2-3-1 tanh network under N(0, 1) priors; a HalfNormal noise scale; a Dirichlet apart."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        one = torch.ones((), dtype=dtype)
        self.hidden, self.out = PyroModule[nn.Linear](2, 3), PyroModule[nn.Linear](3, 1)
        for layer in (self.hidden, self.out):
            for name, parameter in list(layer.named_parameters()):
                prior = dist.Normal(0 * one, one).expand(parameter.shape)
                setattr(layer, name, PyroSample(prior.to_event(parameter.dim())))
        self.scale = PyroSample(dist.HalfNormal(one))
        self.share = PyroSample(dist.Dirichlet(2 * one.expand(3)))

    def forward(self, x, y=None):
        f = self.out(torch.tanh(self.hidden(x))).squeeze(-1)
        scale, _ = self.scale, self.share
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, scale), obs=y)
        return f


def data(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 2, generator=generator, dtype=dtype)
    return x, x[:, 0] - x[:, 1] + 0.1 * torch.randn(30, generator=generator, dtype=dtype)


def scrambled(guide, x, y, size=0.7):
    """Run a guide once and move each of its parameters away from its start."""
    guide(x, y)
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.add_(size * torch.randn_like(parameter))
    return guide


def flat_unconstrained(guide, values, names):
    nodes = guide.prototype_trace.nodes
    parts = [biject_to(nodes[name]["fn"].support).inv(values[name]) for name in names]
    n = len(parts[0])
    return torch.cat([part.reshape(n, -1) for part in parts], -1)


def trace_latents(guide):
    return list(guide.prototype_trace.iter_stochastic_nodes())
