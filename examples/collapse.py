"""Where the diagonal posterior fails: uncertainty in a gap of the data and beyond them.

A noisy sine, training inputs in [-2, -0.5] and [0.5, 2]; the gap between them is near, [4, 6] far
out of distribution. Two networks: a deep one on few rows, and a shallow one with dense data and
wide priors, where the diagonal guide can do. Each fit is kept in a file, so a study that was
stopped goes on; after a change of sizes, name another folder.

python examples/collapse.py --out runs/collapse       an hour
python examples/collapse.py --smoke                   seconds, for tests
"""

import argparse
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import torch
from scipy.stats import t as student  # type: ignore[import-untyped]

import pbnn
from pbnn.errors import ConvergenceWarning
from pbnn.files import writing
from pbnn.infer.posterior import Posterior
from pbnn.model import Model
from pbnn.plots import plot_field, save
from pbnn.plots.figures import grid

MODEL = Path(__file__).parents[1] / "models" / "regression.py"
NOISE = 0.2
LINE = torch.linspace(-4.0, 7.0, 111)[:, None]
GUIDES = ("normal", "lowrank", "kronecker")
CASES: dict[str, dict[str, Any]] = {
    "deep": {
        "rows": 100,
        "network": {"hidden": 20, "depth": 2, "weight_scale": 2.0},
        "posteriors": (*GUIDES, "nuts", "ensemble"),
    },
    "shallow": {
        "rows": 500,
        "network": {"hidden": 20, "depth": 1, "weight_scale": 3.0, "bias_scale": 3.0},
        "posteriors": ("normal",),
    },
}
SHOWN = {
    "A gap": ("A", "gap", "auroc_epistemic"),
    "A far": ("A", "far", "auroc_epistemic"),
    "B gap": ("B", "gap", "log_ratio"),
    "B far": ("B", "far", "log_ratio"),
    "coverage id": ("C", "id", "coverage_90"),
    "coverage gap": ("C", "gap", "coverage_90"),
    "coverage far": ("C", "far", "coverage_90"),
    "NLL id": ("C", "id", "nll"),
}

Rows = tuple[torch.Tensor, torch.Tensor]
Job = tuple[str, str, int]  # network, posterior, seed
Result = dict[str, Any]


def noisy_sine(rows: int, seed: int) -> dict[str, Rows]:
    """Return x `(n, 1)` and y `(n,)` of training, held-out, near and far rows."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(count: int, low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(count, generator=generator)

    def observed(x: torch.Tensor) -> Rows:
        noise = NOISE * torch.randn(len(x), generator=generator)
        return x[:, None], torch.sin(2.0 * x) + noise

    def home(count: int) -> torch.Tensor:
        return torch.cat([uniform(count // 2, -2.0, -0.5), uniform(count // 2, 0.5, 2.0)])

    inputs = {"train": home(rows), "id": home(200)}
    inputs |= {"gap": uniform(200, -0.5, 0.5), "far": uniform(200, 4.0, 6.0)}
    return {name: observed(x) for name, x in inputs.items()}


def fit(road: str, model: Model, data: Rows, seed: int, *, smoke: bool) -> Posterior:
    """Return a posterior of one road."""
    steps = 20 if smoke else 4000
    if road == "nuts":
        length = 5 if smoke else 200
        return pbnn.fit_nuts(
            model,
            *data,
            chains=2,
            warmup=length,
            draws=length,
            max_tree_depth=3 if smoke else 8,
            seed=seed,
            compile=not smoke,
            progress=False,
        )
    plain: dict[str, Any] = {"steps": steps, "seed": seed, "compile": False, "progress": False}
    if road == "ensemble":
        return pbnn.fit_ensemble(model, *data, members=10, **plain)
    return pbnn.fit_svi(model, *data, guide=road, draws=500, **plain)


def study(name: str, road: str, seed: int, *, smoke: bool) -> Result:
    """Fit one posterior to one data set, and return its numbers, verdicts and field."""
    case = CASES[name]
    data = noisy_sine(20 if smoke else case["rows"], seed)
    network = {"hidden": 4} if smoke else case["network"]
    model = pbnn.load_model(MODEL, in_features=1, **network)
    with warnings.catch_warnings():
        # Some fits of this study are meant to be poor; the table says how poor.
        warnings.simplefilter("ignore", ConvergenceWarning)
        posterior = fit(road, model, data["train"], seed, smoke=smoke)
    report = pbnn.check_ood(
        model,
        posterior,
        *data["id"],
        {"gap": data["gap"], "far": data["far"]},
        scores=("epistemic",),
        replicates=20 if smoke else 1000,
        seed=seed,
    )
    field = pbnn.predict(model, posterior, LINE, quantiles=()).epistemic_scale
    assert field is not None
    return {
        "numbers": {short: report.interval(*key).value for short, key in SHOWN.items()},
        "verdicts": {where: verdict.name for where, verdict in report.verdicts.items()},
        "field": field.tolist(),
        "seconds": posterior.seconds,
    }


def jobs(seeds: int, chosen: list[str] | None) -> Iterator[Job]:
    """Yield each fit, all of a seed before the next."""
    for seed in range(seeds):
        for name, case in CASES.items():
            for road in case["posteriors"]:
                if chosen is None or road in chosen:
                    yield name, road, seed


def interval(values: "pd.Series[float]") -> str:
    """Return mean and 95% interval over seeds (Student's t)."""
    half = student.ppf(0.975, len(values) - 1) * values.std() / len(values) ** 0.5
    return f"{values.mean():.2f} ± {half:.2f}"


def counted(values: "pd.Series[str]") -> str:
    """Return each verdict and how often it was reached."""
    return ", ".join(f"{name} {count}" for name, count in values.value_counts().items())


def tables(results: Mapping[Job, Result]) -> tuple[str, str]:
    """Return the numbers over seeds, and how often each verdict was reached, in Markdown."""
    names = ["network", "posterior", "seed"]
    index = pd.MultiIndex.from_tuples(list(results), names=names)
    numbers, verdicts = (
        pd.DataFrame([result[part] for result in results.values()], index=index).groupby(
            names[:2], sort=False
        )
        for part in ("numbers", "verdicts")
    )
    frame = numbers.agg(interval)
    frame.insert(0, "seeds", numbers.size())
    return markdown(frame), markdown(verdicts.agg(counted))


def markdown(frame: pd.DataFrame) -> str:
    """Return a table with its index as leading columns."""
    whole = frame.reset_index()
    rows = [whole.columns.tolist(), ["---"] * whole.shape[1], *whole.values.tolist()]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


def draw(results: Mapping[Job, Result], path: Path) -> Path:
    """Draw the variance fields: a panel for each network and posterior, a line for each seed."""
    fields: dict[tuple[str, str], list[list[float]]] = {}
    for (name, road, _), result in results.items():
        fields.setdefault((name, road), []).append(result["field"])
    panels = grid(len(fields))
    for axes, ((name, road), runs) in zip(panels, fields.items(), strict=True):
        training = noisy_sine(CASES[name]["rows"], 0)["train"][0]
        axes.axvspan(4.0, 6.0, color="0.92", linewidth=0)
        plot_field(LINE[:, 0].numpy(), np.array(runs), training=training.numpy(), log=True, ax=axes)
        axes.set_title(f"{road}, {name}")
        axes.label_outer()
    return save(panels, path)


def main() -> None:
    """Fit what is not there yet, then print the tables and draw the fields."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/collapse"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="+", metavar="POSTERIOR", help="posteriors to fit")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # small sums; and the same bits everywhere
    out = arguments.out / "smoke" if arguments.smoke else arguments.out
    results: dict[Job, Result] = {}
    smoke = [("deep", "normal", 0), ("deep", "nuts", 0)]
    for job in smoke if arguments.smoke else jobs(arguments.seeds, arguments.only):
        path = out / f"{'-'.join(map(str, job))}.json"
        if not path.exists():
            result = study(*job, smoke=arguments.smoke)
            with writing(path) as temporary:
                temporary.write_text(json.dumps(result), encoding="utf-8")
        results[job] = json.loads(path.read_text(encoding="utf-8"))
    print("\n\n".join(tables(results)))
    print(draw(results, out / "collapse.png"))


if __name__ == "__main__":
    matplotlib.use("Agg")
    main()
