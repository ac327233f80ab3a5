"""Draws by rows on disk: a netCDF file that is filled row by row, and mapped into memory."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pbnn.files import writing

__all__ = ["DrawFile", "in_file", "map_draws", "open_draws"]


class DrawFile:
    """One group of a netCDF file, with variables `(chain, draw, row, …)` that are filled in order.

    Args:
        group: The group of an open h5netcdf file, whose dims are chain, draw and the row's.
        row_dim: Name of the dim of the rows.
    """

    def __init__(self, group: Any, row_dim: str) -> None:
        self._group = group
        self._row_dim = row_dim
        self._row = 0
        self._variables: dict[str, Any] = {}

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Write the next rows, each `(chain × draw, rows, …)`."""
        stop = self._row
        for name, value in values.items():
            array = value.numpy()
            if name not in self._variables:
                self._variables[name] = self._create(in_file(name), array)
            variable = self._variables[name]
            stop = self._row + array.shape[1]
            variable[:, :, self._row : stop] = array.reshape(*variable.shape[:2], *array.shape[1:])
        self._row = stop

    def _create(self, name: str, array: Any) -> Any:
        ends = {f"{name}_dim_{axis}": size for axis, size in enumerate(array.shape[2:])}
        for dim, size in ends.items():
            self._group.dimensions[dim] = size
            self._group.create_variable(dim, (dim,), data=np.arange(size))
        dims = ("chain", "draw", self._row_dim, *ends)
        return self._group.create_variable(name, dims, array.dtype)


def in_file(name: str) -> str:
    """Return a site's name as netCDF can hold it."""
    return name.replace("/", ".")


@contextmanager
def open_draws(
    path: Path, group: str, sizes: Mapping[str, int], attrs: Mapping[str, Any]
) -> Iterator[DrawFile]:
    """Open a new netCDF file for one group of draws; it appears under its name when complete.

    Args:
        path: File name.
        group: Name of the group, one of ArviZ's.
        sizes: Sizes of the dims chain, draw, and of the rows.
        attrs: Attributes of the file.
    """
    import h5netcdf  # type: ignore[import-untyped]

    with writing(path) as temporary, h5netcdf.File(temporary, "w") as file:
        file.attrs.update(attrs)
        held = file.create_group(group)
        for dim, size in sizes.items():
            held.dimensions[dim] = size
            held.create_variable(dim, (dim,), data=np.arange(size))
        yield DrawFile(held, list(sizes)[-1])


def map_draws(path: Path, group: str) -> dict[str, Tensor]:
    """Return the draws in a group, mapped from disk: read when touched, never written back."""
    import h5py  # type: ignore[import-untyped]

    with h5py.File(path) as file:
        found = {k: v for k, v in file[group].items() if v.ndim >= 3}
        places = {k: (v.id.get_offset(), v.shape, v.dtype) for k, v in found.items()}
    return {
        name: torch.from_numpy(
            np.memmap(path, dtype, mode="c", offset=offset, shape=shape)
            if offset is not None
            else np.empty(shape, dtype)
        )
        for name, (offset, shape, dtype) in places.items()
    }
