"""The log joint at many points at once, with its gradient, on all rows or on batches of them."""

from collections.abc import Callable, Mapping
from typing import Any

import pyro
import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from pbnn.errors import FitError, ModelError
from pbnn.infer.batches import Batches, check_batching
from pbnn.infer.graph import FlatGraph, agree, trace
from pbnn.infer.lane import NUMERICAL
from pbnn.infer.points import Points, Space, lane_seed
from pbnn.infer.terms import Terms
from pbnn.model import isolated, take

__all__ = ["LogJoint"]

Function = Callable[..., Any]

_SHIFT = 0.1
"""The graph is held against the model at points shifted by Normal noise of this scale."""


class LogJoint:
    """Log joint of a bound model at the points of all lanes, each on rows of its own.

    log p(y | θ, x) · rows / batch size + log p(θ): what the constants and the latent values, on
    their unconstrained space, are trained by. Calls are made inside `pbnn.model.isolated`.

    Args:
        space: The vectors.
        points: The points to begin with, one in each lane.
        batch_size: Rows in each evaluation; None takes all. Each lane takes them in its own order.
        seed: Seed of the orders.
        first: Number of the first lane, where others come before these.
        jacobian: Whether log |det J| of the bijections onto the supports is added: the density is
            then that of the unconstrained values, and else that of the values themselves.
        shift: By latent or observed site with a Normal distribution, by how many of its scales
            each lane shifts the value at which the density is taken: `(lanes, *shape)`.

    Attributes:
        space: The vectors.
        lanes: Number of lanes.
        first: Number of the first of them.
        factor: Rows / batch size.
        data: What `function` takes after the points: rows, buffers, shifts.
        function: Points `(lanes, size)` and `data` to gradient `(lanes, size)` and log joint
            `(lanes,)`; pure, so that it can become a part of what is compiled.
        graph: The flat graph that `function` is, None where the model cannot be traced.
        slow_because: Why it cannot, in words.

    Raises:
        FitError: The batch size is out of range.
        ModelError: The model's data cannot be taken in batches.
    """

    def __init__(
        self,
        space: Space,
        points: Points,
        *,
        batch_size: int | None = None,
        seed: int = 0,
        first: int = 0,
        jacobian: bool = True,
        shift: Mapping[str, Tensor] | None = None,
    ) -> None:
        bound = space.bound
        if batch_size is not None:
            check_batching(bound, batch_size)
        self.space, self.lanes, self.first = space, len(points), first
        self.factor = 1.0 if batch_size is None else (bound.rows or 1) / batch_size
        self._jacobian, self._shift = jacobian, dict(shift or {})
        self._terms = Terms(bound, list(space.constants), reads=batch_size is None)
        self._batches = [
            Batches(bound, batch_size, lane_seed(seed, first + lane, "rows"))
            for lane in range(self.lanes)
        ]
        self._batched = batch_size is not None
        self._buffers = points.buffers
        self.data: tuple[Tensor, ...] = ()
        self._in_plate = {site.name for site in bound.sites if site.row_dim is not None}
        self._set_rows(None)
        if self._batched:
            # Any rows do to find out about shapes; the first step takes those of the order.
            some = torch.arange(batch_size or 0, device=bound.device)
            self._set_rows(some.expand(self.lanes, -1))
        self.slow_because: str | None = None
        self.graph, self.function = self._prepare(points.values)

    def __call__(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return gradient `(lanes, size)` and log joint `(lanes,)` on the rows at hand."""
        gradient, value = self.function(values, *self.data)
        return gradient, value

    def advance(self) -> None:
        """Take the next rows, where they come in batches."""
        if self._batched:
            self._set_rows(torch.stack([batch.rows() for batch in self._batches]))  # type: ignore[misc]

    def set_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Set the statistics of BatchNorm layers, by name, `(lanes, *shape)`."""
        self._buffers = buffers
        self.data = (*self.data[: self._count], *self._state(), *self._shifts)

    def curvature(self, point: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the gradient of the first lane at a point, and its Hessian times vectors.

        Args:
            point: A vector `(size,)`.

        Returns:
            The gradient `(size,)`, and a function from a vector `(size,)` to the Hessian's product
            with it, by differentiating the gradient again.
        """
        own = (v if dim is None else v[0] for v, dim in zip(self.data, self._dims(), strict=True))
        with isolated(0, point.device), pyro.validation_enabled(False):
            leaf = point.detach().clone().requires_grad_()
            value = self._one(leaf, *own)
            (slope,) = torch.autograd.grad(value, leaf, create_graph=True)

        def product(vector: Tensor) -> Tensor:
            (found,) = torch.autograd.grad(
                slope, leaf, vector, retain_graph=True, materialize_grads=True
            )
            return found

        return slope.detach(), product

    def _set_rows(self, index: Tensor | None) -> None:
        """Set the rows of the next evaluations, `(lanes, batch)`; all rows of the data by None."""
        x, y = self.space.bound.x, self.space.bound.y
        if index is not None:
            x, y = take(x, index), take(y, index)
        rows = self._terms.rows(x, y)
        self._count = len(rows)
        self._shifts = tuple(
            value
            if index is None or name not in self._in_plate
            else torch.stack([own[i] for own, i in zip(value, index, strict=True)])
            for name, value in self._shift.items()
        )
        self.data = (*(row.contiguous() for row in rows), *self._state(), *self._shifts)

    def _state(self) -> tuple[Tensor, ...]:
        pairs = zip(self._terms.held, self._terms.state(), strict=True)
        return tuple(self._buffers.get(name, value) for name, value in pairs)

    def _dims(self) -> tuple[int | None, ...]:
        """Return which of the data have a leading axis of lanes."""
        rows = [0 if self._batched else None] * self._count
        state = [0 if name in self._buffers else None for name in self._terms.held]
        return (*rows, *state, *(0 for _ in self._shifts))

    def _one(self, point: Tensor, *data: Tensor) -> Tensor:
        """Return the log joint of one lane at its point `(size,)`."""
        z, constants = self.space.split(point)
        data, shifts = data[: len(data) - len(self._shift)], data[len(data) - len(self._shift) :]
        likelihood, prior = self._terms(
            self.space.latent(z),
            constants,
            data,
            self.factor,
            shift=dict(zip(self._shift, shifts, strict=True)),
            jacobian=self._jacobian,
        )
        return likelihood + prior

    def _mapped(self, values: Tensor, *data: Tensor) -> tuple[Tensor, Tensor]:
        gradient, value = vmap(grad_and_value(self._one), (0, *self._dims()))(values, *data)
        return gradient, value

    def _alone(self, values: Tensor, *data: Tensor) -> tuple[Tensor, Tensor]:
        """Do what `_mapped` does for one lane, where an axis of 1 would only cost calls."""
        own = (v if dim is None else v[0] for v, dim in zip(data, self._dims(), strict=True))
        gradient, value = grad_and_value(self._one)(values[0], *own)
        return gradient[None], value[None]

    def _lane_by_lane(self, values: Tensor, *data: Tensor) -> tuple[Tensor, Tensor]:
        """Evaluate through Python, one lane after another."""
        found = [self._in_python(point, lane, data) for lane, point in enumerate(values)]
        gradients, log_joints = zip(*found, strict=True)
        return torch.stack(gradients), torch.stack(log_joints)

    def _in_python(
        self, point: Tensor, lane: int, data: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        own = (v if dim is None else v[lane] for v, dim in zip(data, self._dims(), strict=True))
        leaf = point.detach().clone().requires_grad_()
        try:
            with torch.enable_grad():
                value = self._one(leaf, *own)
            (gradient,) = torch.autograd.grad(value, leaf, materialize_grads=True)
        except ModelError:
            raise
        except NUMERICAL:
            return torch.full_like(point, torch.nan), torch.full_like(point[0], torch.nan)
        return gradient, value.detach()

    def _prepare(self, values: Tensor) -> tuple[FlatGraph | None, Function]:
        """Trace the lanes, and hold the graph against the model where it was not traced."""
        function = self._mapped if self.lanes > 1 else self._alone
        lanes = sorted({0, self.lanes - 1})
        try:
            with isolated(0, values.device), torch.no_grad(), pyro.validation_enabled(False):
                # A model that reads its own values would leave one way in the graph; mapped, it
                # raises.
                self._mapped(values, *self.data)
                graph = trace(function, (values, *self.data))
                shifted = values + _SHIFT * torch.randn_like(values)
                found = graph(shifted, *self.data)
                expected = [self._in_python(shifted[lane], lane, self.data) for lane in lanes]
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            message = str(error).strip() or type(error).__name__
            self.slow_because = message.splitlines()[0][:200]
            return None, self._lane_by_lane
        for lane, terms in zip(lanes, expected, strict=True):
            if not agree([value[lane] for value in found], terms):
                raise FitError(
                    "the graph of the log joint gives other numbers than the model itself"
                )
        return graph, graph
