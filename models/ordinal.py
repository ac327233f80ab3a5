"""Ordered classes (grades, stages): one function of x and learned cut points along it.

    f(x)  = w · h(… h(W_1 x + b_1) …)                h = tanh unless changed; no last bias
    W_l   ~ Normal(0, weight_scale / sqrt(fan in))   b_l ~ Normal(0, bias_scale)
    c_1   ~ Normal(−1, 2)                            c_k − c_{k−1} ~ LogNormal(0, 1)
    P(y_n ≤ k) = sigmoid(c_{k+1} − f(x_n))           y = 0, …, out_features − 1

(McCullagh 1980.) The cut points take the place of a last bias, which could not be told from them.
Their likelihood is written out, since Pyro's OrderedLogistic cannot be mapped over chains.
Change: width, depth, activation and the prior scales, by keyword.
Do not use it where x moves the ends apart and not all levels one way: classification.py assumes no
order.
"""

import itertools

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn

from pbnn.priors import normal, place_priors


class Model(PyroModule):  # type: ignore[misc]
    """Cumulative logit model with a multilayer perceptron.

    Args:
        in_features: Number of columns of x; y has shape `(n,)`.
        out_features: Number of levels, 3 or more; y holds 0, …, out_features − 1.
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
        out_features: int = 3,
        hidden: int = 50,
        depth: int = 1,
        activation: str = "tanh",
        weight_scale: float = 1.0,
        bias_scale: float = 1.0,
    ) -> None:
        super().__init__()
        if out_features < 3:
            raise ValueError(f"out_features={out_features}; expected 3 levels or more (binary.py)")
        self.activation = getattr(nn.functional, activation)
        widths = [in_features, *[hidden] * depth]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.last = nn.Linear(widths[-1], 1, bias=False)
        place_priors(self, {"*.weight": normal(weight_scale), "*.bias": normal(bias_scale)})
        self.first = PyroSample(dist.Normal(-1.0, 2.0))
        self.gaps = PyroSample(dist.LogNormal(0.0, 1.0).expand([out_features - 2]).to_event(1))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Return f(x), of shape `(n,)`."""
        h = x
        for layer in self.layers:
            h = self.activation(layer(h))
        f: Tensor = self.last(h).squeeze(-1)
        logits = log_probabilities(f, self.first, self.gaps)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Categorical(logits=logits), obs=y)
        return f


def log_probabilities(f: Tensor, first: Tensor, gaps: Tensor) -> Tensor:
    """Return log P(y = k) at f `(n,)`, of shape `(n, levels)`.

    sigmoid(a) − sigmoid(b) = sigmoid(a) · sigmoid(−b) · (1 − exp(b − a)): no difference of close
    numbers, however far f is from the cut points.
    """
    cuts = first + torch.cat([torch.zeros_like(gaps[:1]), gaps.cumsum(0)])
    below, end = cuts - f.unsqueeze(-1), torch.zeros_like(f).unsqueeze(-1)
    within = (-torch.expm1(-gaps)).log()
    zero = torch.zeros_like(gaps[:1])
    return (
        torch.cat([nn.functional.logsigmoid(below), end], -1)
        + torch.cat([end, nn.functional.logsigmoid(-below)], -1)
        + torch.cat([zero, within, zero])
    )
