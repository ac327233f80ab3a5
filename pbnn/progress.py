"""The one progress bar of every long piece of work, on stderr."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm.auto import tqdm

__all__ = ["progress_bar"]

# A terminal is redrawn often; a log file gets a line now and then.
TERMINAL_SECONDS = 0.2
LOG_SECONDS = 30.0


def progress_bar(
    iterable: Iterable[Any] | None = None,
    *,
    label: str,
    unit: str,
    show: bool,
    total: int | None = None,
    initial: int = 0,
) -> Any:
    """Return a tqdm bar, which can be iterated over, or updated by hand and closed.

    Args:
        iterable: What to iterate over, if anything.
        label: What is going on.
        unit: What is counted, in the singular.
        show: Whether to show it at all.
        total: How many there will be, where the iterable does not know.
        initial: How many there were before.
    """
    return tqdm(
        iterable,
        desc=label,
        unit=f" {unit}",
        total=total,
        initial=initial,
        disable=not show,
        leave=False,
        file=sys.stderr,
        mininterval=TERMINAL_SECONDS if sys.stderr.isatty() else LOG_SECONDS,
    )
