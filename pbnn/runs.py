"""The run folder: what `pbnn fit` and `pbnn compare` leave, and what later commands need.

    run.json       the model's file, hash and options; how the table was encoded; settings
    model.py       a copy of the model file
    NAME.pt        a posterior, as `Posterior.save` writes it
    NAME.nc        the same for ArviZ, with predictions for the held-out rows
    table.csv, distances.csv, sites.csv, svi_sites.csv, *.png

Each file appears under its name only when it is complete.
"""

import contextlib
import inspect
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from pbnn._version import __version__
from pbnn.data import Preprocessor, Table, TargetKind
from pbnn.data.rows import Rows
from pbnn.errors import DataError, FileError
from pbnn.files import refusal_named, writing
from pbnn.front_door import target_kind
from pbnn.model import load_model

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray
    from torch import nn

    from pbnn.infer.posterior import Posterior

__all__ = ["Run", "check_range", "free_folder", "model_for", "target_kind_of"]

FORMAT = 1


def free_folder(model_path: str | os.PathLike[str], dataset: str) -> Path:
    """Return `runs/MODEL-DATASET`, with a number where that folder is there already."""
    base = Path("runs") / f"{Path(model_path).stem}-{Path(dataset).stem}"
    numbered = (base.with_name(f"{base.name}-{k}") for k in itertools.count(2))
    return next(path for path in itertools.chain([base], numbered) if not path.exists())


def target_kind_of(
    model_path: str | os.PathLike[str], options: Mapping[str, Any], table: Table
) -> TargetKind:
    """Return what kind of target a model file observes, before the table is encoded.

    Args:
        model_path: The model file.
        options: Keyword arguments of its `Model`.
        table: The table; of it only the shape of an array of features counts.
    """
    # Which numbers stand in x does not matter for the support of y, nor do columns of a frame.
    shape = table.features.shape[1:] if isinstance(table.features, np.ndarray) else (1,)
    model = load_model(model_path, in_features=_in_features(shape), **options)
    return target_kind(model, np.zeros((2, *shape), dtype=np.float32))


def _in_features(shape: Sequence[int]) -> int:
    """Return the features of one row: columns, the channels of an image, the features of a step."""
    return shape[0] if len(shape) != 2 else shape[1]


def model_for(
    model_path: str | os.PathLike[str], preprocessor: Preprocessor, options: Mapping[str, Any]
) -> "nn.Module":
    """Build a model for encoded data: its `in_features`, and `out_features` where it takes one.

    Args:
        model_path: The model file.
        preprocessor: The fitted encoders.
        options: Keyword arguments of its `Model`; they win.
    """
    chosen = dict(options)
    model = load_model(model_path, in_features=preprocessor.in_features, **chosen)
    if "out_features" in inspect.signature(type(model)).parameters and "out_features" not in chosen:
        chosen["out_features"] = preprocessor.out_features
        model = load_model(model_path, in_features=preprocessor.in_features, **chosen)
    return model


def check_range(
    values: "NDArray[Any]", names: Sequence[str], model: "nn.Module", rows: Rows | None = None
) -> None:
    """Refuse values that are infinite in the floating type of a model.

    Args:
        values: Encoded features, or targets in either units, rows first.
        names: Names of the columns of x, or of y.
        model: The model that is to take them.
        rows: What messages call the rows; row 1, 2, … when left out.

    Raises:
        DataError: A value is too large; the message names its column and row.
    """
    import torch

    held = [t.dtype for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    dtype = (held or [torch.get_default_dtype()])[0]
    wide = np.abs(values) > torch.finfo(dtype).max
    if wide.any():
        at = tuple(np.argwhere(wide)[0])
        column = at[1] if values.ndim == 2 else 0
        what = f"column {names[column]!r}" if values.ndim <= 2 else "the array"
        raise DataError(
            f"{what} ranges too widely: {(rows or Rows.counted(len(values))).say(at[0])} comes to "
            f"{values[at]:.3g} where {dtype} ends at {torch.finfo(dtype).max:.3g}; rescale it, or "
            "take the row out"
        )


@dataclass(frozen=True)
class Run:
    """A run folder.

    Attributes:
        folder: Where it lies.
        model: The model, built with the run's options.
        preprocessor: What encodes new rows as the training rows were.
        record: What `run.json` holds.
        made: Whether the folder was made for this run, where before there was none.
    """

    folder: Path
    model: "nn.Module"
    preprocessor: Preprocessor
    record: Mapping[str, Any]
    made: bool = False

    @classmethod
    def create(
        cls,
        folder: str | os.PathLike[str],
        model_path: str | os.PathLike[str],
        model: "nn.Module",
        preprocessor: Preprocessor,
        settings: Mapping[str, Any],
    ) -> Self:
        """Make a run folder that holds all but the posteriors.

        Args:
            folder: A new or empty folder.
            model_path: The model file.
            model: The model that `load_model` built from it.
            preprocessor: The fitted encoders.
            settings: Anything else worth keeping, as plain JSON values.

        Raises:
            DataError: The folder exists and is not empty.
            FileError: The folder cannot be made or written.
        """
        folder = Path(folder)
        made = not folder.exists()
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise DataError(f"{folder} exists already; choose another --out, or remove it")
        with refusal_named(folder):
            folder.mkdir(parents=True, exist_ok=True)
        record = {
            "format": FORMAT,
            "pbnn": __version__,
            "model": model.pbnn_source,
            "preprocessor": preprocessor.to_json(),
            "settings": dict(settings),
        }
        with writing(folder / "model.py") as path:
            shutil.copyfile(model_path, path)
        with writing(folder / "run.json") as path:
            path.write_text(json.dumps(record, indent=1), encoding="utf-8")
        return cls(folder, model, preprocessor, record, made)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Self:
        """Open a run folder. Its `model.py` is code: it is executed.

        Raises:
            FileError: The folder is no run, or its model file is not the one that was fitted.
        """
        folder = Path(folder)
        path = folder / "run.json"
        if not path.is_file():
            raise FileError(f"{folder} is no run folder (no run.json); make one with `pbnn fit`")
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["format"] != FORMAT:
                raise FileError(f"{path} has format {record['format']}; expected {FORMAT}")
            options = record["model"]["options"]
            preprocessor = Preprocessor.from_json(record["preprocessor"])
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, FileError):
                raise
            raise FileError(f"{path} is damaged ({type(error).__name__}: {error})") from error
        model = load_model(folder / "model.py", **options)
        source: Any = model.pbnn_source
        if source["sha256"] != record["model"]["sha256"]:
            raise FileError(
                f"{folder / 'model.py'} is not the file that was fitted (other hash); fit again"
            )
        return cls(folder, model, preprocessor, record)

    @contextlib.contextmanager
    def removed_if_empty(self) -> Iterator[None]:
        """Remove the files, and the folder made for them, if a block fails with nothing fitted.

        The same command, corrected, then finds its folder free.
        """
        try:
            yield
        except BaseException:
            if not self.posteriors():
                for path in self.folder.iterdir():
                    path.unlink()
                if self.made:
                    self.folder.rmdir()
            raise

    def posteriors(self) -> list[str]:
        """Return the names of the saved posteriors, sorted."""
        return sorted(path.stem for path in self.folder.glob("*.pt"))

    def posterior(self, name: str | None = None) -> "Posterior":
        """Load a saved posterior.

        Args:
            name: Its name; needless where there is only one.

        Raises:
            FileError: There is no such posterior, or several and no name, or none at all.
        """
        from pbnn.infer.posterior import Posterior

        names = self.posteriors()
        if not names:
            raise FileError(f"{self.folder} holds no posterior (no .pt file); fit again")
        if name is None and len(names) == 1:
            name = names[0]
        if name not in names:
            asked = "which posterior?" if name is None else f"no posterior {name!r};"
            raise FileError(f"{self.folder}: {asked} expected one of {names} with --posterior")
        return Posterior.load(self.folder / f"{name}.pt")

    def write_table(self, name: str, table: "pd.DataFrame", *, index: bool = True) -> Path:
        """Write a table as `NAME.csv`."""
        with writing(self.folder / f"{name}.csv") as path:
            table.to_csv(path, index=index)
        return self.folder / f"{name}.csv"
