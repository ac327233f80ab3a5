"""Pictures of uncertainty beyond the data: its field over the inputs."""

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike, NDArray

from pbnn.errors import DataError
from pbnn.plots.figures import BLUE, STYLE, WIDE, new_axes

__all__ = ["plot_field"]


@mpl.rc_context(STYLE)
def plot_field(
    x: ArrayLike,
    scale: ArrayLike,
    *,
    training: ArrayLike | None = None,
    log: bool = False,
    ax: Axes | None = None,
) -> Axes:
    """Plot the epistemic scale over one input, along rays, or over a grid of two inputs.

    Args:
        x: One input, or the distance along a ray, `(n,)`; or two inputs `(n, 2)` on a grid, as
            `pbnn.evaluate.field.grid_rows` gives them.
        scale: Epistemic scale (standard deviation) at each x, `(n,)`; over one input also of
            several runs or rays, `(runs, n)`: thin lines and their median.
        training: Training inputs, `(rows,)` or `(rows, 2)`, as ticks or points.
        log: Whether scales are shown by their logarithm.
        ax: Axes to draw on.

    Raises:
        DataError: Shapes do not fit.
    """
    where, u = np.asarray(x, float), np.asarray(scale, float)
    if where.ndim not in (1, 2) or u.ndim not in (1, 2) or u.shape[-1] != len(where):
        raise DataError(
            f"x has shape {where.shape} and scale {u.shape}; expected (n,) or (n, 2), and (n,) or "
            "(runs, n)"
        )
    ax = ax or new_axes(WIDE)
    if where.ndim == 2:
        _map(ax, where, u, log=log)
    else:
        _lines(ax, where, np.atleast_2d(u), log=log)
    if training is not None:
        points = np.asarray(training, float)
        if points.ndim == 2 and points.shape[1] == 2:
            ax.plot(points[:, 0], points[:, 1], ".", color="0.1", markersize=3, label="training")
        else:
            # Ticks along the bottom, whatever the range of the scales.
            ax.plot(
                points.ravel(),
                np.full(points.size, 0.03),
                "|",
                color="0.1",
                transform=ax.get_xaxis_transform(),
                label="training rows",
            )
    return ax


def _lines(ax: Axes, x: NDArray[np.float64], runs: NDArray[np.float64], *, log: bool) -> None:
    if len(runs) > 1:
        for run in runs:
            ax.plot(x, run, color=BLUE, alpha=0.35, linewidth=1.0)
    ax.plot(
        x,
        np.median(runs, 0),
        color=BLUE,
        label="epistemic scale" if len(runs) == 1 else f"median of {len(runs)}",
    )
    if log:
        ax.set_yscale("log")
    else:
        ax.set_ylim(bottom=0)
    ax.set(xlabel="x", ylabel="epistemic scale")


def _map(ax: Axes, x: NDArray[np.float64], u: NDArray[np.float64], *, log: bool) -> None:
    first, second = np.unique(x[:, 0]), np.unique(x[:, 1])
    if u.ndim != 1 or len(first) * len(second) != len(x):
        raise DataError(f"{len(x)} rows are no grid of {len(first)} × {len(second)} values")
    order = np.lexsort((x[:, 0], x[:, 1]))
    field = u[order].reshape(len(second), len(first))
    norm = mpl.colors.LogNorm() if log else None
    image = ax.pcolormesh(first, second, field, norm=norm, cmap="cividis", shading="nearest")
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.colorbar(image, ax=ax, label="epistemic scale")
    ax.set(xlabel="first input", ylabel="second input")
