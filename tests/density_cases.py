"""Densities written by hand, with their gradients, and a plain recursive NUTS: the references."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Density = Callable[[Tensor], tuple[Tensor, Tensor]]

SCHOOLS_Y = (28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0)
SCHOOLS_SCALE = (15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0)


def independent(scale: Tensor) -> Density:
    """Normal with mean 0 and independent coordinates of the given scales."""

    def density(z: Tensor) -> tuple[Tensor, Tensor]:
        return -0.5 * ((z / scale) ** 2).sum(1), -z / scale**2

    return density


def correlated(mean: Tensor, covariance: Tensor) -> Density:
    """Multivariate Normal."""
    precision = torch.linalg.inv(covariance)

    def density(z: Tensor) -> tuple[Tensor, Tensor]:
        pull = (z - mean) @ precision
        return -0.5 * (pull * (z - mean)).sum(1), -pull

    return density


def funnel(z: Tensor) -> tuple[Tensor, Tensor]:
    """Neal's funnel: z₀ ~ N(0, 3), the others N(0, exp(z₀/2))."""
    v, x = z[:, :1], z[:, 1:]
    inverse = (-v).exp()
    squares = (x**2).sum(1, keepdim=True)
    value = -(v**2) / 18 - 0.5 * squares * inverse - 0.5 * x.shape[1] * v
    slope = -v / 9 + 0.5 * squares * inverse - 0.5 * x.shape[1]
    return value[:, 0], torch.cat([slope, -x * inverse], 1)


def schools(z: Tensor) -> tuple[Tensor, Tensor]:
    """Eight schools, non-centred: z = (mu, log tau, 8 standard effects).

    mu ~ N(0, 5), tau ~ HalfCauchy(5), theta = mu + tau·effect, y ~ N(theta, known scale).
    """
    y, scale = z.new_tensor(SCHOOLS_Y), z.new_tensor(SCHOOLS_SCALE)
    mu, log_tau, effect = z[:, :1], z[:, 1:2], z[:, 2:]
    tau = log_tau.exp()
    error = (y - mu - tau * effect) / scale
    ratio = (tau / 5) ** 2
    value = -0.5 * (error**2 + effect**2).sum(1)
    value = value + (-((mu / 5) ** 2) / 2 - torch.log1p(ratio) + log_tau)[:, 0]
    pull = error / scale
    slope_mu = pull.sum(1, keepdim=True) - mu / 25
    slope_tau = (pull * tau * effect).sum(1, keepdim=True) - 2 * ratio / (1 + ratio) + 1
    return value, torch.cat([slope_mu, slope_tau, pull * tau - effect], 1)


@dataclass
class RecursiveNuts:
    """Stan's NUTS as its recursion, one chain, with given directions and no choice of a sample.

    `extra` switches Stan's tests across the seam of a tree's halves.
    """

    density: Density
    step_size: float
    max_depth: int = 10
    extra: bool = True

    def __call__(self, z: Tensor, r: Tensor, directions: Sequence[int]) -> tuple[int, int]:
        """Return depth and number of leapfrogs of the trajectory from position z, momentum r."""
        value, gradient = self._at(z)
        self.energy = float(0.5 * r @ r - value)
        self.leapfrogs = 0
        ends = {1: (z, r, gradient), -1: (z, r, gradient)}
        total, edge, depth = r, {1: r, -1: r}, 0
        while depth < self.max_depth:
            way = directions[depth]
            valid, ends[way], first, last, new = self._build(depth, ends[way], way)
            if not valid:
                break
            depth += 1
            turns = self._turns(total, new, edge[-way], edge[way], first, last)
            total, edge[way] = total + new, last
            if turns:
                break
        return depth, self.leapfrogs

    def _at(self, z: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient = self.density(z[None])
        return value[0], gradient[0]

    def _build(self, depth, end, way):
        if depth == 0:
            z, r, gradient = end
            r = r + 0.5 * way * self.step_size * gradient
            z = z + way * self.step_size * r
            value, gradient = self._at(z)
            r = r + 0.5 * way * self.step_size * gradient
            self.leapfrogs += 1
            error = float(0.5 * r @ r - value) - self.energy
            return math.isfinite(error) and error < 1000, (z, r, gradient), r, r, r
        valid, end, a, b, one = self._build(depth - 1, end, way)
        if not valid:
            return False, end, a, b, one
        valid, end, c, d, two = self._build(depth - 1, end, way)
        if not valid:
            return False, end, a, d, one
        return not self._turns(one, two, a, b, c, d), end, a, d, one + two

    def _turns(self, one, two, a, b, c, d) -> bool:
        """Test a tree with halves of momentum sums one and two, and end momenta a, b and c, d."""
        tests = [(one + two, a, d)]
        if self.extra:
            tests += [(one + c, a, c), (two + b, b, d)]
        return any(bool(rho @ p <= 0) or bool(rho @ q <= 0) for rho, p, q in tests)
