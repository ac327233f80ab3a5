"""Images in classes: a small convolutional network and a softmax.

    h_1   = relu(conv3×3(x))                         width channels
    h_2   = relu(conv3×3(h_1)), every second pixel   2 · width channels
    h_3   = relu(W h_2 + b)                          hidden units
    f(x)  = V h_3 + c                                logits
    weights ~ Normal(0, weight_scale / sqrt(fan in)) biases ~ Normal(0, bias_scale)
    y_n   ~ Categorical(logits = f(x_n))

x is `(n, in_features)` with the pixels of each channel row by row, or `(n, channels, side, side)`.
Change: width, hidden, channels and the prior scales, by keyword. With relu, weight_scale = sqrt(2)
keeps the prior scale of f from shrinking layer by layer.
Do not use it for NUTS but on the smallest images: it has thousands of weights. Local
reparameterization does not serve a convolution; estimator="flipout" does.
"""

import math

import pyro
import pyro.distributions as dist
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.nn.functional import relu

from pbnn.priors import normal, place_priors


class Model(PyroModule):  # type: ignore[misc]
    """Convolutional network with two convolutions and two dense layers.

    Args:
        in_features: Number of values of an image: channels · side².
        out_features: Number of classes; y holds 0, …, out_features − 1.
        channels: Channels of an image.
        width: Channels of the first convolution.
        hidden: Units of the hidden dense layer.
        weight_scale: Prior scale of a weight, times sqrt(fan in).
        bias_scale: Prior scale of a bias.
    """

    def __init__(
        self,
        in_features: int,
        *,
        out_features: int = 2,
        channels: int = 1,
        width: int = 16,
        hidden: int = 32,
        weight_scale: float = 1.0,
        bias_scale: float = 1.0,
    ) -> None:
        super().__init__()
        side = math.isqrt(in_features // channels)
        if channels * side**2 != in_features:
            raise ValueError(f"in_features={in_features} is not channels={channels} times a square")
        self.image = (channels, side, side)
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.dense = nn.Linear(2 * width * math.ceil(side / 2) ** 2, hidden)
        self.head = nn.Linear(hidden, out_features)
        place_priors(self, {"*.weight": normal(weight_scale), "*.bias": normal(bias_scale)})

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Return the logits f(x), of shape `(n, out_features)`."""
        h = relu(self.conv1(x.reshape(-1, *self.image)))
        h = relu(self.conv2(h)).flatten(1)
        f: Tensor = self.head(relu(self.dense(h)))
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Categorical(logits=f), obs=y)
        return f
