"""Digits that a network has never seen, and patches of photographs: which posterior notices?

scikit-learn's 8 × 8 digits, 0 to 7 for fit and test. Near out of distribution are the digits 8 and
9, far are patches of scikit-learn's sample photographs. Everything is standardised by the training
rows. Then the test digits are turned, step by step.

python examples/digits_ood.py --out runs/digits_ood       minutes
python examples/digits_ood.py --smoke                     seconds, for tests
"""

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import t as student  # type: ignore[import-untyped]
from sklearn.datasets import load_sample_images

import pbnn
from pbnn.data import Dataset, Table, prepare, read_table
from pbnn.data.shifts import hold_out_classes, shift_series
from pbnn.errors import ConvergenceWarning
from pbnn.evaluate.shift_series import shift_table
from pbnn.infer.posterior import Posterior
from pbnn.plots import plot_scores, plot_shift, save
from pbnn.plots.figures import grid

MODEL = Path(__file__).parents[1] / "models" / "classification.py"
SIDE = 8  # pixels of an image, each way
NUMBERS = {
    "A near": ("A", "near", "auroc_epistemic"),
    "A far": ("A", "far", "auroc_epistemic"),
    "A near, entropy": ("A", "near", "auroc_entropy"),
    "A far, entropy": ("A", "far", "auroc_entropy"),
    "A near, density": ("A", "near", "auroc_density"),
    "A far, density": ("A", "far", "auroc_density"),
    "B near": ("B", "near", "log_ratio"),
    "B far": ("B", "far", "log_ratio"),
    "accuracy": ("C", "id", "accuracy"),
    "NLL": ("C", "id", "nll"),
    "ECE": ("C", "id", "ece"),
}


def patches(count: int, seed: int) -> NDArray[Any]:
    """Return patches of two photographs in grey, 0 to 16 as the digits, `(count, 64)`."""
    rng = np.random.default_rng(seed)
    photographs = [image.mean(-1) / 16 for image in load_sample_images().images]
    out = []
    for k in range(count):
        image = photographs[k % len(photographs)]
        top, left = (rng.integers(size - SIDE) for size in image.shape)
        out.append(image[top : top + SIDE, left : left + SIDE].ravel())
    return np.stack(out)


def digits(seed: int) -> tuple[Dataset, Table, dict[str, Any]]:
    """Return the digits 0 to 7, their table, and the encoded rows of both other sets."""
    inside, outside = hold_out_classes(read_table("digits"), [8, 9])
    data = prepare(inside, target_kind="class", test_fraction=0.3, seed=seed)
    assert isinstance(outside.features, pd.DataFrame)
    far = pd.DataFrame(patches(300, seed), columns=outside.features.columns)
    sets = {"near": outside.features, "far": far}
    return data, inside, {name: data.preprocessor.transform(x) for name, x in sets.items()}


def roads(smoke: bool) -> dict[str, Callable[..., Posterior]]:
    """Return the posteriors to compare, by name, each a function of model, x, y and seed."""
    steps = 10 if smoke else 3000
    plain: dict[str, Any] = {"compile": False, "progress": False}
    draws = 10 if smoke else 200

    def guide(name: str) -> Callable[..., Posterior]:
        return lambda *data, seed: pbnn.fit_svi(
            *data, guide=name, steps=steps, draws=draws, seed=seed, **plain
        )

    few = steps // 5
    found: dict[str, Callable[..., Posterior]] = {
        "normal": guide("normal"),
        "lowrank": guide("lowrank"),
        "kronecker": guide("kronecker"),
        "swag": lambda *data, seed: pbnn.fit_swag(
            *data, steps=few, draws=draws, seed=seed, **plain
        ),
        "ensemble": lambda *data, seed: pbnn.fit_ensemble(
            *data, members=10, steps=few, seed=seed, **plain
        ),
    }
    return {"normal": found["normal"]} if smoke else found


def interval(values: "pd.Series[float]") -> str:
    """Return mean and 95% interval over seeds (Student's t)."""
    half = student.ppf(0.975, len(values) - 1) * values.std() / len(values) ** 0.5
    return f"{values.mean():.3f} ± {half:.3f}"


def main() -> None:
    """Fit each posterior for each seed; print one table, draw scores and turned digits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/digits_ood"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    arguments = parser.parse_args()
    seeds, few = (2, 20) if arguments.smoke else (arguments.seeds, 1000)
    rows: list[dict[str, Any]] = []
    scores: dict[str, dict[str, Any]] = {}
    turned: dict[str, pd.DataFrame] = {}
    for seed in range(seeds):
        data, table, sets = digits(seed)
        model = pbnn.load_model(
            MODEL, in_features=SIDE**2, out_features=8, hidden=4 if arguments.smoke else 30
        )
        for name, fit in roads(arguments.smoke).items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                posterior = fit(model, data.x_train, data.y_train, seed=seed)
            report = pbnn.check_ood(
                model,
                posterior,
                data.x_test,
                data.y_test,
                sets,
                x_train=data.x_train,
                scores=("epistemic", "entropy", "density"),
                replicates=few,
                seed=seed,
            )
            numbers = {k: report.interval(*key).value for k, key in NUMBERS.items()}
            rows.append({"posterior": name, **numbers, "seconds": posterior.seconds})
            if seed == 0:
                scores[name] = {k: of_set["epistemic"] for k, of_set in report.scores.items()}
                assert isinstance(table.features, pd.DataFrame)
                raw = table.features.iloc[data.test_rows]
                series = shift_series(raw, data.preprocessor, "rotation", image=(SIDE, SIDE))
                turned[name] = shift_table(model, posterior, series, data.y_test, replicates=few)
    table_of = pd.DataFrame(rows).groupby("posterior", sort=False).agg(interval).T
    print(f"mean over {seeds} splits, with 95% intervals\n\n{table_of.to_string()}\n")

    panels = grid(len(scores))
    for axes, (name, of_set) in zip(panels, scores.items(), strict=True):
        plot_scores(of_set, ax=axes)
        axes.set_title(name)
        axes.label_outer()
    print(save(panels, arguments.out / "scores.png"))
    for number in ("nll", "auroc_epistemic"):
        panels = grid(len(turned))
        for axes, (name, of_shift) in zip(panels, turned.items(), strict=True):
            plot_shift(of_shift, number, ax=axes)
            axes.set_title(name)
            axes.label_outer()
        print(save(panels, arguments.out / f"turned_{number}.png"))


if __name__ == "__main__":
    matplotlib.use("Agg")
    main()
