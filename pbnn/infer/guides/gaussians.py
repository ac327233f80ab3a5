"""Gaussian families as plain tensors: square roots of covariances, and densities built on them.

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

__all__ = [
    "AffineTransform",
    "DiagonalRoot",
    "Gaussian",
    "LowRankRoot",
    "MatrixNormal",
    "Root",
    "TriangularRoot",
    "VectorNormal",
    "gaussian_from_tensors",
    "unit_mean_variance",
]


class Root(Protocol):
    """An invertible n × n square root A of a covariance A Aᵀ."""

    def multiply(self, x: Tensor) -> Tensor:
        """Return A x for x of shape `(…, n, m)`."""
        ...

    def whiten(self, x: Tensor) -> Tensor:
        """Return A⁻¹ x for x of shape `(…, n, m)`."""
        ...

    def log_det(self) -> Tensor:
        """Return log|A|, half the log determinant of the covariance."""
        ...

    def variance(self) -> Tensor:
        """Return the diagonal of A Aᵀ, of shape `(n,)`."""
        ...

    def covariance(self) -> Tensor:
        """Return A Aᵀ, of shape `(n, n)`."""
        ...

    def scaled(self, factor: Tensor) -> "Root":
        """Return the root `factor · A`, for a scalar factor."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that rebuild this root."""
        ...


@dataclass(frozen=True)
class DiagonalRoot:
    """A = diag(scale).

    Attributes:
        scale: Standard deviations, `(n,)`.
    """

    scale: Tensor

    def multiply(self, x: Tensor) -> Tensor:
        """Return A x for x of shape `(…, n, m)`."""
        return self.scale.unsqueeze(-1) * x

    def whiten(self, x: Tensor) -> Tensor:
        """Return A⁻¹ x for x of shape `(…, n, m)`."""
        return x / self.scale.unsqueeze(-1)

    def log_det(self) -> Tensor:
        """Return log|A|."""
        return self.scale.log().sum(-1)

    def variance(self) -> Tensor:
        """Return the diagonal of A Aᵀ."""
        return self.scale.square()

    def covariance(self) -> Tensor:
        """Return A Aᵀ."""
        return self.scale.square().diag_embed()

    def scaled(self, factor: Tensor) -> "DiagonalRoot":
        """Return the root `factor · A`."""
        return DiagonalRoot(factor * self.scale)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that rebuild this root."""
        return {"scale": self.scale}


@dataclass(frozen=True)
class TriangularRoot:
    """A lower triangular with a positive diagonal: the Cholesky factor of any covariance.

    Attributes:
        tril: The factor, `(n, n)`.
    """

    tril: Tensor

    def multiply(self, x: Tensor) -> Tensor:
        """Return A x for x of shape `(…, n, m)`."""
        return self.tril @ x

    def whiten(self, x: Tensor) -> Tensor:
        """Return A⁻¹ x for x of shape `(…, n, m)`."""
        noise: Tensor = torch.linalg.solve_triangular(self.tril, x, upper=False)
        return noise

    def log_det(self) -> Tensor:
        """Return log|A|."""
        return self.tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def variance(self) -> Tensor:
        """Return the diagonal of A Aᵀ."""
        return self.tril.square().sum(-1)

    def covariance(self) -> Tensor:
        """Return A Aᵀ."""
        return self.tril @ self.tril.mT

    def scaled(self, factor: Tensor) -> "TriangularRoot":
        """Return the root `factor · A`."""
        return TriangularRoot(factor * self.tril)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that rebuild this root."""
        return {"tril": self.tril}


@dataclass(frozen=True)
class LowRankRoot:
    """A Aᵀ = S (I + G Gᵀ) S with S = diag(scale) and G of r columns.

    The square root is A = S (I + G (I + L)⁻¹ Gᵀ) with L the Cholesky factor of I + Gᵀ G, as
    multiplying out shows; it costs O(n r) a column, and noise of n values instead of n + r.

    Attributes:
        scale: Scales S, `(n,)`; the marginal scale of entry i is S_i sqrt(1 + |G_i|²).
        factor: G, `(n, r)`, relative to `scale`.
    """

    scale: Tensor
    factor: Tensor

    def _capacitance_root(self) -> Tensor:
        g = self.factor
        eye = torch.eye(g.shape[-1], dtype=g.dtype, device=g.device)
        root, info = torch.linalg.cholesky_ex(eye + g.mT @ g)
        # Overflow must reach the loss as NaN, where the fit stops at it, never as a traceback here.
        checked: Tensor = torch.where(info == 0, root, torch.nan)
        return checked

    def multiply(self, x: Tensor) -> Tensor:
        """Return A x for x of shape `(…, n, m)`."""
        g, root = self.factor, self._capacitance_root()
        eye = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device)
        inner: Tensor = torch.linalg.solve_triangular(eye + root, g.mT @ x, upper=False)
        return self.scale.unsqueeze(-1) * (x + g @ inner)

    def whiten(self, x: Tensor) -> Tensor:
        """Return A⁻¹ x = (I − G (I + Lᵀ)⁻¹ L⁻¹ Gᵀ) S⁻¹ x for x of shape `(…, n, m)`."""
        g, root = self.factor, self._capacitance_root()
        eye = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device)
        x = x / self.scale.unsqueeze(-1)
        inner = torch.linalg.solve_triangular(root, g.mT @ x, upper=False)
        inner = torch.linalg.solve_triangular(eye + root.mT, inner, upper=True)
        noise: Tensor = x - g @ inner
        return noise

    def log_det(self) -> Tensor:
        """Return log|A|."""
        capacitance = self._capacitance_root().diagonal(dim1=-2, dim2=-1)
        return self.scale.log().sum(-1) + capacitance.log().sum(-1)

    def variance(self) -> Tensor:
        """Return the diagonal of A Aᵀ."""
        return self.scale.square() * (1 + self.factor.square().sum(-1))

    def covariance(self) -> Tensor:
        """Return A Aᵀ."""
        g = self.scale.unsqueeze(-1) * self.factor
        return self.scale.square().diag_embed() + g @ g.mT

    def scaled(self, factor: Tensor) -> "LowRankRoot":
        """Return the root `factor · A`."""
        return LowRankRoot(factor * self.scale, self.factor)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that rebuild this root."""
        return {"scale": self.scale, "factor": self.factor}


def unit_mean_variance(root: Root) -> Root:
    """Return the root scaled so that its covariance has a diagonal of mean 1."""
    return root.scaled(root.variance().mean().rsqrt())


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


def _root_from_tensors(tensors: Mapping[str, Tensor], prefix: str = "") -> Root:
    if f"{prefix}tril" in tensors:
        return TriangularRoot(tensors[f"{prefix}tril"])
    if f"{prefix}factor" in tensors:
        return LowRankRoot(tensors[f"{prefix}scale"], tensors[f"{prefix}factor"])
    return DiagonalRoot(tensors[f"{prefix}scale"])


def gaussian_from_tensors(tensors: Mapping[str, Tensor]) -> VectorNormal | MatrixNormal:
    """Return the Gaussian whose method `tensors` gave these tensors."""
    if tensors["loc"].dim() == 1:
        return VectorNormal(tensors["loc"], _root_from_tensors(tensors))
    return MatrixNormal(
        tensors["loc"],
        tensors["scale"],
        _root_from_tensors(tensors, "row."),
        _root_from_tensors(tensors, "column."),
    )
