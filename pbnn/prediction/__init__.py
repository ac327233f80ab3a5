"""Prediction: draws × rows → moments, quantiles, samples, log-likelihoods; from the prior, too."""

from pbnn.prediction.draws import (
    function_draws,
    log_likelihood,
    predict,
    predictive,
    prior_predictive,
)
from pbnn.prediction.prior import sample_prior
from pbnn.prediction.summary import Prediction

__all__ = [
    "Prediction",
    "function_draws",
    "log_likelihood",
    "predict",
    "predictive",
    "prior_predictive",
    "sample_prior",
]
