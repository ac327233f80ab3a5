"""NUTS side by side: pbnn, Pyro and NumPyro on a network and on eight schools, as Markdown.

python examples/benchmark_nuts.py --data yacht.csv --numpyro-python ENV/bin/python      8 minutes
python examples/benchmark_nuts.py --smoke                                     seconds, for tests

Each side runs in a process of its own (benchmark/sides.py). Windows of leapfrogs alternate between
the sides, so that all see the same machine, and the fastest window of each counts.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import arviz as az

SIDES = Path(__file__).parent / "benchmark" / "sides.py"
SCHOOLS_Y = (28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0)
SCHOOLS_SCALE = (15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0)
PROBES = 20
ROUNDS = 3

Numbers = np.ndarray[Any, Any]


def network_data(path: Path | None) -> dict[str, Numbers]:
    """Return standardised x, y and probes: of a table whose last column is the target, or made."""
    if path is None:
        generator = np.random.default_rng(0)
        x = generator.standard_normal((308, 6))
        y = np.sin(2.0 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * generator.standard_normal(308)
    else:
        table = np.genfromtxt(path, delimiter=",")
        table = table[~np.isnan(table).any(1)]
        x, y = table[:, :-1], table[:, -1]
    x, y = (((v - v.mean(0)) / v.std(0)).astype(np.float32) for v in (x, y))
    return {"x": x, "y": y, "probes": x[:: max(1, len(x) // PROBES)][:PROBES]}


def schools_data() -> dict[str, Numbers]:
    """Return the effects of eight coaching programmes and their standard errors."""
    return {"y": np.array(SCHOOLS_Y, "f4"), "scale": np.array(SCHOOLS_SCALE, "f4")}


@dataclass
class Worker:
    """One side on one problem with one number of chains, in a process of its own.

    Attributes:
        label: Its name in the tables.
        windows: µs per leapfrog and chain, window by window.
        answers: What it said last, by word.
    """

    label: str
    python: str
    side: str
    problem: Path
    settings: dict[str, Any]
    windows: list[float] = field(default_factory=list)
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __enter__(self) -> "Worker":
        """Start the process, with cold caches."""
        self._cache = tempfile.TemporaryDirectory()
        threads = str(self.settings["threads"])
        one_core = "--xla_cpu_multi_thread_eigen=false" if self.settings["threads"] == 1 else ""
        self._process = subprocess.Popen(
            [
                self.python, "-W", "ignore", SIDES, self.side, self.problem,
                json.dumps(self.settings),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": threads,
                "XLA_FLAGS": one_core,
                "JAX_PLATFORMS": "cpu",
                "TORCHINDUCTOR_CACHE_DIR": self._cache.name,
            },
        )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        self._process.communicate()
        self._cache.cleanup()

    def ask(self, word: str) -> dict[str, Any]:
        """Have something done, and return what was found."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.label} failed:\n{self._process.communicate()[1]}")
        answer: dict[str, Any] = json.loads(line)
        self.answers[word] = answer
        if word == "window":
            self.windows.append(1e6 * answer["seconds"] / answer["leapfrogs"])
        return answer

    @property
    def cost(self) -> float:
        """The µs per leapfrog and chain of its fastest window."""
        return min(self.windows)


@dataclass
class Benchmark:
    """What is run, and where.

    Attributes:
        arguments: Of the command line.
        folder: For problems and draws.
    """

    arguments: argparse.Namespace
    folder: Path

    def workers(self, problem: str, chains: int) -> list[Worker]:
        """Name the sides that run a number of chains."""
        smoke, threads = self.arguments.smoke, self.arguments.threads
        shared = {
            "chains": chains,
            "threads": threads,
            "warmup": 5 if smoke else 100 if problem == "network" else 500,
            "draws": 10 if smoke else 60 if problem == "network" else 500,
            "depth": 3 if smoke else 7 if problem == "network" else 10,
            "compile": False if smoke else None,
            "window": 50 if smoke else self.arguments.window,
            "long": 127 if problem == "network" else 10,
            "deep": 2 if smoke else 5,
            "lengths": 10 if smoke else 100,
        }
        kinds = [("pbnn", sys.executable, "pbnn", "")]
        if chains == 1 or smoke:
            kinds.append(("Pyro", sys.executable, "pyro", ""))
        other = self.arguments.numpyro_python
        # Chains one after another cost what one costs, and devices for 64 processes are too many.
        methods = ["sequential"] if chains == 1 else ["vectorized"]
        if 1 < chains <= 16:
            methods.insert(0, "parallel")
        for method in methods if other else []:
            kinds.append((f"NumPyro, {method}", other, "numpyro", method))
        path = self.folder / f"{problem}.npz"
        found = []
        for label, python, side, method in kinds:
            file = str(self.folder / f"{problem}-{chains}-{side}-{method}.npy")
            settings = {**shared, "method": method, "file": file}
            found.append(Worker(label, python, side, path, settings))
        return found

    def group(self, problem: str, chains: int, *, runs: bool) -> list[Worker]:
        """Run all sides with one number of chains; windows alternate between them."""
        workers = self.workers(problem, chains)
        opened: list[Worker] = []
        try:
            for worker in workers:
                opened.append(worker.__enter__())
                if runs and worker.side != "pyro":
                    worker.ask("run")
                worker.ask("prepare")
            for _ in range(1 if self.arguments.smoke else ROUNDS):
                for worker in workers:
                    worker.ask("window")
            if problem == "schools" and runs:
                for worker in workers:
                    if worker.side == "pbnn" or worker.settings["method"] == "vectorized":
                        worker.ask("depths")
        finally:
            for worker in opened:
                worker.__exit__()
        return workers

    def choices(self) -> list[Worker]:
        """Run few draws of a small model compiled, not compiled, and as the rule decides."""
        pbnn = self.workers("schools", 2 if self.arguments.smoke else 4)[0]
        named = {"as the rule decides": None, "not compiled": False, "compiled": True}
        found = []
        for label, compile in named.items():
            settings = {**pbnn.settings, "warmup": 100, "draws": 100, "compile": compile}
            with replace(pbnn, label=label, settings=settings, windows=[], answers={}) as worker:
                worker.ask("run")
            found.append(worker)
        return found


def effective(worker: Worker) -> Numbers:
    """Return the bulk ESS of f(x) at each probe."""
    f = np.load(worker.settings["file"])
    values: Numbers = az.ess(az.convert_to_dataset({"f": f}))["f"].to_numpy()
    return values


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return Markdown."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def costs(groups: dict[int, list[Worker]]) -> str:
    """Tabulate µs per leapfrog and chain: sides by numbers of chains."""
    labels = list(dict.fromkeys(worker.label for group in groups.values() for worker in group))
    found = {(w.label, chains): f"{w.cost:.1f}" for chains, ws in groups.items() for w in ws}
    rows = [[label, *(found.get((label, chains), "") for chains in groups)] for label in labels]
    return table(["µs per leapfrog and chain", *(f"{chains} chains" for chains in groups)], rows)


def compiling(groups: dict[int, list[Worker]]) -> str:
    """Tabulate seconds of compiling and peak memory of all that was run."""
    rows = [
        [
            worker.label,
            str(chains),
            f"{worker.answers['prepare']['compile']:.1f}",
            f"{worker.answers['window']['peak']:.0f}",
            f"{worker.answers['window']['imports']:.0f}",
        ]
        for chains, group in groups.items()
        for worker in group
    ]
    return table(["", "chains", "compile s", "peak MB", "of which imports"], rows)


def runs(group: Sequence[Worker]) -> str:
    """Tabulate whole runs: time, leapfrogs, ESS per second."""
    rows = []
    for worker in group:
        if "run" not in worker.answers:
            continue
        answer, ess = worker.answers["run"], effective(worker)
        seconds, whole = answer["seconds"], answer["seconds"] + answer["compile"]
        rows.append(
            [
                worker.label,
                f"{answer['leapfrogs']:,}",
                f"{seconds:.1f}",
                f"{answer['compile']:.1f}",
                f"{np.median(ess):.0f} ({ess.min():.0f})",
                f"{np.median(ess) / seconds:.1f}",
                f"{np.median(ess) / whole:.1f}",
            ]
        )
    head = ["", "leapfrogs of draws", "run s", "compile s", "bulk ESS of f(x): median (least)"]
    return table([*head, "ESS/s", "with compiling"], rows)


def lanes(worker: Worker) -> str:
    """Say what waiting for the deepest tree would cost."""
    run = worker.answers["run"]
    return (
        f"{worker.settings['chains']} chains made {run['calls']:,} leapfrogs together, "
        f"{run['calls'] / run['busiest']:.3f} times the {run['busiest']:,} of the busiest; "
        f"in lockstep the same draws take {run['lockstep']:,} "
        f"({run['lockstep'] / run['busiest']:.2f} times).\n"
    )


def depths(group: Sequence[Worker]) -> str:
    """Tabulate how many trajectories have 1, 2 to 3, 4 to 7, … leapfrogs at a fixed step size."""
    counts = {w.label: w.answers["depths"]["counts"] for w in group if "depths" in w.answers}
    width = max(map(len, counts.values()))
    rows = [
        [label, *(f"{n / sum(found):.3f}" for n in found + [0] * (width - len(found)))]
        for label, found in counts.items()
    ]
    ranges = [f"{2**k}–{2 ** (k + 1) - 1}" for k in range(1, width)]
    return table(["leapfrogs of a trajectory", "1", *ranges], rows)


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="CSV, target last; default: 308 made rows")
    parser.add_argument("--numpyro-python", help="a Python that has NumPyro")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="default: all cores")
    parser.add_argument("--chains", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--window", type=int, default=8000, help="leapfrogs; default: 8000")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    arguments = parser.parse_args()
    started = time.perf_counter()
    numbers = [2] if arguments.smoke else arguments.chains
    with tempfile.TemporaryDirectory() as name:
        benchmark = Benchmark(arguments, Path(name))
        data = {"network": network_data(arguments.data), "schools": schools_data()}
        source = "308 made rows" if arguments.data is None else arguments.data.name
        titles = {
            "network": f"A 6-50-1 network on {source}",
            "schools": "Eight schools",
        }
        print(
            f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
            f"{arguments.threads} thread(s) a process, {date.today()}\n"
        )
        for problem, title in titles.items():
            arrays: dict[str, Any] = data[problem]
            np.savez(benchmark.folder / f"{problem}.npz", **arrays)
            groups: dict[int, list[Worker]] = {}
            print(f"### {title}\n")
            for chains in numbers:
                whole = arguments.smoke or chains == (4 if problem == "network" else 16)
                groups[chains] = benchmark.group(problem, chains, runs=whole)
            print(costs(groups))
            print(compiling(groups))
            for chains, group in groups.items():
                if "run" in group[0].answers:
                    settings = group[0].settings
                    print(
                        f"{chains} chains, {settings['warmup']} + {settings['draws']} transitions, "
                        f"depth at most {settings['depth']}:\n"
                    )
                    print(runs(group))
                    print(lanes(group[0]))
                    if problem == "schools":
                        print(depths(group))
        if not arguments.smoke:
            print("### Compile time is counted: 100 + 100 transitions of eight schools, 4 chains\n")
            print(runs(benchmark.choices()))
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
