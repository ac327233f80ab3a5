"""Square roots of covariances as plain tensors: diagonal, diagonal plus low rank, triangular."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = [
    "DiagonalRoot",
    "LowRankRoot",
    "Root",
    "TriangularRoot",
    "root_from_tensors",
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

    def whiten_adjoint(self, x: Tensor) -> Tensor:
        """Return A⁻ᵀ x for x of shape `(…, n, m)`."""
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

    def whiten_adjoint(self, x: Tensor) -> Tensor:
        """Return A⁻ᵀ x for x of shape `(…, n, m)`."""
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

    def whiten_adjoint(self, x: Tensor) -> Tensor:
        """Return A⁻ᵀ x for x of shape `(…, n, m)`."""
        solved: Tensor = torch.linalg.solve_triangular(self.tril.mT, x, upper=True)
        return solved

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

    def whiten_adjoint(self, x: Tensor) -> Tensor:
        """Return A⁻ᵀ x = S⁻¹ (I − G L⁻ᵀ (I + L)⁻¹ Gᵀ) x for x of shape `(…, n, m)`."""
        g, root = self.factor, self._capacitance_root()
        eye = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device)
        inner = torch.linalg.solve_triangular(eye + root, g.mT @ x, upper=False)
        inner = torch.linalg.solve_triangular(root.mT, inner, upper=True)
        solved: Tensor = (x - g @ inner) / self.scale.unsqueeze(-1)
        return solved

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


def root_from_tensors(tensors: Mapping[str, Tensor], prefix: str = "") -> Root:
    """Return the root whose method `tensors` gave these tensors, named with a prefix."""
    if f"{prefix}tril" in tensors:
        return TriangularRoot(tensors[f"{prefix}tril"])
    if f"{prefix}factor" in tensors:
        return LowRankRoot(tensors[f"{prefix}scale"], tensors[f"{prefix}factor"])
    return DiagonalRoot(tensors[f"{prefix}scale"])
