"""Classification into two or more classes with a multilayer perceptron and a softmax.

    f(x)  = W_L h(… h(W_1 x + b_1) …) + b_L          logits; h = tanh unless changed
    W_l   ~ Normal(0, weight_scale / sqrt(fan in))   b_l ~ Normal(0, bias_scale)
    y_n   ~ Categorical(logits = f(x_n))

Change: width, depth, activation and the prior scales, by keyword.
Use ordinal.py when the classes are ordered, counts.py when y is a count, convnet.py for images.
"""

import itertools

import pyro
import pyro.distributions as dist
from pyro.nn import PyroModule
from torch import Tensor, nn

from pbnn.priors import normal, place_priors


class Model(PyroModule):  # type: ignore[misc]
    """Multilayer perceptron with a softmax over classes.

    Args:
        in_features: Number of columns of x.
        out_features: Number of classes; y holds 0, …, out_features − 1.
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
        out_features: int = 2,
        hidden: int = 50,
        depth: int = 1,
        activation: str = "tanh",
        weight_scale: float = 1.0,
        bias_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.activation = getattr(nn.functional, activation)
        widths = [in_features, *[hidden] * depth, out_features]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        place_priors(self, {"*.weight": normal(weight_scale), "*.bias": normal(bias_scale)})

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Return the logits f(x), of shape `(n, out_features)`."""
        h = x
        for layer in self.layers[:-1]:
            h = self.activation(layer(h))
        f: Tensor = self.layers[-1](h)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Categorical(logits=f), obs=y)
        return f
