"""Tables of features and targets, as the user gave them, from any source.

What is checked here holds whatever is fitted: the source can be read, each column has one name, the
target is there. What depends on a column's role is checked where it is encoded.
"""

import difflib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pbnn.data.arrays import read_npz
from pbnn.data.delimited import read_delimited
from pbnn.data.rows import Rows, listed
from pbnn.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["SHIPPED", "Table", "read_rows", "read_table"]

SHIPPED = ("diabetes", "breast_cancer", "wine", "iris", "digits")
"""Names of the sets that come with scikit-learn."""

_DELIMITED = (".csv", ".tsv", ".txt", ".data")
_PARQUET = (".parquet", ".pq")


@dataclass(frozen=True)
class Table:
    """Rows of features and targets, before any statistic is taken.

    Attributes:
        name: The file's name, or that of the shipped set.
        features: A data frame of n rows, or from an `.npz` an array of shape `(n, d)`,
            `(n, steps, d)` or `(n, channels, height, width)`.
        target: A data frame of n rows and one column for each output.
        rows: What messages call the rows.
        dropped: Columns that the user took out of `features`.
    """

    name: str
    features: "pd.DataFrame | NDArray[Any]"
    target: "pd.DataFrame"
    rows: Rows
    dropped: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.target)

    def without(self, columns: Sequence[str]) -> "Table":
        """The table without these feature columns.

        Raises:
            DataError: A column is unknown, or is the target, or none would be left.
        """
        if not columns:
            return self
        if isinstance(self.features, np.ndarray):
            raise DataError(
                f"the columns of an array have no names to drop; write {self.name} without "
                f"{listed(columns)}"
            )
        for column in columns:
            if column in self.target.columns:
                raise DataError(f"column {column!r} is the target of {self.name}; keep it")
            if column not in self.features.columns:
                raise _unknown(column, list(self.features.columns), self.name)
        kept = self.features.drop(columns=list(columns))
        _require_features(kept, self.name)
        return replace(self, features=kept, dropped=(*self.dropped, *columns))


def read_table(
    source: "str | Path | pd.DataFrame",
    target: str | Sequence[str] | None = None,
    *,
    categorical: Sequence[str] = (),
) -> Table:
    """Read a table of features and targets.

    Args:
        source: A path to a CSV, Parquet or `.npz` file; the name of a set that scikit-learn ships
            ("diabetes", "breast_cancer", "wine", "iris", "digits"); or a data frame.
        target: The target's column, or several as a list or separated by commas. Shipped sets
            have one already ("target"); in an `.npz` it is the key of an array, by default "y",
            beside the features under "x".
        categorical: Columns whose values are categories, whatever they look like.

    Raises:
        DataError: The source cannot be read as a table, or the target is not in it.
    """
    import pandas as pd

    if isinstance(source, pd.DataFrame):
        name, frame, rows = "the table", _plain(source), Rows.counted(len(source))
    elif isinstance(source, str) and source in SHIPPED:
        name, frame = source, _shipped(source)
        rows, target = Rows.counted(len(frame)), target or "target"
    else:
        path = _existing(source)
        if path.suffix.lower() == ".npz":
            return _array_table(path, target, categorical)
        name, (frame, rows) = path.name, _read_frame(path, dict.fromkeys(categorical, ()))
    _check_header(list(frame.columns), name)
    for column in categorical:
        if column not in frame.columns:
            raise _unknown(column, list(frame.columns), name)
    frame = frame.astype(dict.fromkeys(categorical, "category"))
    chosen = _target_columns(target, list(frame.columns), name)
    if len(frame) == 0:
        raise DataError(f"{name} has column names but no rows")
    features = frame.drop(columns=chosen)
    _require_features(features, name)
    return Table(name, features, frame[chosen], rows)


def read_rows(
    path: str | Path, levels: Mapping[str, Collection[str]]
) -> "tuple[pd.DataFrame | NDArray[Any], Rows]":
    """Read rows without need of a target; column names alone are a table of no rows.

    Args:
        path: A CSV, Parquet or `.npz` file.
        levels: The known categories of text columns by name. Such a column stays text, even where
            all its cells in this file look like numbers or like missing values.

    Raises:
        DataError: The file cannot be read as a table.
    """
    path = _existing(path)
    if path.suffix.lower() == ".npz":
        x, _ = read_npz(path, None)
        return x, Rows.counted(len(x))
    frame, rows = _read_frame(path, levels)
    _check_header(list(frame.columns), path.name)
    return frame, rows


def _existing(source: str | Path) -> Path:
    path = Path(source)
    known = f"the name of a set: {listed(SHIPPED)}"
    if path.is_dir():
        raise DataError(f"'{source}' is a folder; expected a file, or {known}")
    if not path.exists():
        raise DataError(f"file not found: '{source}'; expected a path to a table, or {known}")
    suffixes = (*_DELIMITED, *_PARQUET, ".npz")
    if path.suffix.lower() not in suffixes:
        raise DataError(
            f"'{source}' is not a table; expected a name that ends in {listed(suffixes)}"
        )
    return path


def _read_frame(path: Path, texts: Mapping[str, Collection[str]]) -> "tuple[pd.DataFrame, Rows]":
    import pandas as pd

    try:
        if path.suffix.lower() in _DELIMITED:
            return read_delimited(path, texts)
    except OSError as error:
        raise DataError(f"{path.name} cannot be read: {error.strerror}") from error
    try:
        frame = _plain(pd.read_parquet(path))
    except ImportError as error:
        raise DataError(
            f"{path.name} needs pyarrow to be read: pip install 'pbnn[parquet]'"
        ) from error
    except Exception as error:
        # A damaged file makes the reader raise nearly anything, KeyError among it.
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(f"{path.name} cannot be read: {reason}") from error
    return frame, Rows.counted(len(frame))


def _plain(frame: "pd.DataFrame") -> "pd.DataFrame":
    """The frame with text column names, and the named parts of its index as columns."""
    unnamed = [i for i, name in enumerate(frame.index.names) if name is None]
    if len(unnamed) == frame.index.nlevels:
        frame = frame.reset_index(drop=True)
    else:
        frame = frame.reset_index(unnamed, drop=True).reset_index()
    return frame.set_axis([str(column) for column in frame.columns], axis=1)


def _shipped(name: str) -> "pd.DataFrame":
    import pandas as pd
    from sklearn import datasets

    bunch = getattr(datasets, f"load_{name}")(as_frame=True)
    frame: pd.DataFrame = bunch.frame
    if name == "diabetes":
        return frame
    labels = np.asarray(bunch.target_names)[frame["target"].to_numpy()]
    return frame.assign(target=pd.Categorical(labels.tolist()))


def _array_table(
    path: Path, target: str | Sequence[str] | None, categorical: Sequence[str]
) -> Table:
    import pandas as pd

    keys = [target] if isinstance(target, str) else list(target or ["y"])
    if len(keys) != 1:
        raise DataError(
            f"the target in {path.name} is one array with a column for each output; "
            f"got {listed(keys)}"
        )
    if categorical:
        raise DataError(
            f"the columns of an array have no names; code {listed(categorical)} as 0 and 1 in "
            f"{path.name}"
        )
    x, y = read_npz(path, keys[0])
    if y is None or len(y) == 0:
        raise DataError(f"{path.name} has arrays without rows")
    outputs = y.reshape(len(y), -1)
    several = outputs.shape[1] > 1
    names = [f"{keys[0]}{i}" for i in range(outputs.shape[1])] if several else keys
    return Table(path.name, x, pd.DataFrame(outputs, columns=names), Rows.counted(len(y)))


def _target_columns(
    target: str | Sequence[str] | None, columns: Sequence[str], name: str
) -> list[str]:
    if not target:
        raise DataError(
            f"{name} needs a target: pass target=… (--target COLUMN), one or more of its columns "
            f"{listed(columns)}"
        )
    if not isinstance(target, str):
        chosen = list(target)
    elif target in columns:
        chosen = [target]
    else:
        chosen = [part.strip() for part in target.split(",")]
    for column in chosen:
        if column not in columns:
            raise _unknown(column, columns, name)
    if len(set(chosen)) < len(chosen):
        raise DataError(f"the target names a column twice: {listed(chosen)}")
    return chosen


def _unknown(column: str, columns: Sequence[str], name: str) -> DataError:
    lower = {name.lower(): name for name in columns}
    close = difflib.get_close_matches(column.lower(), lower, n=1)
    hint = f"; did you mean {lower[close[0]]!r}?" if close else ""
    return DataError(f"{name} has no column {column!r}; its columns are {listed(columns)}{hint}")


def _require_features(features: "pd.DataFrame", name: str) -> None:
    if features.shape[1] == 0:
        raise DataError(
            f"no feature column is left in {name}; keep at least one beside the target"
            " (fields are separated by commas, semicolons or tabs)"
        )


def _check_header(header: Sequence[str], name: str) -> None:
    if not header:
        raise DataError(f"{name} has no columns")
    unnamed = [i for i, column in enumerate(header, 1) if not column]
    if unnamed:
        raise DataError(
            f"column {listed(unnamed)} of {name} has no name; name it, or leave it out when the "
            "file is written (pandas: to_csv(…, index=False))"
        )
    twice = [column for column, count in Counter(header).items() if count > 1]
    if twice:
        raise DataError(f"{name} has more than one column named {listed(twice)}; rename them")
