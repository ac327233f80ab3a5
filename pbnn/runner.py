"""A model under the draws of a posterior: blocks of rows by blocks of draws.

Draws are evaluated together by `torch.func.vmap`. The sizes of blocks follow from shapes alone, so
memory is bounded and results repeat.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pyro
import torch
from pyro import poutine
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pbnn.checks import PLATE, check_observed, check_output, unwrapped
from pbnn.errors import DataError, ModelError
from pbnn.front_door import observations, prepare, prior_values
from pbnn.infer.posterior import Posterior
from pbnn.model import Data, Model, isolated, leaves, run, sample_nodes, take
from pbnn.progress import progress_bar

__all__ = ["Runner"]

# Values of the widest layer held at once, over the draws and rows of a block.
BLOCK_VALUES = 2**22
BLOCK_ROWS = 512


class Runner:
    """A model, a posterior of it and rows of data, ready to be evaluated together.

    Args:
        model: The model that was fitted.
        posterior: Its posterior.
        x: Input rows `(n, …)`, or a dict of inputs; n may be 0.
        device: Where to run; by default where the model's parameters or x are.
        y: Observations of the rows; None samples them.

    Attributes:
        rows: Number of rows.
        observed: Names of the observed sites.
        classes: Whether the one observed site is categorical.
        device: Where the model runs.

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
    ) -> None:
        dtype = next(iter(posterior.draws.values())).dtype
        self.rows, x, y = _padded(x, y)
        self.model, self.x, self.y = prepare(
            model,
            x,
            y,
            device=device,
            dtype=dtype,
            constants=posterior.constants,
            buffers=posterior.buffers,
        )
        self.posterior = posterior
        self.device = leaves(self.x)[0][1].device
        self.fill: Mapping[str, Tensor] = {}
        trace = self._prior_run(slice(0, 2), dtype)
        self._check_sites(trace)
        if not self.rows:
            self.y = None  # what stands in for no rows need not be a legal y
        elif y is not None:
            with isolated(0, self.device):
                self.y, self.fill = observations(
                    self.model, self.x, self.y, trace, self.device, dtype
                )
            self._check_y(dtype)
        fn = trace.nodes[self.observed[0]]["fn"]
        self.classes = len(self.observed) == 1 and isinstance(
            unwrapped(fn), torch.distributions.Categorical
        )
        self.width = self._widest(dtype)
        self.vectorised = True

    def _prior_run(self, rows: slice | Tensor, dtype: torch.dtype, y: Data = None) -> poutine.Trace:
        """Run the model once on some rows, at a draw from the prior, with all checks."""
        x = take(self.x, rows)
        with isolated(0, self.device), prior_values(dtype, self.device), torch.no_grad():
            try:
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
        check_output(trace, leaves(take(self.x, slice(0, 2)))[0][1].shape[0])

    def _check_y(self, dtype: torch.dtype) -> None:
        """Refuse a y that its sites would score in another shape."""
        trace = self._prior_run(slice(None), dtype, self.y)
        given = {name or "y": value for name, value in leaves(self.y)}
        for name in self.observed:
            if name not in given or not trace.nodes[name]["is_observed"]:
                raise DataError(f"y has no values for site {name!r}; it has {sorted(given)}")
            check_observed(trace, name, given[name])

    def _widest(self, dtype: torch.dtype) -> int:
        """Return the most values that one operation of the model gives for one row."""
        counts: list[list[int]] = []
        for rows in (1, 2):
            with _Counting() as counting:
                self._prior_run(torch.zeros(rows, dtype=torch.int64, device=self.device), dtype)
            counts.append(counting.values)
        one, two = counts
        return max(1, *(b - a for a, b in zip(one, two, strict=False)))

    def single_observed(self) -> str:
        """Return the one observed site."""
        if len(self.observed) != 1:
            raise ModelError(
                f"the model observes {self.observed}; predict gives moments of one site: use "
                "predictive for several"
            )
        return str(self.observed[0])

    def row_blocks(self, *, progress: bool) -> Iterator[slice]:
        """Yield slices of rows whose size follows from shapes alone."""
        total = max(1, self.rows)
        starts = range(0, total, BLOCK_ROWS)
        for start in progress_bar(starts, label="rows", unit="block", show=progress):
            yield slice(start, min(start + BLOCK_ROWS, total))

    def map(
        self, read: Callable[[poutine.Trace], dict[str, Tensor]], rows: slice
    ) -> Iterator[dict[str, Tensor]]:
        """Yield what `read` takes from the model's trace, for one block of draws after another."""
        x, y = take(self.x, rows), take(self.y, rows)
        posterior = self.posterior
        count = posterior.chains * posterior.draws_per_chain
        held = sum(value[0, 0].numel() for value in posterior.draws.values())
        size = max(1, BLOCK_VALUES // ((rows.stop - rows.start) * self.width + held))

        def one(values: dict[str, Tensor]) -> dict[str, Tensor]:
            # Pyro's own checks read values, which cannot be mapped.
            with pyro.validation_enabled(False):
                return read(run(self.model, values, x, y, fill=self.fill))

        for start in range(0, count, size):
            block = {
                name: value.to(self.device)
                for name, value in posterior.flat(start, min(start + size, count)).items()
            }
            yield self._mapped(one, block)

    def _mapped(
        self, one: Callable[[dict[str, Tensor]], dict[str, Tensor]], block: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        if self.vectorised:
            try:
                with warnings.catch_warnings():
                    # torch tells of operations that it maps one by one, or resizes for: not wrong.
                    warnings.filterwarnings("ignore", ".*(batching rule|resized).*", UserWarning)
                    with _FreshNoise():
                        return torch.func.vmap(one, randomness="different")(block)
            except (RuntimeError, NotImplementedError, ValueError):
                # Some operations cannot be mapped; a loop gives the same numbers, slower.
                self.vectorised = False
        size = next(iter(block.values())).shape[0]
        parts = [one({name: value[k] for name, value in block.items()}) for k in range(size)]
        return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}

    def gather(
        self, read: Callable[[poutine.Trace], dict[str, Tensor]], rows: slice
    ) -> dict[str, Tensor]:
        """Return what `read` takes, for all draws: each `(draws, rows, …)`, on the CPU."""
        blocks = [{k: v.cpu() for k, v in block.items()} for block in self.map(read, rows)]
        return {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}

    def by_chain(self, value: Tensor) -> Tensor:
        """Split the leading dimension into chain and draw."""
        posterior = self.posterior
        return value.reshape(posterior.chains, posterior.draws_per_chain, *value.shape[1:])


class _FreshNoise(TorchFunctionMode):
    """Draws noise into new tensors: vmap cannot fill one tensor differently for each draw."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        like = _NOISE.get(func)
        return (like or func)(*args, **(kwargs or {}))


_NOISE: dict[Any, Callable[..., Tensor]] = {
    Tensor.normal_: lambda t, mean=0.0, std=1.0: mean + std * torch.randn_like(t),
    Tensor.uniform_: lambda t, low=0.0, high=1.0: low + (high - low) * torch.rand_like(t),
    Tensor.exponential_: lambda t, lambd=1.0: -torch.log1p(-torch.rand_like(t)) / lambd,
}


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
