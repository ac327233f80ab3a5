"""How sharp the training loss is about a point: its curvature, and what a random push costs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyro
import torch
from torch import Tensor

from pbnn.errors import DataError, ModelError
from pbnn.front_door import bind
from pbnn.infer.log_joint import LogJoint
from pbnn.infer.points import Points, Space
from pbnn.infer.posterior import Posterior
from pbnn.model import Data, Model, isolated

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Sharpness", "check_sharpness", "lanczos"]

# Products with the Hessian; its ends are found to a thousandth within some twenty.
_ITERATIONS = 60
_TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Sharpness:
    """Sharpness of the loss -log joint / rows at one point.

    Attributes:
        loss: The loss there.
        gradient_norm: Euclidean norm of its gradient; far from 0 the point is no optimum.
        largest: Largest eigenvalue of its Hessian, over latent values on their unconstrained space
            and constants.
        smallest: Smallest eigenvalue; below 0 the point is no minimum.
        residual: Bound of the error of `largest`: an eigenvalue lies within it.
        radii: Lengths of the random perturbations.
        increase: Mean increase of the loss at each length.
        spread: Standard deviation of the increase over perturbations.
    """

    loss: float
    gradient_norm: float
    largest: float
    smallest: float
    residual: float
    radii: tuple[float, ...]
    increase: tuple[float, ...]
    spread: tuple[float, ...]

    def to_frame(self) -> "pd.DataFrame":
        """Return the numbers as a table of quantity and value."""
        import pandas as pd

        rows = [
            ("loss", self.loss),
            ("gradient norm", self.gradient_norm),
            ("largest eigenvalue", self.largest),
            ("smallest eigenvalue", self.smallest),
        ]
        rows += [
            (f"increase at radius {radius:g}", increase)
            for radius, increase in zip(self.radii, self.increase, strict=True)
        ]
        return pd.DataFrame(rows, columns=["quantity", "value"])


def check_sharpness(
    model: Model,
    posterior: Posterior,
    x: Data,
    y: Data = None,
    *,
    radii: Sequence[float] = (0.05, 0.5),
    perturbations: int = 20,
    jacobian: bool = False,
    seed: int = 0,
    device: str | torch.device | None = None,
) -> Sharpness:
    """Measure how sharp the loss is at the mean of a posterior's draws, or at its one draw.

    The largest eigenvalue of the Hessian by Lanczos iterations on Hessian-vector products, and
    the increase of the loss at random points on spheres about the mean. Neither is invariant to how
    the network is parametrised (Dinh et al. 2017): compare points of one model.

    Args:
        model: The model that was fitted.
        posterior: Its posterior; the mean is taken on the unconstrained space, with statistics of
            BatchNorm layers recomputed for it.
        x: The training rows.
        y: Their observations.
        radii: Lengths of the perturbations, in units of the weights.
        perturbations: Number of perturbations of each length.
        jacobian: Whether log |det J| belongs to the log joint; see `pbnn.fit_map`.
        seed: Seed of the perturbations.
        device: Where to run; see `pbnn.front_door.bind`.

    Raises:
        DataError: The data or an option cannot be used.
        ModelError: The loss is not finite at the point.
        FitError: The posterior is not one of this model.
    """
    if not radii:
        raise DataError("radii is empty; expected lengths of perturbations")
    if perturbations < 2:
        raise DataError(f"perturbations={perturbations}; expected at least 2")
    for radius in radii:
        if not radius > 0:
            raise DataError(f"radius {radius}; expected a positive length")
    dtype = next(iter(posterior.draws.values())).dtype
    bound = bind(model, x, y, device=device, dtype=dtype)
    with isolated(seed, bound.device), pyro.validation_enabled(False):
        space = Space(bound)
        point = _mean(space, posterior)
        joint = LogJoint(space, point, jacobian=jacobian)
        center, rows = point.values[0], bound.rows or 1

        def loss(at: Tensor) -> float:
            return float(joint(at[None])[1]) / -rows

        here = loss(center)
        if not torch.tensor(here).isfinite():
            raise ModelError("the log joint is not finite at the mean of the draws")
        slope, product = joint.curvature(center)
        start = torch.randn_like(center)
        values, residual = lanczos(lambda v: product(v) / -rows, start)
        increases = [
            [loss(center + radius * _direction(center)) - here for _ in range(perturbations)]
            for radius in radii
        ]
    found = torch.tensor(increases, dtype=torch.float64).reshape(len(radii), perturbations)
    return Sharpness(
        loss=here,
        gradient_norm=float(torch.linalg.vector_norm(slope)) / rows,
        largest=float(values[-1]),
        smallest=float(values[0]),
        residual=residual,
        radii=tuple(map(float, radii)),
        increase=tuple(found.mean(1).tolist()),
        spread=tuple(found.std(1).tolist()),
    )


def lanczos(
    product: Callable[[Tensor], Tensor], start: Tensor, *, iterations: int = _ITERATIONS
) -> tuple[Tensor, float]:
    """Return approximate eigenvalues of a symmetric matrix, the extreme ones first to be right.

    Lanczos iterations with full reorthogonalisation (Golub & Van Loan 2013, "Matrix computations",
    section 10.1), until the largest eigenvalue is known to a relative 1e-4.

    Args:
        product: From a vector to the matrix's product with it.
        start: Any vector that is not 0, `(n,)`.
        iterations: Largest number of products.

    Returns:
        The eigenvalues of the projected matrix in rising order, and a bound of the error of the
        last one: an eigenvalue lies within it.
    """
    basis = [start / torch.linalg.vector_norm(start)]
    diagonal: list[float] = []
    beside: list[float] = []
    while True:
        vector = product(basis[-1])
        diagonal.append(float(vector @ basis[-1]))
        known = torch.stack(basis)
        for _ in range(2):  # once more, against the rounding of the first time
            vector = vector - known.T @ (known @ vector)
        rest = float(torch.linalg.vector_norm(vector))
        matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
        if beside:
            off = torch.tensor(beside, dtype=torch.float64)
            matrix += torch.diag(off, 1) + torch.diag(off, -1)
        values, vectors = torch.linalg.eigh(matrix)
        residual = rest * abs(float(vectors[-1, -1]))
        largest = float(values.abs().max())
        done = residual <= _TOLERANCE * largest or rest <= 1e-10 * largest
        if done or len(basis) >= min(iterations, len(start)):
            return values, residual
        beside.append(rest)
        basis.append(vector / rest)


def _direction(like: Tensor) -> Tensor:
    vector = torch.randn_like(like)
    length: Tensor = torch.linalg.vector_norm(vector)
    return vector / length


def _mean(space: Space, posterior: Posterior) -> Points:
    points = space.start_at(posterior)
    return points if len(points) == 1 else space.points(points.values.mean(0, keepdim=True))
