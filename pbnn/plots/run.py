"""The pictures of a run folder: what a person looks at first after a fit or a comparison."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from pbnn.inference_data import Container, group
from pbnn.plots.figures import save
from pbnn.plots.posterior import plot_scales
from pbnn.plots.predictive import (
    plot_calibration,
    plot_posterior_predictive,
    plot_predicted_against_observed,
    plot_reliability,
)

if TYPE_CHECKING:
    from pbnn.data import Units
    from pbnn.prediction import Prediction

__all__ = ["draw_run"]


def draw_run(
    folder: Path,
    fits: Mapping[str, Container],
    predictions: Mapping[str, "Prediction"],
    y_test: ArrayLike,
    units: "Units",
    *,
    reference: str = "nuts",
) -> list[Path]:
    """Draw the pictures that suit the target, and write them as PNG files.

    For one number: predictive data sets against the training data; predictions, calibration and,
    with a reference, scales of f(x) against its scales on held-out rows. For classes: reliability
    on held-out rows.

    Args:
        folder: Where to write.
        fits: Inference data by name of the posterior, with held-out rows under "predictions".
        predictions: What each posterior predicts for the held-out rows, by the same names.
        y_test: Their observations, as the fit took them.
        units: How y was standardised.
        reference: Name of the posterior whose scales the others are held against.

    Returns:
        The files.
    """
    y = units.restore(y_test)
    if not len(y):
        return []
    files = []
    for name, prediction in predictions.items():
        if prediction.probabilities is not None:
            axes = plot_reliability(prediction.probabilities, y)
            axes.set_title(f"{name}: held-out rows")
            files.append(save(axes, folder / f"reliability_{name}.png"))
    if not files and y.ndim == 1:
        files = _numbers(folder, fits, y)
        scales = {k: np.asarray(p.epistemic_scale) for k, p in predictions.items()}
        if reference in scales and len(scales) > 1:
            axes = plot_scales(scales.pop(reference), scales, reference_name=reference)
            files.append(save(axes, folder / "scales.png"))
    return files


def _numbers(folder: Path, fits: Mapping[str, Container], y: ArrayLike) -> list[Path]:
    files = [save(plot_posterior_predictive(fits), folder / "posterior_predictive.png")]
    axes = None
    for name, data in fits.items():
        draws = group(data, "predictions")["y"].values
        axes = plot_calibration(draws, y, label=name, ax=axes)
        against = plot_predicted_against_observed(draws, y)
        against.set_title(f"{name}: held-out rows")
        files.append(save(against, folder / f"predicted_{name}.png"))
    assert axes is not None
    axes.set_title("held-out rows")
    return [*files, save(axes, folder / "calibration.png")]
