"""Names for the axes of exported arrays, and labels along them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pbnn.errors import DataError

__all__ = [
    "SAMPLED",
    "UNSAMPLED",
    "feature_coords",
    "for_group",
    "layer_dims",
    "refuse_unused",
    "row_dims",
]

SAMPLED = (
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
"""Groups of draws, whose arrays begin with the axes chain and draw."""

UNSAMPLED = ("observed_data", "constant_data", "predictions_constant_data")
"""Groups of arrays without the axes chain and draw."""

Arrays = Mapping[str, NDArray[Any]]


def layer_dims(name: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Names for a variable's axes, shared by a layer's weight and bias where their sizes agree."""
    module, _, leaf = name.rpartition(".")
    own = tuple(f"{name}_dim_{axis}" for axis in range(len(shape)))
    if not module or leaf not in ("weight", "bias") or not shape:
        return own
    kernel = (f"kernel_{axis}" for axis in range(len(shape) - 2))
    layer = tuple(f"{module}_{end}" for end in ["out", "in", *kernel][: len(shape)])
    agree = all(sizes.get(axis, size) == size for axis, size in zip(layer, shape, strict=True))
    return layer if agree else own


def row_dims(parts: Mapping[str, Mapping[str, NDArray[Any]]]) -> dict[str, list[str]]:
    """Dims of the variables that have a row for each row of the data."""
    observed = parts["observed_data"]
    ends = {key: [f"{key}_output"] for key, value in observed.items() if value.ndim == 2}
    dims = {}
    for name, variables in parts.items():
        row = "pred_id" if name.startswith("predictions") else "obs_id"
        for key, value in variables.items():
            shape = value.shape[1 if name in UNSAMPLED else 3 :]
            end = ends.get(key, [f"{key}_dim_{axis}" for axis in range(len(shape))])
            if name.endswith("constant_data") and len(shape) == 1:
                end = ["feature"] if len(variables) == 1 else [f"{key}_feature"]
            elif key == "f" and len(shape) == 1:
                end = _output_dims(shape, observed) or end
            dims[f"{name}/{key}"] = [row, *end[: len(shape)]]
    return dims


def _output_dims(shape: tuple[int, ...], observed: Arrays) -> list[str]:
    """The last dim of f: that of the y that it locates, or the classes of an integer y."""
    for key, value in observed.items():
        if value.shape[1:] == shape:
            return [f"{key}_output"]
    whole = any(np.issubdtype(value.dtype, np.integer) for value in observed.values())
    return ["class"] if whole else []


def feature_coords(
    parts: Mapping[str, Arrays], names: Sequence[str] | None
) -> dict[str, Sequence[str]]:
    """Labels for the columns of x and for the inputs of the first weight that takes them."""
    if names is None:
        return {}
    labels: dict[str, Sequence[str]] = {}
    if [value.ndim for value in parts.get("constant_data", {}).values()] == [2]:
        labels["feature"] = list(names)
    for key, value in parts["posterior"].items():
        if key.endswith(".weight") and value.ndim == 4 and value.shape[-1] == len(names):
            labels[f"{key.removesuffix('.weight')}_in"] = list(names)
            break
    if not labels:
        raise DataError(
            f"feature_names has {len(names)} names, but there is no x with columns and no weight "
            f"with {len(names)} inputs to label; pass coords={{dim: labels}}"
        )
    return labels


def for_group(values: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    """Entries for one group: those of every group, then those under "group/…"."""
    values = values or {}
    own = {k.removeprefix(f"{name}/"): v for k, v in values.items() if k.startswith(f"{name}/")}
    return {**{k: v for k, v in values.items() if "/" not in k}, **own}


def refuse_unused(
    argument: str, given: Mapping[str, Any], known: Mapping[str, Mapping[Any, Any]]
) -> None:
    """Raise on a key of dims or coords that names nothing, which else would go unseen."""
    bare = {str(key) for keys in known.values() for key in keys}
    full = {f"{name}/{key}" for name, keys in known.items() for key in keys}
    for key in given:
        if key not in bare | full:
            raise DataError(
                f"{argument}[{key!r}] names nothing here; use {', '.join(sorted(bare))}"
            )
