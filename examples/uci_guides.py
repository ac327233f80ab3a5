"""What a guide's shape is worth on small tables: held-out density and spread of f, beside NUTS.

python examples/uci_guides.py --data FOLDER                hours; may be stopped and called again
python examples/uci_guides.py --data FOLDER --budget 600   no new fit after ten minutes
python examples/uci_guides.py --smoke                      seconds, for tests

FOLDER holds NAME.csv, whose last column is the target, and NAME.splits.json, whose `test_rows` are
lists of row numbers. Each fit leaves one file under --out and is not done again; the table is made
of what is there, so that several processes may share the work by --datasets and --splits.
"""

import argparse
import json
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

import pbnn
from pbnn.data.units import location_and_scale
from pbnn.errors import PbnnWarning
from pbnn.evaluate.calibration import log_predictive_density
from pbnn.evaluate.convergence import check_convergence
from pbnn.files import writing
from pbnn.prediction import function_draws

MODEL = Path(__file__).parents[1] / "models" / "regression.py"
GUIDES = ("normal", "layer_lowrank", "lowrank", "kronecker")
REFERENCE = "nuts"
REPLICATES = 2_000


@dataclass(frozen=True)
class Split:
    """Training and test rows, standardised by the training rows.

    Attributes:
        train: x `(n, features)` and y `(n,)`.
        test: Likewise.
        scale: Standard deviation of y in the user's units.
    """

    train: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]
    scale: float

    @classmethod
    def of(cls, values: NDArray[np.float64], test: list[int]) -> "Split":
        """Split a table whose last column is y."""
        held_out = np.zeros(len(values), dtype=bool)
        held_out[test] = True
        loc, scale, _ = location_and_scale(values[~held_out])
        parts = [(values[rows] - loc) / scale for rows in (~held_out, held_out)]
        train, test_rows = (torch.tensor(part, dtype=torch.float32) for part in parts)
        return cls(
            (train[:, :-1], train[:, -1]), (test_rows[:, :-1], test_rows[:, -1]), float(scale[-1])
        )


def splits(arguments: argparse.Namespace) -> Iterator[tuple[str, int, Split]]:
    """Yield each data set's splits: first all first ones, so that a short run sees every set."""
    if arguments.data is None:
        from sklearn.datasets import load_diabetes

        x, y = load_diabetes(return_X_y=True)
        yield "diabetes", 0, Split.of(np.column_stack([x, y])[:60], list(range(40, 60)))
        return
    tables = {
        name: (
            np.loadtxt(arguments.data / f"{name}.csv", delimiter=",", skiprows=1),
            json.loads((arguments.data / f"{name}.splits.json").read_text())["test_rows"],
        )
        for name in arguments.datasets
    }
    for number in arguments.splits:
        for name, (values, test_rows) in tables.items():
            yield name, number, Split.of(values, test_rows[number])


def fit(kind: str, split: Split, arguments: argparse.Namespace) -> dict[str, Any]:
    """Fit one posterior and return its scores by held-out row, as plain JSON values."""
    features = split.train[0].shape[1]
    model = pbnn.load_model(MODEL, in_features=features, hidden=arguments.hidden)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", PbnnWarning)
        if kind == REFERENCE:
            posterior = pbnn.fit_nuts(
                model,
                *split.train,
                chains=arguments.chains,
                warmup=arguments.warmup,
                draws=arguments.draws,
                max_tree_depth=arguments.max_tree_depth,
                compile=False if arguments.smoke else None,
                progress=not arguments.quiet,
            )
        else:
            posterior = pbnn.fit_svi(
                model,
                *split.train,
                guide=kind,
                steps=arguments.steps,
                draws=1000,
                progress=not arguments.quiet,
            )
        # In the user's units the log density loses log scale(y).
        lpd = log_predictive_density(pbnn.log_likelihood(model, posterior, *split.test))
        f = function_draws(model, posterior, split.test[0]).double().flatten(0, 1)
    verdict = ""
    if posterior.markov:
        verdict = check_convergence(model, posterior, split.test[0]).verdict
    return {
        "lpd": (lpd - np.log(split.scale)).tolist(),
        "f_scale": (f.std(0)[:, 0] * split.scale).tolist(),
        "seconds": posterior.seconds,
        "verdict": verdict,
        "warnings": sorted({str(w.message) for w in told if issubclass(w.category, PbnnWarning)}),
    }


def settings(kind: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what a stored result must have been made with."""
    names = ["hidden", "steps"]
    if kind == REFERENCE:
        names = ["hidden", "chains", "warmup", "draws", "max_tree_depth"]
    return {name: getattr(arguments, name) for name in names}


def stored(path: Path, wanted: dict[str, Any]) -> dict[str, Any] | None:
    """Return a result that is there already and was made with these settings."""
    if not path.is_file():
        return None
    result: dict[str, Any] = json.loads(path.read_text())
    return result if result["settings"] == wanted else None


def collect(arguments: argparse.Namespace) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Fit what is missing, within the budget; return results by data set and kind."""
    started = time.monotonic()
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for name, number, split in splits(arguments):
        for kind in (*GUIDES, REFERENCE):
            path = arguments.out / f"{name}-{number}-{kind}.json"
            wanted = settings(kind, arguments)
            result = stored(path, wanted)
            if result is None:
                if arguments.budget and time.monotonic() - started > arguments.budget:
                    continue
                result = {**fit(kind, split, arguments), "settings": wanted, "split": number}
                with writing(path) as temporary:
                    temporary.write_text(json.dumps(result))
                print(f"{path.stem}: {result['seconds']:.0f} s {result['verdict']}", flush=True)
            found.setdefault((name, kind), []).append(result)
    return found


def interval(values: NDArray[np.float64], statistic: Any) -> str:
    """Return a statistic with its 95% bootstrap interval over rows, as text."""
    if not len(values):
        return ""
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(values), (REPLICATES, len(values)))
    low, high = np.quantile(statistic(values[picks], axis=1), [0.025, 0.975])
    return f"{statistic(values):.2f} [{low:.2f}, {high:.2f}]"


def table(found: dict[tuple[str, str], list[dict[str, Any]]]) -> pd.DataFrame:
    """Return one row for each data set and posterior, over the held-out rows of all its splits."""
    rows = []
    for (name, kind), results in found.items():
        reference = {r["split"]: r for r in found.get((name, REFERENCE), [])}
        pairs = [(r, reference[r["split"]]) for r in results if r["split"] in reference]
        gains, ratios = (
            np.concatenate([[], *(combine(*(np.array(r[key]) for r in pair)) for pair in pairs)])
            for key, combine in (("lpd", np.subtract), ("f_scale", np.divide))
        )
        verdicts = [r["verdict"] for r in results if r["verdict"]]
        rows.append(
            {
                "data": name,
                "posterior": kind,
                "splits": len(results),
                "log density": interval(np.concatenate([r["lpd"] for r in results]), np.mean),
                "minus NUTS": "" if kind == REFERENCE else interval(gains, np.mean),
                "spread of f / NUTS": "" if kind == REFERENCE else interval(ratios, np.median),
                "seconds": f"{np.median([r['seconds'] for r in results]):.0f}",
                "reference": ", ".join(f"{verdicts.count(v)} {v}" for v in sorted(set(verdicts))),
            }
        )
    return pd.DataFrame(rows).sort_values("data", kind="stable")


def markdown(frame: pd.DataFrame) -> str:
    """Return a table as Markdown."""
    lines = [frame.columns, ["---"] * len(frame.columns), *frame.astype(str).to_numpy()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def main() -> None:
    """Fit, and write the table as Markdown and CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of the tables and their splits")
    parser.add_argument("--out", type=Path, default=Path("runs/uci_guides"))
    parser.add_argument("--datasets", nargs="+", default=["yacht", "energy", "concrete"])
    parser.add_argument("--splits", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--hidden", type=int, default=50)
    parser.add_argument("--steps", type=int, default=20_000, help="of SVI, at most")
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=500)
    parser.add_argument("--draws", type=int, default=500, help="of each chain")
    parser.add_argument("--max-tree-depth", type=int, default=9)
    parser.add_argument("--budget", type=float, help="seconds after which no fit is begun")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on shipped data")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.hidden, arguments.steps, arguments.quiet = 3, 40, True
        arguments.chains, arguments.warmup, arguments.draws, arguments.max_tree_depth = 2, 10, 10, 3
    elif arguments.data is None:
        parser.error("--data is needed: a folder with yacht.csv, yacht.splits.json, …")
    frame = table(collect(arguments))
    with writing(arguments.out / "table.csv") as path:
        frame.to_csv(path, index=False)
    with writing(arguments.out / "table.md") as path:
        path.write_text(markdown(frame), encoding="utf-8")
    print(markdown(frame))


if __name__ == "__main__":
    main()
