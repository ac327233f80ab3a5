"""Regression in groups (schools, patients): one trunk, and last layers that are partially pooled.

    h(x)   = a(… a(W_1 x + b_1) …)                   shared; a = tanh unless changed
    v_g    = v + pool · z_g                          last layer of group g, with its bias
    v      ~ Normal(0, weight_scale / sqrt(hidden)), its bias Normal(0, bias_scale)
    z_g    ~ Normal(0, 1 / sqrt(hidden)),            its bias Normal(0, 1)
    pool   ~ HalfNormal(pool_scale)
    scale  ~ HalfNormal(noise_scale)
    y_n    ~ Normal(v_g(n) · (h(x_n), 1), scale)

pool → 0 makes one network of all groups, a large pool one for each. It is written non-centred, for
groups with few rows. x is a dict: "x" `(n, in_features)`, and "group" `(n,)` with integers 0, …,
groups − 1. A group without rows in the data has its prior, given pool: so a new group is predicted.
Change: width, depth, activation and the prior scales, by keyword.
Do not use it for two or three groups, which say next to nothing about pool.
"""

import itertools
from collections.abc import Mapping

import pyro
import pyro.distributions as dist
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn

from pbnn.priors import normal, place_priors


class Model(PyroModule):  # type: ignore[misc]
    """Multilayer perceptron whose last layer differs between groups.

    Args:
        in_features: Number of columns of x["x"]; y has shape `(n,)`.
        groups: Number of groups.
        hidden: Units in each hidden layer.
        depth: Number of hidden layers.
        activation: Name of a function in `torch.nn.functional`, such as "tanh" or "relu".
        weight_scale: Prior scale of a weight, times sqrt(fan in).
        bias_scale: Prior scale of a bias.
        pool_scale: Scale of the HalfNormal prior on pool.
        noise_scale: Scale of the HalfNormal prior on the noise scale, in units of standardised y.
    """

    def __init__(
        self,
        in_features: int,
        *,
        groups: int = 5,
        hidden: int = 20,
        depth: int = 1,
        activation: str = "tanh",
        weight_scale: float = 1.0,
        bias_scale: float = 1.0,
        pool_scale: float = 0.5,
        noise_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.activation = getattr(nn.functional, activation)
        widths = [in_features, *[hidden] * depth]
        self.trunk = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.head = nn.Linear(widths[-1], 1)  # of all groups
        self.groups = nn.Linear(widths[-1], groups)  # what each group adds, over pool
        place_priors(
            self,
            {
                "groups.*": normal(),
                "*.weight": normal(weight_scale),
                "*.bias": normal(bias_scale),
            },
        )
        self.pool = PyroSample(dist.HalfNormal(pool_scale))
        self.scale = PyroSample(dist.HalfNormal(noise_scale))

    def forward(self, x: Mapping[str, Tensor], y: Tensor | None = None) -> Tensor:
        """Return f(x), of shape `(n,)`."""
        h = x["x"]
        for layer in self.trunk:
            h = self.activation(layer(h))
        own = self.groups(h).gather(-1, x["group"].unsqueeze(-1))
        f: Tensor = (self.head(h) + self.pool * own).squeeze(-1)
        scale = self.scale
        with pyro.plate("data", f.shape[0]):
            pyro.sample("y", dist.Normal(f, scale), obs=y)
        return f
