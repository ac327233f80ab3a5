"""One side of the benchmark in a process of its own: pbnn, Pyro or NumPyro on one problem.

python sides.py pbnn problem.npz '{"chains": 4, …}'

Takes words on stdin, answers each with one line of JSON. Only the side's own libraries are
imported, so that NumPyro can live in another environment, and a peak of memory is one side's.

    run       warm-up and draws, from a cold start; f(x) at the probes goes to settings["file"]
    prepare   compile, and a short warm-up
    window    leapfrogs for about a second
    depths    lengths of trajectories at a fixed step size, by powers of two
"""

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

__all__: list[str] = []

HIDDEN = 50
WARMUP = 15
"""Transitions before the windows."""
STEP_SIZE, BURN = 0.4, 20
"""Of `depths`, where both sides must draw lengths from one distribution; transitions left out."""

Numbers = np.ndarray[Any, Any]


def memory() -> float:
    """Return the peak of this process's resident memory in MB."""
    status = Path("/proc/self/status").read_text()
    return next(int(r.split()[1]) for r in status.splitlines() if r.startswith("VmHWM")) / 1024


def by_length(lengths: Numbers) -> list[int]:
    """Count trajectories of 1, 2 to 3, 4 to 7, … leapfrogs."""
    counts: list[int] = np.bincount(np.log2(lengths.reshape(-1)).astype(int)).tolist()
    return counts


class Pbnn:
    """All chains in one batch."""

    def __init__(self, problem: dict[str, Numbers], settings: dict[str, Any]) -> None:
        import torch

        import pbnn

        torch.set_num_threads(settings["threads"])
        self.settings = settings
        self.x = torch.from_numpy(problem["x"]) if "x" in problem else None
        self.probes = torch.from_numpy(problem["probes"]) if "x" in problem else None
        self.y = torch.from_numpy(problem["y"])
        self.model: Any = schools(problem["scale"]) if self.x is None else network(self.x.shape[1])
        self.compile_seconds = 0.0
        self.pbnn = pbnn

    def _compile(self, *arguments: Any, **options: Any) -> Any:
        from pbnn.infer.compiled import compile_step

        start = time.perf_counter()
        stepper = compile_step(*arguments, **options)
        self.compile_seconds = time.perf_counter() - start
        return stepper

    def run(self) -> dict[str, Any]:
        """Fit as a user does."""
        nuts: Any = importlib.import_module("pbnn.infer.nuts")
        settings = self.settings
        nuts.compile_step = self._compile
        start = time.perf_counter()
        posterior = self.pbnn.fit_nuts(
            self.model,
            self.x,
            self.y,
            chains=settings["chains"],
            warmup=settings["warmup"],
            draws=settings["draws"],
            max_tree_depth=settings["depth"],
            compile=settings["compile"],
            progress=False,
        )
        seconds = time.perf_counter() - start
        np.save(settings["file"], self._f(posterior))
        record = posterior.provenance
        return {
            "seconds": seconds - self.compile_seconds,
            "compile": self.compile_seconds,
            "leapfrogs": int(posterior.stats["n_steps"].sum()),
            "busiest": max(record["leapfrogs"]),
            "calls": record["calls"],
            "lockstep": record["lockstep_calls"],
        }

    def _f(self, posterior: Any) -> Numbers:
        if self.x is None:
            f = posterior.draws["mu"][..., None] + (
                posterior.draws["tau"][..., None] * posterior.draws["effect"]
            )
        else:
            f = self.pbnn.predictive(self.model, posterior, self.probes)["f"]
        values: Numbers = f.numpy()
        return values

    def _engine(self, **options: Any) -> tuple[Any, Any]:
        import torch

        from pbnn.front_door import bind
        from pbnn.infer.density import Density
        from pbnn.infer.engine import Engine
        from pbnn.infer.options import Options

        chains = self.settings["chains"]
        with torch.no_grad():
            density = Density(bind(self.model, self.x, self.y), chains=chains, compile=False)
            start = density.initial_prior(chains, 0)
            engine = Engine.start(density.value_and_grad, start, Options(**options))
        return density, engine

    def prepare(self) -> dict[str, Any]:
        """Compile a step, and warm up."""
        from pbnn.infer.engine import eager
        from pbnn.infer.lanes import Rule

        rule = Rule(max_tree_depth=self.settings["depth"])
        # Few are kept, so that the peak is that of the state and not of draws nobody wants.
        density, self.engine = self._engine(warmup=WARMUP, draws=10, thin=10**4, rule=rule)
        self.take = (
            self._compile(density.graph, density.data_tensors, self.engine, self._group(density))
            if self.settings["compile"] is not False
            else eager(density.value_and_grad, rule)
        )
        while self.engine.done.min() < WARMUP:
            self.engine.advance(self.take)
        return {"compile": self.compile_seconds}

    def _group(self, density: Any) -> int:
        from pbnn.infer.compiled import group_size

        chains = self.settings["chains"]
        return group_size(density._prepare(chains), chains)

    def window(self) -> dict[str, Any]:
        """Take blocks of leapfrogs."""
        before, start = int(self.engine.lanes.leapfrogs.sum()), time.perf_counter()
        while (made := int(self.engine.lanes.leapfrogs.sum()) - before) < self.settings["window"]:
            self.engine.advance(self.take)
        return {"seconds": time.perf_counter() - start, "leapfrogs": made}

    def depths(self) -> dict[str, Any]:
        """Sample at a fixed step size."""
        from pbnn.infer.engine import eager

        draws = self.settings["lengths"] + BURN
        density, engine = self._engine(warmup=0, draws=draws, step_size=STEP_SIZE)
        take = eager(density.value_and_grad, engine.options.rule)
        while not engine.complete:
            engine.advance(take)
        return {"counts": by_length(engine.lengths[:, BURN:])}


class Pyro:
    """Pyro's own NUTS, one chain."""

    def __init__(self, problem: dict[str, Numbers], settings: dict[str, Any]) -> None:
        import torch

        torch.set_num_threads(settings["threads"])
        self.settings = settings
        self.data: Any = [torch.from_numpy(problem["y"])]
        if "x" in problem:
            self.model: Any = network(problem["x"].shape[1])
            self.data.insert(0, torch.from_numpy(problem["x"]))
        else:
            self.model = schools(problem["scale"])
            self.data.insert(0, None)

    def prepare(self) -> dict[str, Any]:
        """Count the leapfrogs that Pyro makes."""
        nuts: Any = importlib.import_module("pyro.infer.mcmc.nuts")
        verlet, self.made = nuts.velocity_verlet, 0

        def counted(*arguments: Any, **options: Any) -> Any:
            self.made += 1
            return verlet(*arguments, **options)

        nuts.velocity_verlet = counted
        return {"compile": 0.0}

    def window(self) -> dict[str, Any]:
        """Run some transitions at a small step size, timed between the first and the last."""
        from pyro.infer import MCMC, NUTS

        marks: list[tuple[float, int]] = []
        kernel = NUTS(
            self.model, step_size=1e-3, adapt_step_size=False, max_tree_depth=self.settings["deep"]
        )
        mcmc = MCMC(
            kernel,
            num_samples=4,
            warmup_steps=1,
            disable_progbar=True,
            hook_fn=lambda *_: marks.append((time.perf_counter(), self.made)),
        )
        mcmc.run(*self.data)
        (start, before), (end, after) = marks[0], marks[-1]
        return {"seconds": end - start, "leapfrogs": after - before}


class Numpyro:
    """NumPyro's NUTS with one of its ways to run chains."""

    def __init__(self, problem: dict[str, Numbers], settings: dict[str, Any]) -> None:
        self.numpyro: Any = importlib.import_module("numpyro")
        if settings["method"] == "parallel":
            self.numpyro.set_host_device_count(settings["chains"])
        self.jax: Any = importlib.import_module("jax")
        self.np: Any = importlib.import_module("jax.numpy")
        self.problem, self.settings = problem, settings
        self.compile_seconds = 0.0
        self.jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, seconds: float, **_: Any) -> None:
        # Tracing is left out: functions traced within another would count twice.
        if event.endswith(("backend_compile_duration", "jaxpr_to_mlir_module_duration")):
            self.compile_seconds += seconds

    def _mcmc(self, warmup: int, draws: int, **options: Any) -> Any:
        infer: Any = importlib.import_module("numpyro.infer")
        options = {"max_tree_depth": self.settings["depth"], **options}
        return infer.MCMC(
            infer.NUTS(self.model, init_strategy=infer.init_to_sample, **options),
            num_warmup=warmup,
            num_samples=draws,
            num_chains=self.settings["chains"],
            chain_method=self.settings["method"],
            progress_bar=False,
        )

    def f(self, values: dict[str, Any], x: Any) -> Any:
        """Return the network's output at x, or the schools' effects, of one draw."""
        if x is None:
            return values["mu"] + values["tau"] * values["effect"]
        hidden = self.np.tanh(x @ values["w0"].T + values["b0"])
        return hidden @ values["w1"] + values["b1"]

    def model(self) -> None:
        """Declare the same model as the other sides."""
        sample, dist = self.numpyro.sample, self.numpyro.distributions
        if "x" not in self.problem:
            values = {"mu": sample("mu", dist.Normal(0.0, 5.0))}
            values["tau"] = sample("tau", dist.HalfCauchy(5.0))
            values["effect"] = sample("effect", dist.Normal(0.0, 1.0).expand([8]).to_event(1))
            x, scale = None, self.problem["scale"]
        else:
            x = self.problem["x"]
            columns = x.shape[1]
            priors = {
                "w0": dist.Normal(0.0, columns**-0.5).expand([HIDDEN, columns]).to_event(2),
                "b0": dist.Normal(0.0, 1.0).expand([HIDDEN]).to_event(1),
                "w1": dist.Normal(0.0, HIDDEN**-0.5).expand([HIDDEN]).to_event(1),
                "b1": dist.Normal(0.0, 1.0),
            }
            values = {name: sample(name, prior) for name, prior in priors.items()}
            scale = sample("scale", dist.HalfNormal(1.0))
        sample("y", dist.Normal(self.f(values, x), scale), obs=self.problem["y"])

    def run(self) -> dict[str, Any]:
        """Warm up and draw."""
        mcmc = self._mcmc(self.settings["warmup"], self.settings["draws"])
        start = time.perf_counter()
        mcmc.run(self.jax.random.PRNGKey(0), extra_fields=("num_steps",))
        leapfrogs = int(mcmc.get_extra_fields()["num_steps"].sum())
        seconds = time.perf_counter() - start
        draws = mcmc.get_samples(group_by_chain=True)
        probes = self.problem["probes"] if "x" in self.problem else None
        f = self.jax.vmap(self.jax.vmap(lambda values: self.f(values, probes)))(draws)
        np.save(self.settings["file"], np.asarray(f))
        return {
            "seconds": seconds - self.compile_seconds,
            "compile": self.compile_seconds,
            "leapfrogs": leapfrogs,
        }

    def prepare(self) -> dict[str, Any]:
        """Warm up, and compile a loop of transitions: MCMC.run would compile in each window."""
        jax, settings = self.jax, self.settings
        mcmc = self._mcmc(WARMUP, 1)
        mcmc.run(jax.random.PRNGKey(0), extra_fields=("num_steps",))
        self.state = mcmc.last_state
        alone = settings["method"] == "sequential"
        if alone and settings["chains"] > 1:
            self.state = jax.tree.map(lambda value: value[0], self.state)
        at_once = 1 if alone else settings["chains"]
        count = max(2, settings["window"] // (at_once * settings["long"]))

        def transition(_: int, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            state = mcmc.sampler.sample(carry[0], (), {})
            return state, carry[1] + state.num_steps

        def transitions(state: Any) -> Any:
            return jax.lax.fori_loop(0, count, transition, (state, 0 * state.num_steps))

        self.transitions = (jax.pmap if settings["method"] == "parallel" else jax.jit)(transitions)
        self.compile_seconds = 0.0
        self.window()
        return {"compile": self.compile_seconds}

    def window(self) -> dict[str, Any]:
        """Draw some more."""
        start = time.perf_counter()
        self.state, made = self.jax.block_until_ready(self.transitions(self.state))
        return {"seconds": time.perf_counter() - start, "leapfrogs": int(made.sum())}

    def depths(self) -> dict[str, Any]:
        """Sample at a fixed step size."""
        fixed = {"step_size": STEP_SIZE, "adapt_step_size": False, "adapt_mass_matrix": False}
        mcmc = self._mcmc(BURN, self.settings["lengths"], **fixed)
        mcmc.run(self.jax.random.PRNGKey(1), extra_fields=("num_steps",))
        return {"counts": by_length(np.asarray(mcmc.get_extra_fields()["num_steps"]))}


def network(columns: int) -> Any:
    """Return the regression network."""
    import pbnn

    path = Path(__file__).parents[2] / "models" / "regression.py"
    return pbnn.load_model(path, in_features=columns, hidden=HIDDEN)


def schools(scale: Numbers) -> Callable[..., Any]:
    """Return eight schools, not centred."""
    import pyro
    import pyro.distributions as dist
    import torch

    known = torch.from_numpy(scale)

    def model(x: None, y: Any = None) -> Any:
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        effect = pyro.sample("effect", dist.Normal(0.0, 1.0).expand([8]).to_event(1))
        f = mu + tau * effect
        pyro.sample("y", dist.Normal(f, known).to_event(1), obs=y)
        return f

    return model


def main() -> None:
    """Serve one side."""
    side, path, text = sys.argv[1:]
    with np.load(path) as held:
        problem = dict(held)
    worker: Any = {"pbnn": Pbnn, "pyro": Pyro, "numpyro": Numpyro}[side](problem, json.loads(text))
    imports = memory()
    for word in sys.stdin:
        answer = getattr(worker, word.strip())()
        print(json.dumps({**answer, "peak": memory(), "imports": imports}), flush=True)


if __name__ == "__main__":
    main()
