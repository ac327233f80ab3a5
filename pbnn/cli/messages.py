"""What the command line says on stderr: one line for each mistake, each warning once."""

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from pbnn.errors import PbnnWarning

__all__ = ["say", "warnings_held", "warnings_shown_once"]


def say(text: str, status: int = 0) -> int:
    """Print a message as one line, without the shapes that Pyro adds to errors; return a status."""
    text = text.partition("\nTrace Shapes:")[0]
    print("pbnn:", *(line.strip() for line in text.splitlines()), file=sys.stderr)
    return status


@contextlib.contextmanager
def warnings_shown_once() -> Iterator[None]:
    """Print each warning of pbnn the first time that a block gives it, and no others."""
    shown = set()

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, PbnnWarning) and str(message) not in shown:
            shown.add(str(message))
            say(f"warning: {message}")

    with warnings.catch_warnings():
        warnings.simplefilter("always", PbnnWarning)
        warnings.showwarning = show
        yield


@contextlib.contextmanager
def warnings_held() -> Iterator[None]:
    """Give the warnings of a block at its end; none where it fails, whose error is one line."""
    with warnings.catch_warnings(record=True) as held:
        yield
    for warning in held:
        if issubclass(warning.category, PbnnWarning):
            warnings.warn(warning.message, warning.category, stacklevel=2)
