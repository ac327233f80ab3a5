"""Stochastic-gradient MCMC: SGLD and SGHMC on batches of rows, chains in lanes."""

import math
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import numpy as np
import pyro
import torch
from torch import Tensor
from torch.func import functionalize

from pbnn.errors import ConvergenceWarning, FitError
from pbnn.front_door import bind
from pbnn.infer.density import Density
from pbnn.infer.graph import agree, compile_graph, disk_cache
from pbnn.infer.log_joint import LogJoint
from pbnn.infer.nuts import init_word, named_draws, split_rhat
from pbnn.infer.options import whole_number
from pbnn.infer.points import Points, Space
from pbnn.infer.posterior import Posterior, provenance
from pbnn.infer.starts import find_starts
from pbnn.infer.step import compile_where_it_pays
from pbnn.infer.step_sizes import Schedule, StepSizes
from pbnn.model import Data, Model, isolated
from pbnn.progress import progress_bar

__all__ = ["Algorithm", "fit_sgmcmc"]

Algorithm = Literal["sgld", "sghmc"]

# Steps between two looks at the log joint: each look waits for the device.
_LOOK = 100
# Rows times draws whose log joint is taken at once.
_HELD = 2**16


def fit_sgmcmc(
    model: Model,
    x: Data,
    y: Data = None,
    *,
    algorithm: Algorithm = "sghmc",
    steps: int = 20_000,
    lr: float = 0.01,
    friction: float | None = None,
    schedule: Schedule = "cyclical",
    cycles: int | None = None,
    burn_in: float = 0.5,
    batch_size: int | None = None,
    chains: int = 4,
    draws: int = 250,
    init: Literal["prior", "map", "svi"] | Mapping[str, Tensor] | Tensor = "map",
    constants: Mapping[str, Tensor] | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    compile: bool | None = None,
    progress: bool = True,
) -> Posterior:
    """Draw from the posterior by stochastic-gradient MCMC, for data too large for full gradients.

    With step size η = lr / rows, friction α and standard Normal ξ, on the unconstrained space
    (Chen et al. 2014, eq. 15; Zhang et al. 2020, algorithm 2):

        v ← (1 − α) v + η ∇log p̂(θ, D) + √(2αη) ξ,    θ ← θ + v

    where the likelihood in log p̂ is that of a batch, scaled by rows / batch size. SGLD (Welling &
    Teh 2011, eq. 4, with ε = 2η) is α = 1.

    There is no acceptance step, so the draws are biased. On a Gaussian posterior of precision λ the
    mean is right, and at constant step size the variance comes out as

        (1 + ηV / 2α) / (λ (1 − ηλ / (4 − 2α)))

    with V the variance of a batch's gradient, if batches are independent; batches of shuffled rows
    add less. Stable are steps with ηλ < 4 − 2α.

    Args:
        model: A Pyro model `(x, y=None)` with its rows in plate `data`.
        x: Input `(n, …)`, a dict of inputs, or None.
        y: Observations `(n,)` or `(n, outputs)`, or a dict by site.
        algorithm: "sghmc", or "sgld" (the same with friction 1).
        steps: Steps of each chain, those before its first draw among them.
        lr: Largest step size, times rows: so it need not change with the number of rows.
        friction: What part of its velocity SGHMC loses in a step, above 0 and at most 1; 0.1 by
            default.
        schedule: "cyclical": each cycle's step size falls from `lr` to 0 by half a cosine, without
            noise at first, to find a mode, and with it later, to sample there; or "constant".
        cycles: Cycles of the cyclical schedule; 4 by default.
        burn_in: Share of each cycle, or of a run at constant step size, that gives no draws. In a
            cycle it is the part without noise.
        batch_size: Rows in each step; all by default.
        chains: Number of chains; each has its own batches and noise.
        draws: Kept draws of each chain, spread evenly over the steps after burn-in. The log joint
            of each takes a pass over all rows: where these are many, ask for few.
        init: Where chains start; see `pbnn.infer.starts.find_starts`.
        constants: Values of the parameters without a prior, such as `svi.constants`.
        seed: Seed; a chain's draws depend on it and on the chain's index, not on other chains.
        device: Where to run; see `pbnn.front_door.bind`.
        dtype: `torch.float32` or `torch.float64`; see `pbnn.front_door.bind`.
        compile: Whether to compile the gradient; None decides by a rule of its size.
        progress: Whether to show a progress bar on stderr.

    Returns:
        The draws; `stats` hold `lp` on all rows, and `step_size` η; `history` the estimated log
        joint at each step, `log_joint` `(steps, chains)`. After Ctrl-C, the draws so far.

    Raises:
        DataError: The data cannot be used as they are.
        ModelError: The front door refuses the model, or it cannot be taken in batches.
        FitError: An option is out of range, or the log joint is no longer finite.
    """
    chains, seed = whole_number("chains", chains), whole_number("seed", seed, least=0)
    alpha = _friction(algorithm, friction)
    if cycles is not None and schedule == "constant":
        raise FitError("cycles are those of schedule='cyclical'; leave cycles out")
    sizes = StepSizes(
        steps=steps,
        lr=lr,
        schedule=schedule,
        cycles=4 if cycles is None else cycles,
        burn_in=burn_in,
        draws=draws,
    )
    if batch_size is not None:
        batch_size = whole_number("batch_size", batch_size)
    started = time.perf_counter()
    bound = bind(model, x, y, device=device, dtype=dtype, constants=constants)
    if free := [name for name in bound.named("constant") if name not in (constants or {})]:
        raise FitError(
            f"parameters without a prior: {', '.join(free)}; give them priors, or freeze them: "
            "`fit_sgmcmc(…, constants=fit_map(model, x, y).constants)`"
        )
    bound.model.requires_grad_(False)
    density = Density(bound, chains=chains, compile=False)
    with isolated(seed, bound.device), pyro.validation_enabled(False), torch.no_grad():
        start = Points(values=find_starts(density, init, model, chains, seed), buffers={})
        joint = LogJoint(Space(bound), start, batch_size=batch_size, seed=seed)
        run = _Chains(joint, start.values, sizes, alpha, seed, compile=compile)
        run.run(progress=progress)
        sites, deterministic = named_draws(density, run.draws)
        lp = _log_joint(density, run.draws)
    for message in run.messages(lp):
        warnings.warn(message, ConvergenceWarning, stacklevel=2)
    settings = {
        "algorithm": algorithm,
        "friction": alpha,
        **vars(sizes),
        "batch_size": batch_size,
        "chains": chains,
        "init": init_word(init),
    }
    return Posterior(
        draws=sites,
        deterministic=deterministic,
        stats={"lp": lp, "step_size": run.step_sizes().expand_as(lp).contiguous()},
        method=algorithm,
        markov=True,
        seconds=time.perf_counter() - started,
        constants={name: value.cpu() for name, value in bound.constants().items()},
        buffers={name: value.cpu() for name, value in bound.buffers().items()},
        history={"log_joint": run.log_joints.cpu()},
        provenance={**provenance(bound, seed=seed, **settings), **run.account()},
    )


def _friction(algorithm: str, friction: float | None) -> float:
    """Return the friction of an algorithm, checked."""
    if algorithm not in get_args(Algorithm):
        raise FitError(f"algorithm={algorithm!r}; expected 'sghmc' or 'sgld'")
    if algorithm == "sgld":
        if friction is not None:
            raise FitError("friction is that of algorithm='sghmc'; leave it out")
        return 1.0
    friction = 0.1 if friction is None else friction
    if not 0 < friction <= 1:
        raise FitError(f"friction={friction}; expected a number above 0, at most 1")
    return friction


class _Chains:
    """All chains of a run, which take their steps together.

    Args:
        joint: The log joint of all chains, on batches.
        start: Where they start `(chains, dim)`.
        sizes: Their step sizes.
        friction: See `fit_sgmcmc`.
        seed: Seed of the noise.
        compile: Whether inductor compiles a step; None decides by a rule of counts.

    Attributes:
        draws: Kept draws `(chain, draw, dim)`, on the CPU.
        log_joints: Estimates before each step, `(steps, chains)`.
    """

    def __init__(
        self,
        joint: LogJoint,
        start: Tensor,
        sizes: StepSizes,
        friction: float,
        seed: int,
        *,
        compile: bool | None,
    ) -> None:
        self.joint, self.sizes, self._friction = joint, sizes, friction
        self._rows = joint.space.bound.rows or 1
        self._z, self._v = start.clone(), torch.zeros_like(start)
        self._generators = [_generator(start.device, seed, chain) for chain in range(len(start))]
        self._kept = sizes.kept()
        self.draws = torch.empty((len(start), 0, start.shape[1]), dtype=start.dtype)
        self.log_joints = start.new_full((sizes.steps, len(start)), torch.nan)
        self._interrupted = False
        self._step: Callable[..., tuple[Tensor]] = self._eager
        self.compiled, self.rule = False, "traced"
        if joint.graph is not None:
            self.graph = joint.graph
            compile_where_it_pays(self, compile, sizes.steps)
        elif compile:
            raise FitError(
                f"compile=True, but the step cannot be traced ({joint.slow_because}); leave it out"
            )
        else:
            self.rule = f"through Python: {joint.slow_because}"

    def run(self, *, progress: bool) -> None:
        """Take the steps.

        Raises:
            FitError: The log joint of a chain is not finite.
        """
        draws = torch.empty((len(self._z), len(self._kept), self._z.shape[1]), dtype=self._z.dtype)
        place = {step: number for number, step in enumerate(self._kept)}
        done = looked = 0
        with progress_bar(
            label="SGMCMC", unit="step", total=self.sizes.steps, show=progress
        ) as bar:
            try:
                for step in range(self.sizes.steps):
                    self._advance(step)
                    if step in place:
                        draws[:, done] = self._z.cpu()
                        done += 1
                    if step + 1 - looked == _LOOK or step + 1 == self.sizes.steps:
                        self._look(looked, step + 1)
                        looked = step + 1
                    bar.update()
            except KeyboardInterrupt:
                if not done:
                    raise
                self._look(looked, self._kept[done - 1] + 1)
                self._interrupted = True
        if not bool(draws[:, :done].isfinite().all()):
            raise FitError(f"the last step left the numbers; lower lr (now {self.sizes.lr})")
        self.draws = draws[:, :done]

    def step_sizes(self) -> Tensor:
        """Return the step size of each kept draw, `(draws,)`."""
        kept = self._kept[: self.draws.shape[1]]
        return self.draws.new_tensor([self.sizes.size(step) / self._rows for step in kept])

    def messages(self, lp: Tensor) -> list[str]:
        """Say what is wrong with the draws, in one line each, with the repair."""
        found, asked = [], len(self._kept)
        if self._interrupted:
            found.append(f"interrupted: {lp.shape[1]} of {asked} draws a chain are kept")
        rhat = split_rhat(lp)
        if not rhat <= 1.05:  # it is NaN where nothing moves
            found.append(
                f"R-hat of the log density is {rhat:.2f} (expected below 1.05): chains have not "
                f"converged, or found modes apart; give more steps (now {self.sizes.steps})"
            )
        return found

    def account(self) -> dict[str, Any]:
        """Return what the run did, as plain JSON values."""
        return {
            "interrupted": self._interrupted,
            "compiled": self.compiled,
            "compile_rule": self.rule,
        }

    def compile(self) -> None:
        """Compile the step.

        Raises:
            FitError: Inductor cannot compile here, or gives other numbers.
        """
        control = self._z.new_tensor([1e-3, 1e-3])
        with isolated(0, self._z.device), torch.no_grad():
            noise = torch.randn_like(self._z)  # not the chains' own, which is for their steps
            inputs = (self._z, self._v, noise, control, *self.joint.data)
            with disk_cache():
                compiled = compile_graph(functionalize(self._eager), inputs)
            found, expected = ([v.clone() for v in inputs] for _ in range(2))
            found += compiled(*found)
            expected += self._eager(*expected)
        if not agree(found, expected):
            raise FitError("the compiled step gives other numbers; pass compile=False")
        self._step, self.compiled = compiled, True

    def _advance(self, step: int) -> None:
        """Take one step of all chains."""
        size = self.sizes.size(step) / self._rows
        scale = math.sqrt(2 * self._friction * size) if self.sizes.noisy(step) else 0.0
        self.joint.advance()
        control = self._z.new_tensor([size, scale])
        (self.log_joints[step],) = self._step(
            self._z, self._v, self._noise(), control, *self.joint.data
        )

    def _eager(
        self, z: Tensor, v: Tensor, noise: Tensor, control: Tensor, *data: Tensor
    ) -> tuple[Tensor]:
        """Take one step in place; return the log joint of each chain before it."""
        gradient, value = self.joint.function(z, *data)
        v.mul_(1 - self._friction).add_(control[0] * gradient + control[1] * noise)
        z.add_(v)
        return (value,)

    def _noise(self) -> Tensor:
        """Return standard Normal values `(chains, dim)`, each chain's from its own generator.

        By torch, and not counted as in `pbnn.infer.noise`: a step of a large network needs as many
        as it has weights, and all chains are always at the same step.
        """
        like, size = self._z, self._z.shape[1]
        return torch.stack(
            [
                torch.randn(size, generator=g, dtype=like.dtype, device=like.device)
                for g in self._generators
            ]
        )

    def _look(self, first: int, last: int) -> None:
        """Stop at the first step at which the log joint of a chain is not finite."""
        bad = (~self.log_joints[first:last].isfinite()).nonzero()
        if len(bad):
            step, chain = first + int(bad[0, 0]), int(bad[0, 1])
            raise FitError(
                f"the log joint of chain {chain} is {float(self.log_joints[step, chain])} at step "
                f"{step}; lower lr (now {self.sizes.lr})"
            )


def _generator(device: torch.device, seed: int, chain: int) -> torch.Generator:
    entropy = np.random.SeedSequence((seed, chain)).generate_state(1)[0]
    return torch.Generator(device).manual_seed(int(entropy))


def _log_joint(density: Density, draws: Tensor) -> Tensor:
    """Return the log joint of draws on all rows `(chain, draw)`, on the CPU, block by block."""
    blocks = draws.flatten(0, 1).split(max(1, _HELD // (density.bound.rows or 1)))
    found = [density.log_density(block.to(density.device)).cpu() for block in blocks]
    return torch.cat(found).reshape(draws.shape[:2])
