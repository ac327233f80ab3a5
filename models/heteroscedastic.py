"""Regression whose noise scale depends on x: one trunk with a mean head and a scale head.

    h(x)  = a(… a(W_1 x + b_1) …)                     a = tanh unless changed
    f(x)  = V h(x) + c                                scale(x) = softplus(U h(x) + d) + min_scale
    weights ~ Normal(0, weight_scale / sqrt(fan in))  biases ~ Normal(0, bias_scale)
    y_n   ~ Normal(f(x_n), scale(x_n))

Change: width, depth, activation and the prior scales, by keyword.
Do not use it for small data with even noise: two functions are learned where rows show one.
"""

import itertools

import pyro
import pyro.distributions as dist
from pyro.nn import PyroModule
from torch import Tensor, nn

from pbnn.priors import normal, place_priors


class Model(PyroModule):  # type: ignore[misc]
    """Multilayer perceptron with a mean head and a scale head.

    Args:
        in_features: Number of columns of x.
        out_features: Number of columns of y; with 1, y has shape `(n,)`.
        hidden: Units in each hidden layer.
        depth: Number of hidden layers.
        activation: Name of a function in `torch.nn.functional`, such as "tanh" or "relu".
        weight_scale: Prior scale of a weight, times sqrt(fan in).
        bias_scale: Prior scale of a bias.
        min_scale: Smallest noise scale, in units of standardised y; keeps the likelihood bounded.
    """

    def __init__(
        self,
        in_features: int,
        *,
        out_features: int = 1,
        hidden: int = 50,
        depth: int = 1,
        activation: str = "tanh",
        weight_scale: float = 1.0,
        bias_scale: float = 1.0,
        min_scale: float = 0.01,
    ) -> None:
        super().__init__()
        self.activation = getattr(nn.functional, activation)
        self.min_scale = min_scale
        widths = [in_features, *[hidden] * depth]
        self.trunk = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.mean = nn.Linear(widths[-1], out_features)
        self.scale = nn.Linear(widths[-1], out_features)
        place_priors(self, {"*.weight": normal(weight_scale), "*.bias": normal(bias_scale)})

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Return the mean f(x), of shape `(n,)` or `(n, out_features)`."""
        h = x
        for layer in self.trunk:
            h = self.activation(layer(h))
        f: Tensor = self.mean(h)
        scale: Tensor = nn.functional.softplus(self.scale(h)) + self.min_scale
        if f.shape[-1] == 1:
            f, scale = f.squeeze(-1), scale.squeeze(-1)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, scale).to_event(f.ndim - 1), obs=y)
        return f
