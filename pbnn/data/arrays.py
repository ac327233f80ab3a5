"""Arrays of features (images, sequences, columns): read from `.npz`, standardised, kept as JSON."""

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pbnn.data.rows import IMPUTE, Rows, listed
from pbnn.data.units import location_and_scale
from pbnn.errors import DataError

__all__ = ["ArrayEncoder", "read_npz"]

_UNREADABLE = (OSError, ValueError, EOFError, zipfile.BadZipFile, zipfile.LargeZipFile)


def read_npz(path: Path, target: str | None) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Read the features `x`, and the target where its key is given. Nothing is ever unpickled.

    Raises:
        DataError: An array is absent, cannot be read, or has a shape or dtype that is not one of
            features or targets.
    """
    try:
        arrays = np.load(path, allow_pickle=False)
    except _UNREADABLE as error:
        raise DataError(f"{path.name} cannot be read as an .npz file of arrays") from error
    if isinstance(arrays, np.ndarray):
        raise DataError(f"{path.name} is a single array; write it with numpy.savez(…, x=…, y=…)")
    with arrays:
        x = _member(arrays, "x", path.name)
        y = None if target is None else _member(arrays, target, path.name)
    if x.dtype.kind not in "biuf":
        raise DataError(f"array 'x' of {path.name} has dtype {x.dtype}; expected real numbers")
    if x.ndim not in (2, 3, 4) or 0 in x.shape[1:]:
        raise DataError(
            f"array 'x' of {path.name} has shape {x.shape}; expected (n, d), (n, steps, d) or "
            "(n, channels, height, width)"
        )
    if y is not None and (y.ndim not in (1, 2) or 0 in y.shape[1:]):
        raise DataError(
            f"array {target!r} of {path.name} has shape {y.shape}; expected (n,) or (n, outputs)"
        )
    if y is not None and len(x) != len(y):
        raise DataError(f"{path.name} has {len(x)} rows in 'x' and {len(y)} in {target!r}")
    return x, y


def _member(arrays: Any, key: str, name: str) -> NDArray[Any]:
    if key not in arrays.files:
        raise DataError(f"{name} has no array {key!r}; its arrays are {listed(arrays.files)}")
    try:
        array: NDArray[Any] = arrays[key]
    except _UNREADABLE as error:
        raise DataError(
            f"array {key!r} of {name} cannot be read: it is damaged, or holds Python objects, "
            "which are never loaded; save numbers or text"
        ) from error
    return array


@dataclass(frozen=True)
class ArrayEncoder:
    """An array of features, standardised by column, by feature of a sequence, or by image channel.

    Attributes:
        shape: Shape of one row: `(d,)`, `(steps, d)` or `(channels, height, width)`.
        loc: Training means, of a shape that broadcasts against one row: one value for each column,
            for each feature (over rows and steps), or for each channel (over rows and pixels).
        scale: Training standard deviations, of the same shape; 1 for what is constant.
        constant: Positions of what is constant in training.
        impute: Whether a missing value (NaN) becomes `loc`; otherwise it is refused.
    """

    shape: tuple[int, ...]
    loc: NDArray[np.float64]
    scale: NDArray[np.float64]
    constant: tuple[int, ...]
    impute: bool

    @classmethod
    def fit(cls, x: NDArray[Any], rows: Rows, impute: bool) -> "ArrayEncoder":
        """Take the statistics of training rows x, shape `(n, …)`.

        Raises:
            DataError: Values are infinite, missing without `impute`, or range too widely.
        """
        axes = {2: (0,), 3: (0, 1), 4: (0, 2, 3)}[x.ndim]
        values = _finite(x, rows, impute)
        empty = np.flatnonzero(np.isnan(values).all(axes))
        if empty.size:
            raise DataError(f"array 'x' has no value in column or channel {listed(empty.tolist())}")
        loc, scale, constant = location_and_scale(values, axes)
        if not (np.isfinite(loc).all() and np.isfinite(scale).all()):
            raise DataError("array 'x' ranges too widely to be standardised; rescale it")
        return cls(x.shape[1:], loc, scale, tuple(np.flatnonzero(constant).tolist()), impute)

    @property
    def feature_names(self) -> list[str]:
        """One name for each column, feature or channel."""
        return [f"x{i}" for i in range(self.loc.size)]

    def encode(self, x: NDArray[Any], rows: Rows) -> tuple[NDArray[np.float64], str]:
        """Standardise rows; return them, and which of them had missing values that were filled.

        Raises:
            DataError: The rows are not of the training rows' shape, or hold what `fit` refuses.
        """
        if x.shape[1:] != self.shape:
            raise DataError(
                f"array 'x' has rows of shape {x.shape[1:]}; in training they had {self.shape}"
            )
        values = _finite(x, rows, self.impute)
        missing = np.isnan(values)
        encoded = (np.where(missing, self.loc, values) - self.loc) / self.scale
        return encoded, rows.say(_by_row(missing)) if missing.any() else ""

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return {
            "shape": list(self.shape),
            "loc": self.loc.tolist(),
            "scale": self.scale.tolist(),
            "constant": list(self.constant),
            "impute": self.impute,
        }

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "ArrayEncoder":
        """The encoder that `to_json` gave."""
        return cls(
            tuple(saved["shape"]),
            np.asarray(saved["loc"], dtype=np.float64),
            np.asarray(saved["scale"], dtype=np.float64),
            tuple(saved["constant"]),
            saved["impute"],
        )


def _by_row(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    return np.asarray(mask.any(tuple(range(1, mask.ndim))))


def _finite(x: NDArray[Any], rows: Rows, impute: bool) -> NDArray[np.float64]:
    if x.dtype.kind not in "biuf":
        raise DataError(f"array 'x' has dtype {x.dtype}; expected real numbers")
    values = x.astype(np.float64)
    infinite = _by_row(np.isinf(values))
    if infinite.any():
        raise DataError(f"array 'x' is infinite in {rows.say(infinite)}; correct those rows")
    missing = _by_row(np.isnan(values))
    if missing.any() and not impute:
        raise DataError(f"array 'x' misses values in {rows.say(missing)}; {IMPUTE}")
    return values
