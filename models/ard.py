"""Regression that learns which inputs matter: automatic relevance determination.

    f(x)   = W_L h(… h(W_1 x + b_1) …) + b_L         h = tanh unless changed
    W_1,ij = r_j z_ij                                z_ij ~ Normal(0, 1)
    r_j    ~ HalfCauchy(relevance_scale / sqrt(in_features))
    W_l    ~ Normal(0, weight_scale / sqrt(fan in))  b_l ~ Normal(0, bias_scale)       l > 1
    scale  ~ HalfNormal(noise_scale)
    y_n    ~ Normal(f(x_n), scale)

All weights of an input share r_j (site `layers.0.weight_relevance`), so that an irrelevant one can
be switched off as a whole (MacKay 1994; Neal 1996). Standardise x, or r_j measures its units.
Change: width, depth, activation and the prior scales, by keyword; `horseshoe()` in the place of
`ard()` for weights that are sparse one by one.
Do not read r_j as an effect: of two inputs that say the same either may get it, and a product of
inputs needs both.
"""

import itertools

import pyro
import pyro.distributions as dist
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn

from pbnn.priors import ard, normal, place_priors


class Model(PyroModule):  # type: ignore[misc]
    """Multilayer perceptron with one relevance for each input.

    Args:
        in_features: Number of columns of x; y has shape `(n,)`.
        hidden: Units in each hidden layer.
        depth: Number of hidden layers.
        activation: Name of a function in `torch.nn.functional`, such as "tanh" or "relu".
        relevance_scale: Scale of the half-Cauchy prior of the relevances, times sqrt(in_features).
        weight_scale: Prior scale of a weight of the other layers, times sqrt(fan in).
        bias_scale: Prior scale of a bias.
        noise_scale: Scale of the HalfNormal prior on the noise scale, in units of standardised y.
    """

    def __init__(
        self,
        in_features: int,
        *,
        hidden: int = 50,
        depth: int = 1,
        activation: str = "tanh",
        relevance_scale: float = 1.0,
        weight_scale: float = 1.0,
        bias_scale: float = 1.0,
        noise_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.activation = getattr(nn.functional, activation)
        widths = [in_features, *[hidden] * depth, 1]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        place_priors(
            self,
            {
                "layers.0.weight": ard(relevance_scale),
                "*.weight": normal(weight_scale),
                "*.bias": normal(bias_scale),
            },
        )
        self.scale = PyroSample(dist.HalfNormal(noise_scale))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Return f(x), of shape `(n,)`."""
        h = x
        for layer in self.layers[:-1]:
            h = self.activation(layer(h))
        f: Tensor = self.layers[-1](h).squeeze(-1)
        scale = self.scale
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, scale), obs=y)
        return f
