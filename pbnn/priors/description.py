"""The table of what is random in a module and what is constant."""

import inspect
from typing import Any

from pyro.distributions import TransformedDistribution
from pyro.distributions.torch_distribution import ExpandedDistribution
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.distributions import Independent
from torch.distributions.utils import lazy_property

from pbnn.priors.placement import present

__all__ = ["describe_priors"]


def describe_priors(module: nn.Module) -> str:
    """Return a table of a module's parameters: which are random, computed or constant, and how.

    Random ones have their prior, computed ones are deterministic sites, constants are learned by
    SVI and frozen for NUTS, and buffers stay as they are. Sites that a model samples in `forward`
    are not attributes: `pbnn.check_model` lists them too.

    Args:
        module: A module with priors.

    Returns:
        One line for each parameter, `PyroSample` and buffer.
    """
    rows = [("name", "kind", "shape", "prior")]
    paths = {part: path for path, part in module.named_modules(remove_duplicate=False)}
    for part, path in paths.items():
        samples = part._pyro_samples if isinstance(part, PyroModule) else {}
        for name, prior in samples.items():
            rows.append((f"{path}.{name}".lstrip("."), *_described(part, prior)))
    rows += [(name, "constant", _shape(p), "") for name, p in module.named_parameters()]
    rows += [(name, "buffer", _shape(b), "") for name, b in module.named_buffers()]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _described(module: nn.Module, prior: Any) -> tuple[str, str, str]:
    now = present(module, prior)
    if isinstance(now, Tensor):
        return "computed", _shape(now), "from other sites"
    given = "" if now is prior else " given other sites"
    return "random", f"{tuple(now.shape())}", _words(now) + given


def _shape(value: Tensor) -> str:
    return f"{tuple(value.shape)}"


def _words(prior: Any) -> str:
    """Return a distribution with its arguments; one that differs between entries is an ellipsis."""
    while isinstance(prior, Independent | ExpandedDistribution):
        prior = prior.base_dist
    if isinstance(prior, TransformedDistribution) and not prior.arg_constraints:
        return f"{_words(prior.base_dist)}, transformed"
    arguments = []
    for name in prior.arg_constraints:
        lazy = isinstance(inspect.getattr_static(type(prior), name, None), lazy_property)
        if lazy and name not in vars(prior):
            continue  # another form of an argument that was given, such as a precision matrix
        value = getattr(prior, name, None)
        if isinstance(value, Tensor):
            same = bool((value == value.flatten()[0]).all()) if value.numel() else False
            arguments.append(f"{name}={value.flatten()[0]:.3g}" if same else f"{name}=…")
    name = type(prior).__name__.lstrip("_")
    return f"{name}({', '.join(arguments)})" if arguments else name
