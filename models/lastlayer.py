"""Regression with a Bayesian last layer on a trunk without priors.

    h(x)  = a(… a(W_1 x + b_1) …)                    constants: learned, not random; a = tanh
    f(x)  = v · h(x) + c
    v     ~ Normal(0, weight_scale / sqrt(hidden))   c ~ Normal(0, bias_scale)
    scale ~ HalfNormal(noise_scale)
    y_n   ~ Normal(f(x_n), scale)

SVI learns the trunk with the ELBO, nearly as type-II maximum likelihood would; NUTS runs with
`fit_nuts(…, constants=svi.constants)`, given that trunk. One that was trained elsewhere goes in by
`model.trunk.load_state_dict(…)`, as in Snoek et al. (2015).
Change: width, depth, activation and the prior scales, by keyword; any module in the place of the
trunk, with its patterns in `constants=`.
Do not trust its uncertainty away from the data: no one asked where else the trunk could bend, and
directions that the data leave out are often not among its features at all.
"""

import itertools

import pyro
import pyro.distributions as dist
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn

from pbnn.priors import normal, place_priors


class Model(PyroModule):  # type: ignore[misc]
    """Multilayer perceptron of which the last layer alone is random.

    Args:
        in_features: Number of columns of x; y has shape `(n,)`.
        hidden: Units in each hidden layer.
        depth: Number of hidden layers.
        activation: Name of a function in `torch.nn.functional`, such as "tanh" or "relu".
        weight_scale: Prior scale of a weight of the last layer, times sqrt(hidden).
        bias_scale: Prior scale of its bias.
        noise_scale: Scale of the HalfNormal prior on the noise scale, in units of standardised y.
    """

    def __init__(
        self,
        in_features: int,
        *,
        hidden: int = 50,
        depth: int = 2,
        activation: str = "tanh",
        weight_scale: float = 1.0,
        bias_scale: float = 1.0,
        noise_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.activation = getattr(nn.functional, activation)
        widths = [in_features, *[hidden] * depth]
        self.trunk = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.head = nn.Linear(widths[-1], 1)
        place_priors(
            self,
            {"head.weight": normal(weight_scale), "head.bias": normal(bias_scale)},
            constants="trunk.*",
        )
        self.scale = PyroSample(dist.HalfNormal(noise_scale))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Return f(x), of shape `(n,)`."""
        h = x
        for layer in self.trunk:
            h = self.activation(layer(h))
        f: Tensor = self.head(h).squeeze(-1)
        scale = self.scale
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, scale), obs=y)
        return f
