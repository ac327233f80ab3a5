"""Several outputs with one trunk, each with its own noise; cells of y may be missing.

    f(x)    = W_L h(… h(W_1 x + b_1) …) + b_L        of out_features values; h = tanh unless changed
    W_l     ~ Normal(0, weight_scale / sqrt(fan in)) b_l ~ Normal(0, bias_scale)
    scale_k ~ HalfNormal(noise_scale)
    y_nk    ~ Normal(f_k(x_n), scale_k)              for each cell there is; NaN marks the others

A missing cell counts for nothing: right where cells are missing for reasons that x shows.
Change: width, depth, activation and the prior scales, by keyword.
Do not use it for outputs whose noise goes together: the noise here is independent between them.
"""

import itertools

import pyro
import pyro.distributions as dist
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn

from pbnn.priors import normal, place_priors


class Model(PyroModule):  # type: ignore[misc]
    """Multilayer perceptron with several outputs.

    Args:
        in_features: Number of columns of x.
        out_features: Number of columns of y, of shape `(n, out_features)`.
        hidden: Units in each hidden layer.
        depth: Number of hidden layers.
        activation: Name of a function in `torch.nn.functional`, such as "tanh" or "relu".
        weight_scale: Prior scale of a weight, times sqrt(fan in).
        bias_scale: Prior scale of a bias.
        noise_scale: Scale of the HalfNormal prior on each noise scale, in units of standardised y.
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
        noise_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.activation = getattr(nn.functional, activation)
        widths = [in_features, *[hidden] * depth, out_features]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        place_priors(self, {"*.weight": normal(weight_scale), "*.bias": normal(bias_scale)})
        self.scale = PyroSample(dist.HalfNormal(noise_scale).expand([out_features]).to_event(1))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Return f(x), of shape `(n, out_features)`."""
        h = x
        for layer in self.layers[:-1]:
            h = self.activation(layer(h))
        f: Tensor = self.layers[-1](h)
        cells = dist.Normal(f, self.scale)
        if y is not None:
            cells = cells.mask(~y.isnan())
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", cells.to_event(1), obs=y)
        return f
