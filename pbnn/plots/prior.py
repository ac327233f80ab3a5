"""The picture of a prior: what functions it holds for likely, beside the data."""

from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from pbnn.plots.figures import ORANGE, STYLE, WIDE, legend_below, new_axes
from pbnn.plots.posterior import plot_band
from pbnn.plots.sources import flat

__all__ = ["plot_prior"]


@mpl.rc_context(STYLE)
def plot_prior(
    f: ArrayLike,
    x: ArrayLike,
    *,
    points: tuple[ArrayLike, ArrayLike] | None = None,
    functions: int = 5,
    name: str = "x",
    units: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Plot bands of f(x) under the prior over one input, with some of its draws and the data.

    Args:
        f: Draws of f `(…, n)`, rows last, such as `PriorReport.f[..., 0]`.
        x: The input of each row `(n,)`.
        points: The data to show: inputs and observed values, each `(rows,)`.
        functions: Number of draws to show as lines.
        name: Name of the input.
        units: Name of the unit of y.
        ax: Axes to draw on.

    Raises:
        DataError: Shapes do not fit.
    """
    own, ax = ax is None, ax or new_axes(WIDE)
    options: dict[str, Any] = {"points": points, "units": units, "legend": False, "ax": ax}
    plot_band(f, x, **options)
    order = np.argsort(np.asarray(x, float))
    lines = flat(f)[:functions][:, order]
    for k, line in enumerate(lines):
        ax.plot(
            np.asarray(x, float)[order],
            line,
            color=ORANGE,
            linewidth=1.0,
            label="" if k else f"{len(lines)} draws",
        )
    ax.set(title="f(x) under the prior", xlabel=name)
    if own:
        legend_below(ax)
    else:
        ax.legend()
    return ax
