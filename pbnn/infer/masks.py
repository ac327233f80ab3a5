"""Dropout masks as a pure function of a seed, a draw, a layer, a row and a unit."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pbnn.errors import ModelError

__all__ = ["Masks", "check_dropout"]

# The increment and the multipliers of SplitMix64 (Steele, Lea & Flood 2014, "Fast splittable
# pseudorandom number generators", figures 15 and 16), as signed numbers of 64 bits.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64
_BITS = 53

# What a dropped unit of alpha dropout becomes, the limit of SELU at minus infinity (Klambauer et
# al. 2017, "Self-normalizing neural networks", eq. 2 and section 4).
_SELU_LIMIT = -1.7580993408473766


class Masks(TorchFunctionMode):
    """Switches on every dropout that runs inside, with the masks of one draw.

    `nn.Dropout` in eval mode and `F.dropout` in a model's own code are the same here; nothing else
    of the model changes its mode. A mask is no random number but a hash, so that it is the same in
    whatever blocks draws and rows come, in a loop, mapped by vmap, traced or compiled, on any
    device, and whatever else is random.

    Args:
        seed: Seed of all masks.
        draw: Number of the draw, an integer or a tensor of one.
        row: Number of the first row of what comes, likewise: rows are the first dimension.

    Attributes:
        calls: How many dropouts have run inside since the last start; each has masks of its own.
    """

    def __init__(self, seed: int, draw: int | Tensor, row: int | Tensor = 0) -> None:
        super().__init__()
        self._seed, self._draw, self._row = seed, draw, row
        self.calls = 0

    def __enter__(self) -> Self:
        """Start, also in attention, whose fast path in eval mode would leave its dropout out."""
        self._fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Leave all as it was."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.backends.mha.set_fastpath_enabled(self._fast)

    @contextmanager
    def in_each_run_of(self, model: Any) -> Iterator[Any]:
        """Yield the model, of which each run has the same masks; copies of it stay so."""

        def start(*_: Any) -> None:
            self.calls = 0

        if isinstance(model, nn.Module):
            hook = model.register_forward_pre_hook(start)
            try:
                yield model
            finally:
                hook.remove()
        else:

            @functools.wraps(model)
            def started(*args: Any, **kwargs: Any) -> Any:
                start()
                return model(*args, **kwargs)

            yield started

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace dropouts; run all other functions as they are."""
        if func not in _DROPOUTS:
            return func(*args, **(kwargs or {}))
        units, drop = _DROPOUTS[func]
        x, p, inplace = _arguments(*args, **(kwargs or {}))
        self.calls += 1
        out = drop(x, self._kept(x, units(x), p), p)
        return x.copy_(out) if inplace else out

    def _kept(self, x: Tensor, units: torch.Size, p: float) -> Tensor:
        """Return which values are kept, `(rows, …)`, of the shape of x or one that broadcasts."""
        device = x.device
        key = _mixed(torch.as_tensor(self._seed, device=device) * _GAMMA)
        for number in (self._draw, self.calls):
            key = _mixed(key + (torch.as_tensor(number, device=device) + 1) * _GAMMA)
        rows = torch.arange(units[0], device=device) + torch.as_tensor(self._row, device=device)
        columns = torch.arange(units[1:].numel(), device=device)
        by_row = _mixed(key + (rows + 1) * _GAMMA)
        bits = _mixed(by_row[:, None] + (columns + 1) * _GAMMA)
        return (_shifted(bits, 64 - _BITS) >= int(p * 2**_BITS)).reshape(units)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shift words right, with zeros from the left."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _mixed(x: Tensor) -> Tensor:
    """Return words of which each bit depends on each bit of the ones given."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _arguments(
    x: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    train: bool = True,
) -> tuple[Tensor, float, bool]:
    """Read the arguments that all dropouts share; that of the training mode is of no matter."""
    return x, p, inplace


def _dropped(x: Tensor, kept: Tensor, p: float) -> Tensor:
    """Set units to 0, and scale the others (Srivastava et al. 2014, section 10)."""
    return torch.where(kept, x / (1 - p) if p < 1 else x, torch.zeros_like(x))


def _alpha_dropped(x: Tensor, kept: Tensor, p: float) -> Tensor:
    """Set units to SELU's limit; keep mean and variance (Klambauer et al. 2017, section 4)."""
    if p == 1:
        return torch.zeros_like(x)
    scale: float = ((1 - p) * (1 + p * _SELU_LIMIT**2)) ** -0.5
    return scale * torch.where(kept, x, _SELU_LIMIT) - scale * p * _SELU_LIMIT


def _each(x: Tensor) -> torch.Size:
    return x.shape


def _channels(x: Tensor) -> torch.Size:
    """Return one value for each row and channel: a channel is kept or dropped as a whole."""
    return torch.Size([*x.shape[:2], *(1 for _ in x.shape[2:])])


# By torch's function: the values that have a mask of their own, and what the mask does.
_DROPOUTS: Mapping[
    Any, tuple[Callable[[Tensor], torch.Size], Callable[[Tensor, Tensor, float], Tensor]]
] = {
    functional.dropout: (_each, _dropped),
    torch.dropout: (_each, _dropped),
    functional.dropout1d: (_channels, _dropped),
    functional.dropout2d: (_channels, _dropped),
    functional.dropout3d: (_channels, _dropped),
    torch.feature_dropout: (_channels, _dropped),
    functional.alpha_dropout: (_each, _alpha_dropped),
    functional.feature_alpha_dropout: (_channels, _alpha_dropped),
}


def check_dropout(model: nn.Module) -> None:
    """Refuse layers that drop units inside of themselves, where no mask can be given to them.

    Raises:
        ModelError: A recurrent or attention layer has a dropout of its own.
    """
    for name, module in model.named_modules():
        own = isinstance(module, nn.MultiheadAttention) or (
            isinstance(module, nn.RNNBase) and module.num_layers > 1
        )
        if own and module.dropout:
            raise ModelError(
                f"layer {name!r} ({type(module).__name__}) has dropout={module.dropout} of its "
                f"own, which cannot be varied by draw; write `self.{name}.dropout = 0.0`, and "
                f"`nn.Dropout({module.dropout})` after the layer"
            )
