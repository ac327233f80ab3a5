"""What several test files share: models, their exact posteriors, posteriors of prior draws."""

import math

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, PyroSample
from torch import nn

from pbnn.front_door import bind, prior_values
from pbnn.infer.posterior import Posterior, provenance
from pbnn.model import isolated, run


def set_priors(layer, scale=1.0):
    """Give each parameter of a layer N(0, scale) priors."""
    for name, value in list(layer.named_parameters(recurse=False)):
        prior = dist.Normal(0.0, scale).expand(value.shape).to_event(value.ndim)
        setattr(layer, name, PyroSample(prior))


class Toy(PyroModule):
    """2-5-1 tanh network, N(0, 1) priors on each weight and bias, `sigma ~ HalfNormal(1)`."""

    def __init__(self, hidden=5, in_features=2):
        super().__init__()
        self.fc1 = PyroModule[nn.Linear](in_features, hidden)
        self.fc2 = PyroModule[nn.Linear](hidden, 1)
        for layer in (self.fc1, self.fc2):
            set_priors(layer)
        self.sigma = PyroSample(dist.HalfNormal(1.0))

    def network(self, x):
        return self.fc2(torch.tanh(self.fc1(x))).squeeze(-1)

    def forward(self, x, y=None):
        f = self.network(x)
        sigma = self.sigma
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, sigma), obs=y)
        return f


class Linear(PyroModule):
    """Linear regression with known noise; its posterior is exact."""

    def __init__(self, in_features, noise=0.5, prior=1.0):
        super().__init__()
        self.noise, self.prior = noise, prior
        self.w = PyroSample(dist.Normal(0.0, prior).expand([in_features]).to_event(1))

    def forward(self, x, y=None):
        f = x @ self.w
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, self.noise), obs=y)
        return f

    def exact(self, x, y):
        """Return posterior mean `(D,)` and covariance `(D, D)`, in float64."""
        x, y = x.double(), y.double()
        precision = torch.eye(x.shape[1]).double() / self.prior**2 + x.T @ x / self.noise**2
        covariance = torch.linalg.inv(precision)
        return covariance @ x.T @ y / self.noise**2, covariance

    def elbo(self, x, y, mean, covariance):
        """Return the expected log-likelihood and the KL divergence of a Gaussian guide."""
        x, y = x.double(), y.double()
        n, d = x.shape
        squares = (y - x @ mean).square().sum() + (x @ covariance * x).sum()
        likelihood = -0.5 * squares / self.noise**2 - n * math.log(self.noise)
        spread = (covariance.trace() + mean @ mean) / self.prior**2
        kl = 0.5 * (spread - d + 2 * d * math.log(self.prior) - covariance.logdet())
        return float(likelihood - 0.5 * n * math.log(2 * math.pi)), float(kl)


def linear_data(rows, columns, noise=0.5, correlation=0.0, seed=1):
    """Return x with equicorrelated columns `(rows, columns)`, and y of a linear model."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(rows, 1, generator=generator)
    own = torch.randn(rows, columns, generator=generator)
    x = correlation**0.5 * common + (1 - correlation) ** 0.5 * own
    weights = torch.randn(columns, generator=generator)
    return x, x @ weights + noise * torch.randn(rows, generator=generator)


def prior_posterior(model, x, y, draws=20, chains=1, markov=False):
    """Return draws of the prior in the form of a posterior, as if a road had made them."""
    bound = bind(model, x, y)
    latent = list(bound.named("latent"))
    rows = []
    with isolated(0), torch.no_grad(), prior_values(bound.dtype, bound.device):
        for _ in range(chains * draws):
            nodes = run(bound.model, {}, bound.x, bound.y, fill=bound.fill).nodes
            rows.append({name: nodes[name]["value"] for name in latent})
    stacked = {name: torch.stack([row[name] for row in rows]) for name in latent}
    return Posterior(
        draws={k: v.reshape(chains, draws, *v.shape[1:]) for k, v in stacked.items()},
        stats={"lp": torch.randn(chains, draws, generator=torch.Generator().manual_seed(0))},
        method="nuts" if markov else "prior",
        markov=markov,
        seconds=0.0,
        constants=bound.constants(),
        buffers=bound.buffers(),
        provenance=provenance(bound, seed=0),
    )
