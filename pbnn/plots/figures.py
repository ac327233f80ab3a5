"""Figures outside pyplot: their style, their axes, and the way to a file."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pbnn.files import writing

__all__ = [
    "BLUE",
    "ORANGE",
    "SERIES",
    "STYLE",
    "WIDE",
    "grid",
    "label",
    "legend_below",
    "limits",
    "new_axes",
    "save",
]

# Okabe and Ito's palette, which colour-blind readers can tell apart; black and grey are for data.
BLUE, ORANGE, GREEN, PINK, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9"
SERIES = (
    (BLUE, "o", "-"),
    (ORANGE, "s", "--"),
    (GREEN, "^", "-."),
    (PINK, "D", ":"),
    (SKY, "v", "-"),
)
# Any: matplotlib's type for these keys differs between its versions.
STYLE: Any = {
    "font.size": 14,
    "axes.titlesize": 15,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": 12,
    "legend.edgecolor": "none",
    "legend.framealpha": 0.8,
    "lines.linewidth": 2.0,
}
WIDE = (8.0, 5.0)


def save(axes: Axes | Sequence[Axes], path: str | os.PathLike[str], *, dpi: int = 150) -> Path:
    """Write the figure of some axes; the file appears under its name only when complete.

    Args:
        axes: What a plot returned.
        path: File name; its ending chooses the format.
        dpi: Dots per inch.
    """
    path = Path(path)
    figure = (axes if isinstance(axes, Axes) else axes[0]).get_figure(root=True)
    assert figure is not None
    with writing(path) as temporary:
        figure.savefig(temporary, dpi=dpi)
    return path


@mpl.rc_context(STYLE)
def new_axes(size: tuple[float, float]) -> Axes:
    """Axes in a figure of their own, which pyplot does not know and nothing has to close."""
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure.subplots()


@mpl.rc_context(STYLE)
def grid(panels: int) -> list[Axes]:
    """Axes of equal ranges: up to three in a row, more in a square."""
    columns = panels if panels <= 3 else int(np.ceil(np.sqrt(panels)))
    rows = -(-panels // columns)
    figure = Figure(figsize=(4.5 * columns, 3.4 * rows + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for unused in axes[panels:]:
        unused.set_axis_off()
    return list(axes[:panels])


@mpl.rc_context(STYLE)
def legend_below(axes: Axes | Sequence[Axes]) -> None:
    """Draw one legend below all panels of a figure made here, where it covers nothing.

    Args:
        axes: The panels; the entries are those of the first.
    """
    first = axes if isinstance(axes, Axes) else axes[0]
    figure = first.get_figure(root=True)
    assert figure is not None
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), columnspacing=1.2)


def label(text: str, units: str) -> str:
    """A label with its unit in brackets, where there is one."""
    return f"{text} [{units}]" if units else text


def limits(values: NDArray[Any]) -> tuple[float, float]:
    """The range of the values and a twentieth of it on both sides."""
    low, high = float(values.min()), float(values.max())
    margin = 0.05 * (high - low) or 1.0
    return low - margin, high + margin
