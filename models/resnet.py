"""Images in classes: a residual network with random convolutions and constant normalisation.

    h     = conv3×3(x)
    h     = h + conv3×3(n(conv3×3(n(h))))            blocks times; n normalises and rectifies
    f(x)  = V mean over pixels of n(h) + c           logits
    weights ~ Normal(0, weight_scale / sqrt(fan in)) c ~ Normal(0, bias_scale)
    y_n   ~ Categorical(logits = f(x_n))

x is `(n, in_features, height, width)`, of any size; or, with `channels`, a table of pixels.
n is, by `norm`, filter response normalisation with a learned threshold ("frn", Singh & Krishnan
2020), which looks at one row alone; or BatchNorm and relu ("batch"). The parameters of n are
constants: SVI learns them, NUTS runs with `fit_nuts(…, constants=svi.constants)`.
BatchNorm runs with the statistics that it has, in every fit and prediction, which no fit changes:
load those of a trained network by `model.load_state_dict(…, strict=False)`, or take "frn".
Change: width, blocks, norm and the prior scales, by keyword.
Do not use BatchNorm untrained: it then normalises nothing. Do not run NUTS on more than toy sizes.
"""

import math
from typing import Literal

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from pbnn.priors import normal, place_priors


class FilterResponseNorm(nn.Module):
    """Filter response normalisation and a thresholded linear unit (Singh & Krishnan 2020)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, 1, 1))
        self.bias = nn.Parameter(torch.zeros(channels, 1, 1))
        self.threshold = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return max(γ x / sqrt(mean x² over pixels + ε) + β, τ)."""
        scale = (x.square().mean((-2, -1), keepdim=True) + 1e-6).rsqrt()
        return torch.maximum(self.weight * x * scale + self.bias, self.threshold)


class Block(nn.Module):
    """Two convolutions, each after a normalisation, around which the input goes as well."""

    def __init__(self, norm1: nn.Module, norm2: nn.Module, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm1, norm2
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return x + conv2(norm2(conv1(norm1(x))))."""
        output: Tensor = x + self.conv2(self.norm2(self.conv1(self.norm1(x))))
        return output


class Model(PyroModule):  # type: ignore[misc]
    """Residual network.

    Args:
        in_features: Channels of an image; of a table, its number of columns.
        out_features: Number of classes; y holds 0, …, out_features − 1.
        channels: Channels of the square images whose pixels are the columns of a table
            `(n, channels · side²)`, row by row; None for images.
        width: Channels within.
        blocks: Number of residual blocks.
        norm: "frn" or "batch".
        weight_scale: Prior scale of a weight, times sqrt(fan in).
        bias_scale: Prior scale of the biases of the logits.
    """

    def __init__(
        self,
        in_features: int,
        *,
        out_features: int = 2,
        channels: int | None = None,
        width: int = 16,
        blocks: int = 2,
        norm: Literal["frn", "batch"] = "frn",
        weight_scale: float = 1.0,
        bias_scale: float = 1.0,
    ) -> None:
        super().__init__()
        if norm not in ("frn", "batch"):
            raise ValueError(f"norm={norm!r}; expected 'frn' or 'batch'")

        def normed() -> nn.Module:
            if norm == "frn":
                return FilterResponseNorm(width)
            return nn.Sequential(nn.BatchNorm2d(width), nn.ReLU())

        self.channels = channels
        self.stem = nn.Conv2d(channels or in_features, width, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(Block(normed(), normed(), width) for _ in range(blocks))
        self.norm = normed()
        self.head = nn.Linear(width, out_features)
        place_priors(
            self,
            {
                "stem.weight": normal(weight_scale),
                "*.conv?.weight": normal(weight_scale),
                "head.weight": normal(weight_scale),
                "head.bias": normal(bias_scale),
            },
            constants="*norm*",
        )

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Return the logits f(x), of shape `(n, out_features)`."""
        h = x
        if self.channels is not None:
            side = math.isqrt(x.shape[1] // self.channels)
            h = x.reshape(len(x), self.channels, side, side)
        h = self.stem(h)
        for block in self.blocks:
            h = block(h)
        f: Tensor = self.head(self.norm(h).mean((-2, -1)))
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Categorical(logits=f), obs=y)
        return f
