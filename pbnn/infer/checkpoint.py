"""Draws as they come, in memory or mapped to disk, and the state that a killed run goes on from."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pbnn.errors import FileError
from pbnn.files import refusal_named
from pbnn.infer.density import Density
from pbnn.infer.lanes import STATS

__all__ = ["Checkpoint", "Store", "digest", "problem_identity"]

_FORMAT = 1
_STATE = "state.pt"


class Store:
    """Draws `(chain, draw, dim)` and their statistics `(chain, draw, len(STATS))`, on the CPU.

    Args:
        chains: Number of chains.
        draws: Draws of each chain.
        dim: Length of a draw.
        dtype: Floating type.
        folder: Folder of the mapped files; None keeps the draws in memory.
        prefix: What the files' names begin with.
    """

    def __init__(
        self,
        chains: int,
        draws: int,
        dim: int,
        dtype: torch.dtype,
        folder: Path | None = None,
        prefix: str = "",
    ) -> None:
        shapes = {"draws": (chains, draws, dim), "stats": (chains, draws, len(STATS))}
        self.draws, self.stats = (
            torch.zeros(shape, dtype=dtype)
            if folder is None
            else _mapped(folder / f"{prefix}{name}.bin", shape, dtype)
            for name, shape in shapes.items()
        )

    def put(self, kept: NDArray[np.bool_], place: NDArray[np.int64], z: Tensor, s: Tensor) -> None:
        """Write some of the new transitions to their places.

        Args:
            kept: Which of them, `(chain, slot)`.
            place: Draw that each becomes, `(chain, slot)`.
            z: Their draws, `(chain, slot, dim)`.
            s: Their statistics, `(chain, slot, len(STATS))`.
        """
        lane, slot = np.nonzero(kept)
        self.draws[lane, place[kept]] = z[lane, slot]
        self.stats[lane, place[kept]] = s[lane, slot]


def _mapped(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = torch.Size(shape).numel()
    if size == 0:
        return torch.zeros(shape, dtype=dtype)
    flat = torch.from_file(str(path), shared=True, size=size, dtype=dtype)
    return flat.reshape(shape)


def digest(*values: Any) -> str:
    """Return a short hash of tensors (by their bytes) and plain values, also in dicts and lists."""
    sha = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            value = value.detach().cpu().contiguous()
            sha.update(f"{value.dtype}{tuple(value.shape)}".encode())
            sha.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, Mapping):
            sha.update(digest(*(part for item in sorted(value.items()) for part in item)).encode())
        elif isinstance(value, (list, tuple)):
            sha.update(digest(*value).encode())
        else:
            sha.update(repr(value).encode())
    return sha.hexdigest()[:16]


def problem_identity(density: Density) -> dict[str, str]:
    """Name a model and its data, for every road; options are for the road to name.

    Args:
        density: The log density of the bound model.
    """
    bound = density.bound
    return {
        # Before the model, whose log density depends on the data: the cause is named first.
        "data": digest(bound.x, bound.y),
        "model": digest(
            [(s.name, s.kind, s.shape, s.prior, s.support) for s in bound.sites],
            getattr(bound.model, "pbnn_source", None),
            density.fingerprint(),
        ),
        "buffers": digest(bound.buffers()),
        "dtype": str(bound.dtype),
        "device": bound.device.type,
    }


class Checkpoint:
    """A folder that holds the draws so far and one state file, replaced as a whole.

    Draws are written to their places in mapped files before the state that counts them, and a run
    that goes on from an older state writes the same bits again, so no moment of death can mix runs.

    Args:
        folder: The folder; it is made if it is missing.
        identity: What makes the run what it is, by name; another run is refused by it.
    """

    def __init__(self, folder: str | os.PathLike[str], identity: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        with refusal_named(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self.identity = json.loads(json.dumps(dict(identity)))

    @property
    def exists(self) -> bool:
        """Whether there is a state to go on from."""
        return (self.folder / _STATE).is_file()

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace the state file.

        Args:
            state: Tensors and plain values, nested in dicts.
        """
        temporary = self.folder / f"{_STATE}.part"
        meta = json.dumps({"format": _FORMAT, "identity": self.identity})
        with temporary.open("wb") as file:
            torch.save({"json": meta, "state": dict(state)}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.folder / _STATE)

    def load(self) -> dict[str, Any]:
        """Read the state, each tensor to the device from which it was written.

        Raises:
            FileError: The file is no checkpoint, or it belongs to another run.
        """
        path = self.folder / _STATE
        try:
            record = torch.load(path, weights_only=True)
            meta = json.loads(record["json"])
        except Exception as error:
            raise FileError(
                f"{path}: not a checkpoint of this road ({type(error).__name__}); pass another "
                "checkpoint="
            ) from error
        theirs = meta["identity"] if meta["format"] == _FORMAT else {}
        for name in {**theirs, **self.identity}:
            if theirs.get(name) != self.identity.get(name):
                raise FileError(
                    f"{path}: a checkpoint of another run ({name} is {theirs.get(name)} there and "
                    f"{self.identity.get(name)} here); call with the same arguments, or pass "
                    "another checkpoint="
                )
        state: dict[str, Any] = record["state"]
        return state
