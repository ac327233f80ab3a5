"""Monte Carlo errors of what is computed from draws: how far other draws would move a number."""

from collections.abc import Sequence
from math import isqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["MonteCarlo"]


class MonteCarlo:
    """Summaries over draws, each with its standard error, over the leading dimension.

    Independent draws count one by one. Markov chains are cut into batches of about the square root
    of their length, whose means are nearly independent (batch means: Flegal & Jones 2010, "Batch
    means and spectral variance estimators", eq. 6). An error implies the effective sample size
    (scale of the draws / error)².

    Args:
        chains: Chains that the leading dimension holds, one after another.
        draws: Draws of each chain.
        markov: Whether they are Markov chains.
    """

    def __init__(self, chains: int, draws: int, *, markov: bool) -> None:
        self._chains = chains
        self._draws = draws
        self._length = isqrt(draws) if markov else 1

    def error(self, values: Tensor) -> Tensor:
        """Return the standard error of the mean of values `(chain × draw, …)`, of shape `(…)`."""
        batches = self._draws // self._length
        if self._chains * batches < 2:
            return torch.full(values.shape[1:], torch.nan, dtype=torch.float64)
        if self._length > 1:
            chains = values.reshape(self._chains, self._draws, *values.shape[1:])
            chains = chains[:, self._draws - batches * self._length :]
            cut = chains.reshape(self._chains * batches, self._length, *values.shape[1:])
            values = cut.mean(1)
        # torch's own std over the leading dimension takes ten times as long.
        squares = (values - values.mean(0)).square().sum(0).double()
        return (squares / (len(values) * (len(values) - 1))).sqrt()

    def root_mean(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the root of the mean of values, and its error by the delta method."""
        root = values.mean(0).sqrt()
        # What is 0 at every draw has no error.
        return root, torch.where(root > 0, self.error(values) / (2 * root), 0.0)

    def log_mean_exp(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return log mean exp of values, and its error by the delta method."""
        top = values.amax(0)
        top = top.where(top.isfinite(), 0.0)
        weights = (values - top).exp()
        mean = weights.mean(0)
        return top + mean.log(), self.error(weights) / mean

    def quantiles(
        self, values: Tensor, probabilities: Sequence[float]
    ) -> list[tuple[Tensor, Tensor]]:
        """Return quantiles of values `(chain × draw, …, samples)`, each with its error, in float64.

        The error of independent draws is half of the distance between the quantiles one standard
        error of the probability below and above, sqrt(p (1 − p) / S); that of Markov chains is
        larger in the ratio in which the error of the share of draws below the quantile is larger
        (Vehtari et al. 2021, section 4.4). The least and the largest draw have none: NaN.
        """
        shape = values.shape[1:-1]
        together = values.movedim(-1, 1).flatten(0, 1)
        ordered = np.sort(together.flatten(1).T.contiguous().numpy(), axis=1)
        out = []
        for p in probabilities:
            spread = (p * (1 - p) / len(together)) ** 0.5
            low, quantile, high = (
                _at(ordered, at).reshape(shape) for at in (p - spread, p, p + spread)
            )
            share = self.error((values <= quantile[..., None]).to(values.dtype).mean(-1))
            ratio = share / spread if spread else torch.full(shape, torch.nan)
            out.append((quantile, ratio * (high - low) / 2))
        return out


def _at(ordered: NDArray[Any], probability: float) -> Tensor:
    """Return a quantile of each row of ordered values, linear between neighbours."""
    last = ordered.shape[1] - 1
    place = min(max(probability, 0.0), 1.0) * last
    lower = min(int(place), max(last - 1, 0))
    low, high = ordered[:, lower], ordered[:, min(lower + 1, last)]
    return torch.lerp(torch.tensor(low).double(), torch.tensor(high).double(), place - lower)
