"""Pictures of a posterior itself: f(x), scales, spectra, and the bound it was fitted by."""

from collections.abc import Mapping, Sequence
from itertools import cycle

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from pbnn.errors import DataError
from pbnn.inference_data import Container
from pbnn.plots.figures import BLUE, SERIES, STYLE, WIDE, label, legend_below, limits, new_axes
from pbnn.plots.sources import band_of, flat, is_container, scales_of

__all__ = ["plot_band", "plot_elbo", "plot_scales", "plot_spectrum"]


@mpl.rc_context(STYLE)
def plot_band(
    data: Container | ArrayLike,
    x: ArrayLike | None = None,
    *,
    points: tuple[ArrayLike, ArrayLike] | None = None,
    feature: int | str = 0,
    site: str = "y",
    levels: Sequence[float] = (0.5, 0.9),
    units: str = "",
    legend: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """Plot f(x) over one input: mean and central bands over draws, with the data.

    Inference data gives f at the new inputs (group predictions) where it has them, else at the
    training inputs, and the training data as points. With several columns of x, give new inputs
    that move along one of them.

    Args:
        data: Inference data, or draws of f `(…, n)`, rows last.
        x: With draws, the input of each row `(n,)`.
        points: With draws, the data to show: inputs and observed values, each `(rows,)`.
        feature: Column of x to plot over, by its place or its label.
        site: Observed site.
        levels: Probabilities of the bands.
        units: Name of the unit of y, for the labels.
        legend: Whether to draw one: below axes made here, inside axes given. Of many panels, one
            below them all will do; see `pbnn.plots.legend_below`.
        ax: Axes to draw on.

    Raises:
        DataError: No f or x in the inference data, or shapes that do not fit.
    """
    name = "x"
    if is_container(data):
        f, x, points, name = band_of(data, feature, site)
    else:
        f, x = flat(data), np.asarray(x, float)
    if f.shape[1:] != x.shape:
        raise DataError(f"draws of f have {f.shape[1:]} rows and x has shape {x.shape}")
    order = np.argsort(x)
    x, f = x[order], f[:, order]
    own = ax is None
    ax = ax or new_axes(WIDE)
    shades = np.linspace(0.2, 0.4, len(levels))
    for level, shade in zip(sorted(levels, reverse=True), shades, strict=True):
        low, high = np.quantile(f, [(1 - level) / 2, (1 + level) / 2], axis=0)
        ax.fill_between(
            x, low, high, color=BLUE, alpha=shade, linewidth=0, label=f"{level:.0%} of f(x)"
        )
    ax.plot(x, f.mean(0), color=BLUE, label="mean of f(x)")
    if points is not None:
        ax.plot(*points, "o", color="0.15", markersize=4, label="data", zorder=3)
    ax.set(xlabel=name, ylabel=label("f(x)", units), title="Draws of f(x)")
    if legend and own:
        legend_below(ax)
    elif legend:
        ax.legend()
    return ax


@mpl.rc_context(STYLE)
def plot_scales(
    reference: Container | ArrayLike,
    others: Mapping[str, Container | ArrayLike],
    *,
    reference_name: str = "NUTS",
    quantity: str = "scale of f(x)",
    units: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Plot scale against scale, one point an input, of other posteriors and a reference.

    Args:
        reference: Scales (standard deviations) `(n,)` of the reference at n inputs; or inference
            data, for the scales of its f: at the new inputs where it has them, else at the training
            inputs.
        others: The same by name, at the same inputs.
        reference_name: Name of the reference.
        quantity: What the scales are of.
        units: Name of their unit, for the labels.
        ax: Axes to draw on.

    Raises:
        DataError: Shapes differ, or a scale is not positive.
    """
    base = scales_of(reference)
    scales = {name: scales_of(values) for name, values in others.items()}
    for name, values in {reference_name: base, **scales}.items():
        if values.shape != base.shape or base.ndim != 1:
            raise DataError(f"{name}: scales have shape {values.shape}; expected {base.shape[:1]}")
        if not (values > 0).all():
            raise DataError(f"{name}: {(~(values > 0)).sum()} scales are not above 0")
    ax = ax or new_axes((6.0, 6.0))
    every = np.concatenate([base, *scales.values()])
    ends = (every.min() / 1.25, every.max() * 1.25)
    ax.plot(ends, ends, color="0.5", linewidth=1.2)
    for (name, values), (colour, marker, _) in zip(scales.items(), cycle(SERIES)):
        ratio = np.median(values / base)
        entry = f"{name}: median ratio {ratio:.2f}"
        ax.plot(base, values, marker, color=colour, alpha=0.6, markersize=6, label=entry)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set(
        xlim=ends,
        ylim=ends,
        aspect="equal",
        xlabel=label(f"{reference_name}: {quantity}", units),
        ylabel=label(f"others: {quantity}", units),
        title="Scale against scale",
    )
    ax.legend(loc="upper left")
    return ax


@mpl.rc_context(STYLE)
def plot_spectrum(
    eigenvalues: Mapping[str, ArrayLike],
    *,
    ranks: Mapping[str, float] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Plot the eigenvalues of each guide's covariance, largest first, with its effective rank.

    The effective rank is (sum of eigenvalues) squared over the sum of their squares. What a fit's
    `approximation` holds gives both: `GaussianCovariance(posterior.approximation)` of
    `pbnn.infer.covariance` has `leading_eigenvalues` and `effective_rank`.

    Args:
        eigenvalues: By name of the guide, each `(values,)`, in units of a variance.
        ranks: Effective ranks by the same names, where not all eigenvalues are given.
        ax: Axes to draw on.

    Raises:
        DataError: An eigenvalue is not above 0.
    """
    ax = ax or new_axes(WIDE)
    for (name, values), (colour, marker, _) in zip(eigenvalues.items(), cycle(SERIES)):
        ordered = np.sort(np.asarray(values, float))[::-1]
        if ordered.ndim != 1 or not (ordered > 0).all():
            raise DataError(f"{name}: expected positive eigenvalues of shape (values,)")
        rank = (ranks or {}).get(name, ordered.sum() ** 2 / np.square(ordered).sum())
        ax.plot(
            np.arange(1, len(ordered) + 1),
            ordered,
            marker,
            color=colour,
            markersize=4,
            label=f"{name}: effective rank {rank:.1f}",
        )
    ax.set_yscale("log")
    ax.set(xlabel="index, largest first", ylabel="eigenvalue", title="Spectrum of the covariance")
    ax.legend()
    return ax


@mpl.rc_context(STYLE)
def plot_elbo(history: Mapping[str, ArrayLike], *, ax: Axes | None = None) -> Axes:
    """Plot the evidence lower bound of a fit and its two parts, each a running mean over 1% of it.

    The vertical axis is set by the last nine tenths of the steps: the first ones run far below.

    Args:
        history: `elbo`, `expected_log_likelihood` and `kl`, each `(steps,)`, in nats.
        ax: Axes to draw on.

    Raises:
        DataError: A part is missing or the lengths differ.
    """
    parts = {
        "elbo": "ELBO",
        "expected_log_likelihood": "expected log likelihood",
        "kl": "KL(guide, prior)",
    }
    if missing := parts.keys() - history.keys():
        raise DataError(f"the history has no {', '.join(sorted(missing))}; it has {list(history)}")
    lines = {name: np.asarray(history[name], float) for name in parts}
    steps = len(lines["elbo"])
    if any(line.shape != (steps,) for line in lines.values()) or steps == 0:
        raise DataError(f"expected (steps,); got {[line.shape for line in lines.values()]}")
    window = max(1, steps // 100)
    ax = ax or new_axes(WIDE)
    late = []
    for (name, line), (colour, _, dashes) in zip(lines.items(), SERIES, strict=False):
        smooth = np.convolve(line, np.full(window, 1 / window), "valid")
        ax.plot(np.arange(window, steps + 1), smooth, dashes, color=colour, label=parts[name])
        late.append(smooth[len(smooth) // 10 :])
    ax.set_ylim(limits(np.concatenate(late)))
    last = lines["elbo"][-window:].mean()
    ax.set(
        xlabel="step",
        ylabel="nats",
        title=f"ELBO {last:,.1f} at the end".replace("-", "\N{MINUS SIGN}"),
    )
    ax.legend()
    return ax
