"""NUTS and HMC on a model and its data: all chains in one batch, ending in a `Posterior`."""

import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from pbnn.errors import ConvergenceWarning, FitError, PbnnWarning
from pbnn.front_door import bind
from pbnn.infer.checkpoint import digest, problem_identity
from pbnn.infer.compiled import compile_step, group_size, is_wide, worth_compiling_step
from pbnn.infer.density import Density
from pbnn.infer.engine import Engine, Stepper, eager
from pbnn.infer.lanes import Rule
from pbnn.infer.options import Options, whole_number
from pbnn.infer.posterior import Posterior, provenance
from pbnn.infer.sampler import SamplerResult, sample
from pbnn.infer.starts import find_starts
from pbnn.model import BoundModel, Data, Model, isolated

__all__ = ["fit_nuts", "init_word", "named_draws", "split_rhat", "verdict"]

Values = Mapping[str, Tensor]

# Stan's word for too few: below it R-hat, too, says little.
_FEWEST_EFFECTIVE = 100

_BLOCK = 256
"""Draws of each chain that are brought to their supports at once."""


def fit_nuts(
    model: Model,
    x: Data,
    y: Data = None,
    *,
    chains: int = 4,
    warmup: int = 1000,
    draws: int = 1000,
    thin: int = 1,
    max_tree_depth: int = 10,
    target_accept: float = 0.8,
    dense_mass: bool = False,
    pool_mass: bool = False,
    init: Literal["prior", "map", "svi"] | Values | Tensor = "map",
    constants: Values | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    compile: bool | None = None,
    algorithm: Literal["nuts", "hmc"] = "nuts",
    path_length: float = torch.pi / 2,
    checkpoint: str | os.PathLike[str] | None = None,
    resume: bool = False,
    keep_warmup: bool = False,
    progress: bool = True,
) -> Posterior:
    """Draw from the posterior by NUTS (Hoffman & Gelman 2014; Betancourt 2017).

    Multinomial trajectories, the generalised U-turn test with Stan's extra sub-tree checks, Stan's
    warm-up. Chains advance together, leapfrog by leapfrog, but none waits for another: a chain
    whose trajectory ends begins the next one at the next leapfrog.

    Args:
        model: A Pyro model `(x, y=None)`.
        x: Input `(n, …)`, a dict of inputs, or None.
        y: Observations `(n,)` or `(n, outputs)`, or a dict by site.
        chains: Number of chains.
        warmup: Transitions of each chain's warm-up, which are not kept.
        draws: Kept draws of each chain.
        thin: Transitions for each kept draw.
        max_tree_depth: Largest number of doublings of a trajectory.
        target_accept: Acceptance statistic that the step size is adapted to.
        dense_mass: Whether the mass matrix is dense; diagonal otherwise.
        pool_mass: Whether chains share the estimate of their mass matrix.
        init: Where chains start: "map" (from a prior draw a short way uphill), "prior", "svi", or
            values; see `pbnn.infer.starts.find_starts`.
        constants: Values of the parameters without a prior, such as `svi.constants`.
        seed: Seed; a chain's draws depend on it and on the chain's index, not on other chains.
        device: Where to run; see `pbnn.front_door.bind`.
        dtype: `torch.float32` or `torch.float64`; see `pbnn.front_door.bind`.
        compile: Whether to compile; None decides by a rule of graph size, rows and draws.
        algorithm: "nuts", or "hmc" with trajectories of jittered length.
        path_length: Mean length of a trajectory of HMC, in units of the posterior's scale.
        checkpoint: Folder of the draws and the state from which a killed run goes on.
        resume: Go on from the checkpoint, if there is one.
        keep_warmup: Whether `Posterior.warmup` holds every transition of the warm-up.
        progress: Whether to show a progress bar on stderr.

    Returns:
        The draws; `stats` hold lp, energy, energy_error, acceptance_rate, step_size, tree_depth,
        n_steps, diverging and reached_max_treedepth. After Ctrl-C, the draws that all chains have.

    Raises:
        DataError: The data cannot be used as they are.
        ModelError: The front door refuses the model, or it has parameters without a prior and no
            `constants`.
        FitError: An option is out of range, or no finite start was found.
        FileError: The checkpoint belongs to another run, or is there and `resume` is False.
    """
    chains, seed = whole_number("chains", chains), whole_number("seed", seed, least=0)
    options = Options(
        warmup=warmup,
        draws=draws,
        thin=thin,
        target_accept=target_accept,
        dense_mass=dense_mass,
        pool_mass=pool_mass,
        keep_warmup=keep_warmup,
        seed=seed,
        rule=Rule(algorithm, max_tree_depth, path_length),
    )
    started = time.perf_counter()
    bound = bind(model, x, y, device=device, dtype=dtype, constants=constants)
    _check_constants(bound, constants)
    # Inductor gets the density as a part of the step, so that nothing is compiled twice.
    density = Density(bound, chains=chains, compile=False)
    compiled, reason = _whether_to_compile(density, compile, chains, options)
    with isolated(seed, bound.device), torch.no_grad():
        result = sample(
            density.value_and_grad,
            lambda: find_starts(density, init, model, chains, seed),
            options,
            stepper=_stepper(density, chains, must=compile is True) if compiled else None,
            checkpoint=checkpoint,
            resume=resume,
            identity=_identity(density, chains, init, compiled) if checkpoint else None,
            progress=progress,
        )
        if result.interrupted:
            _tell_interrupted(result, draws)
        sites, deterministic = named_draws(density, result.draws)
        before = named_draws(density, result.warmup_draws) if keep_warmup and warmup else None
    for message in verdict(result.stats, options):
        warnings.warn(message, ConvergenceWarning, stacklevel=2)
    settings = {**options.plain(), "chains": chains, "init": init_word(init), "compile": compile}
    del settings["seed"]
    posterior = Posterior(
        draws=sites,
        deterministic=deterministic,
        stats=result.stats,
        method=algorithm,
        markov=True,
        seconds=time.perf_counter() - started,
        constants={name: value.cpu() for name, value in bound.constants().items()},
        buffers={name: value.cpu() for name, value in bound.buffers().items()},
        provenance={
            **provenance(bound, seed=seed, **settings),
            **_account(result),
            "compiled": compiled,
            "compile_rule": reason,
        },
    )
    return posterior.with_warmup(*before, result.warmup_stats) if before else posterior


def _whether_to_compile(
    density: Density, asked: bool | None, chains: int, options: Options
) -> tuple[bool, str]:
    if density.slow_because is not None:
        return False, f"not compiled: {density.slow_because}"
    if asked is not None:
        return asked, "as asked"
    return worth_compiling_step(density._prepare(chains), density.dim, options.transitions)


def _stepper(density: Density, chains: int, *, must: bool) -> Callable[[Engine], Stepper]:
    """Return what compiles the step; where that fails, steps run eagerly unless they must not."""
    graph = density._prepare(chains)
    group = group_size(graph, chains) if density.device.type == "cpu" else chains

    def make(engine: Engine) -> Stepper:
        try:
            return compile_step(
                density.graph, density.data_tensors, engine, group, wide=is_wide(graph, chains)
            )
        except FitError as error:
            if must:
                raise
            warnings.warn(f"{error}; going on uncompiled", PbnnWarning, stacklevel=5)
            return eager(density.value_and_grad, engine.options.rule)

    return make


def named_draws(density: Density, draws: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return latent and deterministic sites of unconstrained draws, on the CPU, block by block."""
    blocks = [block.to(density.device) for block in draws.split(_BLOCK, 1)]
    found = []
    for function in (density.constrain, density.deterministic):
        parts = [{k: v.cpu() for k, v in function(block).items()} for block in blocks]
        found.append({name: torch.cat([part[name] for part in parts], 1) for name in parts[0]})
    return found[0], found[1]


def verdict(stats: Mapping[str, Tensor], options: Options) -> list[str]:
    """Say what is wrong with a run, in one line each, with the repair.

    Args:
        stats: Statistics of the kept draws, `(chain, draw)`.
        options: How they were drawn.

    Returns:
        Messages; none for a run that shows no fault here. Whether chains mix is for
        `pbnn.evaluate` to say.
    """
    messages = []
    total = stats["diverging"].numel()
    if total == 0:
        return []
    divergences = int(stats["diverging"].sum())
    if divergences:
        messages.append(
            f"{divergences} of {total} transitions diverged: draws miss parts of the posterior; "
            f"raise target_accept (now {options.target_accept}), or write the model non-centred"
        )
    saturated = int(stats["reached_max_treedepth"].sum())
    if saturated > 0.01 * total:
        depth = options.rule.max_tree_depth
        messages.append(
            f"{saturated} of {total} trajectories ended at max_tree_depth={depth}: draws are "
            "correlated; raise max_tree_depth, or give a longer warmup"
        )
    accept = float(stats["acceptance_rate"].mean())
    if accept < options.target_accept - 0.15:
        messages.append(
            f"mean acceptance {accept:.2f} is below target_accept={options.target_accept}: the "
            f"step size is not adapted; give a longer warmup (now {options.warmup})"
        )
    rhat, ess = split_rhat(stats["lp"]), _effective_size(stats["lp"])
    now = f"(now {options.warmup} and {options.draws})"
    if not rhat <= 1.05:  # it is NaN where nothing moves
        messages.append(
            f"R-hat of the log density is {rhat:.2f} (expected below 1.05): chains have not "
            f"converged; give more warmup and draws {now}"
        )
    elif not ess >= _FEWEST_EFFECTIVE:
        messages.append(
            f"effective sample size of the log density is {ess:.0f} (expected above "
            f"{_FEWEST_EFFECTIVE}): too few to tell whether chains have converged; give more "
            f"warmup and draws {now}"
        )
    return messages


def split_rhat(lp: Tensor) -> float:
    """Split R-hat of (chain, draw) (Gelman et al. 2013, eq. 11.4); infinite for too few draws."""
    half = lp.shape[1] // 2
    if half < 2:
        return float("inf")
    parts = torch.cat([lp[:, :half], lp[:, -half:]]).double()
    within = parts.var(1).mean()
    between = parts.mean(1).var()
    return float(((half - 1) / half + between / within).sqrt())


def _effective_size(lp: Tensor) -> float:
    """Effective sample size of (chain, draw), of halves of chains; 0 for too few draws.

    Geyer's initial monotone sequence of autocorrelations over all chains (Vehtari et al. 2021,
    "Rank-normalization, folding, and localization", section 3.2).
    """
    half = lp.shape[1] // 2
    if half < 2:
        return 0.0
    parts = torch.cat([lp[:, :half], lp[:, -half:]]).double()
    means = parts.mean(1, keepdim=True)
    spectrum = torch.fft.rfft(parts - means, 2 * half, dim=1).abs().square()
    covariance = torch.fft.irfft(spectrum, 2 * half, dim=1)[:, :half].mean(0) / half
    within = covariance[0] * half / (half - 1)
    total = covariance[0] + means.var()
    correlation = 1 - (within - covariance) / total
    correlation[0] = 1.0
    even = half // 2 * 2
    pairs = correlation[:even].reshape(-1, 2).sum(1)
    ends = (pairs < 0).nonzero()
    pairs = pairs[: int(ends[0])] if len(ends) else pairs
    apart = 2 * float(pairs.cummin(0).values.sum()) - 1
    draws = parts.numel()
    # Antithetic chains: at most that many more than there are draws, as in Stan.
    return float(draws / max(apart, 1 / math.log10(draws)))


def _check_constants(bound: BoundModel, constants: Values | None) -> None:
    free = [name for name in bound.named("constant") if name not in (constants or {})]
    if free:
        raise FitError(
            f"parameters without a prior: {', '.join(free)}; give them priors, or freeze them: "
            "`fit_nuts(…, constants=fit_svi(model, x, y).constants)`"
        )


def _identity(density: Density, chains: int, init: Any, compiled: bool) -> dict[str, Any]:
    """Name what makes a run what it is, beside the options."""
    return {
        "chains": chains,
        "init": init if isinstance(init, str) else digest(init),
        **problem_identity(density),
        "constants": digest(density.bound.constants()),
        "compiled": compiled,
    }


def init_word(init: Any) -> str:
    """Return what chains start from, in a word for the provenance."""
    return init if isinstance(init, str) else "values"


def _account(result: SamplerResult) -> dict[str, Any]:
    """Return what the run did, as plain JSON values."""
    return {
        "interrupted": result.interrupted,
        "leapfrogs": result.leapfrogs.tolist(),
        "calls": result.calls,
        "lockstep_calls": result.lockstep_calls,
        "warmup_divergences": result.warmup_divergences.tolist(),
        "step_size": result.step_size.tolist(),
    }


def _tell_interrupted(result: SamplerResult, draws: int) -> None:
    kept = result.draws.shape[1]
    if kept == 0:
        raise KeyboardInterrupt("interrupted before all chains had a draw")
    warnings.warn(
        f"interrupted: {kept} of {draws} draws a chain are kept", PbnnWarning, stacklevel=3
    )
