"""Pictures of decisions and of rows away from the data: costs, rejection, scores, severity."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from pbnn.errors import DataError
from pbnn.plots.figures import BLUE, ORANGE, SERIES, STYLE, WIDE, new_axes

if TYPE_CHECKING:
    import pandas as pd

    from pbnn.evaluate.decision_report import DecisionReport

__all__ = ["plot_cost_curve", "plot_rejection", "plot_scores", "plot_shift"]


@mpl.rc_context(STYLE)
def plot_cost_curve(report: "DecisionReport", *, ax: Axes | None = None) -> Axes:
    """Plot what a row costs against the share of rows that are reviewed.

    The band is a 95% bootstrap interval over rows at each threshold. The left end accepts all, the
    right end reviews all.

    Args:
        report: What `report_decisions` returned.
        ax: Axes to draw on.
    """
    ax = ax or new_axes(WIDE)
    curve = report.curve.sort_values("reviewed")
    ax.fill_between(curve["reviewed"], curve["low"], curve["high"], color=BLUE, alpha=0.2, lw=0)
    ax.plot(curve["reviewed"], curve["cost"], color=BLUE, label="all thresholds")
    for name, marker, color in (
        ("best in hindsight", "D", "0.45"),
        ("chosen threshold", "o", ORANGE),
    ):
        row = report.costs.loc[name]
        ax.plot(row["reviewed"], row["cost"], marker, color=color, label=name, ms=9, zorder=3)
    ax.set(
        xlim=(-0.02, 1.02),
        xlabel="share of rows reviewed",
        ylabel="cost of a row",
        title=f"{len(report.wrong)} rows; an error costs {report.rule.costs.error:g}, "
        f"a review {report.rule.costs.review:g}",
    )
    ax.legend()
    return ax


@mpl.rc_context(STYLE)
def plot_rejection(report: "DecisionReport", *, ax: Axes | None = None) -> Axes:
    """Plot the accuracy of the rows that are left against the share that is rejected.

    Args:
        report: What `report_decisions` returned.
        ax: Axes to draw on.
    """
    ax = ax or new_axes(WIDE)
    rejected, accuracy = report.rejection["rejected"], report.rejection["accuracy"]
    ax.plot(rejected, accuracy, color=BLUE, label="most uncertain first")
    ax.axhline(float(accuracy.iloc[0]), color="0.5", lw=1.2, label="at random")
    ax.set(
        xlim=(-0.02, 1.02),
        xlabel="share of rows rejected",
        ylabel="accuracy of the rest",
        title="Accuracy and rejection",
    )
    ax.margins(y=0.1)
    ax.legend(loc="center right")
    return ax


@mpl.rc_context(STYLE)
def plot_scores(
    scores: Mapping[str, ArrayLike], *, name: str = "epistemic spread", ax: Axes | None = None
) -> Axes:
    """Plot the distribution of an uncertainty score in several sets of rows, on a log axis.

    Args:
        scores: The score by set, each `(n,)`; the first one is in distribution.
        name: Name of the score.
        ax: Axes to draw on.

    Raises:
        DataError: No set has a score above 0.
    """
    ax = ax or new_axes(WIDE)
    sets = {key: np.asarray(values, dtype=float) for key, values in scores.items()}
    shown = {key: values[values > 0] for key, values in sets.items()}
    everything = np.concatenate([np.zeros(0), *shown.values()])
    if not len(everything):
        raise DataError(f"{name} is 0 in all rows; nothing to plot on a log axis")
    low, high = everything.min(), everything.max()
    edges = np.geomspace(low, high, 31) if high > low else low * np.array([0.9, 1.1])
    for (key, values), (color, _, line) in zip(shown.items(), SERIES * len(shown), strict=False):
        height = np.histogram(values, edges)[0] / max(1, len(sets[key]))
        ax.stairs(height, edges, color=color, ls=line, lw=2, label=f"{key} ({len(sets[key])} rows)")
    ax.set(xscale="log", xlabel=name, ylabel="fraction of rows", title=f"{name} by set")
    ax.legend()
    return ax


@mpl.rc_context(STYLE)
def plot_shift(table: "pd.DataFrame", number: str, *, ax: Axes | None = None) -> Axes:
    """Plot one number against the severity of a shift, with its interval.

    Args:
        table: What `shift_table` returned.
        number: Name of the number.
        ax: Axes to draw on.

    Raises:
        DataError: The table has no such number.
    """
    names = table.index.unique("number")
    if number not in names:
        raise DataError(f"no number {number!r}; the table has {', '.join(map(str, names))}")
    ax = ax or new_axes(WIDE)
    rows = table.xs(number, level="number")
    at = rows.index.to_numpy(dtype=float)
    ax.fill_between(at, rows["low"], rows["high"], color=BLUE, alpha=0.2, lw=0)
    ax.plot(at, rows["value"], "o-", color=BLUE)
    ax.set(xlabel="severity", ylabel=number, title=f"{number} against severity")
    return ax
