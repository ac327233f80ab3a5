"""SVI: fit any guide to a model and its data, and draw from it."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyro
import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor
from torch.distributions import biject_to
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from pbnn.errors import ConvergenceWarning, FitError, ModelError
from pbnn.front_door import bind, prior_values
from pbnn.infer.density import Density
from pbnn.infer.elbo import Elbo
from pbnn.infer.guides import approximation, draw_guide, make_guide
from pbnn.infer.posterior import Posterior, provenance
from pbnn.model import BoundModel, Data, Model, isolated, take
from pbnn.progress import progress_bar

__all__ = ["fit_svi"]

# The ELBO is read back from the device, and looked at, once in this many steps.
WINDOW = 100
# The plateau counts when the smoothed ELBO has not risen over this many windows.
PATIENCE = 5
# After the plateau the learning rate falls to this share, over this share of the steps so far.
FINAL_RATE = 0.01
COOLING = 0.5


def fit_svi(
    model: Model,
    x: Data,
    y: Data = None,
    *,
    guide: str | type[AutoGuide] | AutoGuide | Callable[[Model], AutoGuide] = "normal",
    rank: int | None = None,
    init_scale: float | None = None,
    steps: int = 10_000,
    lr: float = 0.01,
    particles: int | None = None,
    batch_size: int | None = None,
    early_stopping: bool = True,
    draws: int = 1000,
    seed: int = 0,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    compile: bool | None = None,
    progress: bool = True,
) -> Posterior:
    """Fit a guide by stochastic variational inference and draw from it.

    Maximises the ELBO (Kingma & Welling 2014, eq. 3) by Adam: the expected log-likelihood, scaled
    by rows / batch size, minus the KL divergence from guide to prior, both by Monte Carlo with
    reparameterised draws; the gradient of a Gaussian guide leaves out the score (Roeder et al.
    2017), so that the fit comes to rest where guide and posterior agree. The learning rate is
    constant until the smoothed ELBO stops rising, or until two thirds of `steps`, and then falls
    exponentially to a hundredth.

    Args:
        model: A Pyro model `(x, y=None)` with its rows in plate `data`.
        x: Input `(n, …)`, a dict of inputs, or None.
        y: Observations `(n,)` or `(n, outputs)`, or a dict by site.
        guide: "normal" (AutoNormal), "lowrank" (AutoLowRankMultivariateNormal), "kronecker"
            (AutoKronecker), or an AutoGuide class, instance, or function of the model. An instance
            is trained in place, from where it stands.
        rank: Rank of the low-rank guide; 10, or the number of latent values if that is less.
        init_scale: Scale of the guide at the start, on the unconstrained space; each guide of ours
            has a default that suits networks.
        steps: Largest number of optimiser steps.
        lr: Learning rate of Adam before it falls.
        particles: Draws of the guide in each step; 2 by default with `batch_size`, else 1. An even
            number comes in mirrored pairs, whose noise is equal but for its sign: what a batch and
            the noise do together cancels, which would blur the scales.
        batch_size: Rows in each step; all by default. It scales sites inside plate `data` by
            rows / batch size, and nothing else.
        early_stopping: Whether the fit may end before `steps`.
        draws: Number of draws to return.
        seed: Seed; the global random state and Pyro's param store stay untouched.
        device: Where to run; see `pbnn.front_door.bind`.
        dtype: `torch.float32` or `torch.float64`; see `pbnn.front_door.bind`.
        compile: Reserved; True is refused, since the step is not compiled yet.
        progress: Whether to show a progress bar on stderr.

    Returns:
        One chain of `draws` independent draws with `lp` and `log_q`; `history` holds `elbo`,
        `expected_log_likelihood` and `kl` per step; `approximation` the guide's tensors. After
        Ctrl-C, the draws of the guide as it stands.

    Raises:
        DataError: The data cannot be used as they are.
        ModelError: The front door refuses the model.
        FitError: An option is out of range, or the ELBO is not finite from the start.
    """
    if particles is None:
        particles = 1 if batch_size is None else 2
    for name, value in {"steps": steps, "particles": particles, "draws": draws}.items():
        if value < 1:
            raise FitError(f"{name}={value}; expected 1 or more")
    if not lr > 0:
        raise FitError(f"lr={lr}; expected a positive learning rate")
    if compile:
        raise FitError("compile=True: SVI has no compiled step yet; leave compile out")
    bound = bind(model, x, y, device=device, dtype=dtype)
    _check_supports(bound)
    if batch_size is not None:
        _check_batching(bound, batch_size)
    started = time.perf_counter()
    # What is not finite is found in the ELBO, where the fit can go back to its last good state.
    with isolated(seed, bound.device), pyro.validation_enabled(False):
        if isinstance(guide, AutoGuide) and guide.prototype_trace is None:
            guide._model = (bound.model,)  # the copy in eval mode, not the caller's own
        q = make_guide(guide, bound.model, rank=rank, init_scale=init_scale)
        training = _Training(bound, q, particles=particles, batch_size=batch_size, seed=seed)
        outcome = training.run(steps, lr, early_stopping, progress)
        with torch.no_grad():
            drawn, log_q = draw_guide(q, draws, (bound.x, bound.y))
            values = {name: value.contiguous() for name, value in drawn.items()}
            density = Density(bound, chains=0, compile=False)
            z = density.unconstrain(values)
            lp = density.log_density(z)
            deterministic = density.deterministic(z)
        name = guide if isinstance(guide, str) else type(q).__name__
        options = {
            "guide": name,
            "rank": rank,
            "init_scale": init_scale,
            "steps": steps,
            "lr": lr,
            "particles": particles,
            "batch_size": batch_size,
            "early_stopping": early_stopping,
            "draws": draws,
        }
        return Posterior(
            draws={k: v[None].cpu() for k, v in values.items()},
            deterministic={k: v[None].cpu() for k, v in deterministic.items()},
            stats={"lp": lp[None].cpu(), "log_q": log_q[None].cpu()},
            method="svi",
            markov=False,
            seconds=time.perf_counter() - started,
            constants={k: v.cpu() for k, v in bound.constants().items()},
            buffers={k: v.cpu() for k, v in bound.buffers().items()},
            approximation=_on_cpu(approximation(q)),
            history={k: v.cpu() for k, v in training.history().items()},
            provenance={**provenance(bound, seed=seed, **options), **outcome},
        )


def _on_cpu(approximation: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if approximation is None:
        return None
    tensors = {k: v.detach().cpu() for k, v in approximation["tensors"].items()}
    return {**approximation, "tensors": tensors}


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


def _check_batching(bound: BoundModel, batch_size: int) -> None:
    """Refuse a batch size where scaling plate `data` by rows / batch size would be wrong."""
    if batch_size < 1:
        raise FitError(f"batch_size={batch_size}; expected 1 or more")
    if bound.rows is None:
        raise ModelError(
            "batch_size needs rows in plate 'data'; write `with pyro.plate('data', x.shape[0]):` "
            "around the observed site, or leave batch_size out"
        )
    if batch_size > bound.rows:
        raise FitError(f"batch_size={batch_size} for {bound.rows} rows; expected at most as many")
    for site in bound.sites:
        if site.kind == "latent" and site.row_dim is not None:
            raise ModelError(
                f"site {site.name!r} has one value for each row of plate 'data', so the data "
                "cannot be taken in batches; leave batch_size out"
            )
        if site.kind in ("observed", "factor") and site.row_dim is None:
            raise ModelError(
                f"site {site.name!r} is observed outside plate 'data', so the data cannot be taken "
                "in batches; move it inside, or leave batch_size out"
            )


class _Training:
    """The state of one SVI run: guide, constants, optimiser, and what was recorded on the way."""

    def __init__(
        self,
        bound: BoundModel,
        guide: AutoGuide,
        *,
        particles: int,
        batch_size: int | None,
        seed: int,
    ) -> None:
        self.bound = bound
        self.guide = guide
        self.batches = self._batches(batch_size, seed)
        self.terms: list[Tensor] = []
        self.elbo = Elbo(bound, guide, particles)  # builds the guide and registers every param
        self.store = pyro.get_param_store()
        self.parameters = self._parameters()
        self.best: list[Tensor] = []

    def _parameters(self) -> list[Tensor]:
        """List what is learned: the guide's parameters and the model's constants."""
        named = [*self.guide.parameters(), *self.bound.model.parameters()]
        named += [p for _, p in self.store.named_parameters()]  # a guide that is a plain function
        return list({id(p): p for p in named if p.requires_grad}.values())

    def _batches(self, size: int | None, seed: int) -> Iterator[tuple[Data, Data, float]]:
        """Yield x, y and the factor rows / batch size, from an endless stream of permutations."""
        x, y, rows = self.bound.x, self.bound.y, self.bound.rows
        if size is None or rows is None:
            while True:
                yield x, y, 1.0
        # The order of rows is drawn on the CPU, so that it is the same on every device.
        generator = torch.Generator().manual_seed(seed)
        queue = torch.empty(0, dtype=torch.int64)
        while True:
            while len(queue) < size:
                queue = torch.cat([queue, torch.randperm(rows, generator=generator)])
            index, queue = queue[:size].to(self.bound.device), queue[size:]
            yield take(x, index), take(y, index), rows / size

    def step(self, optimiser: torch.optim.Optimizer) -> None:
        x, y, factor = next(self.batches)
        try:
            terms = self.elbo(x, y, factor)
        except LinAlgError:  # a matrix of the model that is no longer positive definite
            self.terms.append(self.parameters[0].new_full((2,), torch.nan))
            return
        loss = (terms[1] - terms[0]) / (self.bound.rows or 1)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        self.terms.append(terms.detach())

    def run(self, steps: int, lr: float, early_stopping: bool, progress: bool) -> dict[str, Any]:
        """Take up to `steps` steps; return how it ended, for the provenance."""
        optimiser = torch.optim.Adam(self.parameters, lr=lr)
        cooling_from, end = (2 * steps) // 3, steps
        windows: list[float] = []
        ended = "steps"
        bar = progress_bar(total=steps, label="SVI", unit="step", show=progress)
        try:
            with bar:
                while len(self.terms) < end:
                    done = len(self.terms)
                    if done >= cooling_from:
                        share = (done - cooling_from) / max(end - cooling_from, 1)
                        optimiser.param_groups[0]["lr"] = lr * FINAL_RATE**share
                    self.step(optimiser)
                    if len(self.terms) % WINDOW and len(self.terms) < end:
                        continue
                    if not self._keep(windows):
                        ended = "not finite"
                        break
                    bar.update(len(self.terms) - bar.n)
                    bar.set_postfix(elbo=f"{windows[-1]:.4g}", refresh=False)
                    if early_stopping and len(self.terms) < cooling_from and _flat(windows):
                        cooling_from = len(self.terms)
                        end = min(steps, int(cooling_from * (1 + COOLING)))
                        ended = "plateau"
        except KeyboardInterrupt:
            if not self.terms:
                raise
            ended = "interrupted"
            warnings.warn(
                f"SVI was interrupted after {len(self.terms)} of {steps} steps; the draws are "
                "those of the guide as it stood",
                ConvergenceWarning,
                stacklevel=3,
            )
            if len(self.terms) > WINDOW * len(windows):
                self._keep(windows)
        if ended == "steps" and early_stopping and not _flat(windows):
            warnings.warn(
                f"the ELBO had not levelled off after {steps} steps; raise steps (or lr)",
                ConvergenceWarning,
                stacklevel=3,
            )
        return {"steps_taken": len(self.terms), "ended": ended}

    def _keep(self, windows: list[float]) -> bool:
        """Take in the last window: keep the parameters if it is finite, else go back."""
        recent = torch.stack(self.terms[WINDOW * len(windows) :])
        finite = recent.isfinite().all() and all(bool(p.isfinite().all()) for p in self.parameters)
        if finite:
            windows.append(float((recent[:, 0] - recent[:, 1]).mean()))
            self.best = [p.detach().clone() for p in self.parameters]
            return True
        good = WINDOW * len(windows)
        step = good + int((~recent.isfinite().all(1)).nonzero()[:1].sum())
        self._retreat(f"the ELBO was not finite at step {step}{self.elbo.culprit()}", good)
        return False

    def _retreat(self, reason: str, good: int) -> None:
        """Go back to the parameters after that many good steps, and say so."""
        if not self.best:
            raise FitError(f"{reason}, before any good state; lower lr or init_scale")
        del self.terms[good:]
        with torch.no_grad():
            for parameter, value in zip(self.parameters, self.best, strict=True):
                parameter.copy_(value)
        warnings.warn(
            f"{reason}; the draws are those of the last good state; lower lr or init_scale",
            ConvergenceWarning,
            stacklevel=5,
        )

    def history(self) -> dict[str, Tensor]:
        """Return the ELBO and its two parts, one value a step."""
        likelihood, kl = torch.stack(self.terms).unbind(1)
        return {"elbo": likelihood - kl, "expected_log_likelihood": likelihood, "kl": kl}


def _flat(windows: list[float]) -> bool:
    """Whether the mean ELBO of the last windows rose by no more than its standard error."""
    if len(windows) < 2 * PATIENCE:
        return False
    before = torch.tensor(windows[-2 * PATIENCE : -PATIENCE], dtype=torch.float64)
    after = torch.tensor(windows[-PATIENCE:], dtype=torch.float64)
    error = ((before.var() + after.var()) / PATIENCE).sqrt()
    return bool(after.mean() - before.mean() <= error)
