"""Writing files so that nothing half-written ever stands under its final name."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pbnn.errors import FileError

__all__ = ["refusal_named", "writing"]


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
