"""Regression with outliers: a multilayer perceptron with Student-t noise, its tails learned.

    f(x)  = W_L h(… h(W_1 x + b_1) …) + b_L          h = tanh unless changed
    W_l   ~ Normal(0, weight_scale / sqrt(fan in))   b_l ~ Normal(0, bias_scale)
    scale ~ HalfNormal(noise_scale)                  df ~ Gamma(2, 0.1), so mostly 3 to 50
    y_n   ~ StudentT(df, f(x_n), scale)

The prior of df is that of Juárez & Steel (2010). The noise has standard deviation
scale · sqrt(df / (df - 2)), and none where df is 2 or less: give df a number to keep it away.
Change: width, depth, activation, prior scales and df, by keyword.
Do not use it for noise that grows with x (heteroscedastic.py): the tails would stand for it.
"""

import itertools

import pyro
import pyro.distributions as dist
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn

from pbnn.priors import normal, place_priors


class Model(PyroModule):  # type: ignore[misc]
    """Multilayer perceptron with Student-t noise.

    Args:
        in_features: Number of columns of x; y has shape `(n,)`.
        hidden: Units in each hidden layer.
        depth: Number of hidden layers.
        activation: Name of a function in `torch.nn.functional`, such as "tanh" or "relu".
        weight_scale: Prior scale of a weight, times sqrt(fan in).
        bias_scale: Prior scale of a bias.
        noise_scale: Scale of the HalfNormal prior on the t's scale, in units of standardised y.
        df: Degrees of freedom; None learns them.
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
        noise_scale: float = 1.0,
        df: float | None = None,
    ) -> None:
        super().__init__()
        self.activation = getattr(nn.functional, activation)
        widths = [in_features, *[hidden] * depth, 1]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        place_priors(self, {"*.weight": normal(weight_scale), "*.bias": normal(bias_scale)})
        self.scale = PyroSample(dist.HalfNormal(noise_scale))
        self.df = PyroSample(dist.Gamma(2.0, 0.1)) if df is None else df

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Return f(x), of shape `(n,)`."""
        h = x
        for layer in self.layers[:-1]:
            h = self.activation(layer(h))
        f: Tensor = self.layers[-1](h).squeeze(-1)
        scale, df = self.scale, self.df
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.StudentT(df, f, scale), obs=y)
        return f
