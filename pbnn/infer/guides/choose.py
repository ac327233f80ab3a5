"""From the name or class of a variational family to a guide of a model."""

import inspect
from collections.abc import Mapping
from typing import Any

from pyro.infer.autoguide import (
    AutoCallable,
    AutoGuide,
    AutoNormal,
)

from pbnn.errors import FitError
from pbnn.infer.guides.kronecker import AutoKronecker
from pbnn.infer.guides.lowrank import AutoLayerLowRank, AutoLowRank, check_rank
from pbnn.infer.guides.patterns import AutoPatterns
from pbnn.infer.guides.starts import init_to_fan_in

__all__ = ["GUIDES", "make_guide"]

_FAMILIES = {
    "normal": AutoNormal,
    "lowrank": AutoLowRank,
    "kronecker": AutoKronecker,
    "layer_lowrank": AutoLayerLowRank,
}
GUIDES = tuple(_FAMILIES)
_DEFAULT_SCALE = 0.01


def make_guide(
    kind: Any,
    model: Any,
    *,
    rank: int | None = None,
    init_loc_fn: Any = init_to_fan_in,
    init_scale: float | None = None,
) -> Any:
    """Return a guide of a model, an ordinary Pyro AutoGuide.

    Args:
        kind: "normal" (Pyro's AutoNormal), "lowrank" (Pyro's AutoLowRankMultivariateNormal),
            "kronecker" (AutoKronecker), "layer_lowrank" (AutoLayerLowRank); a dict from patterns of
            site names to families (AutoPatterns); an AutoGuide class or instance; or a function
            that takes the model and returns a guide.
        model: A Pyro model.
        rank: Columns of a low-rank covariance, for "lowrank" and classes that take a `rank`; by
            default 10, or the number of latent values where that is less.
        init_loc_fn: Initial value of each site; Pyro's own defaults start all hidden units equal.
        init_scale: Initial standard deviation in unconstrained space; 0.01 by default.

    Returns:
        The guide. A class gets those of `rank`, `init_loc_fn` and `init_scale` that it takes.

    Raises:
        FitError: The kind is unknown, or takes no rank, or an option is out of its range.
    """
    init_scale = _DEFAULT_SCALE if init_scale is None else float(init_scale)
    if not init_scale > 0:
        raise FitError(f"init_scale is {init_scale}; expected a positive standard deviation")
    options = {"rank": check_rank(rank), "init_loc_fn": init_loc_fn, "init_scale": init_scale}
    if isinstance(kind, str):
        if kind not in _FAMILIES:
            raise FitError(
                f"guide {kind!r} is unknown; use one of {', '.join(map(repr, GUIDES))}, "
                "or pass an AutoGuide class or instance"
            )
        kind = _FAMILIES[kind]
    if isinstance(kind, Mapping):
        return AutoPatterns(model, kind, **_accepted(AutoPatterns, options))
    if isinstance(kind, type) and issubclass(kind, AutoGuide):
        return kind(model, **_accepted(kind, options))
    if rank is not None:
        raise FitError(
            f"rank {rank} has no effect on a ready guide; give the rank where it is made"
        )
    if isinstance(kind, AutoGuide):
        return kind
    if not callable(kind):
        raise FitError(
            f"guide is a {type(kind).__name__}; expected one of {', '.join(map(repr, GUIDES))}, "
            "an AutoGuide class or instance, or a function of the model"
        )
    guide = kind(model)
    if isinstance(guide, AutoGuide):
        return guide
    if not callable(guide):
        raise FitError(
            f"guide function {getattr(kind, '__name__', kind)!r} returned a "
            f"{type(guide).__name__}; expected a guide, such as AutoNormal(model)"
        )
    return AutoCallable(model, guide)


def _accepted(kind: type, options: dict[str, Any]) -> dict[str, Any]:
    """Return those options that are given and that a guide class takes."""
    names = inspect.signature(kind).parameters
    if options["rank"] is not None and "rank" not in names:
        raise FitError(
            f"guide {kind.__name__} takes no rank; leave rank out, or use guide='lowrank'"
        )
    return {k: v for k, v in options.items() if k in names and v is not None}
