"""Export to ArviZ: a posterior as named, labelled groups of arrays, in memory and as netCDF."""

from pbnn.inference_data.containers import (
    Container,
    build,
    group,
    groups,
    read_netcdf,
    write_netcdf,
)
from pbnn.inference_data.export import ExportablePosterior, to_inference_data

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
