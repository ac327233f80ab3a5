"""ArviZ's containers, in memory and as netCDF; the only file that knows them.

`InferenceData` of ArviZ 0.x and the `DataTree` of ArviZ 1.x get the same groups, variables, dims
and attributes.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import arviz as az
import numpy as np
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from pbnn.errors import DataError, FileError
from pbnn.files import writing
from pbnn.inference_data.labels import SAMPLED, UNSAMPLED, for_group, layer_dims, refuse_unused

__all__ = [
    "Arrays",
    "Container",
    "as_array",
    "build",
    "group",
    "groups",
    "read_netcdf",
    "write_netcdf",
]

Container: TypeAlias = Any
"""`arviz.InferenceData` under ArviZ 0.x, `xarray.DataTree` under ArviZ 1.x."""

Arrays: TypeAlias = Mapping[str, Any]


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
        if name not in SAMPLED + UNSAMPLED:
            known = ", ".join(SAMPLED + UNSAMPLED)
            raise DataError(f"group {name!r} is not one of ArviZ's; use one of {known}")
        datasets[name] = _dataset(
            name,
            {key.replace("/", "."): as_array(value) for key, value in variables.items()},
            coords=for_group(coords, name),
            dims=for_group(dims, name),
        ).assign_attrs(_storable((group_attrs or {}).get(name, {})))
    refuse_unused("coords", coords or {}, {n: ds.sizes for n, ds in datasets.items()})
    refuse_unused("dims", dims or {}, {n: ds.data_vars for n, ds in datasets.items()})
    return _contain(datasets, _storable(attrs or {}))


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
    with writing(path) as temporary:
        xr.Dataset(attrs=data.attrs).to_netcdf(temporary, mode="w", engine="h5netcdf")
        for name, dataset in groups(data).items():
            dataset.to_netcdf(temporary, mode="a", group=name, engine="h5netcdf")
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


def as_array(value: Any) -> NDArray[Any]:
    """A NumPy array of what may be a tensor on any device; no copy where none is needed."""
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


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
    leading = ("chain", "draw") if name in SAMPLED else ()
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
