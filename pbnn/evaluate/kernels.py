"""Kernels in closed form of the Gaussian processes that wide one-layer networks tend to."""

from dataclasses import dataclass
from math import pi
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from pbnn.errors import DataError, ModelError
from pbnn.model import Data, Model
from pbnn.prediction import function_draws, sample_prior

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["KernelCheck", "arccosine_kernel", "arcsine_kernel", "check_kernel", "limit_kernel"]

_LIMIT = 4.0
"""Standard errors: of a hundred correct entries, none is beyond it in 99 of 100 checks."""


def arcsine_kernel(covariance: Tensor) -> Tensor:
    """Return E[erf(u) erf(v)] for Gaussian pre-activations of mean 0.

    (Williams 1997, "Computing with infinite networks", eq. 11.)

    Args:
        covariance: Covariance of the pre-activations at n inputs, `(n, n)`.

    Returns:
        The covariance of one unit's activations, `(n, n)`.
    """
    # Its own 1 + 2 Σ_ii, so that the diagonal is never beyond the range of arcsin.
    size = (1 + 2 * covariance.diagonal()).sqrt()
    ratio = 2 * covariance / torch.outer(size, size)
    return 2 / pi * ratio.clamp(-1.0, 1.0).asin()


def arccosine_kernel(covariance: Tensor) -> Tensor:
    """Return E[relu(u) relu(v)] for Gaussian pre-activations of mean 0.

    (Cho & Saul 2009, "Kernel methods for deep learning", eqs. 3 and 6: half of theirs, whose
    integral has a factor of 2.)

    Args:
        covariance: Covariance of the pre-activations at n inputs, `(n, n)`.

    Returns:
        The second moments of one unit's activations, `(n, n)`.
    """
    size = covariance.diagonal().sqrt()
    both = torch.outer(size, size)
    cosine = torch.where(both > 0, covariance / both, 0.0).clamp(-1.0, 1.0)
    angle = cosine.acos()
    found: Tensor = both * ((1 - cosine.square()).sqrt() + (pi - angle) * cosine) / (2 * pi)
    return found


def limit_kernel(
    x: Tensor,
    *,
    activation: Literal["erf", "relu"],
    weight_scale: float = 1.0,
    bias_scale: float = 1.0,
    output_weight_scale: float | None = None,
    output_bias_scale: float | None = None,
) -> Tensor:
    """Return the prior covariance of f, the output of a one-layer network, at some inputs.

    f(x) = Σ_j v_j h(w_j · x + b_j) + c with independent priors of mean 0. As the width grows, f
    tends to the Gaussian process of this kernel (Neal 1996, "Bayesian learning for neural
    networks", section 2.1); the covariance itself is the same at every width. For the other
    activations of the model files, such as tanh, there is no closed form.

    Args:
        x: Inputs `(n, features)`.
        activation: h.
        weight_scale: Prior scale of w, times sqrt(features): `weight_scale` of the model files.
        bias_scale: Prior scale of b.
        output_weight_scale: Prior scale of v, times sqrt(width); by default `weight_scale`.
        output_bias_scale: Prior scale of c; by default `bias_scale`.

    Returns:
        `(n, n)`, in float64.

    Raises:
        DataError: x is no matrix of finite numbers.
        ModelError: There is no kernel for the activation.
    """
    kernels = {"erf": arcsine_kernel, "relu": arccosine_kernel}
    if activation not in kernels:
        raise ModelError(f"activation={activation!r}; expected one of {', '.join(kernels)}")
    x = torch.as_tensor(x).double().cpu()
    if x.ndim != 2 or not x.isfinite().all():
        raise DataError(f"x has shape {tuple(x.shape)}; expected finite numbers (n, features)")
    covariance = bias_scale**2 + weight_scale**2 * (x @ x.T) / x.shape[1]
    outer = weight_scale if output_weight_scale is None else output_weight_scale
    constant = bias_scale if output_bias_scale is None else output_bias_scale
    return outer**2 * kernels[activation](covariance) + constant**2


@dataclass(frozen=True)
class KernelCheck:
    """The prior covariance of a network's output against a kernel.

    Attributes:
        table: By pair of rows (`row`, `other`) the covariance of the `network` over draws, its
            Monte Carlo `error`, the `kernel`, and `z`, the difference in units of the error.
    """

    table: "pd.DataFrame"

    @property
    def agrees(self) -> bool:
        """Whether no entry is more than 4 of its Monte Carlo errors away from the kernel."""
        return bool((self.table["z"].abs() < _LIMIT).all())

    def __str__(self) -> str:
        place = int(self.table["z"].abs().to_numpy().argmax())
        row, (first, second) = self.table.iloc[place], self.table.index.tolist()[place]
        verdict = "agrees with" if self.agrees else "is not that of"
        return (
            f"the network's prior covariance {verdict} the kernel: at rows {first} and {second}, "
            f"the worst of {len(self.table)} pairs, it is {row['network']:.4g} ± "
            f"{row['error']:.2g} and the kernel {row['kernel']:.4g} ({row['z']:+.1f} errors)"
        )


def check_kernel(
    model: Model,
    x: Data,
    kernel: Tensor,
    *,
    draws: int = 2000,
    seed: int = 0,
    device: str | torch.device | None = None,
) -> KernelCheck:
    """Hold a model's prior against the kernel that it should have, within Monte Carlo error.

    A prior that is not the one that was meant (a scale for a variance, a fan-in forgotten) shows
    here before any fit:

        kernel = limit_kernel(x, activation="relu", weight_scale=1.5)
        print(check_kernel(model, x, kernel))

    Args:
        model: A model with one output f(x) of mean 0 under its prior.
        x: Inputs `(n, …)`, as the model takes them; ten are plenty.
        kernel: Covariance of f at these inputs, `(n, n)`.
        draws: Number of draws from the prior.
        seed: Seed.
        device: Where to run.

    Raises:
        DataError: The kernel has another shape, or draws is below 2.
        ModelError: f(x) has several outputs, or a prior cannot be sampled.
    """
    import pandas as pd

    if draws < 2:
        raise DataError(f"draws is {draws}; expected 2 or more")
    prior = sample_prior(model, x, draws=draws, seed=seed, device=device)
    f = function_draws(model, prior, x, device=device)[0].double()
    if f.shape[2] != 1:
        raise ModelError(f"f(x) has {f.shape[2]} outputs; expected one")
    rows = f.shape[1]
    if kernel.shape != (rows, rows):
        raise DataError(f"the kernel has shape {tuple(kernel.shape)}; expected ({rows}, {rows})")
    first, second = torch.triu_indices(rows, rows)
    products = f[:, first, 0] * f[:, second, 0]
    network, error = products.mean(0), products.std(0) / draws**0.5
    expected = kernel.double().cpu()[first, second]
    index = pd.MultiIndex.from_arrays([first.tolist(), second.tolist()], names=["row", "other"])
    columns = {
        "network": network,
        "error": error,
        "kernel": expected,
        "z": (network - expected) / error,
    }
    return KernelCheck(pd.DataFrame({k: v.numpy() for k, v in columns.items()}, index=index))
