"""Pictures of predictive distributions beside what was observed."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike, NDArray

from pbnn.errors import DataError
from pbnn.evaluate.calibration import confidence_bins
from pbnn.evaluate.crps import pit_samples
from pbnn.inference_data import Container
from pbnn.plots.figures import BLUE, ORANGE, SERIES, STYLE, WIDE, grid, label, limits, new_axes
from pbnn.plots.sources import predictive_of, probabilities_of

__all__ = [
    "plot_calibration",
    "plot_pit",
    "plot_posterior_predictive",
    "plot_predicted_against_observed",
    "plot_reliability",
]


@mpl.rc_context(STYLE)
def plot_predicted_against_observed(
    data: Container | ArrayLike,
    y: ArrayLike | None = None,
    *,
    site: str = "y",
    group_name: str = "posterior_predictive",
    level: float = 0.9,
    units: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Plot the predictive mean and central interval of each row against what was observed.

    Args:
        data: Inference data, or predictive draws `(…, n)`, rows last.
        y: Observed values `(n,)`; by default those of the inference data.
        site: Observed site.
        group_name: Group of the predictive draws; "predictions" together with `y` for new rows.
        level: Probability of the interval.
        units: Name of the unit of y, for the labels.
        ax: Axes to draw on.

    Raises:
        DataError: The draws and y do not fit, or several outputs where one is expected.
    """
    draws, y = predictive_of(data, y, site, group_name)
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], axis=0)
    mean = draws.mean(0)
    covered = (low <= y) & (y <= high)
    ax = ax or new_axes((6.0, 6.0))
    ends = limits(np.concatenate([low, high, y]))
    ax.plot(ends, ends, color="0.2", linewidth=1.2, zorder=4)
    # Hundreds of intervals lie upon each other: thin and pale, they leave the means to be seen.
    faint = 0.35 if len(y) < 100 else 0.15
    for inside, colour, marker in ((True, BLUE, "o"), (False, ORANGE, "s")):
        rows = covered == inside
        if rows.any():
            ax.vlines(y[rows], low[rows], high[rows], color=colour, alpha=faint, linewidth=1.2)
            where = "in" if inside else "outside"
            ax.plot(
                y[rows],
                mean[rows],
                marker,
                color=colour,
                markersize=4,
                label=f"y {where} its interval: {rows.sum()}",
            )
    ax.set(
        xlim=ends,
        ylim=ends,
        aspect="equal",
        xlabel=label("observed", units),
        ylabel=label(f"predicted mean, {level:.0%} interval", units),
        title=f"Predicted against observed: {covered.mean():.0%} covered",
    )
    ax.legend(loc="upper left")
    return ax


@mpl.rc_context(STYLE)
def plot_calibration(
    data: Container | ArrayLike,
    y: ArrayLike | None = None,
    *,
    site: str = "y",
    group_name: str = "posterior_predictive",
    label: str = "this fit",
    ax: Axes | None = None,
) -> Axes:
    """Plot the coverage of central predictive intervals against their nominal probability.

    The band holds 95% of the coverages of a calibrated predictive distribution, pointwise, if rows
    were independent (normal approximation of the binomial). Draw several fits by passing `ax` on.

    Args:
        data: Inference data, or predictive draws `(…, n)`, rows last.
        y: Observed values `(n,)`; by default those of the inference data.
        site: Observed site.
        group_name: Group of the predictive draws; "predictions" together with `y` for new rows.
        label: Name of the fit in the legend.
        ax: Axes to draw on.

    Raises:
        DataError: The draws and y do not fit, or several outputs where one is expected.
    """
    pit = pit_samples(*predictive_of(data, y, site, group_name))
    first = ax is None or not ax.lines
    ax = ax or new_axes((6.0, 6.0))
    nominal = np.linspace(0, 1, 101)
    if first:
        band = 1.96 * np.sqrt(nominal * (1 - nominal) / len(pit))
        ax.fill_between(
            nominal,
            np.clip(nominal - band, 0, 1),
            np.clip(nominal + band, 0, 1),
            color="0.85",
            linewidth=0,
            label=f"95% band, {len(pit)} rows",
        )
        ax.plot([0, 1], [0, 1], color="0.5", linewidth=1.2)
    # The central interval of probability p holds y where |2 PIT - 1| <= p.
    coverage = (abs(2 * pit - 1) <= nominal[:, None]).mean(1)
    colour, _, dashes = SERIES[(len(ax.lines) - 1) % len(SERIES)]
    ax.plot(nominal, coverage, dashes, color=colour, label=label)
    ax.set(
        xlim=(0, 1),
        ylim=(0, 1),
        aspect="equal",
        xlabel="nominal probability of the interval",
        ylabel="fraction of rows inside",
        title="Coverage of central intervals",
    )
    ax.legend(loc="upper left")
    return ax


@mpl.rc_context(STYLE)
def plot_pit(
    data: Container | ArrayLike,
    y: ArrayLike | None = None,
    *,
    site: str = "y",
    group_name: str = "posterior_predictive",
    bins: int = 10,
    ax: Axes | None = None,
) -> Axes:
    """Plot the histogram of the probability integral transform of each row.

    Flat where the predictive distribution is calibrated; a valley in the middle where it is too
    narrow, a hill where it is too wide. Ties between draws and y count half.

    Args:
        data: Inference data, or predictive draws `(…, n)`, rows last.
        y: Observed values `(n,)`; by default those of the inference data.
        site: Observed site.
        group_name: Group of the predictive draws; "predictions" together with `y` for new rows.
        bins: Number of bins.
        ax: Axes to draw on.

    Raises:
        DataError: The draws and y do not fit, or several outputs where one is expected.
    """
    pit = pit_samples(*predictive_of(data, y, site, group_name))
    ax = ax or new_axes(WIDE)
    n, p = len(pit), 1 / bins
    half = 1.96 * np.sqrt(n * p * (1 - p))
    ax.axhspan(max(n * p - half, 0), n * p + half, color="0.85", linewidth=0, label="95% band")
    ax.axhline(n * p, color="0.5", linewidth=1.2)
    ax.hist(pit, bins, range=(0.0, 1.0), color=BLUE, alpha=0.75, rwidth=0.92, zorder=2)
    ax.set(
        xlim=(0, 1),
        xlabel="predictive probability of less than y (PIT)",
        ylabel="rows",
        title=f"PIT of {n} rows",
    )
    ax.margins(y=0.2)
    ax.legend(loc="upper right")
    return ax


@mpl.rc_context(STYLE)
def plot_reliability(
    probabilities: Container | ArrayLike,
    y: ArrayLike | None = None,
    *,
    site: str = "y",
    group_name: str = "posterior_predictive",
    bins: int = 10,
    ax: Axes | None = None,
) -> Axes:
    """Plot how often the most probable class is right against its probability.

    Bins are half-open, the last one closed. The bars are 95% Wilson intervals; the numbers along
    the top count the rows of each bin.

    Args:
        probabilities: Class probabilities `(n, classes)`, or of class 1 among two `(n,)`; draws
            averaged already. Or inference data, whose predictive draws are counted.
        y: Observed classes `(n,)`, counted from 0; by default those of the inference data.
        site: Observed site.
        group_name: Group of the predictive draws; "predictions" together with `y` for new rows.
        bins: Number of bins of equal width.
        ax: Axes to draw on.

    Raises:
        DataError: The shapes do not fit, or a probability lies outside 0 to 1.
    """
    p, y = probabilities_of(probabilities, y, site, group_name)
    if p.ndim != 2 or y.shape != p.shape[:1]:
        raise DataError(f"probabilities {p.shape} and y {y.shape}: expected (n, classes) and (n,)")
    if not ((p >= 0) & (p <= 1 + 1e-6)).all():
        raise DataError("probabilities lie outside 0 to 1; pass probabilities, not logits")
    confidence, right = p.max(1), p.argmax(1) == y
    which = confidence_bins(confidence, bins)
    counts = np.bincount(which, minlength=bins)
    full = np.flatnonzero(counts)
    centre = np.bincount(which, confidence, bins)[full] / counts[full]
    accuracy = np.bincount(which, right, bins)[full] / counts[full]
    low, high = _wilson(accuracy, counts[full])
    ax = ax or new_axes((6.0, 6.0))
    ax.plot([0, 1], [0, 1], color="0.5", linewidth=1.2)
    ax.vlines(centre, low, high, color=BLUE, alpha=0.5)
    ax.plot(centre, accuracy, "o-", color=BLUE)
    for index in full:
        # Thousands as "12k": neighbouring counts must not run into each other.
        count = f"{counts[index]:,}" if counts[index] < 10_000 else f"{counts[index] / 1000:.0f}k"
        ax.text((index + 0.5) / bins, 1.045, count, ha="center", va="center", size=10)
    ax.text(1.01, 1.045, "rows", ha="left", va="center", size=10)
    ax.set(
        xlim=(0, 1),
        ylim=(0, 1.09),
        yticks=np.linspace(0, 1, 6),
        aspect="equal",
        xlabel="probability of the most probable class",
        ylabel="fraction right",
        title=f"Reliability: {right.mean():.1%} right of {len(y):,}",
    )
    return ax


@mpl.rc_context(STYLE)
def plot_posterior_predictive(
    data_by_name: Mapping[str, Container],
    *,
    site: str = "y",
    group_name: str = "posterior_predictive",
    units: str = "",
    axes: Sequence[Axes] | None = None,
) -> list[Axes]:
    """Plot observed values against predictive data sets, one panel for each posterior.

    In each bin the line is the fraction of the observed rows; the band holds 90% of the fractions
    of 400 predictive data sets or all there are, evenly spaced over the draws.

    Args:
        data_by_name: Inference data by name of the posterior.
        site: Observed site.
        group_name: Group of the predictive draws.
        units: Name of the unit of y, for the labels.
        axes: Axes to draw on, one for each posterior.

    Raises:
        DataError: A group or site is missing, or has several outputs.
    """
    panels = {name: predictive_of(d, None, site, group_name) for name, d in data_by_name.items()}
    axes = list(axes or grid(len(panels)))
    edges = _edges(list(panels.values()))
    for axis, (name, (draws, y)) in zip(axes, panels.items(), strict=True):
        chosen = draws[np.linspace(0, len(draws) - 1, min(400, len(draws))).astype(int)]
        sets = np.stack([np.histogram(one, edges)[0] for one in chosen]) / len(y)
        low, middle, high = np.quantile(sets, [0.05, 0.5, 0.95], axis=0)
        axis.stairs(
            high, edges, baseline=low, fill=True, color=BLUE, alpha=0.3, label="90% of sets"
        )
        axis.stairs(middle, edges, color=BLUE, linewidth=1.5, label="median set")
        axis.stairs(np.histogram(y, edges)[0] / len(y), edges, color="0.1", label="observed")
        axis.set(title=name, ylabel="fraction of rows")
        axis.label_outer()
        axis.tick_params(labelbottom=True)
        axis.set_xlabel(label(site, units))
    axes[0].legend()
    return axes


def _wilson(
    fraction: NDArray[Any], counts: NDArray[Any], z: float = 1.96
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Wilson's interval for a binomial proportion (Wilson 1927)."""
    centre = (fraction + z**2 / (2 * counts)) / (1 + z**2 / counts)
    half = np.sqrt(fraction * (1 - fraction) / counts + z**2 / (4 * counts**2))
    half = half * z / (1 + z**2 / counts)
    return centre - half, centre + half


def _edges(panels: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> NDArray[Any]:
    """Bins shared by all panels: one for each value of small integers, else 25 of equal width."""
    low = min(min(np.quantile(draws, 0.005), y.min()) for draws, y in panels)
    high = max(max(np.quantile(draws, 0.995), y.max()) for draws, y in panels)
    whole = all(np.issubdtype(y.dtype, np.integer) for _, y in panels)
    if whole and high - low < 40:
        return np.arange(np.floor(low), np.ceil(high) + 2) - 0.5
    return np.linspace(low, high, 26)
