"""What the covariance of a Gaussian approximation says, block by block and never dense.

Marginals by site, leading eigenvalues and effective rank, and the variance of a linear function of
the unconstrained values. Everything is computed in float64 from the tensors that a `Posterior`
keeps.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pbnn.infer.guides.gaussians import MatrixNormal, VectorNormal, gaussian_from_tensors
from pbnn.infer.guides.roots import DiagonalRoot, LowRankRoot, Root, TriangularRoot
from pbnn.infer.guides.sites import Layout

__all__ = ["GaussianCovariance"]

# Up to this many rows eigenvalues come from the dense matrix, beyond it from Lanczos iterations.
_DENSE = 1_000


class GaussianCovariance:
    """Mean and covariance of a Gaussian approximation of the unconstrained values.

    Args:
        approximation: What `pbnn.infer.guides.approximation` returned, as `Posterior.approximation`
            keeps it.

    Attributes:
        shapes: Unconstrained shape of each site, in the model's order.
    """

    def __init__(self, approximation: Mapping[str, Any]) -> None:
        self.shapes = {name: torch.Size(shape) for name, shape in approximation["sites"]}
        tensors = {k: t.detach().double() for k, t in approximation["tensors"].items()}
        self._blocks: list[tuple[Layout, VectorNormal | MatrixNormal]] = []
        for block in approximation["blocks"]:
            prefix = block["prefix"]
            own = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
            sites = {name: self.shapes[name] for name in block["sites"]}
            self._blocks.append((Layout(sites, tuple(block["rows"])), gaussian_from_tensors(own)))

    @property
    def dim(self) -> int:
        """Number of unconstrained values."""
        return sum(shape.numel() for shape in self.shapes.values())

    def means(self) -> dict[str, Tensor]:
        """Return the mean of each site, of its unconstrained shape."""
        return self._by_site(gaussian.loc for _, gaussian in self._blocks)

    def scales(self) -> dict[str, Tensor]:
        """Return the marginal standard deviations of each site, of its unconstrained shape."""
        return self._by_site(gaussian.variance().sqrt() for _, gaussian in self._blocks)

    def _by_site(self, packed: Iterator[Tensor]) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}
        for (layout, _), value in zip(self._blocks, packed, strict=True):
            values.update(layout.unpack(value))
        return {name: values[name] for name in self.shapes}

    def entropies(self) -> dict[str, float]:
        """Return the differential entropy of each site's marginal distribution, in nats.

        D/2 (1 + log 2π) + ½ log|Σ_site|. They sum to the entropy of the whole where sites are
        independent, and to more where they are not.
        """
        found = {}
        for layout, gaussian in self._blocks:
            start = 0
            for name, shape in layout.sites.items():
                size = shape.numel() // math.prod(layout.rows)
                log_det = _marginal_log_det(gaussian, slice(start, start + size))
                found[name] = shape.numel() / 2 * (1 + math.log(2 * math.pi)) + log_det
                start += size
        return {name: found[name] for name in self.shapes}

    def entropy(self) -> float:
        """Return the differential entropy of all unconstrained values together, in nats."""
        log_det = sum(float(gaussian.log_det()) for _, gaussian in self._blocks)
        return float(self.dim / 2 * (1 + math.log(2 * math.pi)) + log_det)

    def effective_rank(self) -> float:
        """Return (Σλ)² / Σλ² over the eigenvalues λ of the covariance, from trace and norm alone.

        It is the number of values for equal eigenvalues, and 1 for a single one above 0.
        """
        moments = [_trace_and_square(gaussian) for _, gaussian in self._blocks]
        trace, square = (sum(parts) for parts in zip(*moments, strict=True))
        return float(trace**2 / square)

    def leading_eigenvalues(self, count: int = 10) -> Tensor:
        """Return the largest eigenvalues of the covariance (variances), in falling order."""
        every = [_leading(gaussian, count) for _, gaussian in self._blocks]
        return torch.cat(every).sort(descending=True).values[:count]

    def variance_of(self, gradients: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the variance gᵀΣg of linear functions, and its diagonal part Σ_i g_i² Σ_ii.

        Args:
            gradients: g by site, each `(…, *unconstrained_shape)`.

        Returns:
            Variance and its diagonal part, each `(…)`; the cross part is their difference.
        """
        total = diagonal = torch.zeros((), dtype=torch.float64)
        for layout, gaussian in self._blocks:
            g = layout.pack({name: gradients[name].double() for name in layout.sites})
            whole = tuple(range(-gaussian.loc.dim(), 0))
            if isinstance(gaussian, MatrixNormal):
                half = _half(gaussian.row, _half(gaussian.column, g).mT) * gaussian.scale
            else:
                half = _half(gaussian.root, g)
            total = total + half.square().sum(whole)
            diagonal = diagonal + (g.square() * gaussian.variance()).sum(whole)
        return total, diagonal


def _half(root: Root, x: Tensor) -> Tensor:
    """Return a vector `(…, m)` with the squared norm xᵀ A Aᵀ x, for x of shape `(…, n)`."""
    if isinstance(root, LowRankRoot):
        scaled = x * root.scale
        return torch.cat([scaled, scaled @ root.factor], -1)
    if isinstance(root, TriangularRoot):
        return x @ root.tril
    assert isinstance(root, DiagonalRoot)
    return x * root.scale


def _cut_log_det(root: Root, rows: slice) -> float:
    """Return half the log determinant of the rows and columns `rows` of A Aᵀ."""
    if isinstance(root, LowRankRoot):
        return float(LowRankRoot(root.scale[rows], root.factor[rows]).log_det())
    if isinstance(root, TriangularRoot):
        cut = root.tril[rows]
        # The QR of the transposed rows has the determinant without squaring them first.
        corner = torch.linalg.qr(cut.mT, mode="r").R
        return float(corner.diagonal().abs().log().sum())
    assert isinstance(root, DiagonalRoot)
    return float(root.scale[rows].log().sum())


def _marginal_log_det(gaussian: VectorNormal | MatrixNormal, columns: slice) -> float:
    """Return half the log determinant of the marginal covariance of some packed columns."""
    if isinstance(gaussian, VectorNormal):
        return _cut_log_det(gaussian.root, columns)
    rows, count = gaussian.loc.shape[0], columns.stop - columns.start
    roots = count * float(gaussian.row.log_det()) + rows * _cut_log_det(gaussian.column, columns)
    return float(rows * count * gaussian.scale.log() + roots)


def _root_moments(root: Root) -> tuple[float, float]:
    """Return the trace and the squared Frobenius norm of A Aᵀ."""
    trace = float(root.variance().sum())
    if isinstance(root, LowRankRoot):
        u = root.scale[:, None] * root.factor
        own = root.scale.square()
        cross = 2 * (own * u.square().sum(1)).sum() + (u.mT @ u).square().sum()
        return trace, float(own.square().sum() + cross)
    if isinstance(root, TriangularRoot):
        return trace, float((root.tril.mT @ root.tril).square().sum())
    return trace, float(root.variance().square().sum())


def _trace_and_square(gaussian: VectorNormal | MatrixNormal) -> tuple[float, float]:
    """Return the trace and the squared Frobenius norm of a block's covariance."""
    if isinstance(gaussian, VectorNormal):
        return _root_moments(gaussian.root)
    (trace_u, square_u), (trace_v, square_v) = map(_root_moments, (gaussian.row, gaussian.column))
    variance = float(gaussian.scale) ** 2
    return variance * trace_u * trace_v, variance**2 * square_u * square_v


def _root_leading(root: Root, count: int) -> Tensor:
    """Return the largest eigenvalues of A Aᵀ, at most `count` of them."""
    n = len(root.variance())
    if isinstance(root, DiagonalRoot):
        return root.variance().topk(min(count, n)).values
    if n <= max(_DENSE, count + 1):
        exact: Tensor = torch.linalg.eigvalsh(root.covariance()).flip(0)[:count]
        return exact

    from scipy.sparse.linalg import LinearOperator, eigsh  # type: ignore[import-untyped]

    def times(x: Any) -> Any:
        return _times(root, torch.from_numpy(np.ascontiguousarray(x))).numpy()

    operator = LinearOperator((n, n), matvec=times, dtype=np.float64)
    # A fixed start: the same bits at each call.
    values = eigsh(operator, k=count, v0=np.ones(n), tol=1e-9, return_eigenvectors=False)
    return torch.from_numpy(np.sort(values)[::-1].copy())


def _times(root: Root, x: Tensor) -> Tensor:
    """Return A Aᵀ x for a vector x `(n,)`."""
    if isinstance(root, LowRankRoot):
        scaled = root.scale * x.reshape(-1)
        return root.scale * (scaled + root.factor @ (root.factor.mT @ scaled))
    assert isinstance(root, TriangularRoot)
    product: Tensor = root.tril @ (root.tril.mT @ x.reshape(-1))
    return product


def _leading(gaussian: VectorNormal | MatrixNormal, count: int) -> Tensor:
    if isinstance(gaussian, VectorNormal):
        return _root_leading(gaussian.root, count)
    rows, columns = (_root_leading(root, count) for root in (gaussian.row, gaussian.column))
    products: Tensor = gaussian.scale.square() * torch.outer(rows, columns).flatten()
    return products.topk(min(count, len(products))).values
