"""A model under the draws of a posterior: blocks of rows by blocks of draws.

The sizes of blocks follow from shapes alone, so memory is bounded and results repeat.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pyro
import torch
from pyro import poutine
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pbnn.checks import PLATE, check_observed, check_output, unwrapped
from pbnn.errors import DataError, ModelError
from pbnn.front_door import observations, prepare, prior_values
from pbnn.infer.masks import Masks
from pbnn.infer.posterior import Posterior
from pbnn.model import Data, Model, isolated, leaves, run, sample_nodes, take
from pbnn.prediction import mapping
from pbnn.prediction.mapping import DrawMap, MappableSamples
from pbnn.progress import progress_bar

__all__ = ["Reader", "Runner", "is_loader", "rows_of"]

Reader = Callable[[poutine.Trace], dict[str, Tensor]]
"""Takes from the model's trace at one draw what is wanted, rows first."""

_STATE = "state "
"""Marks the constants and buffers of a draw among its sites."""
_MASK = "mask"
"""The statistic that numbers a draw's dropout masks, here among its constants and buffers."""

BLOCK_ROWS = 512
# Values held over all draws of a block of rows, for each number that is read: 32 MB of float64.
HELD_VALUES = 2**22


class Runner:
    """A model, a posterior of it and rows of data, ready to be evaluated together.

    Args:
        model: The model that was fitted.
        posterior: Its posterior.
        x: Input rows `(n, …)`, or a dict of inputs; n may be 0. Or a loader: an iterable of blocks
            of rows, each x, `(x,)` or `(x, y)`.
        device: Where to run; by default where the model's parameters or x are.
        y: Observations of the rows; None samples them.
        scored: Whether the y of a loader's blocks is taken, where they have one.

    Attributes:
        rows: Number of rows; with a loader, of those that it has given so far.
        observed: Names of the observed sites.
        classes: Whether the one observed site is categorical.
        device: Where the model runs.
        draws: Number of draws, over all chains.

    Raises:
        DataError: x or y cannot be used as they are.
        ModelError: The posterior is not one of this model, or the model has no rows.
    """

    def __init__(
        self,
        model: Model,
        posterior: Posterior,
        x: Data,
        device: str | torch.device | None,
        y: Data = None,
        *,
        scored: bool = False,
    ) -> None:
        if is_loader(x) and y is not None:
            raise DataError("x is a loader, so y goes with it; let each of its blocks be (x, y)")
        self._blocks = _pairs(x, scored=scored) if is_loader(x) else iter([(x, y)])
        self._count = None if x is None or is_loader(x) else len(leaves(x)[0][1])
        self.posterior = posterior
        self.draws = posterior.chains * posterior.draws_per_chain
        self._dtype = next(iter(posterior.draws.values())).dtype
        self.rows = 0
        self.fill: Mapping[str, Tensor] = {}
        try:
            x, y = next(self._blocks)
        except StopIteration:
            raise DataError("x is a loader that gave no rows; expected blocks of rows") from None
        count, x, y = _padded(x, y)
        self.model, self.x, self.y = prepare(
            model,
            x,
            y,
            device=device,
            dtype=self._dtype,
            constants=posterior.first_state(),
        )
        self.device = leaves(self.x)[0][1].device
        trace, self.width = self._widest()
        self._check_sites(trace)
        self._check_y(trace, count)
        fn = trace.nodes[self.observed[0]]["fn"]
        self.classes = len(self.observed) == 1 and isinstance(
            unwrapped(fn), torch.distributions.Categorical
        )
        self.outputs = max(v.numel() // v.shape[0] for v in self._read_at_prior(trace))
        self._maps: dict[Reader, DrawMap] = {}

    def _prior_run(self, rows: slice | Tensor, y: Data = None) -> poutine.Trace:
        """Run the model once on some rows, at a draw from the prior, with all checks."""
        x = take(self.x, rows)
        with isolated(0, self.device), prior_values(self._dtype, self.device), torch.no_grad():
            try:
                with self._masked(0, 0):
                    return run(self.model, {}, x, take(y, rows), fill=self.fill, checks=True)
            except Exception as error:
                shapes = {name or "x": tuple(value.shape) for name, value in leaves(self.x)}
                line = str(error).strip().splitlines()[0] if str(error) else ""
                raise ModelError(
                    f"the model cannot predict for x of shape {shapes.get('x', shapes)}: "
                    f"{type(error).__name__}: {line}"
                ) from error

    def _check_sites(self, trace: poutine.Trace) -> None:
        """Refuse a posterior whose sites are not the model's, which would be quietly sampled."""
        draws = self.posterior.draws
        found = {n: node for n, node in sample_nodes(trace) if not node["is_observed"]}
        plated = {
            name
            for name, node in found.items()
            if any(frame.name == PLATE for frame in node["cond_indep_stack"])
        }
        self.observed = [name for name in found if name not in draws]
        expected = self.posterior.provenance.get("observed", self.observed)
        if set(draws) - set(found) or set(self.observed) != set(expected):
            raise ModelError(
                f"the posterior has sites {sorted(draws)}, the model {sorted(found)}; predict with "
                "the model that was fitted"
            )
        for name in self.observed:
            if name not in plated:
                raise ModelError(
                    f"site {name!r} lies outside plate 'data', so that single rows have neither "
                    "predictions nor a likelihood; write `with pyro.plate('data', x.shape[0]):` "
                    "around it"
                )
        for name, value in draws.items():
            if name in plated:
                raise ModelError(
                    f"site {name!r} has one value for each row of the data that were fitted; other "
                    "rows have none"
                )
            shape = found[name]["value"].shape
            if value.shape[2:] != shape:
                raise ModelError(
                    f"site {name!r} has shape {tuple(value.shape[2:])} in the posterior and "
                    f"{tuple(shape)} in the model; build it with the same options"
                )
        check_output(trace, 2)

    def _check_y(self, trace: poutine.Trace, rows: int) -> None:
        """Give y the kind of number of its sites; refuse one scored in another shape."""
        self.rows += rows
        if not rows:
            self.y = None  # what stands in for no rows need not be a legal y
        if self.y is None:
            return
        with isolated(0, self.device):
            self.y, self.fill = observations(
                self.model, self.x, self.y, trace, self.device, self._dtype
            )
        trace = self._prior_run(slice(None), self.y)
        given = {name or "y": value for name, value in leaves(self.y)}
        for name in self.observed:
            if name not in given or not trace.nodes[name]["is_observed"]:
                raise DataError(f"y has no values for site {name!r}; it has {sorted(given)}")
            check_observed(trace, name, given[name])

    def _advance(self) -> bool:
        """Take the next block of a loader; False where there is none."""
        for x, y in self._blocks:
            rows, x, y = _padded(x, y)
            if rows:
                place = {"device": self.device, "dtype": self._dtype}
                _, self.x, self.y = prepare(self.model, x, y, **place)
                self._check_y(self._prior_run(slice(0, 2)), rows)
                return True
        return False

    def _read_at_prior(self, trace: poutine.Trace) -> list[Tensor]:
        """Return what may be read for each row, at the draw from the prior of a trace."""
        found = [trace.nodes[name]["value"] for name in self.observed]
        found.append(trace.nodes["_RETURN"]["value"])
        if self.classes:
            found.append(unwrapped(trace.nodes[self.observed[0]]["fn"]).logits)
        return found

    def _widest(self) -> tuple[poutine.Trace, int]:
        """Return a run on two rows, and the most values that one operation gives for one row."""
        counts: list[list[int]] = []
        for rows in (1, 2):
            with _Counting() as counting:
                trace = self._prior_run(torch.zeros(rows, dtype=torch.int64, device=self.device))
            counts.append(counting.values)
        one, two = counts
        return trace, max(1, *(b - a for a, b in zip(one, two, strict=False)))

    def single_observed(self) -> str:
        """Return the one observed site."""
        if len(self.observed) != 1:
            raise ModelError(
                f"the model observes {self.observed}; predict gives moments of one site: use "
                "predictive for several"
            )
        return str(self.observed[0])

    def row_blocks(self, *, progress: bool) -> Iterator[slice]:
        """Yield slices of the rows at hand, whose size follows from shapes alone.

        With a loader the rows at hand change between slices.
        """
        size = max(1, min(BLOCK_ROWS, HELD_VALUES // (self.draws * self.outputs)))
        with progress_bar(label="rows", unit="row", total=self._count, show=progress) as bar:
            more = True
            while more:
                count = len(leaves(self.x)[0][1])
                for start in range(0, count, size):
                    rows = slice(start, min(start + size, count))
                    yield rows
                    bar.update(rows.stop - rows.start)
                more = self._advance()

    def map(self, read: Reader, rows: slice) -> Iterator[dict[str, Tensor]]:
        """Yield what `read` takes from the model's trace, for one block of draws after another."""
        if read not in self._maps:

            def one(held: dict[str, Tensor], first: Tensor, x: Data, y: Data) -> dict[str, Tensor]:
                values = {name: held[name] for name in self.posterior.draws}
                state = {name: held[_STATE + name] for name in self.posterior.per_draw}
                masked = self._masked(held.get(_STATE + _MASK, 0), first)
                # Pyro's own checks read values, which cannot be mapped.
                with pyro.validation_enabled(False), MappableSamples(), masked:
                    return read(run(self.model, values, x, y, fill=self.fill, state=state))

            self._maps[read] = DrawMap(one)

        def block(start: int, stop: int) -> dict[str, Tensor]:
            state = self.posterior.state(start, stop)
            if self.posterior.mask_seed is not None:
                numbers = self.posterior.stats.get(_MASK, torch.arange(self.draws))
                state[_MASK] = numbers.flatten()[start:stop]
            named = {_STATE + name: value for name, value in state.items()}
            flat = {**self.posterior.flat(start, stop), **named}
            return {name: value.to(self.device) for name, value in flat.items()}

        held = sum(value[0].numel() for value in block(0, 1).values())
        size = mapping.BLOCK_VALUES // ((rows.stop - rows.start) * self.width + held)
        x, y = take(self.x, rows), take(self.y, rows)
        at_hand = len(leaves(self.x)[0][1])
        first = torch.tensor(self.rows - at_hand + rows.start, device=self.device)
        yield from self._maps[read].blocks(block, self.draws, max(1, size), first, x, y)

    def _masked(self, draw: int | Tensor, row: int | Tensor) -> AbstractContextManager[Any]:
        """Return what the model runs inside of: for MC dropout, the masks of a draw."""
        seed = self.posterior.mask_seed
        return nullcontext() if seed is None else Masks(seed, draw, row)

    def gather(self, read: Reader, rows: slice) -> dict[str, Tensor]:
        """Return what `read` takes, for all draws: each `(draws, rows, …)`, on the CPU."""
        out: dict[str, Tensor] = {}
        start = 0
        for block in self.map(read, rows):
            for name, value in block.items():
                if not start:
                    out[name] = torch.empty((self.draws, *value.shape[1:]), dtype=value.dtype)
                out[name][start : start + len(value)] = value
            start += len(value)
        return out

    def by_chain(self, value: Tensor) -> Tensor:
        """Split the leading dimension into chain and draw."""
        posterior = self.posterior
        return value.reshape(posterior.chains, posterior.draws_per_chain, *value.shape[1:])


class _Counting(TorchDispatchMode):
    """Counts the values that each operation gives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.values.extend(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))
        return out


def is_loader(x: Data) -> bool:
    """Whether x is an iterable of blocks of rows, and not rows itself."""
    if hasattr(x, "shape") or isinstance(x, Mapping) or not isinstance(x, Iterable):
        return False
    if not isinstance(x, Sequence):
        return True
    # A sequence of numbers, or of sequences of them, stands for an array.
    first = x[0] if len(x) else None
    if isinstance(first, tuple | list) and first:
        first = first[0]
    return isinstance(first, Mapping) or hasattr(first, "shape")


def rows_of(x: Data) -> int:
    """Return the number of rows; a loader is gone through once to count them.

    Raises:
        DataError: x is an iterator, which cannot be gone through again.
    """
    if not is_loader(x):
        return 0 if x is None else len(leaves(x)[0][1])
    if isinstance(x, Iterator):
        raise DataError(
            "x is an iterator, whose rows cannot be counted first; pass a loader that can be gone "
            "through twice, such as a torch DataLoader or a list of blocks"
        )
    return sum(len(leaves(block)[0][1]) for block, _ in _pairs(x, scored=False))


def _pairs(loader: Iterable[Any], *, scored: bool) -> Iterator[tuple[Data, Data]]:
    """Yield x and y of each block; y is None where there is none, or none is wanted."""
    for block in loader:
        parts = block if isinstance(block, tuple | list) else (block,)
        if len(parts) not in (1, 2):
            raise DataError(f"the loader gave {len(parts)} parts; expected x, (x,) or (x, y)")
        yield parts[0], parts[1] if scored and len(parts) == 2 else None


def _padded(x: Data, y: Data) -> tuple[int, Data, Data]:
    """Return the number of rows, and data with one row of zeros in place of none.

    Pyro has no plates of size 0; the extra row is cut off again at the end.
    """
    if x is None:
        raise ModelError("x is None: a model without input has no rows to predict")
    rows = len(next(value for _, value in leaves(x)))
    if rows:
        return rows, x, y

    def pad(value: Any) -> Any:
        value = value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
        return value.new_zeros((1, *value.shape[1:]))

    def padded(data: Data) -> Data:
        if isinstance(data, Mapping):
            return {name: pad(value) for name, value in data.items()}
        return None if data is None else pad(data)

    return 0, padded(x), padded(y)
