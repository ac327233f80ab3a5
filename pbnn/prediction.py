"""Draws × rows → moments, quantiles, class probabilities and log-likelihoods, streamed.

Nothing here asks which road made the posterior; `pbnn.runner` brings draws and rows together.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pyro import poutine
from torch import Tensor

from pbnn.checks import PLATE, unwrapped
from pbnn.errors import DataError, ModelError
from pbnn.infer.posterior import Posterior
from pbnn.model import Data, Model, isolated
from pbnn.runner import Runner

if TYPE_CHECKING:
    import pandas as pd

    from pbnn.data import Units

__all__ = ["Prediction", "function_draws", "log_likelihood", "predict", "predictive"]


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
    runner = Runner(model, posterior, x, device)
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
    if joined["mean"].isnan().any():
        row = int(joined["mean"].reshape(runner.rows, -1).isnan().any(1).nonzero()[0])
        raise ModelError(
            f"the mean of y is NaN in row {row}: its distribution has no mean, or f(x) is not "
            "finite there; use predictive for samples"
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
    runner = Runner(model, posterior, x, device)

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


def function_draws(
    model: Model,
    posterior: Posterior,
    x: Data,
    *,
    device: str | torch.device | None = None,
    progress: bool = False,
) -> Tensor:
    """Return the network output of each draw, for diagnostics in function space.

    Logits of a softmax are centred over classes, since adding one number to all changes nothing.

    Args:
        model: The model that was fitted.
        posterior: Its posterior, from any road.
        x: Input rows.
        device: Where to run.
        progress: Whether to show a progress bar on stderr.

    Returns:
        f(x), `(chain, draw, n, outputs)`, with one output where f(x) has shape `(n,)`.

    Raises:
        DataError: x cannot be used as it is.
        ModelError: The posterior is not one of this model.
    """
    runner = Runner(model, posterior, x, device)

    def output(trace: poutine.Trace) -> dict[str, Tensor]:
        f: Tensor = trace.nodes["_RETURN"]["value"]
        f = f.reshape(f.shape[0], -1)
        return {"f": f - f.mean(-1, keepdim=True) if runner.classes else f}

    with isolated(0, runner.device), torch.no_grad():
        parts = [runner.gather(output, rows)["f"] for rows in runner.row_blocks(progress=progress)]
    return runner.by_chain(torch.cat(parts, 1)[:, : runner.rows])


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

    What the model masks counts as 0.

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
    if y is None:
        raise DataError("y is None; expected the observations of the rows of x")
    runner = Runner(model, posterior, x, device, y)

    def score(trace: poutine.Trace) -> dict[str, Tensor]:
        trace.compute_log_prob(site_filter=lambda name, _: name in runner.observed)
        total: Tensor = sum(_by_row(trace.nodes[name]) for name in runner.observed)  # type: ignore[assignment]
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


def _by_row(node: Any) -> Tensor:
    """Sum a site's log density over all dimensions but that of plate `data`."""
    log_prob: Tensor = node["log_prob"]
    dim = next(frame.dim for frame in node["cond_indep_stack"] if frame.name == PLATE)
    others = [k for k in range(log_prob.ndim) if k != log_prob.ndim + dim]
    return log_prob.sum(others) if others else log_prob


def _predict_rows(runner: "Runner", rows: slice, quantiles: Sequence[float]) -> dict[str, Tensor]:
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


def _moments(runner: "Runner", *, sample: bool) -> Callable[[poutine.Trace], dict[str, Tensor]]:
    """Return the function that reads moments (or class probabilities) off the observed site."""
    name = runner.single_observed()

    def read(trace: poutine.Trace) -> dict[str, Tensor]:
        node = trace.nodes[name]
        fn = node["fn"]
        if runner.classes:
            probabilities = unwrapped(fn).probs
            entropy = torch.special.entr(probabilities).sum(-1)
            return {"probabilities": probabilities, "entropy": entropy}
        try:
            out = {"location": fn.mean, "variance": fn.variance}
        except NotImplementedError as error:
            raise ModelError(
                f"site {name!r} is {type(unwrapped(fn)).__name__}, which has no mean and variance; "
                "use predictive for samples"
            ) from error
        return {**out, "y": node["value"]} if sample else out

    return read


def _loc_scale(units: "Units | None") -> tuple[Tensor | float, Tensor | float]:
    if units is None:
        return 0.0, 1.0
    return torch.as_tensor(np.asarray(units.loc)), torch.as_tensor(np.asarray(units.scale))


def _array(value: Tensor | None) -> Any:
    return np.asarray([]) if value is None else value.numpy()
