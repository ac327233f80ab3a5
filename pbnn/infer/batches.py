"""Rows of the data for each step of SVI: all of them, or batches in a shuffled order."""

from typing import Any

import torch
from torch import Tensor

from pbnn.errors import FitError, ModelError
from pbnn.model import BoundModel, Data, take

__all__ = ["Batches", "check_batching"]


class Batches:
    """An endless stream of x, y and the factor rows / batch size.

    The rows come from permutations of all rows, one after another; a batch may take the end of one
    and the beginning of the next, so that every batch has the same size.

    Args:
        bound: The model and its data.
        size: Rows in each batch; None gives all rows, in their own order.
        seed: Seed of the order.
    """

    def __init__(self, bound: BoundModel, size: int | None, seed: int) -> None:
        self._bound = bound
        self._size = size
        # The order of rows is drawn on the CPU, so that it is the same on every device.
        self._generator = torch.Generator().manual_seed(seed)
        self._queue = torch.empty(0, dtype=torch.int64)

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> tuple[Data, Data, float]:
        bound, index = self._bound, self.rows()
        if index is None or bound.rows is None:
            return bound.x, bound.y, 1.0
        return take(bound.x, index), take(bound.y, index), bound.rows / len(index)

    def rows(self) -> Tensor | None:
        """Return the numbers of the rows of the next batch; None for all of them."""
        bound, size = self._bound, self._size
        if size is None or bound.rows is None:
            return None
        while len(self._queue) < size:
            order = torch.randperm(bound.rows, generator=self._generator)
            self._queue = torch.cat([self._queue, order])
        index, self._queue = self._queue[:size].to(bound.device), self._queue[size:]
        return index

    def state(self) -> dict[str, Any]:
        """Return what the next batch depends on."""
        return {"queue": self._queue.clone(), "generator": self._generator.get_state()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state` returned."""
        self._queue = state["queue"].clone()
        self._generator.set_state(state["generator"])


def check_batching(bound: BoundModel, batch_size: int) -> None:
    """Refuse a batch size where scaling plate `data` by rows / batch size would be wrong.

    Args:
        bound: The model and its data.
        batch_size: Rows in each batch.

    Raises:
        FitError: The size is below 1 or above the number of rows.
        ModelError: The model has no plate `data`, a latent site inside it, or an observed or factor
            site outside it.
    """
    if bound.rows is None:
        raise ModelError(
            "batch_size needs rows in plate 'data'; write `with pyro.plate('data', x.shape[0]):` "
            "around the observed site, or leave batch_size out"
        )
    if batch_size > bound.rows:
        raise FitError(f"batch_size={batch_size} for {bound.rows} rows; expected at most as many")
    for site in bound.sites:
        if site.kind == "latent" and site.row_dim is not None:
            raise ModelError(
                f"site {site.name!r} has one value for each row of plate 'data', so the data "
                "cannot be taken in batches; leave batch_size out"
            )
        if site.kind in ("observed", "factor") and site.row_dim is None:
            raise ModelError(
                f"site {site.name!r} is observed outside plate 'data', so the data cannot be taken "
                "in batches; move it inside, or leave batch_size out"
            )
