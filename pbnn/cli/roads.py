"""Which fit a road's name stands for, and which options of the command line it takes."""

import argparse
import ast
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pbnn.errors import DataError

if TYPE_CHECKING:
    from pbnn.infer.posterior import Posterior

__all__ = [
    "COMPARED_ROADS",
    "GUIDES",
    "METHODS",
    "check_road",
    "named_values",
    "road_name",
    "road_options",
]

GUIDES = ("normal", "lowrank", "kronecker", "layer_lowrank")
# Options of fits that the command line gives in other ways.
ELSEWHERE = ("model", "x", "y", "guide", "seed", "device", "progress")
COMPARED_ROADS = ("normal", "lowrank", "kronecker", "nuts")
METHODS = (
    "svi", "nuts", "map", "swag", "ensemble", "dropout", "subspace", "laplace", "sgmcmc",
)  # fmt: skip
# Flags that are options of fits; those that nobody gave are None, and the fit's own default holds.
FLAGS = ("guide", "rank", "steps", "lr", "batch_size", "chains", "warmup", "draws")
# Where the command line wants an answer sooner than a script does.
SOONER: dict[str, dict[str, Any]] = {
    "svi": {"steps": 5000},
    "nuts": {"warmup": 500, "draws": 500},
}
# Numbers from 1 up, whatever the road: a fit that comes last must not be the first to say so.
COUNTS = ("steps", "batch_size", "chains", "draws")
# Of these, `compare` gives the first to guides and the second to NUTS, and no other road has any.
COMPARED = {"svi": ("steps", "lr", "batch_size"), "nuts": ("chains", "warmup", "draws")}


def road_name(arguments: argparse.Namespace) -> str:
    """Return the name of a single fit: its guide, or its method."""
    return str(arguments.guide or "normal") if arguments.method == "svi" else arguments.method


def check_road(name: str) -> "Callable[..., Posterior]":
    """Return the fit that a guide's or a method's name stands for.

    Raises:
        DataError: There is none.
    """
    import pbnn

    if name not in (*GUIDES, *METHODS):
        known = ", ".join((*GUIDES, *METHODS[1:]))
        raise DataError(f"road {name!r}; expected one of {known}")
    fit: Callable[..., Posterior] = getattr(pbnn, f"fit_{_method(name)}")
    return fit


def road_options(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of one road's fit, of those on the command line.

    Args:
        name: A guide or a method.
        arguments: The command line. For `fit` every flag must be one of this road's; for `compare`
            each road has its own flags, and `--option` names the road, as in swag.rank=5.

    Raises:
        DataError: The road has no such option.
    """
    from pbnn.infer.options import whole_number

    fit, method = check_road(name), _method(name)
    parameters = inspect.signature(fit).parameters
    alone = hasattr(arguments, "method")
    if not alone:
        _check_owners(arguments)
    flags = FLAGS if alone else COMPARED.get(method, ())
    given = {flag: value for flag in flags if (value := getattr(arguments, flag, None)) is not None}
    more = named_values("--option", _own(arguments.option, name, alone=alone))
    known = [n for n, p in parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    # A fit with further options hands them on to another one, and names what that does not take.
    hands_on = len(known) < len(parameters)
    free = [option for option in known if option not in ELSEWHERE]
    for flag, option, allowed in (
        *((f"--{flag.replace('_', '-')}", flag, known) for flag in given),
        *((f"--option {'' if alone else f'{name}.'}{option}", option, free) for option in more),
    ):
        if option not in allowed and (option in known or not hands_on):
            raise DataError(
                f"{flag}: {fit.__name__} has no such option here; it takes {', '.join(free)}"
            )
        if option in more and option in parameters:
            more[option] = _read(flag, more[option], parameters[option])
    for flag in COUNTS:
        if flag in given:
            whole_number(flag, given[flag])
    if name in GUIDES:
        given["guide"] = name
    return {**SOONER.get(method, {}), **given, **more}


def named_values(flag: str, pairs: Iterable[str]) -> dict[str, Any]:
    """Read NAME=VALUE pairs; a value that is no Python literal is text.

    Raises:
        DataError: A pair is none.
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise DataError(f"{flag} {pair}: expected NAME=VALUE, such as {flag} hidden=64")
        try:
            options[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            options[name] = text
    return options


def _read(flag: str, value: Any, parameter: inspect.Parameter) -> Any:
    """Return an option's value; refuse a word where the fit takes none.

    Raises:
        DataError: It is one.
    """
    expected = str(parameter.annotation)
    if not isinstance(value, str) or "str" in expected or "Literal" in expected:
        return value
    if "torch.dtype" in expected and value in ("float32", "float64"):
        import torch

        return getattr(torch, value)
    if "torch.dtype" in expected:
        raise DataError(f"{flag}={value}: expected float32 or float64")
    kind = "True or False" if "bool" in expected else "a number"
    raise DataError(f"{flag}={value}: expected {kind}")


def _method(name: str) -> str:
    return "svi" if name in GUIDES else name


def _check_owners(arguments: argparse.Namespace) -> None:
    for pair in arguments.option:
        if pair.partition(".")[0] not in arguments.roads:
            raise DataError(
                f"--option {pair}: expected ROAD.NAME=VALUE, where ROAD is one of "
                f"{', '.join(arguments.roads)}"
            )


def _own(pairs: Sequence[str], name: str, *, alone: bool) -> list[str]:
    """Return the options of one road; where there are several, those that begin with its name."""
    if alone:
        return list(pairs)
    return [pair.removeprefix(f"{name}.") for pair in pairs if pair.startswith(f"{name}.")]
