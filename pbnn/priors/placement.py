"""Where priors go: patterns of names to `PyroSample`s on any module."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any, TypeVar

import torch
from pyro.nn import PyroModule, PyroSample
from pyro.nn.module import to_pyro_module_
from torch import Tensor, nn
from torch.distributions import constraints

from pbnn.errors import ModelError

__all__ = ["Prior", "Rule", "Target", "place_priors", "present"]

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class Target:
    """What a prior is for: a parameter of a module, or a random attribute that gets another prior.

    Attributes:
        root: The module that `place_priors` was given.
        module: The module that holds it.
        attribute: Its name there.
        name: Its name from `root`, such as "layers.0.weight".
        value: Its present value; of a random attribute a draw of its present prior.
        support: Its support.
    """

    root: nn.Module
    module: nn.Module
    attribute: str
    name: str
    value: Tensor
    support: constraints.Constraint

    @property
    def shape(self) -> torch.Size:
        """Shape of its value."""
        return self.value.shape

    @property
    def fan_in(self) -> int:
        """Number of inputs of one output: 1 for vectors and for an embedding, whose input is one.

        A convolution's weight `(out, in / groups, …kernel)` has in / groups times kernel inputs; so
        has a transposed convolution's, which is `(in, out / groups, …kernel)`.
        """
        if self.value.ndim < 2 or isinstance(self.module, nn.Embedding | nn.EmbeddingBag):
            return 1
        if isinstance(self.module, nn.modules.conv._ConvTransposeNd):
            return self.shape[0] // self.module.groups * prod(self.shape[2:])
        return prod(self.shape[1:])

    def number(self, value: float) -> Tensor:
        """Return a number in the parameter's dtype, on its device."""
        return self.value.new_tensor(value)


Rule = Callable[[Target], Mapping[str, Any]]
"""From a target to what takes its place, by suffix: "" stands for the target itself and "local" for
the attribute `weight_local` beside `weight`, say. A part is a distribution, a function of the
module that returns a distribution or a tensor, or a tensor, which becomes a buffer."""

Prior = Rule | torch.distributions.Distribution


def place_priors(
    module: Module, priors: Mapping[str, Prior], *, constants: str | Sequence[str] = ()
) -> Module:
    """Put priors on the parameters of any module, in place.

    Each parameter gets the prior of the first pattern that its name matches. The module and all
    within it become PyroModules; the site of a parameter is its path from the outermost module. A
    parameter that several modules share is one site, where it comes first, and elsewhere a
    deterministic copy. An attribute that is random already keeps its prior, unless its exact name
    is among the patterns.

    Fits bring priors to their own device and dtype. With Pyro alone, call `module.to(…)` before:
    afterwards it does not reach the numbers inside a prior.

    Args:
        module: Any module; names are those of its `named_parameters()`.
        priors: Shell-style pattern of names (`*`, `?`, `[…]`) to prior, in order. A prior is a rule
            of `pbnn.priors`, or a Pyro distribution, which is expanded to the parameter's shape.
        constants: Patterns of parameters without a prior, looked at after `priors`: SVI learns
            them, and `fit_nuts(…, constants=svi.constants)` freezes them.

    Returns:
        The module.

    Raises:
        ModelError: A parameter matches no pattern, a pattern takes nothing, or a distribution has
            another shape than its parameter.
    """
    constants = (constants,) if isinstance(constants, str) else tuple(constants)
    patterns = (*priors, *constants)
    # Pyro does not take a module that has run already into another, not even into its own again.
    if not all(isinstance(part, PyroModule) for part in module.modules()):
        to_pyro_module_(module)
    owners: dict[int, Target] = {}
    taken: dict[str, list[Target]] = {pattern: [] for pattern in patterns}
    copies: list[tuple[Target, Target]] = []
    for target, held in _targets(module):
        # Two random attributes may share one distribution, and are two sites all the same.
        owner = owners.setdefault(id(held if isinstance(held, nn.Parameter) else target), target)
        pattern = _first(patterns, target.name, exact=not isinstance(held, nn.Parameter))
        if owner is not target:
            copies.append((target, owner))
        elif pattern is not None:
            taken[pattern].append(target)
        elif isinstance(held, nn.Parameter):
            raise ModelError(
                f"parameter {target.name!r} matches none of the patterns {list(patterns)}; give it "
                "a prior, or name it in constants="
            )
    _check_used(taken, [target.name for target in owners.values()])
    # Rules look at the module as it came: it changes only after all of them have.
    placed = [
        (target, _parts(prior, target))
        for pattern, prior in priors.items()
        for target in taken[pattern]
    ]
    random = {id(target) for target, _ in placed}
    placed += [(target, {"": _copy(owner)}) for target, owner in copies if id(owner) in random]
    for target, parts in placed:
        for suffix, part in parts.items():
            _set(target.module, f"{target.attribute}_{suffix}".removesuffix("_"), part)
    return module


def _first(patterns: Sequence[str], name: str, *, exact: bool) -> str | None:
    """Return the first pattern that takes a name."""
    if exact:
        return name if name in patterns else None
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def _targets(root: nn.Module) -> Iterator[tuple[Target, Any]]:
    """Yield what can get a prior, each with the parameter or prior that is there now."""
    # A module that stands in two places goes by the name of the last, with Pyro as here.
    paths = {module: name for name, module in root.named_modules(remove_duplicate=False)}
    for module in root.modules():
        path = f"{paths[module]}." if paths[module] else ""
        assert isinstance(module, PyroModule)
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = key.removesuffix("_unconstrained")
            if name in module._pyro_params:
                value, support = getattr(module, name), module._pyro_params[name][0]
            else:
                name, value, support = key, parameter, constraints.real
            yield Target(root, module, name, path + name, value.detach(), support), parameter
        for name, prior in module._pyro_samples.items():
            now = present(module, prior)
            if not isinstance(now, Tensor):
                value, support = _value(now), now.support
                yield Target(root, module, name, path + name, value, support), prior


def present(module: nn.Module, prior: Any) -> Any:
    """Return the distribution of a random attribute, or the tensor that it is computed as."""
    with _forked(), torch.no_grad():
        return prior if hasattr(prior, "sample") else prior(module)


def _forked() -> AbstractContextManager[None]:
    return torch.random.fork_rng(devices=range(torch.cuda.device_count()))


def _value(prior: Any) -> Tensor:
    with _forked():
        try:
            value: Tensor = prior.sample()
        except NotImplementedError:  # a flat prior
            value = torch.zeros(prior.shape())
    return value


def _check_used(taken: Mapping[str, Sequence[Target]], names: Sequence[str]) -> None:
    for pattern, targets in taken.items():
        if not targets:
            matching = [name for name in names if fnmatchcase(name, pattern)]
            raise ModelError(
                f"pattern {pattern!r} takes nothing: "
                + (
                    f"{matching} went to patterns before it, or are random already, where exact "
                    "names alone give another prior"
                    if matching
                    else f"expected a name or pattern among {list(names)}"
                )
            )


def _parts(prior: Prior, target: Target) -> Mapping[str, Any]:
    if isinstance(prior, torch.distributions.Distribution):
        return {"": _expanded(prior, target)}
    return prior(target)


def _expanded(prior: Any, target: Target) -> Any:
    """Return a distribution over the whole of a parameter."""
    if prior.shape() == target.shape:
        return prior.to_event(len(prior.batch_shape))
    if prior.shape() == ():
        return prior.expand(target.shape).to_event(target.value.ndim)
    raise ModelError(
        f"prior {type(prior).__name__} of shape {tuple(prior.shape())} does not fit parameter "
        f"{target.name!r} of shape {tuple(target.shape)}; give it numbers, such as "
        "dist.Normal(0.0, 1.0), or the parameter's own shape"
    )


def _copy(owner: Target) -> Callable[[nn.Module], Tensor]:
    """Return what reads a shared parameter where it is random."""
    module, attribute = owner.module, owner.attribute

    def shared(_: nn.Module) -> Tensor:
        value: Tensor = getattr(module, attribute)
        return value

    return shared


def _set(module: nn.Module, attribute: str, part: Any) -> None:
    if isinstance(part, Tensor):
        module.register_buffer(attribute, part)
    else:
        setattr(module, attribute, PyroSample(part))
