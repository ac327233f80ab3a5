"""Two classes with one logit: a multilayer perceptron and a Bernoulli.

    f(x)  = W_L h(… h(W_1 x + b_1) …) + b_L          logit of class 1; h = tanh unless changed
    W_l   ~ Normal(0, weight_scale / sqrt(fan in))   b_l ~ Normal(0, bias_scale)
    y_n   ~ Bernoulli(logit = f(x_n))                y in {0, 1}

Change: width, depth, activation and the prior scales, by keyword. A prior scale of f far above 2
says that almost every probability is near 0 or 1.
Use classification.py for three and more classes, ordinal.py for ordered ones. Do not use it for
several independent labels of one row: write one site for each.
"""

import itertools

import pyro
import pyro.distributions as dist
from pyro.nn import PyroModule
from torch import Tensor, nn

from pbnn.priors import normal, place_priors


class Model(PyroModule):  # type: ignore[misc]
    """Multilayer perceptron with one logit.

    Args:
        in_features: Number of columns of x; y has shape `(n,)` and holds 0 and 1.
        hidden: Units in each hidden layer.
        depth: Number of hidden layers.
        activation: Name of a function in `torch.nn.functional`, such as "tanh" or "relu".
        weight_scale: Prior scale of a weight, times sqrt(fan in).
        bias_scale: Prior scale of a bias.
    """

    def __init__(
        self,
        in_features: int,
        *,
        hidden: int = 50,
        depth: int = 1,
        activation: str = "tanh",
        weight_scale: float = 1.0,
        bias_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.activation = getattr(nn.functional, activation)
        widths = [in_features, *[hidden] * depth, 1]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        place_priors(self, {"*.weight": normal(weight_scale), "*.bias": normal(bias_scale)})

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Return the logit f(x), of shape `(n,)`."""
        h = x
        for layer in self.layers[:-1]:
            h = self.activation(layer(h))
        f: Tensor = self.layers[-1](h).squeeze(-1)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Bernoulli(logits=f), obs=y)
        return f
