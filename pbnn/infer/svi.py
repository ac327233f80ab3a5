"""SVI: fit any guide to a model and its data, and draw from it."""

import inspect
import os
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import pyro
import torch
from pyro.infer.autoguide import AutoGuide, AutoLaplaceApproximation
from torch import Tensor
from torch.distributions import biject_to

from pbnn.errors import ConvergenceWarning, FileError, FitError, ModelError
from pbnn.front_door import bind, prior_values
from pbnn.infer.batches import Batches, check_batching
from pbnn.infer.checkpoint import Checkpoint, digest, problem_identity
from pbnn.infer.density import Density
from pbnn.infer.guides import approximation, draw_guide, make_guide, prepare_guide
from pbnn.infer.guides.drawing import gaussian_blocks
from pbnn.infer.guides.scales import start_scales_by_fan_in
from pbnn.infer.guides.starts import find_start
from pbnn.infer.options import whole_number
from pbnn.infer.posterior import Posterior, provenance
from pbnn.infer.schedule import Plan
from pbnn.infer.step import Divergence, Estimator, Step, make_step
from pbnn.infer.training import Training
from pbnn.model import BoundModel, Data, Model, isolated

__all__ = ["fit_svi"]


@dataclass(frozen=True, kw_only=True)
class _StepOptions:
    """What one step is made of, checked; see `fit_svi`."""

    particles: int
    batch_size: int | None
    estimator: Estimator
    divergence: Divergence
    clip: float | None

    def __post_init__(self) -> None:
        whole_number("particles", self.particles)
        if self.batch_size is not None:
            whole_number("batch_size", self.batch_size)
        if self.clip is not None and not self.clip > 0:
            raise FitError(f"clip={self.clip}; expected a positive norm")
        for name, known in {"estimator": Estimator, "divergence": Divergence}.items():
            if getattr(self, name) not in get_args(known):
                raise FitError(
                    f"{name}={getattr(self, name)!r}; expected one of "
                    f"{', '.join(map(repr, get_args(known)))}"
                )

    def make(self, bound: BoundModel, guide: Any, steps: int, compile: bool | None) -> Step:
        return make_step(
            bound,
            guide,
            particles=self.particles,
            batch_size=self.batch_size,
            steps=steps,
            compile=compile,
            estimator=self.estimator,
            divergence=self.divergence,
            clip=self.clip,
        )


def fit_svi(
    model: Model,
    x: Data,
    y: Data = None,
    *,
    guide: str
    | Mapping[str, str]
    | type[AutoGuide]
    | AutoGuide
    | Callable[[Model], Any] = "normal",
    rank: int | None = None,
    init: str | Mapping[str, Tensor] = "fan_in",
    init_scale: float | Literal["fan_in"] | None = None,
    steps: int = 10_000,
    lr: float = 0.01,
    schedule: str | Callable[[float], float] = "plateau",
    particles: int = 2,
    batch_size: int | None = None,
    estimator: Estimator = "pathwise",
    divergence: Divergence = "auto",
    clip: float | None = None,
    kl_weight: float = 1.0,
    kl_annealing: int = 0,
    average: bool = False,
    early_stopping: bool = True,
    draws: int = 1000,
    seed: int = 0,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    compile: bool | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    resume: bool = False,
    progress: bool = True,
) -> Posterior:
    """Fit a guide by stochastic variational inference and draw from it.

    Maximises the ELBO (Kingma & Welling 2014, eq. 3) by Adam: the expected log-likelihood, scaled
    by rows / batch size, minus the KL divergence from guide to prior, with reparameterised draws;
    the gradient of a Gaussian guide leaves out the score (Roeder et al. 2017), so that the fit
    comes to rest where guide and posterior agree. The model is in eval mode, and its parameters
    without a prior are learned with the guide.

    Args:
        model: A Pyro model `(x, y=None)` with its rows in plate `data`.
        x: Input `(n, …)`, a dict of inputs, or None.
        y: Observations `(n,)` or `(n, outputs)`, or a dict by site.
        guide: "normal", "lowrank", "kronecker" or "layer_lowrank"; a dict from patterns of site
            names to families; or an AutoGuide class, instance, or function of the model. An
            instance is trained in place, from where it stands.
        rank: Rank of the low-rank guide; 10, or the number of latent values if that is less.
        init: Where the guide's means start: "fan_in" (a prior draw no wider than the fan-in scale),
            "map" (from there a short way up the log joint), or a trained network's `state_dict`,
            whose names are those of sites, constants and buffers.
        init_scale: Scale of the guide at the start, on the unconstrained space: 0.01 by default for
            the guides named above; "fan_in" is 0.02 / sqrt(fan in) for each site.
        steps: Largest number of optimiser steps.
        lr: Learning rate of Adam at the start.
        schedule: "plateau" keeps the rate until the smoothed ELBO stops rising, or until half of
            `steps`, and then lets it fall exponentially to a hundredth over as many steps again;
            "constant"; "cosine"; or a function from the share of `steps` done to the factor of
            `lr`.
        particles: Draws of the guide in each step. An even number comes in mirrored pairs, whose
            noise is equal but for its sign: what is linear in it cancels in the gradient of the
            means, and what a batch and the noise do together, which would blur the scales.
        batch_size: Rows in each step; all by default. It scales sites inside plate `data` by
            rows / batch size, and nothing else.
        estimator: How noise enters; see `pbnn.infer.step.make_step`.
        divergence: How the KL divergence is had, "closed form" (where there is one) or "Monte
            Carlo"; "auto" decides by the estimator. Provenance holds what was used, by site.
        clip: Largest norm of the gradient of the loss, a mean over rows.
        kl_weight: Weight of the KL divergence in the loss. Anything but 1 does not approximate the
            posterior but a tempered one, and reports say so.
        kl_annealing: Steps over which the weight rises linearly from 0 to `kl_weight`.
        average: Whether to return the mean of the unconstrained parameters over the last phase, at
            a constant rate, in place of the last ones at a falling rate (Izmailov et al. 2018).
        early_stopping: Whether the fit may end before `steps`.
        draws: Number of draws to return.
        seed: Seed; the global random state and Pyro's param store stay untouched.
        device: Where to run; see `pbnn.front_door.bind`.
        dtype: `torch.float32` or `torch.float64`; see `pbnn.front_door.bind`.
        compile: Whether to compile the step; None decides by a rule of its size.
        checkpoint: Folder of the state from which a killed run goes on.
        resume: Go on from the checkpoint, if there is one: to the same bits.
        progress: Whether to show a progress bar on stderr.

    Returns:
        One chain of `draws` independent draws with `lp` and `log_q`; `history` holds `elbo`,
        `expected_log_likelihood` and `kl` per step; `approximation` the guide's tensors. After
        Ctrl-C, the draws of the guide as it stands; after a step that is not finite, those of the
        best parameters before it.

    Raises:
        DataError: The data cannot be used as they are.
        ModelError: The front door refuses the model.
        FitError: An option is out of range, or the ELBO is not finite from the start.
        FileError: The checkpoint belongs to another run, or is there and `resume` is False.
    """
    plan = Plan(
        steps=steps,
        lr=lr,
        schedule=schedule,
        kl_weight=kl_weight,
        kl_annealing=kl_annealing,
        early_stopping=early_stopping,
        average=average,
    )
    seed, draws = whole_number("seed", seed, least=0), whole_number("draws", draws)
    if resume and checkpoint is None:
        raise FitError("resume=True goes on from a checkpoint; pass checkpoint=FOLDER too")
    options = _StepOptions(
        particles=particles,
        batch_size=batch_size,
        estimator=estimator,
        divergence=divergence,
        clip=clip,
    )
    bound = bind(model, x, y, device=device, dtype=dtype)
    _check_supports(bound)
    if batch_size is not None:
        check_batching(bound, batch_size)
    settings = {
        "guide": guide,
        "rank": rank,
        "init": init if isinstance(init, str) else "state_dict",
        "init_scale": init_scale,
        **plan.plain(),
        **vars(options),
    }
    started = time.perf_counter()
    # What is not finite is found in the ELBO, where the fit can go back to its best state.
    with isolated(seed, bound.device), pyro.validation_enabled(False):
        q = _make_guide(guide, bound, rank=rank, init=init, init_scale=init_scale)
        if not isinstance(guide, str | Mapping):
            settings["guide"] = type(q).__name__
        step = options.make(bound, q, steps, compile)
        training = Training(step, Batches(bound, batch_size, seed), plan, lambda: _scales(q))
        saved = None
        if checkpoint is not None:
            identity = {**settings, "seed": seed, **_identity(bound, step)}
            saved = _open_checkpoint(checkpoint, resume, identity)
            if saved.exists:
                training.load(saved.load())
        training.run(progress=progress, checkpoint=saved)
        if isinstance(q, AutoLaplaceApproximation):
            q = q.laplace_approximation(bound.x, bound.y)
        drawn = _draw(q, bound, draws)
    account = training.account()
    messages = [*training.messages]
    if not _spreads(drawn["draws"]):
        messages.append(
            f"all draws of guide {type(q).__name__} are one point: an estimate, not a posterior, "
            "and its uncertainty is none"
        )
        account["notes"] = [*account.get("notes", []), messages[-1]]
    for message in messages:
        warnings.warn(message, ConvergenceWarning, stacklevel=2)
    return Posterior(
        **drawn,
        method="svi",
        markov=False,
        seconds=time.perf_counter() - started,
        constants={k: v.cpu() for k, v in bound.constants().items()},
        buffers={k: v.cpu() for k, v in bound.buffers().items()},
        history=training.history(),
        provenance={
            **provenance(bound, seed=seed, **settings, draws=draws),
            **account,
        },
    )


def _make_guide(
    guide: Any,
    bound: BoundModel,
    *,
    rank: int | None,
    init: str | Mapping[str, Tensor],
    init_scale: float | str | None,
) -> Any:
    """Return the guide that a user's choice names, with its start."""
    if init == "fan_in" or isinstance(guide, str | Mapping) or _takes_start(guide):
        start = find_start(init, bound)
    else:
        raise FitError(
            "init has no effect on a ready guide or a class without init_loc_fn; give the start "
            "where the guide is made, or leave init out"
        )
    if isinstance(guide, AutoGuide) and guide.prototype_trace is None:
        guide._model = (bound.model,)  # the copy in eval mode, not the caller's own
    number = None if isinstance(init_scale, str) else init_scale
    q = make_guide(guide, bound.model, rank=rank, init_loc_fn=start, init_scale=number)
    if isinstance(init_scale, str):
        if init_scale != "fan_in" or isinstance(guide, AutoGuide):
            raise FitError(
                f"init_scale={init_scale!r}; expected a number, or 'fan_in' for a guide that is "
                "made here"
            )
        prepare_guide(q, (bound.x, bound.y))
        start_scales_by_fan_in(q)
    return q


def _takes_start(guide: Any) -> bool:
    return isinstance(guide, type) and "init_loc_fn" in inspect.signature(guide).parameters


def _draw(guide: Any, bound: BoundModel, draws: int) -> dict[str, Any]:
    """Return the fields of a `Posterior` that come from the trained guide."""
    with torch.no_grad():
        drawn, log_q = draw_guide(guide, draws, (bound.x, bound.y))
        values = {name: value.contiguous() for name, value in drawn.items()}
        density = Density(bound, chains=0, compile=False)
        z = density.unconstrain(values)
        lp = density.log_density(z)
        deterministic = density.deterministic(z)
        known = approximation(guide)
    if known is not None:
        known = {**known, "tensors": {k: v.detach().cpu() for k, v in known["tensors"].items()}}
    return {
        "draws": {k: v[None].cpu() for k, v in values.items()},
        "deterministic": {k: v[None].cpu() for k, v in deterministic.items()},
        "stats": {"lp": lp[None].cpu(), "log_q": log_q[None].cpu()},
        "approximation": known,
    }


def _spreads(draws: Mapping[str, Tensor]) -> bool:
    """Whether any two of the draws differ; a single one has nothing to differ from."""
    values = list(draws.values())
    return values[0].shape[1] < 2 or any(bool((v != v[:, :1]).any()) for v in values)


def _scales(guide: Any) -> dict[str, float]:
    """Return the median scale by site of a Gaussian guide; nothing of other guides."""
    with torch.no_grad():
        scales: dict[str, Tensor] = {}
        for block in gaussian_blocks(guide) or []:
            scales.update(block.layout.unpack(block.gaussian.variance().sqrt()))
        return {name: float(scale.median()) for name, scale in scales.items()}


def _open_checkpoint(
    folder: str | os.PathLike[str], resume: bool, identity: Mapping[str, Any]
) -> Checkpoint:
    checkpoint = Checkpoint(folder, identity)
    if checkpoint.exists and not resume:
        raise FileError(
            f"{checkpoint.folder}: holds a checkpoint; pass resume=True to go on from it, or "
            "another checkpoint="
        )
    return checkpoint


def _identity(bound: BoundModel, step: Step) -> dict[str, Any]:
    """Name what makes a run what it is, beside the options."""
    return {
        "road": "svi",
        "start": digest(step.parameters),
        **problem_identity(Density(bound, chains=0)),
        "compiled": step.compiled,
    }


def _check_supports(bound: BoundModel) -> None:
    """Refuse a support that moves with another site: guides would keep it as they first saw it."""
    with isolated(0, bound.device), torch.no_grad(), prior_values(bound.dtype, bound.device):
        first, second = bound.run({}), bound.run({})
        for name in bound.named("latent"):
            middles = [_middle(trace.nodes[name]["fn"], bound) for trace in (first, second)]
            if not torch.equal(*middles):
                raise ModelError(
                    f"site {name!r} has a support that depends on another site, which guides "
                    "cannot follow; draw it on a fixed support and map it (b = (1 - a) * u with u "
                    "uniform), or use fit_nuts"
                )


def _middle(fn: Any, bound: BoundModel) -> Tensor:
    """Return the image of 0 under the map from the unconstrained space to a site's support."""
    transform = biject_to(fn.support)
    shape = transform.inverse_shape(fn.shape())
    value: Tensor = transform(torch.zeros(shape, dtype=bound.dtype, device=bound.device))
    return value
