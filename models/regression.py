"""Regression with a multilayer perceptron and one noise scale, learned from the data.

    f(x)  = W_L h(… h(W_1 x + b_1) …) + b_L          h = tanh unless changed
    W_l   ~ Normal(0, weight_scale / sqrt(fan in))   b_l ~ Normal(0, bias_scale)
    scale ~ HalfNormal(noise_scale)
    y_n   ~ Normal(f(x_n), scale)

Change: width, depth, activation and the prior scales, by keyword.
Use heteroscedastic.py when the noise depends on x, classification.py when y is a class.
"""

import itertools
from collections.abc import Sequence

import pyro
import pyro.distributions as dist
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn

from pbnn.priors import normal, place_priors


class Model(PyroModule):  # type: ignore[misc]
    """Multilayer perceptron with homoscedastic Normal noise.

    Args:
        in_features: Number of columns of x.
        out_features: Number of columns of y; with 1, y has shape `(n,)`.
        hidden: Units in each hidden layer.
        depth: Number of hidden layers.
        activation: Name of a function in `torch.nn.functional`, such as "tanh" or "relu".
        weight_scale: Prior scale of a weight, times sqrt(fan in); one, or one for each layer.
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
        weight_scale: float | Sequence[float] = 1.0,
        bias_scale: float = 1.0,
        noise_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.activation = getattr(nn.functional, activation)
        widths = [in_features, *[hidden] * depth, out_features]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        if not isinstance(weight_scale, Sequence):
            weight_scale = [weight_scale] * len(self.layers)
        weights = {f"layers.{i}.weight": normal(scale) for i, scale in enumerate(weight_scale)}
        place_priors(self, {**weights, "*.bias": normal(bias_scale)})
        outputs = [] if out_features == 1 else [out_features]
        scale = dist.HalfNormal(noise_scale).expand(outputs)
        self.scale = PyroSample(scale.to_event(len(outputs)))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Return f(x), of shape `(n,)` or `(n, out_features)`."""
        h = x
        for layer in self.layers[:-1]:
            h = self.activation(layer(h))
        f: Tensor = self.layers[-1](h)
        if f.shape[-1] == 1:
            f = f.squeeze(-1)
        scale = self.scale
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, scale).to_event(f.ndim - 1), obs=y)
        return f
