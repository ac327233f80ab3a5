"""Does a score put rows in order: AUROC, AUPR, FPR at 95%, risk and coverage, rank correlation.

A score is high where a row is more likely to be positive (out of distribution, or wrong). Ties
count half, so a constant score has AUROC 0.5. Each class sorts its scores once and offers its
numbers as functions of counts, which `pbnn.evaluate.bootstrap` resamples; each function at the end
gives one number.
"""

import numpy as np
from numpy.typing import ArrayLike

from pbnn.errors import DataError
from pbnn.evaluate.arrays import Array, column, same_rows

__all__ = [
    "Detection",
    "RankCorrelation",
    "RiskCoverage",
    "area_under_risk_coverage",
    "auroc",
    "average_precision",
    "fpr_at_tpr",
    "risk_coverage",
    "spearman",
]

# Counts of true positives are compared with a share of them, which rounds.
_ROUNDING = 1e-9


class _Ordered:
    """Rows in the order of a score, and the groups of equal scores among them."""

    def __init__(self, scores: Array) -> None:
        self.rows = len(scores)
        self._order = np.argsort(scores, kind="stable")
        ordered = scores[self._order]
        self._starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])

    def totals(self, values: Array) -> Array:
        """Return the sums of values `(replicates, n)` over each group of equal scores."""
        ordered = np.take(values, self._order, axis=1)
        if len(self._starts) == self.rows:
            return ordered
        totals: Array = np.add.reduceat(ordered, self._starts, axis=1)
        return totals

    def midranks(self, counts: Array) -> Array:
        """Return the mean rank of each row's score in the resample, `(replicates, n)`."""
        totals = self.totals(counts)
        ranks = totals.cumsum(1) - totals / 2 + 0.5
        group = np.empty(self.rows, dtype=np.int64)
        sizes = np.diff(np.r_[self._starts, self.rows])
        group[self._order] = np.repeat(np.arange(len(sizes)), sizes)
        return ranks[:, group]


def _once(counts: Array | None, rows: int) -> Array:
    return np.ones((1, rows)) if counts is None else counts


class Detection:
    """How well a score tells positive rows from the rest, at all thresholds.

    Args:
        scores: One number a row, `(n,)`; infinities are allowed.
        positive: Whether a row is positive, `(n,)`.

    Raises:
        DataError: Shapes differ, a score is NaN, or only one kind of row is there.
    """

    def __init__(self, scores: ArrayLike, positive: ArrayLike) -> None:
        score, labels = column(scores, "scores"), column(positive, "positive")
        same_rows(scores=score, positive=labels)
        if not np.isin(labels, (0.0, 1.0)).all():
            raise DataError(f"positive has the value {labels.max():g}; expected only 0 and 1")
        if labels.all() or not labels.any():
            kind = "positive" if labels.all() else "negative"
            raise DataError(
                f"all {len(labels)} rows are {kind}; a ranking needs rows of both kinds"
            )
        self._labels = labels
        # From the highest score down, as a threshold falls.
        self._ordered = _Ordered(-score)

    def _groups(self, counts: Array | None) -> tuple[Array, Array]:
        """Return positives and negatives of each group of equal scores, `(replicates, groups)`."""
        counts = _once(counts, len(self._labels))
        positives = self._ordered.totals(counts * self._labels)
        return positives, self._ordered.totals(counts) - positives

    def auroc(self, counts: Array | None = None) -> Array:
        """Return the probability that a positive row scores above a negative one, ties half.

        (Mann & Whitney 1947; Fawcett 2006, "An introduction to ROC analysis", section 7.)
        """
        positives, negatives = self._groups(counts)
        above = negatives.cumsum(1)
        total = above[:, -1].copy()
        above -= negatives / 2
        found = positives.sum(1)
        pairs = found * total - np.einsum("rg,rg->r", positives, above)
        return _ratio(pairs, found * total)

    def average_precision(self, counts: Array | None = None) -> Array:
        """Return the area under the precision-recall curve, Σ (R_k − R_(k−1)) P_k.

        By steps, without interpolation, which would be too good (Davis & Goadrich 2006).
        """
        positives, negatives = self._groups(counts)
        true, false = positives.cumsum(1), negatives.cumsum(1)
        area = np.einsum("rg,rg->r", positives, _ratio(true, true + false, 0.0))
        return _ratio(area, true[:, -1])

    def fpr(self, counts: Array | None = None, *, tpr: float = 0.95) -> Array:
        """Return the false positive rate at the highest threshold that finds a share of positives.

        Args:
            counts: Counts of rows.
            tpr: The share, the least true positive rate.
        """
        true, false = (part.cumsum(1) for part in self._groups(counts))
        enough = true >= tpr * true[:, -1:] * (1 - _ROUNDING)
        at = np.take_along_axis(false, enough.argmax(1)[:, None], 1)[:, 0]
        rate = _ratio(at, false[:, -1])
        return np.where(true[:, -1] > 0, rate, np.nan)


def _ratio(numerator: Array, denominator: Array, otherwise: float = np.nan) -> Array:
    """Return a ratio, and another number where the denominator is 0."""
    safe = np.where(denominator == 0, 1.0, denominator)
    return np.where(denominator == 0, otherwise, numerator / safe)


class RiskCoverage:
    """The mean loss of the rows kept, when the most uncertain ones are given away first.

    (Geifman & El-Yaniv 2017, "Selective classification for deep neural networks", section 2.) Rows
    of equal uncertainty are kept in random order: the expected loss stands for them.

    Args:
        uncertainty: One number a row, `(n,)`.
        loss: Loss of each row, `(n,)`, such as whether its prediction is wrong.

    Raises:
        DataError: Shapes differ, or a value is NaN.
    """

    def __init__(self, uncertainty: ArrayLike, loss: ArrayLike) -> None:
        score, self._loss = column(uncertainty, "uncertainty"), column(loss, "loss")
        same_rows(uncertainty=score, loss=self._loss)
        self._ordered = _Ordered(score)

    def curve(self) -> tuple[Array, Array]:
        """Return coverages k / n, for k from 1 to n, and the mean loss of the k rows kept."""
        once = np.ones((1, len(self._loss)))
        sizes = self._ordered.totals(once)[0].astype(np.int64)
        mean = self._ordered.totals(once * self._loss)[0] / sizes
        kept = np.arange(1, len(self._loss) + 1)
        return kept / len(kept), np.repeat(mean, sizes).cumsum() / kept

    def area(self, counts: Array | None = None) -> Array:
        """Return the mean over coverages k / n of the risk (AURC; Geifman et al. 2019, eq. 5).

        A constant uncertainty has the mean loss. Over a group of W equal scores with total loss L,
        after n₀ rows with L₀, the risks add up to L + (L₀ − L n₀ / W)(H(n₀ + W) − H(n₀)), H the
        harmonic numbers.
        """
        counts = _once(counts, len(self._loss))
        size, loss = self._ordered.totals(counts), self._ordered.totals(counts * self._loss)
        reached = size.cumsum(1)
        before, lost = reached - size, loss.cumsum(1) - loss
        rows = int(reached[:, -1].max())
        harmonic = np.r_[0.0, (1 / np.arange(1, rows + 1)).cumsum()]
        gained = harmonic[reached.astype(np.int64)] - harmonic[before.astype(np.int64)]
        risks = loss + (lost - before * _ratio(loss, size, 0.0)) * gained
        area: Array = risks.sum(1) / reached[:, -1]
        return area


class RankCorrelation:
    """Spearman's rank correlation: Pearson's, of mean ranks.

    Args:
        a: One number a row, `(n,)`.
        b: Another, `(n,)`.

    Raises:
        DataError: Shapes differ, or a value is NaN.
    """

    def __init__(self, a: ArrayLike, b: ArrayLike) -> None:
        first, second = column(a, "a"), column(b, "b")
        same_rows(a=first, b=second)
        self._ordered = (_Ordered(first), _Ordered(second))

    def __call__(self, counts: Array | None = None) -> Array:
        """Return the correlation; 0 where one side is constant, and so ranks nothing."""
        counts = _once(counts, self._ordered[0].rows)
        # Ranks are at most n apart from their mean, (n + 1) / 2, whatever the ties.
        middle = (counts.sum(1, keepdims=True) + 1) / 2
        a, b = (ordered.midranks(counts) - middle for ordered in self._ordered)
        product = (counts * a * b).sum(1)
        return _ratio(product, np.sqrt((counts * a**2).sum(1) * (counts * b**2).sum(1)), 0.0)


def auroc(scores: ArrayLike, positive: ArrayLike) -> float:
    """Return the area under the ROC curve; see `Detection.auroc`."""
    return float(Detection(scores, positive).auroc()[0])


def average_precision(scores: ArrayLike, positive: ArrayLike) -> float:
    """Return the area under the precision-recall curve; see `Detection.average_precision`."""
    return float(Detection(scores, positive).average_precision()[0])


def fpr_at_tpr(scores: ArrayLike, positive: ArrayLike, *, tpr: float = 0.95) -> float:
    """Return the false positive rate where 95% of positives are found; see `Detection.fpr`."""
    return float(Detection(scores, positive).fpr(tpr=tpr)[0])


def risk_coverage(uncertainty: ArrayLike, loss: ArrayLike) -> tuple[Array, Array]:
    """Return coverages and risks, `(n,)` each; see `RiskCoverage.curve`."""
    return RiskCoverage(uncertainty, loss).curve()


def area_under_risk_coverage(uncertainty: ArrayLike, loss: ArrayLike) -> float:
    """Return the mean risk over coverages; see `RiskCoverage.area`."""
    return float(RiskCoverage(uncertainty, loss).area()[0])


def spearman(a: ArrayLike, b: ArrayLike) -> float:
    """Return Spearman's rank correlation; see `RankCorrelation`."""
    return float(RankCorrelation(a, b)()[0])
