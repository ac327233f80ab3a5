"""What messages call rows and lists of names."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["IMPUTE", "Rows", "leave_out", "listed", "option"]

IMPUTE = (
    "complete them, take those rows out, or fill them from the training rows with impute=True "
    "(--impute)"
)
"""The repair of missing features."""


@dataclass(frozen=True)
class Rows:
    """What messages call the rows of a table.

    Attributes:
        numbers: The number of each row, shape `(n,)`: its line in a CSV file, whose header is
            line 1; elsewhere its place in the table, counted from 1.
        word: "line" or "row".
    """

    numbers: NDArray[np.int64]
    word: str = "row"

    @classmethod
    def counted(cls, n: int) -> "Rows":
        """Rows 1 to n."""
        return cls(np.arange(1, n + 1))

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, which: ArrayLike) -> "Rows":
        """The rows at these positions, or where this mask is true."""
        return replace(self, numbers=self.numbers[np.asarray(which)])

    def say(self, which: ArrayLike) -> str:
        """Name the rows at these positions, or where this mask is true: "lines 4, 9 and 17"."""
        numbers = self.numbers[np.atleast_1d(np.asarray(which))].tolist()
        return f"{self.word}{'s' if len(numbers) > 1 else ''} {listed(numbers, 3)}"


def listed(items: Iterable[object], limit: int = 20) -> str:
    """Join items for a message, text in quotes: the first `limit`, and how many more there are."""
    shown = [repr(item) if isinstance(item, str) else str(item) for item in items]
    if len(shown) > limit:
        return f"{', '.join(shown[:limit])} and {len(shown) - limit} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def leave_out(column: str) -> str:
    """The repair of a column that cannot be used."""
    return f"leave it out with {option('drop', column)}"


def option(name: str, column: str) -> str:
    """What to write for an option that lists columns, in Python and on the command line."""
    return f"{name}=[{column!r}] (--{name} {column!r})"
