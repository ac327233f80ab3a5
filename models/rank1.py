"""Regression with rank-1 randomness: weights without priors, scaled by random vectors.

    layer(x) = (W (x ∘ s)) ∘ r + b                   W, b: constants, learned and not random
    s, r     ~ Normal(1, factor_scale)               one number for each input and output
    f(x)     = layer_L(… h(layer_1(x)) …)            h = relu unless changed
    scale    ~ HalfNormal(noise_scale)
    y_n      ~ Normal(f(x_n), scale)

The prior on W ∘ (r sᵀ) of Dusenberry et al. (2020), with one component: for K of them, fit K times
with other seeds. One latent value for each input and output, instead of one for each weight, suits
large networks. Local reparameterization and Flipout do not apply to it.
NUTS runs with `fit_nuts(…, constants=svi.constants)`. With weight_decay the log joint holds
−weight_decay / 2 · Σ W², a factor outside plate `data`, so that batches are refused.
Change: width, depth, activation, weight_decay and the prior scales, by keyword.
Do not use it for few data, where W itself is uncertain: regression.py.
"""

import itertools
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn

from pbnn.priors import place_priors


class Rank1Linear(nn.Module):
    """(W (x ∘ s)) ∘ r + b."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, bias=False)
        self.bias = nn.Parameter(torch.zeros(out_features))
        self.inputs = nn.Parameter(torch.ones(in_features))
        self.outputs = nn.Parameter(torch.ones(out_features))

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output `(n, out_features)`."""
        output: Tensor = self.linear(x * self.inputs) * self.outputs + self.bias
        return output


class Model(PyroModule):  # type: ignore[misc]
    """Multilayer perceptron with rank-1 randomness.

    Args:
        in_features: Number of columns of x; y has shape `(n,)`.
        hidden: Units in each hidden layer.
        depth: Number of hidden layers.
        activation: Name of a function in `torch.nn.functional`, such as "tanh" or "relu".
        factor_scale: Prior scale of the entries of s and r about 1.
        weight_decay: Weight of the penalty on W; 0 leaves the factor out.
        noise_scale: Scale of the HalfNormal prior on the noise scale, in units of standardised y.
    """

    def __init__(
        self,
        in_features: int,
        *,
        hidden: int = 50,
        depth: int = 2,
        activation: str = "relu",
        factor_scale: float = 0.1,
        weight_decay: float = 0.0,
        noise_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.activation = getattr(nn.functional, activation)
        self.weight_decay = weight_decay
        widths = [in_features, *[hidden] * depth, 1]
        self.layers: Any = nn.ModuleList(Rank1Linear(a, b) for a, b in itertools.pairwise(widths))
        around_one = dist.Normal(1.0, factor_scale)
        place_priors(
            self,
            {"*.inputs": around_one, "*.outputs": around_one},
            constants=("*.weight", "*.bias"),
        )
        self.scale = PyroSample(dist.HalfNormal(noise_scale))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Return f(x), of shape `(n,)`."""
        h = x
        for layer in self.layers[:-1]:
            h = self.activation(layer(h))
        f: Tensor = self.layers[-1](h).squeeze(-1)
        if self.weight_decay:
            weights = torch.cat([layer.linear.weight.flatten() for layer in self.layers])
            pyro.factor("weight_decay", -0.5 * self.weight_decay * weights.square().sum())
        scale = self.scale
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, scale), obs=y)
        return f
