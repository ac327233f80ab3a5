"""Draws × rows → moments, quantiles, class probabilities and log-likelihoods, streamed.

Nothing here asks which road made the posterior. Draws are evaluated in blocks by `torch.func.vmap`;
the block sizes follow from the shapes alone, so memory is bounded and results repeat.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pyro import poutine
from torch import Tensor
from tqdm.auto import tqdm

from pbnn.errors import DataError, ModelError
from pbnn.front_door import prepare, prior_values
from pbnn.infer.posterior import Posterior
from pbnn.model import Data, Model, isolated, run, sample_nodes

if TYPE_CHECKING:
    import pandas as pd

    from pbnn.data import Units

__all__ = ["Prediction", "log_likelihood", "predict", "predictive"]

# Values held at once: draws × rows × the widest layer in a block, and draws × rows for quantiles.
BLOCK_VALUES = 2**22
BLOCK_ROWS = 512


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a posterior predicts for some rows.

    For numbers, shapes are those of y, `(n,)` or `(n, outputs)`, in the user's units. For classes
    `probabilities` is `(n, classes)`, and `mean` and the scales are None.

    Attributes:
        mean: Mean of the posterior predictive.
        epistemic_scale: Standard deviation over draws of E[y given draw and x].
        aleatoric_scale: Square root of the mean over draws of Var[y given draw and x].
        quantiles: Quantiles of the posterior predictive, by probability, each shaped like `mean`.
            Sampled: one y for each draw.
        probabilities: Mean over draws of the class probabilities.
        entropy: Entropy of `probabilities`, in nats, `(n,)`.
        mutual_information: `entropy` less the mean entropy of the draws, in nats, `(n,)`.
    """

    mean: Tensor | None = None
    epistemic_scale: Tensor | None = None
    aleatoric_scale: Tensor | None = None
    quantiles: Mapping[float, Tensor] | None = None
    probabilities: Tensor | None = None
    entropy: Tensor | None = None
    mutual_information: Tensor | None = None

    @property
    def scale(self) -> Tensor | None:
        """Standard deviation of the posterior predictive: both parts together."""
        if self.epistemic_scale is None or self.aleatoric_scale is None:
            return None
        return torch.hypot(self.epistemic_scale, self.aleatoric_scale)

    def to_frame(self, classes: Sequence[Any] | None = None) -> "pd.DataFrame":
        """Return one row for each row of x and one column for each number.

        Args:
            classes: Names of the classes, in the order of `probabilities`.
        """
        import pandas as pd

        if self.probabilities is not None:
            labels = range(self.probabilities.shape[1]) if classes is None else classes
            frame = pd.DataFrame(
                self.probabilities.numpy(), columns=[f"probability_{label}" for label in labels]
            )
            best = self.probabilities.argmax(1).tolist()
            frame.insert(0, "prediction", pd.Series([list(labels)[k] for k in best], dtype=object))
            frame["entropy"] = _array(self.entropy)
            frame["mutual_information"] = _array(self.mutual_information)
            return frame
        columns = {
            "mean": self.mean,
            "scale": self.scale,
            "epistemic_scale": self.epistemic_scale,
            "aleatoric_scale": self.aleatoric_scale,
            **{f"q{p:g}": value for p, value in (self.quantiles or {}).items()},
        }
        out = {}
        for name, value in columns.items():
            values = _array(value)
            if values.ndim == 1:
                out[name] = values
            else:
                for k, column in enumerate(values.reshape(len(values), -1).T):
                    out[f"{name}_{k}"] = column
        return pd.DataFrame(out)


def predict(
    model: Model,
    posterior: Posterior,
    x: Data,
    *,
    quantiles: Sequence[float] = (0.05, 0.5, 0.95),
    units: "Units | None" = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    progress: bool = False,
) -> Prediction:
    """Predict y for new rows: moments, quantiles, or class probabilities.

    The total variance is the variance of the locations plus the mean of the noise variances (the
    law of total variance); class probabilities are averaged over draws, never the logits.

    Args:
        model: The model that was fitted.
        posterior: Its posterior, from any road.
        x: Input rows `(n, …)`, or a dict of inputs; n may be 0.
        quantiles: Probabilities of the quantiles; none for classes.
        units: How y was standardised; results are in the user's units.
        seed: Seed of the sampled y behind the quantiles.
        device: Where to run; by default where the model's parameters or x are.
        progress: Whether to show a progress bar on stderr.

    Returns:
        The prediction, on the CPU.

    Raises:
        DataError: x cannot be used, or a probability is outside 0 to 1.
        ModelError: The posterior is not one of this model, or y has no moments.
    """
    for p in quantiles:
        if not 0 <= p <= 1:
            raise DataError(f"quantile {p}; expected a probability from 0 to 1")
    runner = _Runner(model, posterior, x, device)
    with isolated(seed, runner.device), torch.no_grad():
        parts = [
            _predict_rows(runner, rows, quantiles) for rows in runner.row_blocks(progress=progress)
        ]
    joined = {name: torch.cat([part[name] for part in parts])[: runner.rows] for name in parts[0]}
    if "probabilities" in joined:
        return Prediction(
            probabilities=joined["probabilities"],
            entropy=joined["entropy"],
            mutual_information=joined["mutual_information"],
        )
    loc, scale = _loc_scale(units)
    return Prediction(
        mean=joined["mean"] * scale + loc,
        epistemic_scale=joined["epistemic_scale"] * scale,
        aleatoric_scale=joined["aleatoric_scale"] * scale,
        quantiles={p: joined[f"q{p}"] * scale + loc for p in quantiles},
    )


def predictive(
    model: Model,
    posterior: Posterior,
    x: Data,
    *,
    units: "Units | None" = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    progress: bool = False,
) -> dict[str, Tensor]:
    """Sample y for each draw and row, and return the network output beside it.

    Args:
        model: The model that was fitted.
        posterior: Its posterior, from any road.
        x: Input rows.
        units: How y was standardised; y and f are then in the user's units.
        seed: Seed of the samples.
        device: Where to run.
        progress: Whether to show a progress bar on stderr.

    Returns:
        By observed site, samples `(chain, draw, n, …)`; under "f", f(x), `(chain, draw, n, …)`.

    Raises:
        DataError: x cannot be used as it is.
        ModelError: The posterior is not one of this model.
    """
    runner = _Runner(model, posterior, x, device)

    def sample(trace: poutine.Trace) -> dict[str, Tensor]:
        out = {name: trace.nodes[name]["value"] for name in runner.observed}
        return {**out, "f": trace.nodes["_RETURN"]["value"]}

    with isolated(seed, runner.device), torch.no_grad():
        parts = [runner.gather(sample, rows) for rows in runner.row_blocks(progress=progress)]
    out = {name: torch.cat([p[name] for p in parts], 1)[:, : runner.rows] for name in parts[0]}
    loc, scale = _loc_scale(units)
    for name, value in out.items():
        if units is not None and value.is_floating_point():
            out[name] = value * scale + loc
    return {name: runner.by_chain(value) for name, value in out.items()}


def log_likelihood(
    model: Model,
    posterior: Posterior,
    x: Data,
    y: Data,
    *,
    units: "Units | None" = None,
    device: str | torch.device | None = None,
    progress: bool = False,
) -> Tensor:
    """Return the log-likelihood of each row under each draw, summed over observed sites.

    Args:
        model: The model that was fitted.
        posterior: Its posterior, from any road.
        x: Input rows, as the fit took them.
        y: Observations, as the fit took them (standardised, if it did).
        units: How y was standardised; the result is then a density in the user's units, which is
            lower by log scale.
        device: Where to run.
        progress: Whether to show a progress bar on stderr.

    Returns:
        `(chain, draw, n)`.

    Raises:
        DataError: x or y cannot be used as they are.
        ModelError: The posterior is not one of this model, or the model has no rows.
    """
    runner = _Runner(model, posterior, x, device, y)

    def score(trace: poutine.Trace) -> dict[str, Tensor]:
        trace.compute_log_prob()
        total: Tensor = sum(_by_row(trace.nodes[name], name) for name in runner.observed)  # type: ignore[assignment]
        return {"log_likelihood": total}

    with isolated(0, runner.device), torch.no_grad():
        parts = [
            runner.gather(score, rows)["log_likelihood"]
            for rows in runner.row_blocks(progress=progress)
        ]
    total = runner.by_chain(torch.cat(parts, 1)[:, : runner.rows])
    if units is None:
        return total
    outputs = 1 if np.ndim(units.scale) else int(np.prod(np.shape(runner.y)[1:]))
    return total - outputs * float(np.sum(np.log(units.scale)))


def _by_row(node: Any, name: str) -> Tensor:
    """Sum a site's log density over all dimensions but that of plate `data`."""
    log_prob: Tensor = node["log_prob"]
    dims = [frame.dim for frame in node["cond_indep_stack"] if frame.name == "data"]
    if not dims:
        raise ModelError(
            f"site {name!r} lies outside plate 'data', so it has no row-wise log-likelihood; write "
            "`with pyro.plate('data', x.shape[0]):` around it"
        )
    others = [k for k in range(log_prob.ndim) if k != log_prob.ndim + dims[0]]
    return log_prob.sum(others) if others else log_prob


def _predict_rows(runner: "_Runner", rows: slice, quantiles: Sequence[float]) -> dict[str, Tensor]:
    """Predict one block of rows from all draws."""
    total: dict[str, Tensor] = {}
    samples: list[Tensor] = []
    count = 0
    for block in runner.map(_moments(runner, sample=bool(quantiles)), rows):
        size = next(iter(block.values())).shape[0]
        if "y" in block:
            samples.append(block.pop("y").cpu())
        parts = {name: value.double() for name, value in block.items()}
        if "location" in parts:
            # Chan et al. 1983: merge means and sums of squares of two blocks of draws.
            mean = parts.pop("location")
            centre = mean.mean(0)
            squares = (mean - centre).square().sum(0)
            if count:
                gap = centre - total["mean"]
                squares = total["squares"] + squares + gap.square() * count * size / (count + size)
                centre = total["mean"] + gap * size / (count + size)
            total |= {"mean": centre, "squares": squares}
        for name, value in parts.items():
            total[name] = total.get(name, 0.0) + value.sum(0)
        count += size
    if "probabilities" in total:
        probabilities = (total["probabilities"] / count).cpu()
        entropy = torch.special.entr(probabilities).sum(-1)
        return {
            "probabilities": probabilities,
            "entropy": entropy,
            "mutual_information": (entropy - (total["entropy"] / count).cpu()).clamp(min=0.0),
        }
    return {
        "mean": total["mean"].cpu(),
        "epistemic_scale": (total["squares"] / count).sqrt().cpu(),
        "aleatoric_scale": (total["variance"] / count).sqrt().cpu(),
        **_quantiles(samples, quantiles),
    }


def _quantiles(samples: list[Tensor], probabilities: Sequence[float]) -> dict[str, Tensor]:
    if not samples:
        return {}
    values = np.quantile(torch.cat(samples).numpy(), np.asarray(probabilities), axis=0)
    return {
        f"q{p}": torch.as_tensor(v).double() for p, v in zip(probabilities, values, strict=True)
    }


def _moments(runner: "_Runner", *, sample: bool) -> Callable[[poutine.Trace], dict[str, Tensor]]:
    """Return the function that reads moments (or class probabilities) off the observed site."""
    name = runner.single_observed()

    def read(trace: poutine.Trace) -> dict[str, Tensor]:
        node = trace.nodes[name]
        fn = node["fn"]
        if runner.classes:
            probabilities = _base(fn).probs
            entropy = torch.special.entr(probabilities).sum(-1)
            return {"probabilities": probabilities, "entropy": entropy}
        out = {"location": fn.mean, "variance": fn.variance}
        return {**out, "y": node["value"]} if sample else out

    return read


def _base(fn: Any) -> Any:
    while not hasattr(fn, "probs") and hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return fn


def _loc_scale(units: "Units | None") -> tuple[Tensor | float, Tensor | float]:
    if units is None:
        return 0.0, 1.0
    return torch.as_tensor(np.asarray(units.loc)), torch.as_tensor(np.asarray(units.scale))


def _array(value: Tensor | None) -> Any:
    return np.asarray([]) if value is None else value.numpy()


class _Runner:
    """A model and a posterior brought together: evaluates blocks of rows under blocks of draws."""

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
        self.device = _first(self.x).device
        trace = self._prototype(dtype)
        self._check_sites(trace)
        observed = [self.observed[0]] if len(self.observed) == 1 else []
        self.classes = bool(observed) and isinstance(
            _base(trace.nodes[observed[0]]["fn"]), torch.distributions.Categorical
        )
        self.width = max([1, *(max(v.shape[2:], default=1) for v in posterior.draws.values())])
        self.vectorised = True

    def _prototype(self, dtype: torch.dtype) -> poutine.Trace:
        """Run the model once on a few rows, with all checks, to see its sites."""
        x = _cut(self.x, slice(0, 2))
        with isolated(0, self.device), prior_values(dtype, self.device):
            try:
                return run(self.model, {}, x, checks=True)
            except Exception as error:
                shape = {k: tuple(v.shape) for k, v in _named(self.x).items()}
                line = str(error).strip().splitlines()[0] if str(error) else ""
                raise ModelError(
                    f"the model cannot predict for x of shape {shape.get('x', shape)}: "
                    f"{type(error).__name__}: {line}"
                ) from error

    def _check_sites(self, trace: poutine.Trace) -> None:
        """Refuse a posterior whose sites are not the model's, which would be quietly sampled."""
        draws = self.posterior.draws
        found = {
            name: node["value"].shape
            for name, node in sample_nodes(trace)
            if not node["is_observed"]
        }
        self.observed = [name for name in found if name not in draws]
        expected = self.posterior.provenance.get("observed", self.observed)
        missing = [name for name in draws if name not in found]
        if missing or set(self.observed) != set(expected):
            raise ModelError(
                f"the posterior has sites {sorted(draws)}, the model {sorted(found)}; predict with "
                "the model that was fitted"
            )
        for name, value in draws.items():
            if value.shape[2:] != found[name]:
                raise ModelError(
                    f"site {name!r} has shape {tuple(value.shape[2:])} in the posterior and "
                    f"{tuple(found[name])} in the model; build it with the same options"
                )

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
        total = _first(self.x).shape[0]
        starts = range(0, total, BLOCK_ROWS)
        for start in tqdm(starts, desc="rows", disable=not progress, leave=False):
            yield slice(start, min(start + BLOCK_ROWS, total))

    def map(
        self, read: Callable[[poutine.Trace], dict[str, Tensor]], rows: slice
    ) -> Iterator[dict[str, Tensor]]:
        """Yield what `read` takes from the model's trace, for one block of draws after another."""
        x, y = _cut(self.x, rows), _cut(self.y, rows)
        count = self.posterior.chains * self.posterior.draws_per_chain
        size = max(1, BLOCK_VALUES // (_first(x).shape[0] * self.width))

        def one(values: dict[str, Tensor]) -> dict[str, Tensor]:
            return read(run(self.model, values, x, y))

        for start in range(0, count, size):
            block = {
                k: v.to(self.device)
                for k, v in self.posterior.flat(start, min(start + size, count)).items()
            }
            yield self._mapped(one, block)

    def _mapped(
        self, one: Callable[[dict[str, Tensor]], dict[str, Tensor]], block: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        if self.vectorised:
            try:
                return torch.func.vmap(one, randomness="different")(block)
            except (RuntimeError, NotImplementedError, ValueError):
                # Some operations have no batching rule; a loop gives the same numbers, slower.
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


def _named(data: Data) -> dict[str, Any]:
    if data is None:
        return {}
    return dict(data) if isinstance(data, Mapping) else {"x": data}


def _first(data: Data) -> Any:
    return next(iter(_named(data).values()))


def _cut(data: Data, rows: slice) -> Data:
    if isinstance(data, Mapping):
        return {name: value[rows] for name, value in data.items()}
    return None if data is None else data[rows]


def _padded(x: Data, y: Data) -> tuple[int, Data, Data]:
    """Return the number of rows, and data with one row of zeros in place of none.

    Pyro has no plates of size 0; the extra row is cut off again at the end.
    """
    if x is None:
        raise ModelError("x is None: a model without input has no rows to predict")
    rows = len(_first(x))
    if rows:
        return rows, x, y

    def pad(value: Any) -> Any:
        return np.zeros((1, *np.shape(value)[1:]), dtype=np.float32)

    def padded(data: Data) -> Data:
        if isinstance(data, Mapping):
            return {name: pad(value) for name, value in data.items()}
        return None if data is None else pad(data)

    return 0, padded(x), padded(y)
