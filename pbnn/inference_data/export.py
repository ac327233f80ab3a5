"""A posterior, and what the model makes of it at the data, as ArviZ's groups.

Without a model nothing here needs torch.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pbnn.errors import DataError
from pbnn.files import origin
from pbnn.inference_data.containers import Arrays, Container, as_array, build
from pbnn.inference_data.labels import SAMPLED, UNSAMPLED, feature_coords, row_dims

if TYPE_CHECKING:
    from pbnn.data import Units

__all__ = ["ExportablePosterior", "to_inference_data"]

_RHAT_NOTE = {
    True: "R-hat of network weights means nothing: hidden units permute and flip sign. "
    "Judge convergence by R-hat of lp, of the noise scale and of f.",
    False: "These draws are independent draws from an approximation, not a Markov chain: "
    "R-hat and effective sample size say nothing about them.",
}
_LOO_NOTE = {
    True: "az.loo holds for these draws once the chains have converged; "
    "rows with a Pareto k above 0.7 are not to be trusted.",
    False: "az.loo takes these draws for draws from the posterior, which they are not: it favours "
    "an approximation that is too narrow, with Pareto k that look clean. Do not rank by it; rank "
    "by held-out log predictive density, or weight the draws by "
    "exp(lp - log_q - log_likelihood) where log_q is in sample_stats.",
}


class ExportablePosterior(Protocol):
    """What `to_inference_data` reads of a `Posterior`, whose fields these are."""

    @property
    def draws(self) -> Arrays: ...  # noqa: D102
    @property
    def deterministic(self) -> Arrays: ...  # noqa: D102
    @property
    def stats(self) -> Arrays: ...  # noqa: D102
    @property
    def method(self) -> str: ...  # noqa: D102
    @property
    def markov(self) -> bool: ...  # noqa: D102
    @property
    def seconds(self) -> float: ...  # noqa: D102
    @property
    def provenance(self) -> Mapping[str, Any]: ...  # noqa: D102
    @property
    def warmup(self) -> "ExportablePosterior | None": ...  # noqa: D102
    def select(self, *, draws: slice | None = None) -> Self: ...  # noqa: D102


def to_inference_data(
    posterior: ExportablePosterior,
    *,
    model: Any = None,
    x: Any = None,
    y: Any = None,
    x_new: Any = None,
    prior: ExportablePosterior | int | None = None,
    warmup: ExportablePosterior | None = None,
    coords: Mapping[str, ArrayLike] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    feature_names: Sequence[str] | None = None,
    units: "Units | None" = None,
    log_likelihood: bool | ArrayLike = True,
    predictive_draws: int | None = None,
    seed: int = 0,
    device: Any = None,
    progress: bool = False,
) -> Container:
    """Return the posterior, and what the model makes of it at the data, as ArviZ's container.

    Groups: posterior (latent and deterministic sites) and sample_stats always; observed_data with
    `y`; constant_data with `x`; with a model posterior_predictive at `x`, log_likelihood at `x` and
    `y`, predictions and predictions_constant_data at `x_new`; prior and prior_predictive with
    `prior`; warmup_posterior and warmup_sample_stats where the warm-up was kept. `f`, the output of
    the network, stands at x in posterior (and prior) unless `predictive_draws` asks for fewer
    draws, and at x_new in predictions.

    Dims: rows are `obs_id`, new rows `pred_id`, columns of a two-dimensional x `feature`, columns
    of an observed site s `s_output`, the last axis of f `class` where y holds integers; layers are
    named as in `build`.

    Each observed site has a log-likelihood of its own; with several, name one to ArviZ
    (`az.loo(data, var_name="y")`), or add them up for the joint one.

    Draws of a guide are one chain. The attributes `pbnn_markov`, `pbnn_rhat` and `pbnn_loo` say
    what R-hat and `az.loo` are worth on the draws; `pbnn_provenance` is JSON.

    Args:
        posterior: A `Posterior`.
        model: The model that was fitted.
        x: Inputs `(n, …)`, or a dict of them, as they were given to the fit.
        y: Observed values `(n,)` or `(n, outputs)`, or a dict by site.
        x_new: Inputs to predict at.
        prior: Draws from the prior, in the same form as `posterior`; or how many to draw with
            `model` at `x`, by `pbnn.sample_prior`.
        warmup: The draws of warm-up, in the same form as `posterior`; by default those that it
            holds (`fit_nuts(…, keep_warmup=True)`).
        coords: Labels by dim; they win over those made here. Keys as in `build`.
        dims: Names of axes by variable; they win over those made here. Keys as in `build`.
        feature_names: Labels of the columns of x, and of the inputs of the first weight matrix;
            those of x by default, where it is a frame.
        units: How y was standardised; y, f and the log densities are then in the user's units.
        log_likelihood: False for none; an array of row numbers for those rows only. Rows of which
            nothing was observed have none and are left out; an attribute says how many.
        predictive_draws: Draws of each chain in the predictive groups, evenly spaced; all by
            default, 0 for none.
        seed: Seed of the predictive draws.
        device: Where to run the model.
        progress: Whether to show a progress bar on stderr.

    Raises:
        DataError: The arrays, dims and coords do not fit each other.
    """
    warmup = posterior.warmup if warmup is None else warmup
    parts: dict[str, dict[str, Any]] = {
        "observed_data": _in_units(_named(y, "y"), units),
        "constant_data": _named(x, "x"),
        "predictions_constant_data": _named(x_new, "x"),
    }
    if feature_names is None and hasattr(x, "columns"):
        feature_names = [str(name) for name in x.columns]
    made: dict[str, ArrayLike] = {}
    missing = 0
    if predictive_draws is not None and predictive_draws < 0:
        raise DataError(f"predictive_draws={predictive_draws}; expected 0 (for none) or more")
    if isinstance(prior, int):
        prior = _prior(model, x, prior, seed, device)
    if model is not None:
        options = {"units": units, "device": device, "progress": progress}
        sources: list[tuple[str, ExportablePosterior, Any]] = [
            ("posterior", posterior, x),
            ("predictions", posterior, x_new),
        ]
        if prior is not None:
            sources.append(("prior", prior, x))
        for name, drawn, at in sources:
            if at is not None and predictive_draws != 0:
                groups, kept = _predictive(model, drawn, at, name, predictive_draws, seed, options)
                parts |= groups
                if predictive_draws is not None:
                    made |= {f"{group}/draw": kept for group in groups}
        if log_likelihood is not False and x is not None and y is not None:
            rows = None if isinstance(log_likelihood, bool) else _row_numbers(log_likelihood, y)
            rows, missing = _with_observations(parts["observed_data"], rows)
            parts["log_likelihood"] = _log_likelihood(model, posterior, x, y, rows, options)
            if rows is not None:
                length = len(next(iter(parts["observed_data"].values())))
                labels = (coords or {}).get("obs_id", np.arange(length))
                made["log_likelihood/obs_id"] = np.asarray(labels)[rows]
    named = row_dims(parts)
    held = {"posterior": posterior, "prior": prior, "warmup_posterior": warmup}
    for name, source in held.items():
        if source is not None:
            parts[name] = {**source.draws, **source.deterministic, **parts.get(name, {})}
    parts["sample_stats"] = dict(posterior.stats)
    parts["warmup_sample_stats"] = {} if warmup is None else dict(warmup.stats)
    return build(
        {name: parts[name] for name in SAMPLED + UNSAMPLED if parts.get(name)},
        coords={**made, **feature_coords(parts, feature_names), **(coords or {})},
        dims={**named, **(dims or {})},
        attrs=_marks(posterior),
        group_attrs={
            "posterior": {
                "pbnn_method": posterior.method,
                "pbnn_markov": posterior.markov,
                "pbnn_rhat": _RHAT_NOTE[posterior.markov],
            },
            "log_likelihood": {
                "pbnn_loo": _LOO_NOTE[posterior.markov],
                "pbnn_rows_without_observation": missing,
            },
        },
    )


def _predictive(
    model: Any,
    source: Any,
    x: Any,
    name: str,
    draws: int | None,
    seed: int,
    options: Mapping[str, Any],
) -> tuple[dict[str, dict[str, NDArray[Any]]], NDArray[np.int64]]:
    """Predictive draws at x by group, and which draws of each chain they were made with."""
    # Imported only when a model is run: it needs torch, which reading a file does not.
    from pbnn.prediction import predictive

    count = next(iter(source.stats.values())).shape[1]
    # Evenly spaced, as neighbours in a chain are alike.
    step = 1 if draws is None else max(1, count // draws)
    cut = slice(0, None if draws is None else draws * step, step)
    values = predictive(model, source.select(draws=cut), x, seed=seed, **options)
    kept = np.arange(count)[cut]
    sites = {key: as_array(value) for key, value in values.items()}
    if name == "predictions":
        return {name: sites}, kept
    # f beside the draws is where ArviZ looks for it (rhat, ess, forest), and ArviZ's predictive
    # plots want in the predictive group what was observed and nothing else. A site of that name
    # comes first; fewer predictive draws do not fit beside the posterior's.
    output = sites.pop("f")
    groups = {f"{name}_predictive": sites}
    if len(kept) == count and "f" not in {**source.draws, **source.deterministic}:
        groups[name] = {"f": output}
    return groups, kept


def _row_numbers(rows: ArrayLike, y: Any) -> NDArray[Any]:
    """Return the rows whose log-likelihood is wanted, which must be there."""
    length = len(next(iter(y.values())) if isinstance(y, Mapping) else y)
    numbers = np.asarray(rows)
    if (
        numbers.size == 0
        or numbers.dtype.kind not in "iu"
        or not (numbers.min() >= 0 and numbers.max() < length)
    ):
        raise DataError(
            f"log_likelihood={rows!r}; expected True, False, or numbers of rows from 0 to "
            f"{length - 1}"
        )
    return numbers


def _with_observations(
    observed: Mapping[str, NDArray[Any]], rows: NDArray[Any] | None
) -> tuple[NDArray[Any] | None, int]:
    """Return the rows of which something was observed, None for all, and how many are left out."""
    real = [v.reshape(len(v), -1) for v in observed.values() if np.issubdtype(v.dtype, np.floating)]
    if len(real) < len(observed):
        return rows, 0
    gone = np.isnan(np.concatenate(real, 1)).all(1)
    asked = np.arange(len(gone)) if rows is None else rows
    kept = asked[~gone[asked]]
    return (rows, 0) if len(kept) == len(asked) else (kept, len(asked) - len(kept))


def _log_likelihood(
    model: Any,
    posterior: Any,
    x: Any,
    y: Any,
    rows: NDArray[Any] | None,
    options: Mapping[str, Any],
) -> dict[str, NDArray[Any]]:
    """Row-wise log-likelihood by observed site."""
    from pbnn.prediction import log_likelihood

    if rows is not None:
        x, y = _take(x, rows), _take(y, rows)
    values = log_likelihood(model, posterior, x, y, by_site=True, **options)
    return {name: as_array(value) for name, value in values.items()}


def _prior(model: Any, x: Any, draws: int, seed: int, device: Any) -> ExportablePosterior:
    """Draw from the prior of a model."""
    if model is None or x is None:
        raise DataError(f"prior={draws} draws from the prior of a model at x; pass model= and x=")
    from pbnn.prediction import sample_prior

    prior: ExportablePosterior = sample_prior(model, x, draws=draws, seed=seed, device=device)
    return prior


def _take(data: Any, rows: NDArray[Any]) -> Any:
    if isinstance(data, Mapping):
        return {name: _take(value, rows) for name, value in data.items()}
    # A frame would take the rows' numbers for names of columns.
    return data[rows] if hasattr(data, "detach") else as_array(data)[rows]


def _in_units(observed: dict[str, NDArray[Any]], units: "Units | None") -> dict[str, NDArray[Any]]:
    """Observed values as the predictive draws beside them: real ones in the user's units."""
    if units is None:
        return observed
    return {
        name: value * units.scale + units.loc if np.issubdtype(value.dtype, np.floating) else value
        for name, value in observed.items()
    }


def _marks(posterior: ExportablePosterior) -> dict[str, Any]:
    """What the file as a whole says about itself."""
    return {
        **origin(posterior.method, markov=posterior.markov),
        "pbnn_seconds": posterior.seconds,
        "pbnn_rhat": _RHAT_NOTE[posterior.markov],
        "pbnn_loo": _LOO_NOTE[posterior.markov],
        "pbnn_provenance": dict(posterior.provenance),
    }


def _named(value: Any, name: str) -> dict[str, NDArray[Any]]:
    """Arrays by name, from a dict, from one array called `name`, or from None."""
    if value is None:
        return {}
    items = value if isinstance(value, Mapping) else {name: value}
    return {key: as_array(item) for key, item in items.items()}
