"""The density of a layer's features in a form that files hold: plain numbers, no pickle."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from pbnn.errors import DataError, ModelError
from pbnn.evaluate.arrays import Array
from pbnn.evaluate.features import FeatureDensity, feature_rows
from pbnn.infer.posterior import Posterior
from pbnn.model import Data, Model

__all__ = ["SavedDensity"]


@dataclass(frozen=True, kw_only=True)
class SavedDensity:
    """A mixture of Gaussians on standardised features, as `FeatureDensity` fitted it.

    Attributes:
        layer: The layer whose features they are; None for the input.
        features: Number of features of the layer.
        kept: Positions of the features that were not constant in training.
        loc: Their training means.
        scale: Their training standard deviations.
        weights: Weights of the components.
        means: Means of the components, `(components, kept)`.
        precisions: Cholesky factors of their precisions, `(components, kept, kept)`; or their
            diagonals, `(components, kept)`.
    """

    layer: str | None
    features: int
    kept: NDArray[np.int64]
    loc: Array
    scale: Array
    weights: Array
    means: Array
    precisions: Array

    @classmethod
    def of(cls, density: FeatureDensity) -> Self:
        """Take the numbers of a fitted density.

        Raises:
            ModelError: It was not fitted.
        """
        mixture = density.mixture
        if mixture is None:
            raise ModelError("the density is not fitted; call fit with the training rows first")
        kept = np.flatnonzero(density._kept)
        return cls(
            layer=density.layer,
            features=len(density._kept),
            kept=kept,
            loc=density._loc[kept],
            scale=density._scale[kept],
            weights=mixture.weights_,
            means=mixture.means_,
            precisions=mixture.precisions_cholesky_,
        )

    def score(
        self,
        model: Model,
        posterior: Posterior,
        x: Data,
        *,
        device: str | torch.device | None = None,
    ) -> Array:
        """Return −log density of each row's features, `(n,)`.

        Raises:
            DataError: The rows have another number of features.
            ModelError: The model has no such layer.
        """
        from scipy.special import logsumexp  # type: ignore[import-untyped]

        found = feature_rows(model, posterior, x, self.layer, device=device)
        if found.shape[1] != self.features:
            raise DataError(
                f"rows have {found.shape[1]} features where the density is of {self.features}; "
                "fit the rule again"
            )
        z = (found[:, self.kept] - self.loc) / self.scale
        parts = []
        for mean, factor in zip(self.means, self.precisions, strict=True):
            full = factor.ndim == 2
            white = (z - mean) @ factor if full else (z - mean) * factor
            volume = np.log(np.diag(factor) if full else factor).sum()
            parts.append(volume - 0.5 * (np.square(white).sum(1) + len(mean) * np.log(2 * np.pi)))
        log_density = logsumexp(np.stack(parts, 1) + np.log(self.weights), axis=1)
        return -np.asarray(log_density, dtype=np.float64)

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values; Python writes floats so that they keep every bit."""
        arrays = {k: np.asarray(v).tolist() for k, v in vars(self).items() if k != "layer"}
        return {"layer": self.layer, **arrays}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Self:
        """The density that `to_json` gave."""
        names = ("loc", "scale", "weights", "means", "precisions")
        arrays: Any = {name: np.asarray(saved[name], dtype=np.float64) for name in names}
        kept = np.asarray(saved["kept"], dtype=np.int64)
        return cls(layer=saved["layer"], features=int(saved["features"]), kept=kept, **arrays)
