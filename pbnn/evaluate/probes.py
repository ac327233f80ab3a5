"""Inputs to look at a posterior from: away from the data it was fitted to."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from pbnn.errors import DataError
from pbnn.model import Data, indexable

__all__ = ["away"]

SHIFT = 2.0
FAR = 4.0


def away(x: Data, training: Data, *, seed: int = 0) -> dict[str, Data]:
    """Return rows moved away from the training data, for `pbnn.compare(…, elsewhere=…)`.

    "shifted": each row moved by 2 training scales (the root mean square over features) in a random
    direction of its own; "far": each row's distance from the training mean multiplied by 4.
    Features that are constant in training stay where they are.

    Args:
        x: Rows `(n, …)`, or a dict of them, of which floating-point inputs are moved.
        training: The training rows, which say where the data are and how wide.
        seed: Seed of the directions.

    Returns:
        `{"shifted": …, "far": …}`, each shaped like x.

    Raises:
        DataError: No input is floating-point, or only x is a dict.
    """
    x, training = indexable(x), indexable(training)
    if isinstance(x, Mapping):
        if not isinstance(training, Mapping):
            raise DataError(f"x is a dict and training is not; expected inputs {', '.join(x)}")
        moved = {name: away(v, training[name], seed=seed) for name, v in x.items() if _moves(v)}
        if not moved:
            raise DataError("no input is floating-point; expected numbers that can be moved")
        return {
            where: {**x, **{name: value[where] for name, value in moved.items()}}
            for where in ("shifted", "far")
        }
    if not _moves(x):
        raise DataError("x is not floating-point; expected numbers that can be moved")
    rows, data = _double(x), _double(training)
    centre, scale = data.mean(0), data.std(0, correction=0)
    noise = torch.randn(
        rows.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    # A direction of unit root mean square, so that the shift does not depend on the dimension.
    size = noise.flatten(1).square().mean(1).sqrt().reshape(-1, *[1] * (rows.ndim - 1))
    like = torch.as_tensor(x)
    return {
        "shifted": (rows + SHIFT * scale * noise / size).to(like),
        "far": (centre + torch.where(scale > 0, FAR, 1.0) * (rows - centre)).to(like),
    }


def _moves(value: Data) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point()
    return np.issubdtype(np.asarray(value).dtype, np.floating)


def _double(value: Data) -> Tensor:
    return torch.as_tensor(value).double().cpu()
