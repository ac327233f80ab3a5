"""Draws × rows → moments, quantiles, class probabilities and log-likelihoods, streamed.

Nothing here asks which road made the posterior; `runner` brings draws and rows together.
Beside its results, a prediction holds 8 MB for each layer (in float32) and at most 32 MB for each
number that it reads, a few times over while it sums them up, whatever the draws and rows.
"""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from torch import Tensor

from pbnn.checks import PLATE, unwrapped
from pbnn.errors import DataError, ModelError
from pbnn.files import origin
from pbnn.infer.posterior import Posterior
from pbnn.model import Data, Model, isolated
from pbnn.prediction.file import DrawFile, in_file, map_draws, open_draws
from pbnn.prediction.mapping import sampled
from pbnn.prediction.monte_carlo import MonteCarlo
from pbnn.prediction.prior import sample_prior
from pbnn.prediction.runner import Reader, Runner, is_loader, rows_of
from pbnn.prediction.summary import Prediction, Rows, summarise

if TYPE_CHECKING:
    from pbnn.data import Units

__all__ = [
    "Prediction",
    "function_draws",
    "log_likelihood",
    "predict",
    "predictive",
    "prior_predictive",
]


SAMPLES = 1000
"""Sampled y behind the quantiles of a row, at least; draws beyond as many give one each."""


def predict(
    model: Model,
    posterior: Posterior,
    x: Data,
    y: Data = None,
    *,
    quantiles: Sequence[float] = (0.05, 0.5, 0.95),
    units: "Units | None" = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    progress: bool = False,
) -> Prediction:
    """Predict y for new rows: moments, quantiles, or class probabilities.

    The total variance is the variance of the locations plus the mean of the noise variances (the
    law of total variance); class probabilities are averaged over draws, never the logits. Each
    number comes with its Monte Carlo error.

    Args:
        model: The model that was fitted.
        posterior: Its posterior, from any road.
        x: Input rows `(n, …)`, or a dict of inputs; n may be 0. Or a loader, such as a torch
            `DataLoader`: an iterable of blocks of rows, each x, `(x,)` or `(x, y)`.
        y: Observations of the rows, as the fit took them, for their log predictive density; a
            loader gives its own.
        quantiles: Probabilities of the quantiles; none for classes.
        units: How y was standardised; results are in the user's units.
        seed: Seed of the sampled y behind the quantiles: one for each draw, or several where there
            are fewer than 1,000 draws.
        device: Where to run; by default where the model's parameters or x are.
        progress: Whether to show a progress bar on stderr.

    Returns:
        The prediction, on the CPU.

    Raises:
        DataError: x or y cannot be used, or a probability is outside 0 to 1.
        ModelError: The posterior is not one of this model, or y has no moments.
    """
    for p in quantiles:
        if not 0 <= p <= 1:
            raise DataError(f"quantile {p}; expected a probability from 0 to 1")
    runner = Runner(model, posterior, x, device, y, scored=True)
    # Few draws, such as the members of an ensemble, give several y each: quantiles are those of the
    # mixture, whatever the number of its parts.
    repeats = -(-SAMPLES // runner.draws) if quantiles and not runner.classes else 0
    runner.outputs *= max(1, repeats)
    read = _moments(runner, samples=repeats)
    monte_carlo = MonteCarlo(posterior.chains, posterior.draws_per_chain, markov=posterior.markov)
    count = None if is_loader(x) else rows_of(x)
    values, mcse = Rows(count), Rows(count)
    with isolated(seed, runner.device), torch.no_grad():
        for rows in runner.row_blocks(progress=progress):
            found = summarise(runner.gather(read, rows), monte_carlo, quantiles)
            if "log_predictive_density" in found:
                gone = _missing(runner, runner.single_observed(), rows)
                density, error = found["log_predictive_density"]
                found["log_predictive_density"] = (
                    density.masked_fill(gone, torch.nan),
                    error.masked_fill(gone, torch.nan),
                )
            values.write({name: value[: runner.rows] for name, (value, _) in found.items()})
            mcse.write({name: error[: runner.rows] for name, (_, error) in found.items()})
    return _joined(values.whole(), mcse.whole(), runner, quantiles, units)


def predictive(
    model: Model,
    posterior: Posterior,
    x: Data,
    *,
    units: "Units | None" = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> dict[str, Tensor]:
    """Sample y for each draw and row, and return the network output beside it.

    Args:
        model: The model that was fitted.
        posterior: Its posterior, from any road.
        x: Input rows, or a loader of them; see `predict`.
        units: How y was standardised; y and f are then in the user's units.
        seed: Seed of the samples.
        device: Where to run.
        out: A netCDF file to write the draws to, for more than memory holds: ArviZ's group
            `predictions`, with the dims chain, draw and pred_id. The tensors returned are then
            mapped from it.
        progress: Whether to show a progress bar on stderr.

    Returns:
        By observed site, samples `(chain, draw, n, …)`; under "f", f(x), `(chain, draw, n, …)`.

    Raises:
        DataError: x cannot be used as it is.
        ModelError: The posterior is not one of this model.
    """
    runner = Runner(model, posterior, x, device)
    loc, scale = _loc_scale(units)

    def sample(trace: poutine.Trace) -> dict[str, Tensor]:
        values = {name: trace.nodes[name]["value"] for name in runner.observed}
        return {**values, "f": trace.nodes["_RETURN"]["value"]}

    def in_units(values: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
        real = units is not None
        return {
            name: value * scale + loc if real and value.is_floating_point() else value
            for name, value in values.items()
        }

    with isolated(seed, runner.device), torch.no_grad():
        return _all_draws(runner, x, sample, in_units, out, "predictions", progress=progress)


def prior_predictive(
    model: Model,
    x: Data,
    *,
    draws: int = 1000,
    units: "Units | None" = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> dict[str, Tensor]:
    """Sample y and f(x) from the prior predictive distribution, before any data are seen.

    The draws of the parameters are those of `pbnn.sample_prior` with the same seed.

    Args:
        model: A Pyro model `(x, y=None)`.
        x: Input rows, or a loader of them that can be gone through twice.
        draws: Number of draws.
        units: How y was standardised; y and f are then in the user's units.
        seed: Seed.
        device: Where to run.
        out: A netCDF file to write the draws to; see `predictive`.
        progress: Whether to show a progress bar on stderr.

    Returns:
        By observed site, samples `(1, draws, n, …)`; under "f", f(x), `(1, draws, n, …)`.

    Raises:
        DataError: x cannot be used as it is.
        ModelError: A prior cannot be sampled, or the model has no rows.
    """
    first = next(iter(x)) if is_loader(x) else x
    first = first[0] if isinstance(first, tuple | list) and is_loader(x) else first
    prior = sample_prior(model, first, draws=draws, seed=seed, device=device)
    options: dict[str, Any] = {"units": units, "device": device, "out": out, "progress": progress}
    return predictive(model, prior, x, seed=seed, **options)


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
        x: Input rows, or a loader of them; see `predict`.
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
        return _all_draws(runner, x, output, None, None, "", progress=progress)["f"]


@overload
def log_likelihood(
    model: Model,
    posterior: Posterior,
    x: Data,
    y: Data = ...,
    *,
    units: "Units | None" = ...,
    by_site: Literal[False] = ...,
    device: str | torch.device | None = ...,
    out: str | os.PathLike[str] | None = ...,
    progress: bool = ...,
) -> Tensor: ...


@overload
def log_likelihood(
    model: Model,
    posterior: Posterior,
    x: Data,
    y: Data = ...,
    *,
    units: "Units | None" = ...,
    by_site: Literal[True],
    device: str | torch.device | None = ...,
    out: str | os.PathLike[str] | None = ...,
    progress: bool = ...,
) -> dict[str, Tensor]: ...


def log_likelihood(
    model: Model,
    posterior: Posterior,
    x: Data,
    y: Data = None,
    *,
    units: "Units | None" = None,
    by_site: bool = False,
    device: str | torch.device | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> Tensor | dict[str, Tensor]:
    """Return the log-likelihood of each row under each draw, summed over observed sites.

    A row whose y is missing (NaN, and masked by the model) has none: it is NaN. What else the model
    masks counts as 0. Where only its log mean over draws is wanted, `predict` with y holds no
    draws.

    Args:
        model: The model that was fitted.
        posterior: Its posterior, from any road.
        x: Input rows, as the fit took them, or a loader of blocks `(x, y)`.
        y: Observations, as the fit took them (standardised, if it did); none with a loader.
        units: How y was standardised; the result is then a density in the user's units, which is
            lower by log scale.
        by_site: Whether observed sites are kept apart.
        device: Where to run.
        out: A netCDF file to write the result to, by site, for more than memory holds: ArviZ's
            group `log_likelihood`, with the dims chain, draw and obs_id. What is returned is then
            mapped from it.
        progress: Whether to show a progress bar on stderr.

    Returns:
        `(chain, draw, n)`, or a dict of that by observed site.

    Raises:
        DataError: x or y cannot be used as they are.
        ModelError: The posterior is not one of this model, or the model has no rows.
    """
    if y is None and not is_loader(x):
        raise DataError("y is None; expected the observations of the rows of x")
    runner = Runner(model, posterior, x, device, y, scored=True)
    if y is None and runner.y is None:
        raise DataError("the loader gave x alone; expected blocks (x, y)")
    shift = _log_scale(runner, units)

    def score(trace: poutine.Trace) -> dict[str, Tensor]:
        scores = _scores(trace, runner.observed, shift)
        apart = by_site or out is not None
        return scores if apart else {"joint": torch.stack(list(scores.values())).sum(0)}

    def seen(values: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
        missing = {name: _missing(runner, name, rows) for name in values}
        return {k: v.masked_fill(missing[k], torch.nan) for k, v in values.items()}

    with isolated(0, runner.device), torch.no_grad():
        found = _all_draws(runner, x, score, seen, out, "log_likelihood", progress=progress)
    return found if by_site else _total(found)


def _total(scores: Mapping[str, Tensor]) -> Tensor:
    """Sum over sites; those that are NaN, for want of an observation, are left out."""
    first, *rest = scores.values()
    for other in rest:
        first = torch.where(first.isnan(), other, first + other.nan_to_num(nan=0.0))
    return first


def _missing(runner: Runner, site: str, rows: slice) -> Tensor:
    """Return which rows have no observation at a site (at none, if y has no such site)."""
    if runner.y is None:  # of no rows, one stands in
        return torch.zeros(rows.stop - rows.start, dtype=torch.bool)
    y = runner.y if isinstance(runner.y, Mapping) else {runner.observed[0]: runner.y}
    parts = [y[site]] if site in y else list(y.values())
    gone = [
        value[rows].isnan().flatten(1).all(1) if value.ndim > 1 else value[rows].isnan()
        for value in parts
    ]
    return torch.stack(gone).all(0).cpu()


def _scores(
    trace: poutine.Trace, observed: Sequence[str], shift: Mapping[str, float]
) -> dict[str, Tensor]:
    """Return the log density of each row, by observed site."""
    trace.compute_log_prob(site_filter=lambda name, _: name in observed)
    return {name: _by_row(trace.nodes[name]) - shift.get(name, 0.0) for name in observed}


def _by_row(node: Any) -> Tensor:
    """Sum a site's log density over all dimensions but that of plate `data`.

    `poutine.scale` weighs rows in a fit; what is scored is the density without it.
    """
    log_prob: Tensor = scale_and_mask(node["unscaled_log_prob"], mask=node["mask"])
    dim = next(frame.dim for frame in node["cond_indep_stack"] if frame.name == PLATE)
    others = [k for k in range(log_prob.ndim) if k != log_prob.ndim + dim]
    return log_prob.sum(others) if others else log_prob


def _log_scale(runner: Runner, units: "Units | None") -> dict[str, float]:
    """Return by observed site what the log density of a row loses in the user's units."""
    if units is None or runner.y is None:
        return {}
    y = runner.y if isinstance(runner.y, Mapping) else {runner.observed[0]: runner.y}
    total = float(np.sum(np.log(units.scale)))
    return {
        name: total * (1 if np.ndim(units.scale) else value[0].numel())
        for name, value in y.items()
        if value.is_floating_point()
    }


def _moments(runner: Runner, *, samples: int) -> Reader:
    """Return the function that reads moments (or class probabilities) off the observed site.

    With samples it reads as many y as well, one after another along a last axis.
    """
    name = runner.single_observed()

    def read(trace: poutine.Trace) -> dict[str, Tensor]:
        fn = trace.nodes[name]["fn"]
        out = {}
        if trace.nodes[name]["is_observed"]:
            out["log_likelihood"] = _scores(trace, [name], {})[name]
        if runner.classes:
            return {**out, "probabilities": unwrapped(fn).probs}
        try:
            out |= {"location": fn.mean, "variance": fn.variance}
        except NotImplementedError as error:
            raise ModelError(
                f"site {name!r} is {type(unwrapped(fn)).__name__}, which has no mean and variance; "
                "use predictive for samples"
            ) from error
        drawn = [sampled(fn) for _ in range(samples)]
        return {**out, "y": torch.stack(drawn, -1)} if samples else out

    return read


def _joined(
    values: dict[str, Tensor],
    mcse: dict[str, Tensor],
    runner: Runner,
    quantiles: Sequence[float],
    units: "Units | None",
) -> Prediction:
    """Return all rows as a prediction in the user's units."""
    loc, scale = _loc_scale(units)
    if "log_predictive_density" in values:
        values["log_predictive_density"] -= sum(_log_scale(runner, units).values())
    if "mean" in values and units is not None:
        for name in values.keys() - {"log_predictive_density"}:
            shift = loc if name == "mean" or name.startswith("q") else 0.0
            values[name], mcse[name] = values[name] * scale + shift, mcse[name] * scale
    if "mean" in values and values["mean"].isnan().any():
        row = int(values["mean"].reshape(runner.rows, -1).isnan().any(1).nonzero()[0])
        raise ModelError(
            f"the mean of y is NaN in row {row}: its distribution has no mean, or f(x) is not "
            "finite there; use predictive for samples"
        )
    values.pop("scale", None)  # what the two parts make together
    found = {p: values.pop(f"q{p:g}") for p in quantiles if f"q{p:g}" in values}
    return Prediction(**values, quantiles=found if "mean" in values else None, mcse=mcse)


def _all_draws(
    runner: Runner,
    x: Data,
    read: Reader,
    convert: Callable[[dict[str, Tensor], slice], dict[str, Tensor]] | None,
    out: str | os.PathLike[str] | None,
    group: str,
    *,
    progress: bool,
) -> dict[str, Tensor]:
    """Return what is read for all draws and rows, in memory or mapped from a file."""
    posterior = runner.posterior
    with contextlib.ExitStack() as stack:
        sink: _Memory | DrawFile
        if out is None:
            sink = _Memory(None if is_loader(x) else max(1, rows_of(x)))
        else:
            sizes = {
                "chain": posterior.chains,
                "draw": posterior.draws_per_chain,
                "pred_id" if group == "predictions" else "obs_id": rows_of(x),
            }
            marks = origin(posterior.method, markov=posterior.markov)
            sink = stack.enter_context(open_draws(Path(out), group, sizes, marks))
        names: list[str] = []
        for rows in runner.row_blocks(progress=progress):
            values = runner.gather(read, rows)
            names = list(values)
            if not runner.rows and out is not None:
                values = {name: value[:, :0] for name, value in values.items()}
            sink.write(values if convert is None else convert(values, rows))
    if isinstance(sink, DrawFile):
        mapped = map_draws(Path(str(out)), group)
        return {name: mapped[in_file(name)] for name in names}
    return {name: runner.by_chain(v[:, : runner.rows]) for name, v in sink.whole().items()}


class _Memory:
    """Blocks of rows `(draws, rows, …)` put side by side in memory, like a `DrawFile`.

    Args:
        rows: Number of rows, where it is known: then nothing is held twice.
    """

    def __init__(self, rows: int | None) -> None:
        self._rows = rows
        self._row = 0
        self._held: dict[str, Tensor] = {}
        self._parts: list[Mapping[str, Tensor]] = []

    def write(self, values: Mapping[str, Tensor]) -> None:
        if self._rows is None:
            self._parts.append(values)
            return
        stop = self._row
        for name, value in values.items():
            if name not in self._held:
                shape = (value.shape[0], self._rows, *value.shape[2:])
                self._held[name] = torch.empty(shape, dtype=value.dtype)
            stop = self._row + value.shape[1]
            self._held[name][:, self._row : stop] = value
        self._row = stop

    def whole(self) -> dict[str, Tensor]:
        if self._rows is not None:
            return self._held
        return {name: torch.cat([p[name] for p in self._parts], 1) for name in self._parts[0]}


def _loc_scale(units: "Units | None") -> tuple[Tensor | float, Tensor | float]:
    if units is None:
        return 0.0, 1.0
    return torch.as_tensor(np.asarray(units.loc)), torch.as_tensor(np.asarray(units.scale))
