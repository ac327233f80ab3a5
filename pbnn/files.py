"""Writing files: nothing half-written under its final name, and where the draws came from."""

import contextlib
import datetime
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pbnn._version import __version__
from pbnn.errors import FileError

__all__ = ["origin", "refusal_named", "writing"]


def origin(method: str, *, markov: bool) -> dict[str, Any]:
    """Return what a file of draws says about where they came from, as attributes of the file.

    Args:
        method: The road, as `Posterior.method`.
        markov: Whether the draws are Markov chains.
    """
    return {
        "created_at": datetime.datetime.now(datetime.UTC).isoformat(),
        "inference_library": "pbnn",
        "inference_library_version": __version__,
        "pbnn_method": method,
        "pbnn_markov": int(markov),
    }


@contextlib.contextmanager
def refusal_named(path: Path) -> Iterator[None]:
    """Turn the system's refusal to make something into an error that names it as the user did.

    Raises:
        FileError: The block raised an OSError.
    """
    try:
        yield
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Yield a temporary path on the same disk, and rename it to `path` if the block succeeds.

    Args:
        path: Final name; its folder is made where it is missing.

    Raises:
        FileError: The system refuses the folder or the name.
    """
    with refusal_named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield folder / path.name
        with refusal_named(path):
            (folder / path.name).replace(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
