"""The UCI protocol over any roads: fixed splits, training statistics, scores in original units.

python examples/uci.py --data FOLDER                      may be stopped and called again
python examples/uci.py --data FOLDER --roads nuts normal --datasets yacht --splits 0 1 --jobs 2
python examples/uci.py --smoke                            seconds, for tests

FOLDER holds NAME.csv, whose last column is the target, and NAME.splits.json, whose `test_rows` are
lists of row numbers. A road is a guide of SVI, "nuts", or the NAME of any other `pbnn.fit_NAME`.
Each fit leaves one file under --out and is not done again; the tables are made of what is there.
--jobs fits run side by side by joblib, whose other backends (--backend dask, ray) use a cluster.
"""

import argparse
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

import pbnn
from pbnn.data.units import location_and_scale
from pbnn.errors import PbnnWarning
from pbnn.evaluate.convergence import check_convergence
from pbnn.files import writing
from pbnn.progress import progress_bar

MODEL = Path(__file__).parents[1] / "models" / "regression.py"
GUIDES = ("normal", "layer_lowrank", "lowrank", "kronecker")
REFERENCE = "nuts"
NUMPYRO = "numpyro"  # its fits are made by benchmark/uci_numpyro.py, and read here
REPLICATES = 2_000
# RMSE and log density, mean ± standard error over 20 splits: Hernández-Lobato & Adams (2015), Gal &
# Ghahramani (2016) and Lakshminarayanan et al. (2017), all as in table 1 of the last.
PUBLISHED = {
    "boston": {
        "PBP": ("3.01 ± 0.18", "-2.57 ± 0.09"),
        "MC dropout": ("2.97 ± 0.85", "-2.46 ± 0.25"),
        "deep ensemble": ("3.28 ± 1.00", "-2.41 ± 0.25"),
    },
    "concrete": {
        "PBP": ("5.67 ± 0.09", "-3.16 ± 0.02"),
        "MC dropout": ("5.23 ± 0.53", "-3.04 ± 0.09"),
        "deep ensemble": ("6.03 ± 0.58", "-3.06 ± 0.18"),
    },
    "energy": {
        "PBP": ("1.80 ± 0.05", "-2.04 ± 0.02"),
        "MC dropout": ("1.66 ± 0.19", "-1.99 ± 0.09"),
        "deep ensemble": ("2.09 ± 0.29", "-1.38 ± 0.22"),
    },
    "yacht": {
        "PBP": ("1.02 ± 0.05", "-1.63 ± 0.02"),
        "MC dropout": ("1.11 ± 0.38", "-1.55 ± 0.12"),
        "deep ensemble": ("1.58 ± 0.48", "-1.18 ± 0.21"),
    },
}

Numbers = NDArray[np.float64]
Result = dict[str, Any]


@dataclass(frozen=True)
class Split:
    """Training and test rows, standardised by the training rows.

    Attributes:
        train: x `(n, features)` and y `(n,)`.
        test: Likewise.
        scale: Standard deviation of y in original units.
    """

    train: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]
    scale: float

    @classmethod
    def of(cls, values: Numbers, test: list[int]) -> "Split":
        """Split a table whose last column is y."""
        held_out = np.zeros(len(values), dtype=bool)
        held_out[test] = True
        loc, scale, _ = location_and_scale(values[~held_out])
        parts = [(values[rows] - loc) / scale for rows in (~held_out, held_out)]
        train, test_rows = (torch.tensor(part, dtype=torch.float32) for part in parts)
        return cls(
            (train[:, :-1], train[:, -1]), (test_rows[:, :-1], test_rows[:, -1]), float(scale[-1])
        )


@dataclass(frozen=True)
class Task:
    """One fit: a data set, the number of its split, a road and a seed."""

    dataset: str
    split: int
    road: str
    seed: int

    def path(self, folder: Path) -> Path:
        """Return where its result is kept."""
        return folder / f"{self.dataset}-{self.split}-{self.road}-{self.seed}.json"

    def settings(self, arguments: argparse.Namespace) -> Result:
        """Return what a stored result must have been made with."""
        names = ["hidden"]
        if self.road in (REFERENCE, NUMPYRO):
            names += ["chains", "warmup", "draws", "max_tree_depth"]
        elif self.road in GUIDES:
            names += ["steps"]
        return {name: getattr(arguments, name) for name in names}


def split_of(task: Task, arguments: argparse.Namespace) -> Split:
    """Read a task's data."""
    if arguments.data is None:
        from sklearn.datasets import load_diabetes

        x, y = load_diabetes(return_X_y=True)
        return Split.of(np.column_stack([x, y])[:60], list(range(40, 60)))
    values = np.loadtxt(arguments.data / f"{task.dataset}.csv", delimiter=",", skiprows=1)
    listed = json.loads((arguments.data / f"{task.dataset}.splits.json").read_text())
    return Split.of(values, listed["test_rows"][task.split])


def fit(task: Task, split: Split, arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Return the model and its posterior."""
    features = split.train[0].shape[1]
    # Weights of the first layer have prior scale 1, those of the second 1 / sqrt(hidden).
    model = pbnn.load_model(
        MODEL, in_features=features, hidden=arguments.hidden, weight_scale=[features**0.5, 1.0]
    )
    options: Result = {"seed": task.seed, "progress": False}
    if task.road == REFERENCE:
        names = ("chains", "warmup", "draws", "max_tree_depth")
        options |= {name: getattr(arguments, name) for name in names}
        options["compile"] = False if arguments.smoke else None
        return model, pbnn.fit_nuts(model, *split.train, **options)
    if task.road in GUIDES:
        options |= {"guide": task.road, "steps": arguments.steps}
        return model, pbnn.fit_svi(model, *split.train, **options)
    return model, getattr(pbnn, f"fit_{task.road}")(model, *split.train, **options)


def scores(model: Any, posterior: Any, split: Split) -> Result:
    """Return the scores by held-out row, in original units, as plain JSON values."""
    x, y = split.test
    prediction = pbnn.predict(model, posterior, x, y=y, quantiles=(0.05, 0.95))
    row = {name: column.to_numpy() for name, column in prediction.to_frame().items()}
    observed = y.numpy()
    return {
        # In original units the log density loses log scale(y).
        "lpd": (row["log_predictive_density"] - math.log(split.scale)).tolist(),
        "error": ((row["mean"] - observed) * split.scale).tolist(),
        "f_scale": (row["epistemic_scale"] * split.scale).tolist(),
        "covered": ((row["q0.05"] <= observed) & (observed <= row["q0.95"])).tolist(),
    }


def run(task: Task, arguments: argparse.Namespace) -> str:
    """Do one task and keep its result; return a line that says so."""
    torch.set_num_threads(arguments.threads)
    split = split_of(task, arguments)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", PbnnWarning)
        model, posterior = fit(task, split, arguments)
        scored = scores(model, posterior, split)
    verdict = ""
    if posterior.markov:
        verdict = check_convergence(model, posterior, split.test[0]).verdict
    result = {
        **scored,
        "seconds": posterior.seconds,
        "verdict": verdict,
        "warnings": sorted({str(w.message) for w in told if issubclass(w.category, PbnnWarning)}),
        "settings": task.settings(arguments),
    }
    path = task.path(arguments.out)
    with writing(path) as temporary:
        temporary.write_text(json.dumps(result))
    return f"{path.stem}: {posterior.seconds:.0f} s {verdict}"


def found(tasks: Iterable[Task], arguments: argparse.Namespace) -> dict[Task, Result]:
    """Return the results that are there already and were made with these settings."""
    results = {}
    for task in tasks:
        path = task.path(arguments.out)
        if path.is_file():
            result = json.loads(path.read_text())
            if result["settings"] == task.settings(arguments):
                results[task] = result
    return results


def rmse(result: Result) -> float:
    """Return the root mean square error over the held-out rows."""
    return float(np.mean(np.square(result["error"])) ** 0.5)


def log_density(result: Result) -> float:
    """Return the mean log predictive density of the held-out rows."""
    return float(np.mean(result["lpd"]))


def mean_and_error(fits: dict[Task, Result], score: Callable[[Result], float]) -> str:
    """Return a score's mean ± its standard error over splits, as text; seeds are averaged first."""
    splits = dict.fromkeys(task.split for task in fits)
    values = [np.mean([score(r) for t, r in fits.items() if t.split == s]) for s in splits]
    error = f" ± {np.std(values, ddof=1) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
    return f"{np.mean(values):.2f}{error}"


def interval(values: Numbers, statistic: Any) -> str:
    """Return a statistic with its 95% bootstrap interval over rows, as text."""
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(values), (REPLICATES, len(values)))
    low, high = np.quantile(statistic(values[picks], axis=1), [0.025, 0.975])
    return f"{statistic(values):.2f} [{low:.2f}, {high:.2f}]"


def by_road(results: dict[Task, Result]) -> Iterator[tuple[str, str, dict[Task, Result]]]:
    """Yield data set, road and their fits."""
    for dataset in dict.fromkeys(task.dataset for task in results):
        for road in dict.fromkeys(t.road for t in results if t.dataset == dataset):
            fits = {t: r for t, r in results.items() if (t.dataset, t.road) == (dataset, road)}
            yield dataset, road, fits


def protocol(results: dict[Task, Result]) -> pd.DataFrame:
    """Return mean ± standard error over splits by data set and road, published values below."""
    rows = []
    for dataset, road, fits in by_road(results):
        verdicts = [r["verdict"] for r in fits.values() if r["verdict"]]
        rows.append(
            {
                "data": dataset,
                "road": road,
                "splits": len({task.split for task in fits}),
                "RMSE": mean_and_error(fits, rmse),
                "log density": mean_and_error(fits, log_density),
                "90% coverage": f"{np.mean([np.mean(r['covered']) for r in fits.values()]):.2f}",
                "seconds": f"{np.median([r['seconds'] for r in fits.values()]):.0f}",
                "chains": ", ".join(f"{verdicts.count(v)} {v}" for v in sorted(set(verdicts))),
            }
        )
    for dataset in dict.fromkeys(task.dataset for task in results):
        for name, (error, density) in PUBLISHED.get(dataset, {}).items():
            published = {"data": dataset, "road": f"{name} (published)", "splits": 20}
            rows.append({**published, "RMSE": error, "log density": density})
    return pd.DataFrame(rows).fillna("").sort_values("data", kind="stable")


def ranges(results: dict[Task, Result]) -> pd.DataFrame:
    """Return the least and the largest score over seeds, by split, where there are several."""
    rows: list[dict[str, Any]] = []
    for dataset, road, fits in by_road(results):
        for split in dict.fromkeys(task.split for task in fits):
            seeds = [result for task, result in fits.items() if task.split == split]
            row: Result = {"data": dataset, "split": split, "road": road, "seeds": len(seeds)}
            for name, score in (("RMSE", rmse), ("log density", log_density)):
                values = [score(result) for result in seeds]
                row[name] = f"{min(values):.2f} to {max(values):.2f}"
            rows.append(row)
    return pd.DataFrame([row for row in rows if row["seeds"] > 1])


def beside_reference(results: dict[Task, Result]) -> pd.DataFrame:
    """Return each road beside NUTS of the same split, over the held-out rows of all splits."""
    reference: dict[tuple[str, int], Result] = {}
    for task, result in results.items():
        if task.road == REFERENCE:
            reference.setdefault((task.dataset, task.split), result)  # the first seed
    pairs: dict[tuple[str, str], list[tuple[Result, Result]]] = {}
    for task, result in results.items():
        beside = reference.get((task.dataset, task.split))
        if task.road != REFERENCE and beside is not None:
            pairs.setdefault((task.dataset, task.road), []).append((result, beside))
    rows = []
    for (dataset, road), compared in pairs.items():
        gains, ratios = (
            np.concatenate([combine(*(np.array(r[key]) for r in pair)) for pair in compared])
            for key, combine in (("lpd", np.subtract), ("f_scale", np.divide))
        )
        rows.append(
            {
                "data": dataset,
                "road": road,
                "splits": len(compared),
                "log density minus NUTS": interval(gains, np.mean),
                "scale of f over NUTS": interval(ratios, np.median),
            }
        )
    return pd.DataFrame(rows)


def markdown(frame: pd.DataFrame) -> str:
    """Return a table as Markdown."""
    lines = [frame.columns, ["---"] * len(frame.columns), *frame.astype(str).to_numpy()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def arguments_given() -> argparse.Namespace:
    """Return the command line, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder of the tables and their splits")
    parser.add_argument("--out", type=Path, default=Path("runs/uci"))
    parser.add_argument("--roads", nargs="+", default=[*GUIDES, REFERENCE])
    parser.add_argument("--datasets", nargs="+", default=list(PUBLISHED))
    parser.add_argument("--splits", nargs="+", type=int, default=list(range(20)))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--jobs", type=int, default=1, help="fits side by side")
    parser.add_argument("--backend", default="loky", help="of joblib")
    parser.add_argument("--threads", type=int, default=1, help="of each fit")
    parser.add_argument("--hidden", type=int, default=50)
    parser.add_argument("--steps", type=int, default=20_000, help="of SVI, at most")
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=500)
    parser.add_argument("--draws", type=int, default=500, help="of each chain")
    parser.add_argument("--max-tree-depth", type=int, default=9)
    parser.add_argument("--tables-only", action="store_true", help="begin no fit")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on shipped data")
    arguments = parser.parse_args()
    for road in arguments.roads:
        if road not in (*GUIDES, REFERENCE, NUMPYRO) and not hasattr(pbnn, f"fit_{road}"):
            parser.error(f"--roads {road}: there is neither such a guide nor a pbnn.fit_{road}")
    if arguments.smoke:
        arguments.datasets, arguments.splits, arguments.roads = (
            ["diabetes"],
            [0],
            ["normal", "nuts"],
        )
        arguments.hidden, arguments.steps = 3, 40
        arguments.chains, arguments.warmup, arguments.draws, arguments.max_tree_depth = 2, 10, 10, 3
    elif arguments.data is None:
        parser.error("--data is needed: a folder with yacht.csv, yacht.splits.json, …")
    return arguments


def main() -> None:
    """Fit what is missing, and write the tables as Markdown and CSV."""
    arguments = arguments_given()
    # All first splits come first, so that a short run sees every data set.
    tasks = [
        Task(dataset, split, road, seed)
        for seed in arguments.seeds
        for split in arguments.splits
        for dataset in arguments.datasets
        for road in arguments.roads
    ]
    there = found(tasks, arguments)
    missing = [task for task in tasks if task not in there and task.road != NUMPYRO]
    if arguments.tables_only:
        missing = []
    with (
        joblib.parallel_config(backend=arguments.backend, n_jobs=arguments.jobs),
        progress_bar(label="fits", unit="fit", total=len(missing), show=bool(missing)) as bar,
    ):
        work = joblib.Parallel(return_as="generator_unordered")
        for line in work(joblib.delayed(run)(task, arguments) for task in missing):
            print(line, flush=True)
            bar.update(1)
    results = found(tasks, arguments)
    tables = {"protocol": protocol, "beside_nuts": beside_reference, "ranges": ranges}
    for name, table in tables.items():
        frame = table(results)
        if len(frame):
            with writing(arguments.out / f"{name}.csv") as path:
                frame.to_csv(path, index=False)
            with writing(arguments.out / f"{name}.md") as path:
                path.write_text(markdown(frame), encoding="utf-8")
            print(markdown(frame))


if __name__ == "__main__":
    main()
