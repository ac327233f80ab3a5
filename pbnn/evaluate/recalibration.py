"""Scaling what a posterior predicts until probability means frequency, on validation rows alone.

One factor cannot change which row is more uncertain than which (but for scores of three or more
classes); it changes what the uncertainty is worth. Fit on validation rows: not those that the
posterior was fitted to, nor those that it is judged on.
"""

import math
import warnings
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from pbnn.errors import DataError, ModelError, PbnnWarning
from pbnn.evaluate.arrays import Array, column, probabilities_and_classes, same_rows

__all__ = ["ScaleCalibration", "TemperatureScaling"]

# Temperatures are looked for between these.
COLDEST, HOTTEST = 0.01, 100.0
# What a probability of 0 stands for: the least that float32 tells from it. One row of it would
# else decide the fit.
_LEAST = float(np.finfo(np.float32).tiny)


class TemperatureScaling:
    """Class probabilities to the power of 1 / T, normalised (Guo et al. 2017, eq. 9).

    T is that of the least negative log-likelihood on validation rows. What a posterior predicts is
    the mean over draws of class probabilities, and this mean is tempered: tempering each draw and
    averaging then leaves their disagreement as it is, so that it can only sharpen or blur what all
    draws share.

    Args:
        by_draw: Whether each draw is tempered, and then averaged, instead.

    Attributes:
        temperature_: T, above 1 where probabilities were too extreme.
    """

    def __init__(self, *, by_draw: bool = False) -> None:
        self.by_draw = by_draw
        self.temperature_ = math.nan

    def fit(self, probabilities: ArrayLike, y: ArrayLike) -> Self:
        """Find the temperature on validation rows.

        Args:
            probabilities: Class probabilities `(n, classes)`; or of draws `(…, n, classes)`, which
                are averaged first unless `by_draw`.
            y: Classes `(n,)`, counted from 0.

        Returns:
            Itself.

        Raises:
            DataError: Shapes do not agree, or the values are no probabilities and classes.
        """
        from scipy.optimize import minimize_scalar  # type: ignore[import-untyped]

        logs = self._logs(probabilities)
        _, classes = probabilities_and_classes(np.exp(logs).mean(0), y)
        rows = np.arange(len(classes))

        def loss(log_temperature: float) -> float:
            p = _softmax(logs / math.exp(log_temperature)).mean(0)[rows, classes]
            return float(-np.log(np.maximum(p, _LEAST)).mean())

        ends = math.log(COLDEST), math.log(HOTTEST)
        found = minimize_scalar(loss, bounds=ends, method="bounded", options={"xatol": 1e-6})
        self.temperature_ = math.exp(found.x)
        if any(loss(end) <= found.fun + 1e-9 for end in ends):
            warnings.warn(
                f"these {len(rows)} rows do not determine the temperature (all of them right, or "
                f"none): {self.temperature_:.3g} is as good as the end of its range; use more "
                "validation rows",
                PbnnWarning,
                stacklevel=2,
            )
        return self

    def transform(self, probabilities: ArrayLike) -> Array:
        """Return tempered probabilities, `(n, classes)`.

        Args:
            probabilities: As for `fit`.

        Raises:
            DataError: The values are no probabilities.
            ModelError: It was not fitted.
        """
        if math.isnan(self.temperature_):
            raise ModelError("the temperature is not fitted; call fit with validation rows first")
        tempered: Array = _softmax(self._logs(probabilities) / self.temperature_).mean(0)
        return tempered

    def fit_transform(self, probabilities: ArrayLike, y: ArrayLike) -> Array:
        """Return tempered probabilities of the rows that the temperature was found on."""
        return self.fit(probabilities, y).transform(probabilities)

    def _logs(self, probabilities: ArrayLike) -> Array:
        """Return log probabilities of each draw `(draws, n, classes)`, one of their mean."""
        p = np.asarray(probabilities, dtype=np.float64)
        if p.ndim < 2 or not p.size or not (p >= 0).all():
            raise DataError(
                f"probabilities have shape {p.shape}; expected (n, classes) or (draws, n, classes) "
                "of numbers from 0"
            )
        p = p.reshape(-1, *p.shape[-2:])
        logs: Array = np.log(np.maximum(p if self.by_draw else p.mean(0, keepdims=True), _LEAST))
        return logs


def _softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    p: Array = weights / weights.sum(-1, keepdims=True)
    return p


class ScaleCalibration:
    """One factor on predictive scales, for numbers (Levi et al. 2022, section 4).

    Its square is the mean over validation rows of ((y − mean) / scale)², which is the maximum of
    the likelihood of Normals with these means and scales.

    Attributes:
        factor_: The factor, above 1 where scales were too small.
    """

    def __init__(self) -> None:
        self.factor_ = math.nan

    def fit(self, mean: ArrayLike, scale: ArrayLike, y: ArrayLike) -> Self:
        """Find the factor on validation rows.

        Args:
            mean: Predictive means `(n,)`.
            scale: Predictive standard deviations `(n,)`, all above 0.
            y: Observations `(n,)`.

        Returns:
            Itself.

        Raises:
            DataError: Shapes differ, a value is NaN, or a scale is not above 0.
        """
        centre, spread, seen = column(mean, "mean"), column(scale, "scale"), column(y, "y")
        same_rows(mean=centre, scale=spread, y=seen)
        if not (spread > 0).all():
            raise DataError(f"scale is {spread.min():g} in some row; expected values above 0")
        self.factor_ = float(np.sqrt(np.square((seen - centre) / spread).mean()))
        return self

    def transform(self, scale: ArrayLike) -> Array:
        """Return scales times the factor; and so distances of quantiles from the mean.

        Args:
            scale: Predictive standard deviations, of any shape.

        Raises:
            ModelError: It was not fitted.
        """
        if math.isnan(self.factor_):
            raise ModelError("the factor is not fitted; call fit with validation rows first")
        return self.factor_ * np.asarray(scale, dtype=np.float64)

    def fit_transform(self, mean: ArrayLike, scale: ArrayLike, y: ArrayLike) -> Array:
        """Return the scales of the rows that the factor was found on, times it."""
        return self.fit(mean, scale, y).transform(scale)
