"""Ensembles: several fits from different starts, or of shifted problems, as one posterior."""

import dataclasses
import inspect
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import pyro
import torch
from torch import Tensor

from pbnn.checks import unwrapped
from pbnn.errors import ConvergenceWarning, FitError
from pbnn.front_door import bind, prior_values
from pbnn.infer.descent import StepOptions
from pbnn.infer.log_joint import LogJoint
from pbnn.infer.map import MapPlan, fit_map, start_word
from pbnn.infer.nuts import fit_nuts
from pbnn.infer.options import whole_number
from pbnn.infer.points import Points, Space, lane_seed
from pbnn.infer.posterior import Posterior, provenance
from pbnn.infer.svi import fit_svi
from pbnn.model import BoundModel, Data, Model, isolated

__all__ = ["fit_ensemble"]

Member = Literal["map", "svi", "nuts"]
Perturbation = Literal["none", "anchored", "randomised"]

_FITS: Mapping[str, Callable[..., Posterior]] = {"map": fit_map, "svi": fit_svi, "nuts": fit_nuts}
# What an ensemble gives its members itself.
_OWN = {"model", "x", "y", "seed", "device", "dtype", "compile", "progress"}
_OWN |= {"chains", "checkpoint", "resume", "constants"}
# Members are several, so each has fewer draws, and chains that start at modes less warm-up.
_SHORT = {"svi": {"draws": 100}, "nuts": {"draws": 100, "warmup": 200}}
# Values that a step may write for all lanes at once: 128 MB of float32. More lanes than that allows
# are trained in groups.
_LANE_VALUES = 2**25


def fit_ensemble(
    model: Model,
    x: Data,
    y: Data = None,
    *,
    members: int = 10,
    member: Member = "map",
    perturb: Perturbation = "none",
    seed: int = 0,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    compile: bool | None = None,
    progress: bool = True,
    **options: Any,
) -> Posterior:
    """Fit several members, each from a start of its own.

    MAP members are trained side by side in one batch (deep ensembles, Lakshminarayanan et al.
    2017), plain, or each on a perturbed problem:

    - "anchored" (Pearce et al. 2020, "Uncertainty in neural networks: approximately Bayesian
      ensembling"): the mean of each Normal prior is moved by a draw of the prior's noise. On a
      linear model with known noise the members' mean is exact and their covariance Σ S⁻¹ Σ, for
      posterior covariance Σ and prior covariance S: too narrow.
    - "randomised" (randomised maximum a posteriori): the targets are moved too, by a draw of the
      noise of their Normal likelihood. On such a linear model the members are exact draws from
      the posterior.

    A scale that is learned scales its noise as it stands. Sites with other priors keep them.

    NUTS members are chains, each started at a MAP of its own: they explore the modes that training
    finds. They stay chains, and R-hat says where they do not mix.

    Args:
        model: A Pyro model `(x, y=None)`.
        x: Input `(n, …)`, a dict of inputs, or None.
        y: Observations `(n,)` or `(n, outputs)`, or a dict by site.
        members: Number of members.
        member: What each is: "map", "svi" or "nuts".
        perturb: "none", "anchored" or "randomised", for MAP members.
        seed: Seed. The first MAP or SVI member is what a fit with this seed returns.
        device: Where to run; see `pbnn.front_door.bind`.
        dtype: `torch.float32` or `torch.float64`; see `pbnn.front_door.bind`.
        compile: Whether to compile; None decides by a rule of counts.
        progress: Whether to show a progress bar on stderr.
        **options: Further options of `pbnn.fit_map`, `pbnn.fit_svi` or `pbnn.fit_nuts`; NUTS
            members take those of `fit_map` for their starts. A member of "svi" has 100 draws
            unless told otherwise, one of "nuts" 100 after a warm-up of 200.

    Returns:
        For "map" one chain of one draw a member, whose `history` has `log_joint` by step and
        member; for "svi" one chain of the draws of all members, one member after another; for
        "nuts" one Markov chain a member. Constants and BatchNorm statistics that members do not
        share are kept for each draw.

    Raises:
        DataError: The data cannot be used as they are.
        ModelError: The front door refuses the model.
        FitError: An option is out of range or unknown, the perturbation does not fit the model, or
            a member's log joint is not finite at some step.
    """
    members, seed = whole_number("members", members), whole_number("seed", seed, least=0)
    _check(member, perturb, options)
    started = time.perf_counter()
    bound = bind(model, x, y, device=device, dtype=dtype)
    run: dict[str, Any] = {"seed": seed, "compile": compile, "progress": progress}
    place: dict[str, Any] = {"device": bound.device, "dtype": bound.dtype}
    if member == "map":
        found = _maps(bound, members, perturb, options, **run)
    elif member == "svi":
        found = _guides(model, x, y, members, {**_SHORT["svi"], **options}, **run, **place)
    else:
        found = _chains(model, bound, members, options, **run, **place)
    words = {k: v if k != "init" else start_word(v) for k, v in options.items()}
    settings = {"members": members, "member": member, "perturb": perturb, **words}
    return dataclasses.replace(
        found,
        method="ensemble",
        seconds=time.perf_counter() - started,
        provenance={**found.provenance, **provenance(bound, seed=seed, **settings)},
    )


def _check(member: str, perturb: str, options: Mapping[str, Any]) -> None:
    for name, value, known in (("member", member, Member), ("perturb", perturb, Perturbation)):
        if value not in get_args(known):
            expected = ", ".join(map(repr, get_args(known)))
            raise FitError(f"{name}={value!r}; expected one of {expected}")
    if perturb != "none" and member != "map":
        raise FitError(f"perturb={perturb!r} is for MAP members; leave it out, or member='map'")
    takes = set(inspect.signature(_FITS[member]).parameters) - _OWN
    if member == "nuts":  # chains start at the members' points
        takes |= set(inspect.signature(fit_map).parameters) - _OWN
    if unknown := sorted(set(options) - takes):
        raise FitError(
            f"members of {member!r} take no option {unknown[0]!r}; they take "
            f"{', '.join(sorted(takes))}"
        )


def _plan(options: Mapping[str, Any]) -> tuple[MapPlan, Any]:
    """Return how MAP members are trained, and where they start."""
    rest = dict(options)
    init = rest.pop("init", "fan_in")
    own = {k: rest.pop(k) for k in ("steps", "schedule", "average") if k in rest}
    return MapPlan(**own, options=StepOptions(**rest)), init


def _maps(
    bound: BoundModel,
    members: int,
    perturb: str,
    options: Mapping[str, Any],
    *,
    seed: int,
    compile: bool | None,
    progress: bool,
) -> Posterior:
    """Train points, all members side by side."""
    plan, init = _plan(options)
    with isolated(seed, bound.device), pyro.validation_enabled(False):
        space = Space(bound)
        shift = _shifts(bound, members, perturb, seed)
        points, history, account = _train(
            space, plan, init, members, shift, seed=seed, compile=compile, progress=progress
        )
        fields = space.fields(points)
    return Posterior(
        **fields,
        method="map",
        markov=False,
        seconds=0.0,
        history={"log_joint": history},
        provenance={**account, **({"perturbed": list(shift)} if shift else {})},
    )


def _train(
    space: Space,
    plan: MapPlan,
    init: Any,
    members: int,
    shift: Mapping[str, Tensor],
    *,
    seed: int,
    compile: bool | None,
    progress: bool,
) -> tuple[Points, Tensor, dict[str, object]]:
    """Train all members, in one batch where that is small enough."""
    start = space.start(members, seed, init)
    size = members
    if members > 1:
        own = {name: value[:1] for name, value in shift.items()}
        one = LogJoint(space, start[:1], batch_size=plan.options.batch_size, shift=own)
        size = 1 if one.graph is None else max(1, _LANE_VALUES // max(1, one.graph.values))
    runs = []
    for first in range(0, members, size):
        lanes = slice(first, first + size)
        runs.append(
            plan.train(
                space,
                start[lanes],
                seed=seed,
                first=first,
                shift={name: value[lanes] for name, value in shift.items()},
                compile=compile,
                progress=progress,
                label="members",
            )
        )
    points = Points(
        values=torch.cat([part.values for part, _ in runs]),
        buffers={
            name: torch.cat([part.buffers[name] for part, _ in runs]) for name in start.buffers
        },
    )
    history = torch.cat([descent.history() for _, descent in runs], 1)
    return points, history, {**runs[0][1].account(), "members_at_once": min(size, members)}


def _shifts(bound: BoundModel, members: int, perturb: str, seed: int) -> dict[str, Tensor]:
    """Return by how many scales each member's priors, and targets, are moved."""
    if perturb == "none":
        return {}
    with prior_values(bound.dtype, bound.device), torch.no_grad():
        nodes = bound.run({}).nodes
    normal = {
        name: tuple(nodes[name]["fn"].shape())
        for kind in ("latent", "observed")
        for name in bound.named(kind)
        if isinstance(unwrapped(nodes[name]["fn"]), torch.distributions.Normal)
    }
    priors = {name: shape for name, shape in normal.items() if name in bound.named("latent")}
    if not priors:
        raise FitError(f"perturb={perturb!r} moves Normal priors, and the model has none")
    shapes = priors
    if perturb == "randomised":
        shapes = normal
        for name in (*bound.named("observed"), *bound.named("factor")):
            if name not in normal:
                raise FitError(
                    f"perturb='randomised' needs Normal noise, and site {name!r} has none; use "
                    "perturb='anchored'"
                )
    drawn: dict[str, list[Tensor]] = {name: [] for name in shapes}
    for lane in range(members):
        # On the CPU, so that it is the same on every device.
        generator = torch.Generator().manual_seed(lane_seed(seed, lane, "shift"))
        for name, shape in shapes.items():
            drawn[name].append(torch.randn(shape, generator=generator, dtype=bound.dtype))
    return {name: torch.stack(values).to(bound.device) for name, values in drawn.items()}


def _guides(
    model: Model,
    x: Data,
    y: Data,
    members: int,
    options: Mapping[str, Any],
    *,
    seed: int,
    **place: Any,
) -> Posterior:
    """Fit a guide for each member, and put their draws one after another."""
    seeds = [seed, *(lane_seed(seed, lane, "fit") for lane in range(1, members))]
    fits: list[Posterior] = []
    for member, its_seed in enumerate(seeds):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ConvergenceWarning)
            fits.append(fit_svi(model, x, y, seed=its_seed, **options, **place))
        for warning in caught:
            warnings.warn(f"member {member}: {warning.message}", warning.category, stacklevel=3)
        if fits[-1].provenance["ended"] == "interrupted":
            break

    def joined(part: str) -> dict[str, Tensor]:
        values = [getattr(fit, part) for fit in fits]
        return {name: torch.cat([value[name] for value in values], 1) for name in values[0]}

    def held(part: str) -> dict[str, Tensor]:
        """Return constants or buffers, for each draw where members differ in them."""
        found = {}
        for name, value in getattr(fits[0], part).items():
            each = torch.stack([getattr(fit, part)[name] for fit in fits])
            if bool((each != value).any()):
                own.append(name)
                value = each.repeat_interleave(counts, 0)[None]
            found[name] = value
        return found

    own: list[str] = []
    counts = torch.tensor([fit.draws_per_chain for fit in fits])
    constants, buffers = held("constants"), held("buffers")
    stats = joined("stats")
    del stats["log_q"]  # the density of a draw's own guide is not that of the mixture
    return Posterior(
        draws=joined("draws"),
        deterministic=joined("deterministic"),
        stats=stats,
        method="svi",
        markov=False,
        seconds=0.0,
        constants=constants,
        buffers=buffers,
        per_draw=tuple(own),
        provenance={"seeds": seeds[: len(fits)], "members": [dict(fit.provenance) for fit in fits]},
    )


def _chains(
    model: Model,
    bound: BoundModel,
    members: int,
    options: Mapping[str, Any],
    *,
    seed: int,
    compile: bool | None,
    progress: bool,
    **place: Any,
) -> Posterior:
    """Run one chain of NUTS from each member's MAP."""
    with isolated(seed, bound.device), pyro.validation_enabled(False):
        space = Space(bound)
        if held := [*space.constants, *space.statistics]:
            raise FitError(
                f"{held[0]!r} is learned with each member, but chains share one value of it; give "
                "it a prior, or use member='map'"
            )
        training = set(inspect.signature(fit_map).parameters) - _OWN
        plan, init = _plan({k: v for k, v in options.items() if k in training})
        points, _, _ = _train(
            space, plan, init, members, {}, seed=seed, compile=compile, progress=progress
        )
    rest = {k: v for k, v in options.items() if k not in training}
    return fit_nuts(
        model,
        bound.x,
        bound.y,
        chains=members,
        init=points.values,
        seed=seed,
        compile=compile,
        progress=progress,
        **{**_SHORT["nuts"], **rest},
        **place,
    )
