"""The numbers of the three criteria of collapse for one set of inputs, with their intervals."""

from collections.abc import Mapping

import numpy as np

from pbnn.evaluate.arrays import Array
from pbnn.evaluate.bootstrap import Interval, Mean, Median, Statistic, bootstrap, bootstrap_all
from pbnn.evaluate.field import Slope
from pbnn.evaluate.mass import Mass
from pbnn.evaluate.ranking import Detection, RankCorrelation, spearman

__all__ = ["direction", "error_signal", "mass_numbers", "signal"]


def signal(
    home: Mapping[str, Array], away: Mapping[str, Array], **resampling: int
) -> dict[str, Interval]:
    """Return A: AUROC, AUPR and FPR at 95% of each score, for rows away against those at home.

    Args:
        home: Scores of the rows in distribution by name, each `(n,)`.
        away: The same scores of rows out of distribution.
        **resampling: `replicates` and `seed` of the bootstrap.
    """
    sizes = [len(next(iter(scores.values()))) for scores in (home, away)]
    outside = np.repeat([0.0, 1.0], sizes)
    statistics: dict[str, Statistic] = {}
    for score, values in away.items():
        detection = Detection(np.concatenate([home[score], values]), outside)
        statistics[f"auroc_{score}"] = detection.auroc
        statistics[f"aupr_{score}"] = detection.average_precision
        statistics[f"fpr95_{score}"] = detection.fpr
    return bootstrap_all(statistics, sizes, **resampling)


def error_signal(spread: Array, mass: Mass, **resampling: int) -> dict[str, Interval]:
    """Return A in distribution: the rank correlation of the spread with the error.

    Args:
        spread: Epistemic spread of all rows, `(n,)`.
        mass: The posterior on these rows, which have y.
        **resampling: `replicates` and `seed` of the bootstrap.

    Returns:
        `spearman_error`; and `spearman_replicated`, the same for data drawn from the predictive
        itself: value is their mean, low and high hold 95% of them.
    """
    assert mass.error is not None
    assert mass.replicated is not None
    scored = spread[mass.rows]
    again = np.array([spearman(scored, error) for error in mass.replicated])
    low, high = np.quantile(again, [0.025, 0.975])
    correlation = RankCorrelation(scored, mass.error)
    return {
        "spearman_error": bootstrap(correlation, len(scored), **resampling),
        "spearman_replicated": Interval(float(again.mean()), float(low), float(high)),
    }


def direction(
    home: Array, away: Array, distances: tuple[Array, Array] | None, **resampling: int
) -> dict[str, Interval]:
    """Return B: is the spread larger away, and does it grow with the distance to the data.

    Args:
        home: Epistemic spread of the rows in distribution, `(n,)`.
        away: That of rows out of distribution.
        distances: Distances to the training rows of both; None leaves the slope out.
        **resampling: `replicates` and `seed` of the bootstrap.

    Returns:
        `log_ratio` of mean squares, `log_median_ratio`, and `slope` of the spread, in units of its
        root mean square at home.
    """
    statistics: dict[str, Statistic] = {
        "log_ratio": _LogRatio(Mean(home**2), Mean(away**2), len(home)),
        "log_median_ratio": _LogRatio(Median(home), Median(away), len(home)),
    }
    if distances is not None:
        unit = float(np.sqrt(np.square(home).mean())) or 1.0
        statistics["slope"] = Slope(np.concatenate(distances), np.concatenate([home, away]) / unit)
    return bootstrap_all(statistics, [len(home), len(away)], **resampling)


class _LogRatio:
    """The log of one sample's number over that of another; 0 where both are 0."""

    def __init__(self, below: Statistic, above: Statistic, cut: int) -> None:
        self._below, self._above, self._cut = below, above, cut

    def __call__(self, counts: Array) -> Array:
        below, above = self._below(counts[:, : self._cut]), self._above(counts[:, self._cut :])
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.log(above) - np.log(below)
        return np.where((below == 0) & (above == 0), 0.0, ratio)


def mass_numbers(mass: Mass, **resampling: int) -> dict[str, Interval]:
    """Return C: the scores of one set of rows; with `_replicated`, on data of the predictive."""
    scores = bootstrap_all(mass.statistics, len(mass.rows), **resampling)
    return scores | {f"{name}_replicated": value for name, value in mass.floor.items()}
