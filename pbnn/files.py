"""Writing files so that nothing half-written ever stands under its final name."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["writing"]


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Yield a temporary path on the same disk, and rename it to `path` if the block succeeds.

    Args:
        path: Final name; its folder is made where it is missing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield folder / path.name
        (folder / path.name).replace(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
