"""Counts: Poisson, or negative binomial where they spread more; zeros may have a second source.

    f(x)  = W_L h(… h(W_1 x + b_1) …) + b_L          the log rate; h = tanh unless changed
    W_l   ~ Normal(0, weight_scale / sqrt(fan in))   b_l ~ Normal(0, bias_scale)
    y_n   ~ Poisson(exp f(x_n)),  or  NegativeBinomial of mean exp f(x_n) and variance
            mean + mean² / size,  size ~ Gamma(2, 0.1)
    with zero_inflated, y_n is 0 with probability zeros instead,  zeros ~ Uniform(0, 1)

Change: the likelihood, width, depth, activation and the prior scales, by keyword; where rows were
observed for different times, add the log of the time to f. Counts stay as they are: leave y
unscaled, and let bias_scale cover the log of their mean.
Do not use it for counts out of a known number of trials, nor for zero_inflated data with few zeros:
the share of zeros then has nothing to learn from.
"""

import itertools
from typing import Any, Literal

import pyro
import pyro.distributions as dist
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn

from pbnn.priors import normal, place_priors


class Model(PyroModule):  # type: ignore[misc]
    """Multilayer perceptron of the log rate.

    Args:
        in_features: Number of columns of x; y has shape `(n,)`.
        likelihood: "poisson" or "negative_binomial".
        zero_inflated: Whether zeros have a second source.
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
        likelihood: Literal["poisson", "negative_binomial"] = "poisson",
        zero_inflated: bool = False,
        hidden: int = 50,
        depth: int = 1,
        activation: str = "tanh",
        weight_scale: float = 1.0,
        bias_scale: float = 1.0,
    ) -> None:
        super().__init__()
        if likelihood not in ("poisson", "negative_binomial"):
            raise ValueError(f"likelihood={likelihood!r}; expected poisson or negative_binomial")
        self.activation = getattr(nn.functional, activation)
        self.likelihood, self.zero_inflated = likelihood, zero_inflated
        widths = [in_features, *[hidden] * depth, 1]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        place_priors(self, {"*.weight": normal(weight_scale), "*.bias": normal(bias_scale)})
        if likelihood == "negative_binomial":
            self.size = PyroSample(dist.Gamma(2.0, 0.1))
        if zero_inflated:
            self.zeros = PyroSample(dist.Uniform(0.0, 1.0))

    def distribution(self, f: Tensor) -> Any:
        """Return the distribution of the counts at log rates f `(n,)`."""
        if self.likelihood == "poisson":
            counts = dist.Poisson(f.exp())
        else:
            counts = dist.NegativeBinomial(self.size, logits=f - self.size.log())
        return (
            dist.ZeroInflatedDistribution(counts, gate=self.zeros) if self.zero_inflated else counts
        )

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Return the log rate f(x), of shape `(n,)`."""
        h = x
        for layer in self.layers[:-1]:
            h = self.activation(layer(h))
        f: Tensor = self.layers[-1](h).squeeze(-1)
        counts = self.distribution(f)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", counts, obs=y)
        return f
