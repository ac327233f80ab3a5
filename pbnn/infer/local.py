"""Noise that enters a layer at its output: local reparameterization and Flipout.

Both replace one draw of a weight for all rows by what acts as a draw of its own for each row, so
that the noise of the gradient averages over a batch. They hold for weights that the guide draws
independently, entry by entry, and that a model uses in one layer and nowhere else.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from pbnn.errors import FitError

__all__ = ["Layer", "LayerNoise", "find_layers"]

_LAYERS = {F.linear: "linear"}
_CONVOLUTIONS = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}
# What Pyro itself asks of a site's value, the bijection of real sites among it.
_HARMLESS = {
    torch.zeros_like,
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "ndim", "dtype", "device", "layout", "requires_grad")
    ),
}


@dataclass(frozen=True)
class Layer:
    """One layer with a random weight, as the model called it.

    Attributes:
        weight: The weight's site.
        bias: The bias's site, where it is random too.
        shapes: Shapes of the noise of one draw: of the output, or of the signs of input and output.
    """

    weight: str
    bias: str | None
    shapes: tuple[tuple[int, ...], ...]

    @property
    def sites(self) -> list[str]:
        """The sites whose noise enters here."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    @property
    def sizes(self) -> list[int]:
        """Number of values of each part of the noise."""
        return [prod(shape) for shape in self.shapes]


class _Uses(TorchFunctionMode):
    """Looks at each call that is given one of some tensors, known by identity.

    Args:
        known: The tensors by site.
    """

    def __init__(self, known: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._held = dict(known)  # keeps them alive, so that no other tensor gets their identity
        self._sites = {id(value): name for name, value in known.items()}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Hand a call to `call` if it takes a known tensor; do all others as they are."""
        kwargs = kwargs or {}
        sites = [self._sites[id(v)] for v in _tensors((args, kwargs)) if id(v) in self._sites]
        if not sites or func in _HARMLESS:
            return func(*args, **kwargs)
        return self.call(func, args, kwargs, sites)

    def call(self, func: Any, args: Any, kwargs: dict[str, Any], sites: Sequence[str]) -> Any:
        """Do one call."""
        raise NotImplementedError

    def layer_of(
        self, func: Any, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Tensor, str | None, str | None, Tensor | None] | None:
        """Return input, sites of weight and bias, and the bias, of a call of a layer."""
        if func not in _LAYERS and func not in _CONVOLUTIONS:
            return None
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        weight, bias = given["weight"], given.get("bias")
        return given["input"], self._sites.get(id(weight)), self._sites.get(id(bias)), bias


class _Survey(_Uses):
    """Notes the layers, and what else is done with their weights."""

    def __init__(self, known: Mapping[str, Tensor]) -> None:
        super().__init__(known)
        self.layers: list[tuple[Any, str, str | None, Tensor, Tensor]] = []
        self.others: dict[str, str] = {}

    def call(self, func: Any, args: Any, kwargs: dict[str, Any], sites: Sequence[str]) -> Any:
        """Do one call as it is, and note it."""
        output = func(*args, **kwargs)
        found = self.layer_of(func, args, kwargs)
        taken: set[str | None] = set()
        if found is not None and found[1] is not None:
            self.layers.append((func, found[1], found[2], found[0], output))
            taken = {found[1], found[2]}
        for site in sites:
            if site not in taken:
                self.others[site] = _name(func)
        return output


def find_layers(
    run: Callable[[TorchFunctionMode], Any],
    means: Mapping[str, Tensor],
    estimator: Literal["local", "flipout"],
    rows: int,
) -> list[Layer]:
    """Return the layers that an estimator serves, in the order in which the model calls them.

    Args:
        run: Runs the model at `means` inside a mode.
        means: Values of all latent sites.
        estimator: Which of the two.
        rows: Rows of data in the run.

    Raises:
        FitError: There is none, or one of them is used in a way that the estimator does not serve.
    """
    survey = _Survey(means)
    run(survey)
    name = "local reparameterization" if estimator == "local" else "Flipout"
    layers: list[Layer] = []
    seen: set[str] = set()
    for func, weight, bias, x, output in survey.layers:
        if estimator == "local" and func not in _LAYERS:
            continue
        taken = [weight, *([bias] if bias is not None and estimator == "local" else [])]
        reason = _reason(survey, taken, seen, x, rows, estimator)
        if reason:
            raise FitError(f"{name} does not serve site {weight!r}: {reason}; leave estimator out")
        seen.update(taken)
        if estimator == "local":
            layers.append(Layer(weight, bias, (tuple(output.shape),)))
        else:
            layers.append(Layer(weight, None, _sign_shapes(func, x, output)))
    if not layers:
        kinds = "F.linear" if estimator == "local" else "F.linear or a convolution"
        raise FitError(
            f"{name} found no layer with a random weight in {kinds}; leave estimator out"
        )
    return layers


def _reason(
    survey: _Survey, sites: Sequence[str], seen: set[str], x: Tensor, rows: int, estimator: str
) -> str | None:
    """Return why a layer cannot be served; None where it can."""
    for site in sites:
        if site in survey.others:
            return f"{site!r} is also used by {survey.others[site]}"
        if site in seen:
            return f"{site!r} is used in more than one call, and both would need the same draw"
    if x.ndim == 0 or x.shape[0] != rows:
        return f"its input of shape {tuple(x.shape)} does not have the {rows} rows of data first"
    if estimator == "local" and x.ndim != 2:
        return (
            f"its input of shape {tuple(x.shape)} has several positions in a row, which must share "
            "one draw (Flipout serves it)"
        )
    if estimator == "flipout" and rows < 2:
        return "one row in a batch has no other to differ from"
    return None


def _sign_shapes(func: Any, x: Tensor, output: Tensor) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of one sign for each row and channel, of input and output."""
    if func in _LAYERS:
        between = (1,) * (x.ndim - 2)
        return (len(x), *between, x.shape[-1]), (len(x), *between, output.shape[-1])
    after = (1,) * _CONVOLUTIONS[func]
    return (len(x), x.shape[1], *after), (len(x), output.shape[1], *after)


class LayerNoise(_Uses):
    """Runs the layers with their noise, and refuses any other use of their weights.

    Local reparameterization (Kingma, Salimans & Welling 2015, eq. 6): the output of x under
    independent weights N(M, S²) and biases N(m, s²) is Normal with mean x Mᵀ + m and variance
    x² (S²)ᵀ + s², independent between rows, and is drawn as such.

    Flipout (Wen et al. 2018, eq. 4): with one draw M + Δ for all rows, row n has the layer's output
    under M plus that of (x_n ∘ s_n) under Δ, times r_n, with random signs s_n and r_n. Since the
    entries of Δ are independent and symmetric, Δ ∘ r_n s_nᵀ is a draw as well.

    Args:
        layers: What `find_layers` returned.
        values: By site, what stands for it in the model: its mean, or for Flipout its draw.
        means: Means by site.
        variances: Variances by site, which only local reparameterization needs.
        noise: Standard Normal noise of each layer, one tensor for each of its `shapes`.
    """

    def __init__(
        self,
        layers: Iterable[Layer],
        values: Mapping[str, Tensor],
        means: Mapping[str, Tensor],
        variances: Mapping[str, Tensor],
        noise: Mapping[str, Sequence[Tensor]],
    ) -> None:
        self._layers = {layer.weight: layer for layer in layers}
        sites = [site for layer in self._layers.values() for site in layer.sites]
        super().__init__({site: values[site] for site in sites})
        self._means, self._variances, self._noise = means, variances, noise

    def call(self, func: Any, args: Any, kwargs: dict[str, Any], sites: Sequence[str]) -> Any:
        """Do one call of a layer with its noise."""
        found = self.layer_of(func, args, kwargs)
        layer = None if found is None or found[1] is None else self._layers[found[1]]
        if found is None or layer is None or set(sites) != set(layer.sites):
            raise FitError(f"site {sites[0]!r} is used by {_name(func)} besides its layer")
        x, _, _, bias = found
        if len(layer.shapes) == 1:
            return self._local(x, layer, bias)
        return self._flipped(func, args, kwargs, x, layer)

    def _local(self, x: Tensor, layer: Layer, bias: Tensor | None) -> Tensor:
        mean = F.linear(x, self._means[layer.weight], bias)
        variance = F.linear(
            x.square(),
            self._variances[layer.weight],
            None if layer.bias is None else self._variances[layer.bias],
        )
        (noise,) = self._noise[layer.weight]
        return mean + _root(variance) * noise

    def _flipped(
        self, func: Any, args: Any, kwargs: dict[str, Any], x: Tensor, layer: Layer
    ) -> Tensor:
        mean = self._means[layer.weight]
        delta = self._held[layer.weight] - mean
        sign_in, sign_out = (torch.where(n < 0, -1.0, 1.0).to(x) for n in self._noise[layer.weight])
        rest = {k: v for k, v in kwargs.items() if k not in ("input", "weight", "bias")}
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        further = args[3:]  # stride, padding, dilation and groups of a convolution
        centre = func(x, mean, bias, *further, **rest)
        around: Tensor = func(x * sign_in, delta, None, *further, **rest)
        output: Tensor = centre + around * sign_out
        return output


def _root(variance: Tensor) -> Tensor:
    """Return the square root; where it is 0, as for rows of zeros, its gradient is 0 too."""
    positive = variance > 0
    root: Tensor = torch.where(positive, torch.where(positive, variance, 1.0).sqrt(), 0.0)
    return root


def _name(func: Any) -> str:
    """Return the name of a function, or of the attribute that it reads."""
    name: str = getattr(func, "__name__", str(func))
    return f".{func.__self__.__name__}" if name == "__get__" else name


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _tensors(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _tensors(item)]
    return []
