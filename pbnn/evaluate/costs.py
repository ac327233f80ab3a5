"""What errors and reviews cost, and what every threshold on an error probability would cost."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from pbnn.errors import DataError
from pbnn.evaluate.arrays import Array, column, same_rows
from pbnn.evaluate.bootstrap import Mean

__all__ = ["CostCurve", "Costs"]


@dataclass(frozen=True)
class Costs:
    """The cost matrix of an automatic answer that may be wrong, and that a person may review.

    A right answer that is accepted costs nothing; a reviewed row costs the same, right or wrong.

    Attributes:
        error: Cost of an automatic answer that is wrong.
        review: Cost of a row that a person looks at.

    Raises:
        DataError: A cost is not positive, or a review costs as much as an error, so that none pays.
    """

    error: float
    review: float

    def __post_init__(self) -> None:
        if not 0 < self.review < self.error < np.inf:
            raise DataError(
                f"an error costs {self.error:g} and a review {self.review:g}; expected "
                "0 < review < error, or no review would ever pay"
            )

    @property
    def threshold(self) -> float:
        """The error probability above which a review is cheaper: review / error (Chow 1970).

        Accepting a row costs error · p on average, reviewing it costs review.
        """
        return self.review / self.error


class CostCurve:
    """The mean cost of a row at every threshold; rows with an error probability above are reviewed.

    Thresholds are the probabilities themselves, and −∞, below all of them: between two of them the
    cost does not change. Rows of equal probability are reviewed together.

    Args:
        error_probability: `(n,)`.
        wrong: Whether each automatic answer is wrong, `(n,)`.
        costs: What errors and reviews cost.

    Attributes:
        thresholds: −∞ (review all) and the distinct probabilities, rising; the last accepts all.
        cost: Mean cost of a row at each threshold.
        reviewed: Share of rows that are reviewed at each threshold.

    Raises:
        DataError: Shapes differ, there are no rows, or a value is NaN.
    """

    def __init__(self, error_probability: ArrayLike, wrong: ArrayLike, costs: Costs) -> None:
        self._p = column(error_probability, "error_probability")
        self._wrong, self._costs = column(wrong, "wrong"), costs
        same_rows(error_probability=self._p, wrong=self._wrong)
        order = np.argsort(self._p, kind="stable")
        levels, counts = np.unique(self._p, return_counts=True)
        accepted = np.r_[0, counts.cumsum()]
        errors = np.r_[0.0, self._wrong[order].cumsum()][accepted]
        rows = len(self._p)
        self.thresholds: Array = np.r_[-np.inf, levels]
        self.reviewed: Array = 1 - accepted / rows
        self.cost: Array = (costs.review * (rows - accepted) + costs.error * errors) / rows

    @property
    def best(self) -> float:
        """The threshold of least cost; of several, the one that reviews most."""
        return float(self.thresholds[self.cost.argmin()])

    def costs_at(self, threshold: float) -> Array:
        """Return what each row costs at a threshold, `(n,)`."""
        reviewed = self._p > threshold
        return np.where(reviewed, self._costs.review, self._costs.error * self._wrong)

    def mean_at(self, threshold: float) -> Mean:
        """Return the mean cost at a threshold as a statistic for `pbnn.evaluate.bootstrap`."""
        return Mean(self.costs_at(threshold))

    def saved(self, threshold: float, instead_of: float) -> Mean:
        """Return how much cheaper one threshold is than another, as a statistic, row by row."""
        return Mean(self.costs_at(instead_of) - self.costs_at(threshold))
