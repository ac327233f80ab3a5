"""ArviZ's containers: a posterior as named, labelled groups of arrays, in memory and as netCDF.

The only file that knows them: `InferenceData` of ArviZ 0.x and the `DataTree` of ArviZ 1.x get the
same groups, variables, dims and attributes. Without a model nothing here needs torch.
"""

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import arviz as az
import numpy as np
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from pbnn._version import __version__
from pbnn.errors import DataError, FileError
from pbnn.labels import UNSAMPLED, feature_coords, for_group, layer_dims, refuse_unused, row_dims

__all__ = [
    "Container",
    "ExportablePosterior",
    "build",
    "group",
    "groups",
    "read_netcdf",
    "to_inference_data",
    "write_netcdf",
]

Container: TypeAlias = Any
"""`arviz.InferenceData` under ArviZ 0.x, `xarray.DataTree` under ArviZ 1.x."""

Arrays: TypeAlias = Mapping[str, Any]

_SAMPLED = (
    "posterior",
    "posterior_predictive",
    "predictions",
    "log_likelihood",
    "sample_stats",
    "prior",
    "prior_predictive",
    "warmup_posterior",
    "warmup_sample_stats",
)
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


def build(
    groups: Mapping[str, Arrays],
    *,
    coords: Mapping[str, ArrayLike] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    attrs: Mapping[str, Any] | None = None,
    group_attrs: Mapping[str, Mapping[str, Any]] | None = None,
) -> Container:
    """Return ArviZ's container with the groups given.

    A weight `m.weight` of shape `(out, in)` gets the dims `m_out` and `m_in`, its bias `m_out`;
    further axes of a weight are `m_kernel_0`, …; any other axis i of a variable v is `v_dim_i`.
    A "/" in a name, which netCDF cannot hold, becomes ".".

    Args:
        groups: Arrays by variable name by group. Draws have the axes `(chain, draw, …)`; the groups
            observed_data, constant_data and predictions_constant_data have no draws.
        coords: Labels by dim; integers where none are given. A key "group/dim" holds for that
            group only.
        dims: Names of a variable's axes after chain and draw. A key "group/variable" holds for that
            group only.
        attrs: Attributes of the whole. What netCDF cannot hold becomes JSON text, a bool 0 or 1.
        group_attrs: Attributes by group.

    Raises:
        DataError: An unknown group, or an array that does not fit its dims or coords.
    """
    datasets: dict[str, xr.Dataset] = {}
    for name, variables in groups.items():
        if name not in _SAMPLED + UNSAMPLED:
            known = ", ".join(_SAMPLED + UNSAMPLED)
            raise DataError(f"group {name!r} is not one of ArviZ's; use one of {known}")
        datasets[name] = _dataset(
            name,
            {key.replace("/", "."): _array(value) for key, value in variables.items()},
            coords=for_group(coords, name),
            dims=for_group(dims, name),
        ).assign_attrs(_storable((group_attrs or {}).get(name, {})))
    refuse_unused("coords", coords or {}, {n: ds.sizes for n, ds in datasets.items()})
    refuse_unused("dims", dims or {}, {n: ds.data_vars for n, ds in datasets.items()})
    return _contain(datasets, _storable(attrs or {}))


def to_inference_data(
    posterior: ExportablePosterior,
    *,
    model: Any = None,
    x: Any = None,
    y: Any = None,
    x_new: Any = None,
    prior: ExportablePosterior | None = None,
    coords: Mapping[str, ArrayLike] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    feature_names: Sequence[str] | None = None,
    units: Any = None,
    log_likelihood: bool | ArrayLike = True,
    predictive_draws: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Container:
    """Return the posterior, and what the model makes of it at the data, as ArviZ's container.

    Groups: posterior (latent and deterministic sites) and sample_stats always; observed_data with
    `y`; constant_data with `x`; with a model posterior_predictive at `x`, log_likelihood at `x` and
    `y`, predictions and predictions_constant_data at `x_new`; prior and prior_predictive with
    `prior`. `f`, the output of the network, stands at x in posterior (and prior) unless
    `predictive_draws` asks for fewer draws, and at x_new in predictions.

    Dims: rows are `obs_id`, new rows `pred_id`, columns of a two-dimensional x `feature`, columns
    of an observed site s `s_output`, the last axis of f `class` where y holds integers; layers are
    named as in `build`.

    Draws of a guide are one chain. The attributes `pbnn_markov`, `pbnn_rhat` and `pbnn_loo` say
    what R-hat and `az.loo` are worth on the draws; `pbnn_provenance` is JSON.

    Args:
        posterior: A `Posterior`.
        model: The model that was fitted.
        x: Inputs `(n, …)`, or a dict of them, as they were given to the fit.
        y: Observed values `(n,)` or `(n, outputs)`, or a dict by site.
        x_new: Inputs to predict at.
        prior: Draws from the prior, in the same form as `posterior`.
        coords: Labels by dim; they win over those made here. Keys as in `build`.
        dims: Names of axes by variable; they win over those made here. Keys as in `build`.
        feature_names: Labels of the columns of x, and of the inputs of the first weight matrix.
        units: Units of the data, in which predictions and log densities are returned.
        log_likelihood: False for none; an array of row numbers for those rows only.
        predictive_draws: Draws per chain in the predictive groups; all by default, 0 for none.
        seed: Seed of the predictive draws.
        progress: Show a progress bar.

    Raises:
        DataError: The arrays, dims and coords do not fit each other.
    """
    parts: dict[str, dict[str, Any]] = {
        "observed_data": _named(y, "y"),
        "constant_data": _named(x, "x"),
        "predictions_constant_data": _named(x_new, "x"),
    }
    coords = dict(coords or {})
    if model is not None:
        rows = None if isinstance(log_likelihood, bool) else np.asarray(log_likelihood)
        options = {"units": units, "seed": seed, "draws": predictive_draws}
        parts |= _predictive(model, posterior, x, "posterior", options)
        parts |= _predictive(model, posterior, x_new, "predictions", options)
        if prior is not None:
            parts |= _predictive(model, prior, x, "prior", options)
        if log_likelihood is not False and x is not None and y is not None:
            parts["log_likelihood"] = _log_likelihood(
                model, posterior, x, y, rows=rows, units=units, progress=progress
            )
            if rows is not None:
                labels = coords.get("obs_id", np.arange(len(next(iter(_named(y, "y").values())))))
                coords.setdefault("log_likelihood/obs_id", np.asarray(labels)[rows])
    named = row_dims(parts)
    for name, source in (("posterior", posterior), ("prior", prior)):
        if source is not None:
            parts[name] = {**source.draws, **source.deterministic, **parts.get(name, {})}
    parts["sample_stats"] = dict(posterior.stats)
    return build(
        {name: parts[name] for name in _SAMPLED + UNSAMPLED if parts.get(name)},
        coords={**feature_coords(parts, feature_names), **coords},
        dims={**named, **(dims or {})},
        attrs=_marks(posterior),
        group_attrs={
            "posterior": {
                "pbnn_method": posterior.method,
                "pbnn_markov": posterior.markov,
                "pbnn_rhat": _RHAT_NOTE[posterior.markov],
            },
            "log_likelihood": {"pbnn_loo": _LOO_NOTE[posterior.markov]},
        },
    )


def group(data: Container, name: str) -> xr.Dataset:
    """Return one group of a container, of either version of ArviZ.

    Raises:
        DataError: The container lacks the group.
    """
    found = groups(data)
    if name not in found:
        raise DataError(f"the inference data has no group {name!r}; it has {', '.join(found)}")
    return found[name]


def groups(data: Container) -> dict[str, xr.Dataset]:
    """Return all groups of a container, of either version of ArviZ, by name."""
    if isinstance(data, xr.DataTree):
        return {name: node.to_dataset() for name, node in data.children.items()}
    return {name: data[name] for name in data.groups()}


def write_netcdf(data: Container, path: str | os.PathLike[str]) -> Path:
    """Write a container to a netCDF file, which appears under its name only when complete.

    Args:
        data: What `build` or `to_inference_data` returned.
        path: File name, by custom ending in `.nc`.

    Returns:
        The path written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        xr.Dataset(attrs=data.attrs).to_netcdf(temporary, mode="w", engine="h5netcdf")
        for name, dataset in groups(data).items():
            dataset.to_netcdf(temporary, mode="a", group=name, engine="h5netcdf")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def read_netcdf(path: str | os.PathLike[str]) -> Container:
    """Read a file of `write_netcdf` into memory; either version of ArviZ reads the other's.

    Raises:
        FileError: The file is missing or is no netCDF file with groups.
    """
    path = Path(path)
    if not path.is_file():
        raise FileError(f"{path}: no such file; expected a netCDF file of inference data")
    try:
        opened = xr.open_groups(path, engine="h5netcdf")
    except (OSError, ValueError) as error:
        raise FileError(f"{path}: not a netCDF file ({error})") from error
    try:
        datasets = {name.lstrip("/"): dataset.load() for name, dataset in opened.items()}
    finally:
        for dataset in opened.values():
            dataset.close()
    root = datasets.pop("", xr.Dataset())
    if not datasets:
        raise FileError(f"{path}: holds no groups; expected a file of inference data")
    return _contain(datasets, root.attrs)


def _predictive(
    model: Any, source: ExportablePosterior, x: Any, name: str, options: Mapping[str, Any]
) -> dict[str, dict[str, NDArray[Any]]]:
    """Predictive draws at x, as the group "predictions" or as `name` with its predictive group."""
    if x is None or options["draws"] == 0:
        return {}
    # Imported only when a model is run: it needs torch, which reading a file does not.
    from pbnn.predict import predictive

    sites = {k: _array(v) for k, v in predictive(model, source, x, **options).items()}
    if name == "predictions":
        return {name: sites}
    # f beside the draws is where ArviZ looks for it (rhat, ess, forest), and ArviZ's predictive
    # plots want in the predictive group what was observed and nothing else. A site of that name
    # comes first; fewer predictive draws do not fit beside the posterior's.
    output = sites.pop("f")
    whole = options["draws"] is None and "f" not in {**source.draws, **source.deterministic}
    return {f"{name}_predictive": sites, name: {"f": output} if whole else {}}


def _log_likelihood(
    model: Any, posterior: ExportablePosterior, x: Any, y: Any, **options: Any
) -> dict[str, NDArray[Any]]:
    from pbnn.predict import log_likelihood

    values = log_likelihood(model, posterior, x, y, **options)
    return _named(values, next(iter(_named(y, "y"))))


def _contain(datasets: Mapping[str, xr.Dataset], attrs: Mapping[str, Any]) -> Container:
    if int(az.__version__.split(".")[0]) == 0:
        return az.InferenceData(attrs=dict(attrs), **datasets)
    tree = xr.DataTree.from_dict(dict(datasets))
    tree.attrs.update(attrs)
    return tree


def _dataset(
    name: str,
    variables: Mapping[str, NDArray[Any]],
    *,
    coords: Mapping[str, ArrayLike],
    dims: Mapping[str, Sequence[str]],
) -> xr.Dataset:
    """One group as a dataset, each dim with labels."""
    leading = ("chain", "draw") if name in _SAMPLED else ()
    sizes: dict[str, int] = {}
    arrays = {}
    for key, value in variables.items():
        if value.ndim < len(leading):
            raise DataError(f"{name}: {key} has shape {value.shape}; expected (chain, draw, …)")
        axes = (*leading, *dims.get(key, layer_dims(key, value.shape[len(leading) :], sizes)))
        if len(axes) != value.ndim or len(set(axes)) != len(axes):
            raise DataError(f"{name}: {key} has shape {value.shape}, which dims {axes} do not name")
        for axis, size in zip(axes, value.shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                raise DataError(
                    f"{name}: {key} has {size} values along {axis!r} where another variable has "
                    f"{sizes[axis]}; give it a dim of its own: dims={{{key!r}: [...]}}"
                )
        arrays[key] = (axes, value)
    for key in arrays:
        if key in sizes:
            raise DataError(f"{name}: {key!r} names a variable and a dim; rename the dim by dims=")
    labels = {}
    for axis, size in sizes.items():
        labels[axis] = np.asarray(coords.get(axis, np.arange(size)))
        if labels[axis].shape != (size,):
            raise DataError(
                f"{name}: coords[{axis!r}] has shape {labels[axis].shape}; expected ({size},)"
            )
    return xr.Dataset(arrays, coords=labels)


def _marks(posterior: ExportablePosterior) -> dict[str, Any]:
    """What the file as a whole says about itself."""
    return {
        "created_at": datetime.datetime.now(datetime.UTC).isoformat(),
        "inference_library": "pbnn",
        "inference_library_version": __version__,
        "pbnn_method": posterior.method,
        "pbnn_markov": posterior.markov,
        "pbnn_seconds": posterior.seconds,
        "pbnn_rhat": _RHAT_NOTE[posterior.markov],
        "pbnn_loo": _LOO_NOTE[posterior.markov],
        "pbnn_provenance": dict(posterior.provenance),
    }


def _storable(attrs: Mapping[str, Any]) -> dict[str, str | int | float]:
    """The attributes in the form in which netCDF keeps them, so that a file reads back the same."""
    kept: dict[str, str | int | float] = {}
    for key, value in attrs.items():
        if isinstance(value, bool | np.bool_):
            kept[key] = int(value)
        elif isinstance(value, str | int | float):
            kept[key] = value
        else:
            try:
                kept[key] = json.dumps(value)
            except TypeError as error:
                raise DataError(f"attribute {key!r} cannot be stored as JSON: {error}") from error
    return kept


def _named(value: Any, name: str) -> dict[str, NDArray[Any]]:
    """Arrays by name, from a dict, from one array called `name`, or from None."""
    if value is None:
        return {}
    items = value if isinstance(value, Mapping) else {name: value}
    return {key: _array(item) for key, item in items.items()}


def _array(value: Any) -> NDArray[Any]:
    """A NumPy array of what may be a tensor on any device; no copy where none is needed."""
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
