"""Simulation-based calibration (Talts et al. 2018): replicates are lanes of one run."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from model_cases import set_priors
from pyro.nn import PyroModule
from scipy import stats
from torch import nn

from pbnn.front_door import bind
from pbnn.infer.compiled import compile_step
from pbnn.infer.density import Density
from pbnn.infer.lanes import Rule
from pbnn.infer.options import Options
from pbnn.infer.sampler import sample
from pbnn.model import isolated

ROWS = 12


class Network(PyroModule):
    """1-3-1 tanh network with a LogNormal noise scale."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = PyroModule[nn.Linear](1, 3), PyroModule[nn.Linear](3, 1)
        for layer in (self.fc1, self.fc2):
            set_priors(layer)

    def forward(self, x, y=None):
        f = self.fc2(torch.tanh(self.fc1(x))).squeeze(-1)
        scale = pyro.sample("scale", dist.LogNormal(x.new_tensor(-0.7), 0.3))
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, scale), obs=y)
        return f


def output(values, x):
    """f(x) of draws `(lanes, …)`, as `(lanes, …, rows)`."""
    hidden = x @ values["fc1.weight"].mT + values["fc1.bias"].unsqueeze(-2)
    return (torch.tanh(hidden) @ values["fc2.weight"].mT).squeeze(-1) + values["fc2.bias"]


@pytest.mark.parametrize(
    ("replicates", "warmup", "draws", "thin", "depth", "bins"),
    [(60, 50, 7, 3, 5, 4), pytest.param(400, 150, 63, 4, 10, 8, marks=pytest.mark.slow)],
)
def test_ranks_of_the_truth_are_uniform(replicates, warmup, draws, thin, depth, bins):
    x, probes = (
        torch.linspace(-2, 2, ROWS)[:, None].double(),
        torch.tensor([[-1.5], [0.3]]).double(),
    )
    with isolated(7):
        model = Network()
        start = bind(model, x, torch.zeros(ROWS), dtype=torch.float64)
        truth = Density(start, chains=replicates, compile=False)
        z = truth.initial_prior(replicates, seed=1)
        values = truth.constrain(z)
        f = output(values, x)
        y = f + values["scale"][:, None] * torch.randn(f.shape, dtype=torch.float64)
    density = Density(start, compile=False, lanes={"y": y})
    options = Options(
        warmup=warmup, draws=draws, thin=thin, target_accept=0.9, rule=Rule(max_tree_depth=depth)
    )

    def stepper(engine):
        return compile_step(density.graph, density.data_tensors, engine)

    with torch.no_grad():
        result = sample(
            density.value_and_grad,
            lambda: density.initial_prior(replicates, seed=2),
            options,
            stepper=stepper if replicates > 100 else None,
        )
        found = density.constrain(result.draws)
        lp = density.value_and_grad(z)[0]
    quantities = {
        "f(-1.5)": (output(values, probes)[:, 0], output(found, probes)[..., 0]),
        "f(0.3)": (output(values, probes)[:, 1], output(found, probes)[..., 1]),
        "scale": (values["scale"], found["scale"]),
        "lp": (lp, result.stats["lp"]),
    }
    # The number of draws below the truth is uniform on 0 … draws; 4 tests, 0.001 in all.
    for name, (true, drawn) in quantities.items():
        ranks = (drawn < true[:, None]).sum(1)
        counts = torch.bincount(ranks * bins // (draws + 1), minlength=bins)
        assert stats.chisquare(counts.numpy()).pvalue > 0.00025, (name, counts)
