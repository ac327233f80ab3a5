"""Regression with a multilayer perceptron and one noise scale, learned from the data.

    f(x)  = W_L h(… h(W_1 x + b_1) …) + b_L          h = tanh unless changed
    W_l   ~ Normal(0, weight_scale / sqrt(fan in))    b_l ~ Normal(0, bias_scale)
    scale ~ HalfNormal(noise_scale)
    y_n   ~ Normal(f(x_n), scale)

Change: width, depth, activation and the prior scales, by keyword.
Use another file when the noise depends on x (heteroscedastic.py) or y is a class (classification.py).
"""

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn


class Model(PyroModule):
    """Multilayer perceptron with homoscedastic Normal noise.

    Args:
        in_features: Number of columns of x.
        out_features: Number of columns of y; with 1, y has shape `(n,)`.
        hidden: Units in each hidden layer.
        depth: Number of hidden layers.
        activation: Name of a function in `torch.nn.functional` or `torch`, such as "tanh" or "relu".
        weight_scale: Prior scale of a weight times sqrt(fan in).
        bias_scale: Prior scale of a bias.
        noise_scale: Scale of the HalfNormal prior on the noise scale, in units of standardised y.
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
        noise_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.out_features = out_features
        self.activation: Callable[[Tensor], Tensor] = getattr(torch, activation)
        widths = [in_features, *[hidden] * depth, out_features]
        self.layers = PyroModule[nn.ModuleList](
            [PyroModule[nn.Linear](a, b) for a, b in zip(widths, widths[1:], strict=False)]
        )
        for layer in self.layers:
            fan_in = layer.in_features
            layer.weight = PyroSample(
                dist.Normal(0.0, weight_scale / fan_in**0.5)
                .expand([layer.out_features, fan_in])
                .to_event(2)
            )
            layer.bias = PyroSample(
                dist.Normal(0.0, bias_scale).expand([layer.out_features]).to_event(1)
            )
        self.scale = PyroSample(
            dist.HalfNormal(noise_scale)
            if out_features == 1
            else dist.HalfNormal(noise_scale).expand([out_features]).to_event(1)
        )

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Return f(x), of shape `(n,)` or `(n, out_features)`."""
        *hidden, last = self.layers
        h = x
        for layer in hidden:
            h = self.activation(layer(h))
        f = last(h)
        scale = self.scale
        if self.out_features == 1:
            f, noise = f.squeeze(-1), dist.Normal
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, scale), obs=y)
        return f
