"""The statistics of BatchNorm layers as a function of the weights: those of the training rows."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pbnn.errors import FitError

__all__ = ["BatchStatistics", "statistics_of"]


def statistics_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the running means and variances of a model's BatchNorm layers, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: getattr(module, name)
        for prefix, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        for name in ("running_mean", "running_var")
        if getattr(module, name) is not None
    }


class BatchStatistics(TorchFunctionMode):
    """Gives each BatchNorm layer the statistics of the rows that pass it, and keeps them.

    They are those that the layer in training mode would put in its buffers at momentum 1, with the
    unbiased variance; each layer normalises by what is kept, so that the model in eval mode, with
    these buffers, gives the same output.

    Args:
        held: The tensors that the model runs with, by name; they tell the layers apart.

    Attributes:
        found: The statistics, by name of the buffer.
    """

    def __init__(self, held: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {id(value): name for name, value in held.items()}
        self.found: dict[str, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace the statistics in calls of `batch_norm`; run all others as they are."""
        if func is not functional.batch_norm or args[1] is None:
            return func(*args, **(kwargs or {}))
        value, mean, variance, *rest = args
        name = self._names.get(id(mean), "").removesuffix("running_mean")
        if value.numel() == value.shape[1]:
            raise FitError(
                f"BatchNorm layer {name.rstrip('.')!r} has one value of each channel, which has no "
                "variance; give more rows"
            )
        axes = [axis for axis in range(value.ndim) if axis != 1]
        variance, mean = torch.var_mean(value, axes)
        self.found |= {f"{name}running_mean": mean, f"{name}running_var": variance}
        return func(value, mean, variance, *rest, **(kwargs or {}))
