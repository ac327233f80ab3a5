"""Images in classes: a small convolutional network and a softmax.

    h_1   = relu(conv3×3(x))                         width channels
    h_2   = relu(conv3×3(h_1)), every second pixel   2 · width channels
    h_3   = relu(W (h_2, averaged to 4×4) + b)       hidden units
    f(x)  = V h_3 + c                                logits
    weights ~ Normal(0, weight_scale / sqrt(fan in)) biases ~ Normal(0, bias_scale)
    y_n   ~ Categorical(logits = f(x_n))

x is `(n, in_features, height, width)`, of any size; or, with `channels`, a table of pixels.
Change: width, hidden, channels and the prior scales, by keyword. The default weight_scale, sqrt(2),
keeps the prior scale of f from shrinking layer by layer, since relu halves the mean square.
Do not run NUTS on more than toy images: it has thousands of weights. Of SVI's estimators, "local"
serves the dense layers only, "flipout" the convolutions as well.
"""

import math

import pyro
import pyro.distributions as dist
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, relu

from pbnn.priors import normal, place_priors

GRID = 4  # what images of any size are averaged to before the dense layers


class Model(PyroModule):  # type: ignore[misc]
    """Convolutional network with two convolutions and two dense layers.

    Args:
        in_features: Channels of an image; of a table, its number of columns.
        out_features: Number of classes; y holds 0, …, out_features − 1.
        channels: Channels of the square images whose pixels are the columns of a table
            `(n, channels · side²)`, row by row; None for images.
        width: Channels of the first convolution.
        hidden: Units of the dense layer.
        weight_scale: Prior scale of a weight, times sqrt(fan in).
        bias_scale: Prior scale of a bias.
    """

    def __init__(
        self,
        in_features: int,
        *,
        out_features: int = 2,
        channels: int | None = None,
        width: int = 16,
        hidden: int = 32,
        weight_scale: float = 2**0.5,
        bias_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.channels = channels
        self.conv1 = nn.Conv2d(channels or in_features, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.dense = nn.Linear(2 * width * GRID**2, hidden)
        self.head = nn.Linear(hidden, out_features)
        place_priors(self, {"*.weight": normal(weight_scale), "*.bias": normal(bias_scale)})

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Return the logits f(x), of shape `(n, out_features)`."""
        h = x
        if self.channels is not None:
            side = math.isqrt(x.shape[1] // self.channels)
            h = x.reshape(len(x), self.channels, side, side)
        h = adaptive_avg_pool2d(relu(self.conv2(relu(self.conv1(h)))), GRID)
        f: Tensor = self.head(relu(self.dense(h.flatten(1))))
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Categorical(logits=f), obs=y)
        return f
