"""Gaussian families as plain tensors: a mean and roots of covariances (roots.py) with a density.

Nothing here learns (see blocks.py) and nothing knows a model (see drawing.py). Every family is an
invertible affine map of standard Normal noise, so that the density of a draw needs no solve:
log q(value) = log N(noise; 0, I) − log|d value / d noise|.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.transforms import Transform

from pbnn.infer.guides.roots import Root, root_from_tensors

__all__ = [
    "AffineTransform",
    "Gaussian",
    "MatrixNormal",
    "VectorNormal",
    "gaussian_from_tensors",
]


def _standard_log_density(noise: Tensor, event_dim: int) -> Tensor:
    squared = noise.square().flatten(-event_dim).sum(-1)
    size = math.prod(noise.shape[-event_dim:])
    return -0.5 * (squared + size * math.log(2 * math.pi))


class Gaussian(Protocol):
    """A Gaussian over one tensor `value`, built from noise of the same shape."""

    @property
    def loc(self) -> Tensor:
        """Mean, of the shape of one value."""
        ...

    def transform(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the value of standard Normal noise `(…, *loc.shape)` and its log density `(…)`."""
        ...

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density `(…)` of values `(…, *loc.shape)`."""
        ...

    def whiten(self, value: Tensor) -> Tensor:
        """Return the noise that `transform` maps to values `(…, *loc.shape)`."""
        ...

    def descent(self, noise: Tensor) -> Tensor:
        """Return −∇ log q at the value that `transform` makes of noise `(…, *loc.shape)`.

        It is Σ⁻¹ (value − loc), had from the noise without a difference of close numbers.
        """
        ...

    def variance(self) -> Tensor:
        """Return the marginal variances, of the shape of one value."""
        ...

    def log_det(self) -> Tensor:
        """Return log|d value / d noise|, half the log determinant of the covariance."""
        ...

    def covariance(self) -> Tensor:
        """Return the dense covariance of the value flattened row by row, `(D, D)`."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that rebuild this Gaussian."""
        ...


class _Density:
    """What every Gaussian here derives from its mean, variances and determinant."""

    def kl_to_normal(self: Gaussian, loc: Tensor, scale: Tensor) -> Tensor:
        """Return the Kullback-Leibler divergence to independent Normals, in closed form.

        ½ [ Σ_i (Σ_ii + (m_i − loc_i)²) / scale_i² − D + Σ_i log scale_i² − log|Σ| ]

        Args:
            loc: Means of the Normals, broadcast to the shape of one value.
            scale: Their standard deviations, broadcast likewise.
        """
        loc, scale = loc.expand(self.loc.shape), scale.expand(self.loc.shape)
        ratio = (self.variance() + (self.loc - loc).square()) / scale.square()
        return 0.5 * (ratio - 1).sum() + scale.log().sum() - self.log_det()

    def entropy(self: Gaussian) -> Tensor:
        """Return the entropy, log|A| + ½ D (1 + log 2π)."""
        return self.log_det() + 0.5 * self.loc.numel() * (1 + math.log(2 * math.pi))


@dataclass(frozen=True)
class VectorNormal(_Density):
    """N(loc, A Aᵀ) over a vector.

    Attributes:
        loc: Mean, `(D,)`.
        root: The square root A.
    """

    loc: Tensor
    root: Root

    def transform(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the value of standard Normal noise `(…, D)`, and its log density `(…)`."""
        value = self.loc + self.root.multiply(noise.unsqueeze(-1)).squeeze(-1)
        return value, _standard_log_density(noise, 1) - self.log_det()

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density `(…)` of values `(…, D)`."""
        return _standard_log_density(self.whiten(value), 1) - self.log_det()

    def whiten(self, value: Tensor) -> Tensor:
        """Return the noise `(…, D)` that `transform` maps to values `(…, D)`."""
        return self.root.whiten((value - self.loc).unsqueeze(-1)).squeeze(-1)

    def descent(self, noise: Tensor) -> Tensor:
        """Return −∇ log q = A⁻ᵀ noise at the value of noise `(…, D)`."""
        return self.root.whiten_adjoint(noise.unsqueeze(-1)).squeeze(-1)

    def variance(self) -> Tensor:
        """Return the marginal variances, `(D,)`."""
        return self.root.variance()

    def log_det(self) -> Tensor:
        """Return log|A|."""
        return self.root.log_det()

    def covariance(self) -> Tensor:
        """Return the dense covariance, `(D, D)`."""
        return self.root.covariance()

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that rebuild this Gaussian."""
        return {"loc": self.loc, **self.root.tensors()}


@dataclass(frozen=True)
class MatrixNormal(_Density):
    """W = loc + scale · A E Bᵀ with E iid N(0, 1): Cov(vec W, row by row) = scale² · U ⊗ V.

    U = A Aᵀ couples the rows (outputs) and V = B Bᵀ the columns (inputs). Louizos & Welling 2016,
    "Structured and efficient variational deep learning with matrix Gaussian posteriors", section 3.

    Attributes:
        loc: Mean, `(out, in)`.
        scale: Standard deviation shared by all entries, a scalar.
        row: The root A, `(out, out)`.
        column: The root B, `(in, in)`.
    """

    loc: Tensor
    scale: Tensor
    row: Root
    column: Root

    def transform(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the value of standard Normal noise `(…, out, in)`, and its log density `(…)`."""
        spread = self.column.multiply(self.row.multiply(noise).mT).mT
        log_q = _standard_log_density(noise, 2) - self.log_det()
        return self.loc + self.scale * spread, log_q

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density `(…)` of values `(…, out, in)`."""
        return _standard_log_density(self.whiten(value), 2) - self.log_det()

    def whiten(self, value: Tensor) -> Tensor:
        """Return the noise `(…, out, in)` that `transform` maps to values `(…, out, in)`."""
        spread = (value - self.loc) / self.scale
        return self.column.whiten(self.row.whiten(spread).mT).mT

    def descent(self, noise: Tensor) -> Tensor:
        """Return −∇ log q = A⁻ᵀ E B⁻¹ / scale at the value of noise E `(…, out, in)`."""
        spread = self.row.whiten_adjoint(noise)
        return self.column.whiten_adjoint(spread.mT).mT / self.scale

    def variance(self) -> Tensor:
        """Return the marginal variances scale² U_ii V_jj, `(out, in)`."""
        return self.scale.square() * torch.outer(self.row.variance(), self.column.variance())

    def log_det(self) -> Tensor:
        """Return log|d W / d E| = out·in·log scale + in·log|A| + out·log|B|."""
        out, columns = self.loc.shape
        roots = columns * self.row.log_det() + out * self.column.log_det()
        return out * columns * self.scale.log() + roots

    def covariance(self) -> Tensor:
        """Return the dense covariance of W flattened row by row, `(out·in, out·in)`."""
        covariance = torch.kron(self.row.covariance(), self.column.covariance())
        return self.scale.square() * covariance

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that rebuild this Gaussian."""
        return {
            "loc": self.loc,
            "scale": self.scale,
            **{f"row.{name}": tensor for name, tensor in self.row.tensors().items()},
            **{f"column.{name}": tensor for name, tensor in self.column.tensors().items()},
        }


class AffineTransform(Transform):
    """The map from noise to value of a Gaussian, for torch's TransformedDistribution.

    The density of a draw needs no solve, since the noise behind it is kept. And unlike torch's
    LowRankMultivariateNormal, it holds scales, not their squares, so that 1e-30 stays above zero in
    float32, and a factor that is too large for its Cholesky gives NaN, not an error.

    Args:
        gaussian: The Gaussian.
    """

    bijective = True

    def __init__(self, gaussian: Gaussian) -> None:
        super().__init__(cache_size=1)
        self.gaussian = gaussian
        self.domain = self.codomain = constraints.independent(constraints.real, gaussian.loc.dim())

    def _call(self, x: Tensor) -> Tensor:
        return self.gaussian.transform(x)[0]

    def _inverse(self, y: Tensor) -> Tensor:
        return self.gaussian.whiten(y)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Return log|d y / d x|."""
        return self.gaussian.log_det().expand(x.shape[: x.dim() - self.gaussian.loc.dim()])


def gaussian_from_tensors(tensors: Mapping[str, Tensor]) -> VectorNormal | MatrixNormal:
    """Return the Gaussian whose method `tensors` gave these tensors."""
    if tensors["loc"].dim() == 1:
        return VectorNormal(tensors["loc"], root_from_tensors(tensors))
    return MatrixNormal(
        tensors["loc"],
        tensors["scale"],
        root_from_tensors(tensors, "row."),
        root_from_tensors(tensors, "column."),
    )
