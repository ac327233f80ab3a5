"""Location and scale: taken from training rows, and the way back to the user's units."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Units", "location_and_scale"]

ROUNDING = 8 * float(np.finfo(np.float64).eps)
"""A relative range below this is rounding error of a constant, not information."""


@dataclass(frozen=True)
class Units:
    """What takes a model's y to the user's: `value = loc + scale * standardised`.

    Attributes:
        loc: Shape `()`, or `(outputs,)` where there are several outputs; 0 where the target is not
            standardised.
        scale: The same shape; a standard deviation; 1 where the target is not standardised.
    """

    loc: NDArray[np.float64]
    scale: NDArray[np.float64]

    def restore(self, standardised: ArrayLike) -> NDArray[Any]:
        """Return standardised values `(…, n)` or `(…, n, outputs)` in the user's units.

        Where the target is not standardised they stay as they are, class codes integers.
        """
        values = np.asarray(standardised)
        if not np.any(self.loc) and np.all(self.scale == 1):
            return values
        return np.asarray(self.loc + self.scale * values)


def location_and_scale(
    values: NDArray[np.float64], axes: tuple[int, ...] = (0,)
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """Mean and standard deviation (divisor n) over `axes`, missing values left out.

    Deviations are divided by the range before they are squared, so that values of 1e-200 or 1e200
    neither underflow nor overflow. What is constant up to rounding has scale 1.

    Args:
        values: Shape `(n, …)`, with at least one present value along `axes`.
        axes: Axes to take the statistics over, the first one among them.

    Returns:
        loc, scale, and which are constant; each of the shape of `values` with `axes` of length 1,
        less the first axis. Where the range of a float is exceeded they are not finite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        low = np.nanmin(values, axes, keepdims=True)
        high = np.nanmax(values, axes, keepdims=True)
        spread = high - low
        constant = spread <= ROUNDING * np.maximum(abs(low), abs(high))
        unit = np.where(constant, 1.0, spread)
        n = np.sum(~np.isnan(values), axes, keepdims=True)
        mean = np.nansum(values, axes, keepdims=True) / n
        square = np.nansum(((values - mean) / unit) ** 2, axes, keepdims=True) / n
        loc = np.where(low == high, low, mean)
        scale = np.where(constant, 1.0, unit * np.sqrt(square))
    return loc[0], scale[0], constant[0]
