"""Pictures that ArviZ does not have: each takes axes or makes some, and returns them.

They read plain arrays, or the container of `inference_data` (from a file, too), never a model. Axes
made here belong to a figure of their own, outside pyplot; `save` writes it.
"""

from pbnn.plots.decision import plot_cost_curve, plot_rejection, plot_scores, plot_shift
from pbnn.plots.figures import legend_below, save
from pbnn.plots.ood import plot_field
from pbnn.plots.posterior import plot_band, plot_elbo, plot_scales, plot_spectrum
from pbnn.plots.predictive import (
    plot_calibration,
    plot_pit,
    plot_posterior_predictive,
    plot_predicted_against_observed,
    plot_reliability,
)
from pbnn.plots.prior import plot_prior
from pbnn.plots.report import Section, write_report
from pbnn.plots.run import draw_run

__all__ = [
    "Section",
    "draw_run",
    "legend_below",
    "plot_band",
    "plot_calibration",
    "plot_cost_curve",
    "plot_elbo",
    "plot_field",
    "plot_pit",
    "plot_posterior_predictive",
    "plot_predicted_against_observed",
    "plot_prior",
    "plot_rejection",
    "plot_reliability",
    "plot_scales",
    "plot_scores",
    "plot_shift",
    "plot_spectrum",
    "save",
    "write_report",
]
