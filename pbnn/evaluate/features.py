"""Has the network seen such a row before: the density of a layer's features."""

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from pyro import poutine
from torch import Tensor, nn

from pbnn.errors import DataError, ModelError
from pbnn.evaluate.arrays import Array
from pbnn.evaluate.field import input_columns
from pbnn.infer.posterior import Posterior
from pbnn.model import Data, Model, isolated
from pbnn.prediction.runner import Runner

__all__ = ["FeatureDensity", "feature_rows"]

COMPONENTS = (1, 2, 4, 8)
# Full covariances of more features than this take minutes and say little.
FULL_FEATURES = 100
# Rows that a component must have, or there would be one for each outlier.
ROWS_PER_COMPONENT = 20
# Added to the variances of standardised features: the covariance of few rows is singular.
RIDGE = 1e-3


class FeatureDensity:
    """A mixture of Gaussians on the features of a layer, fitted on training rows alone.

    (Mukhoti et al. 2023, "Deep deterministic uncertainty", section 3.) Features are standardised by
    training rows; those that are constant there are left out. They are those of the network at the
    draw of highest log joint: other draws number their hidden units in another order.

    Args:
        layer: Name of a module whose output gives the features, such as "layers.0"; None takes the
            input x itself.
        components: Number of Gaussians, of full covariance; by default that of 1, 2, 4 and 8, with
            full or diagonal covariances, which has the least BIC. More than 100 features have
            diagonal ones.
        seed: Seed of the start of the fit.

    Attributes:
        mixture: The fitted `sklearn.mixture.GaussianMixture`, of standardised features.
    """

    def __init__(
        self, layer: str | None = None, *, components: int | None = None, seed: int = 0
    ) -> None:
        self.layer, self.components, self.seed = layer, components, seed
        self.mixture: Any = None

    def fit(
        self,
        model: Model,
        posterior: Posterior,
        x: Data,
        *,
        device: str | torch.device | None = None,
    ) -> Self:
        """Fit the density on training rows.

        Args:
            model: The model that was fitted.
            posterior: Its posterior, from any road.
            x: Training rows.
            device: Where to run.

        Returns:
            Itself.

        Raises:
            DataError: There are too few rows for the components.
            ModelError: The model has no such layer.
        """
        self._source = (model, posterior, device)
        features = feature_rows(model, posterior, x, self.layer, device=device)
        self._loc, self._scale = features.mean(0), features.std(0)
        self._kept = self._scale > 1e-12 * np.abs(features).max(initial=1e-300)
        if not self._kept.any():
            raise DataError(
                f"all features of layer {self.layer!r} are constant over the training rows; choose "
                "another layer"
            )
        self.mixture = self._mixture(self._standardised(features))
        return self

    def score(self, x: Data) -> Array:
        """Return −log density of each row's features, `(n,)`: high far from training rows.

        Raises:
            ModelError: It was not fitted.
        """
        if self.mixture is None:
            raise ModelError("the density is not fitted; call fit with the training rows first")
        model, posterior, device = self._source
        features = feature_rows(model, posterior, x, self.layer, device=device)
        score: Array = -self.mixture.score_samples(self._standardised(features))
        return score

    def _standardised(self, features: Array) -> Array:
        kept = self._kept
        standardised: Array = (features[:, kept] - self._loc[kept]) / self._scale[kept]
        return standardised

    def _mixture(self, features: Array) -> Any:
        from sklearn.mixture import GaussianMixture

        rows = len(features)
        if rows < max(2, self.components or 1):
            raise DataError(
                f"{rows} training rows for {self.components or 1} components; expected more rows"
            )
        most = max(1, rows // ROWS_PER_COMPONENT)
        shapes = ("full", "diag") if features.shape[1] <= FULL_FEATURES else ("diag",)
        kinds = (
            [(self.components, "full")]
            if self.components is not None
            else [(k, shape) for k in COMPONENTS if k <= most for shape in shapes]
        )
        fitted = []
        with warnings.catch_warnings():
            # A mixture that still moves a little is a density, too.
            warnings.filterwarnings("ignore", category=UserWarning, module="sklearn")
            for count, kind in kinds:
                mixture = GaussianMixture(
                    count, covariance_type=kind, reg_covar=RIDGE, random_state=self.seed
                )
                fitted.append(mixture.fit(features))
        return min(fitted, key=lambda mixture: mixture.bic(features))


def feature_rows(
    model: Model,
    posterior: Posterior,
    x: Data,
    layer: str | None = None,
    *,
    device: str | torch.device | None = None,
) -> Array:
    """Return the features of a layer at the draw of highest log joint, `(n, features)`.

    Args:
        model: The model that was fitted.
        posterior: Its posterior, from any road.
        x: Input rows `(n, …)`, or a dict of inputs.
        layer: Name of the module; None takes x itself, the floating inputs side by side.
        device: Where to run.

    Raises:
        DataError: x has no floating input.
        ModelError: The model has no such layer, or its output has no rows.
    """
    if layer is None:
        return input_columns(x)
    best = int(posterior.stats["lp"].flatten().argmax())
    chain, draw = divmod(best, posterior.draws_per_chain)
    one = dataclasses.replace(
        posterior.select(chains=[chain], draws=slice(draw, draw + 1)), markov=False
    )
    runner = Runner(model, one, x, device)
    parts = []
    with isolated(0, runner.device), torch.no_grad(), _output_of(runner.model, layer) as outputs:

        def read(trace: poutine.Trace) -> dict[str, Tensor]:
            if not outputs:
                raise ModelError(f"layer {layer!r} does not run in the model's forward")
            value, rows = outputs[-1], trace.nodes["_RETURN"]["value"].shape[0]
            outputs.clear()
            if not isinstance(value, Tensor) or value.shape[:1] != (rows,):
                raise ModelError(
                    f"layer {layer!r} returns no tensor with rows first; choose another layer"
                )
            return {"features": value.reshape(rows, -1)}

        for rows in runner.row_blocks(progress=False):
            parts.append(runner.gather(read, rows)["features"][0, : runner.rows].double().numpy())
    return np.concatenate(parts)


@contextmanager
def _output_of(model: nn.Module, layer: str) -> Iterator[list[Any]]:
    """Collect what a module of the model returns while the block runs."""
    modules: Mapping[str, nn.Module] = dict(model.named_modules())
    if layer not in modules or not layer:
        raise ModelError(f"no layer {layer!r}; the model has {[n for n in modules if n]}")
    outputs: list[Any] = []
    # In the hook vmap's own tensors are at hand; they must leave by the function that it maps.
    handle = modules[layer].register_forward_hook(lambda *call: outputs.append(call[2]))
    try:
        yield outputs
    finally:
        handle.remove()
