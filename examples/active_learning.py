"""Which digits to label next: by the mutual information of a posterior, or at random?

A few digits are labelled. Round after round, an ensemble is fitted to what is labelled, and more
are chosen from the rest: those for which its members disagree most about the class (BALD, Houlsby
et al. 2011), or any. Accuracy on test digits against the number of labels, over several seeds.

python examples/active_learning.py --out runs/active_learning       minutes
python examples/active_learning.py --smoke                          seconds, for tests
"""

import argparse
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import t as student  # type: ignore[import-untyped]

import pbnn
from pbnn.data import prepare
from pbnn.infer.posterior import Posterior
from pbnn.model import Model
from pbnn.plots import save
from pbnn.plots.figures import SERIES, WIDE, new_axes

MODEL = Path(__file__).parents[1] / "models" / "classification.py"
CHOICES = ("mutual information", "random")


def grow(choice: str, seed: int, rounds: int, batch: int, *, smoke: bool) -> list[float]:
    """Return the accuracy on test digits after each round, before the first choice onwards."""
    data = prepare("digits", target_kind="class", test_fraction=0.4, seed=seed)
    model = pbnn.load_model(
        MODEL,
        in_features=data.x_train.shape[1],
        out_features=10,
        hidden=4 if smoke else 30,
        weight_scale=4.0,
    )
    rng = np.random.default_rng(seed)
    labelled = rng.permutation(len(data.x_train))[:batch]
    accuracy = []
    for taken in range(rounds):
        posterior = pbnn.fit_ensemble(
            model,
            data.x_train[labelled],
            data.y_train[labelled],
            members=10,
            steps=5 if smoke else 300,
            seed=seed + taken,
            compile=False,
            progress=False,
        )
        found = pbnn.predict(model, posterior, data.x_test).probabilities
        assert found is not None
        accuracy.append(float((found.argmax(1).numpy() == data.y_test).mean()))
        rest = np.setdiff1d(np.arange(len(data.x_train)), labelled)
        labelled = np.r_[labelled, chosen(choice, model, posterior, data.x_train, rest, batch, rng)]
    return accuracy


def chosen(
    choice: str,
    model: Model,
    posterior: Posterior,
    x: NDArray[np.float64],
    rest: NDArray[np.int64],
    batch: int,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Return the rows to label next."""
    if choice == "random":
        return rng.choice(rest, batch, replace=False)
    information = pbnn.predict(model, posterior, x[rest]).mutual_information
    assert information is not None
    return rest[np.argsort(-information.numpy(), kind="stable")[:batch]]


def main() -> None:
    """Grow both sets of labels for each seed; print one table and draw one figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/active_learning"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batch", type=int, default=20, help="digits labelled in each round")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    arguments = parser.parse_args()
    seeds, rounds = (2, 1) if arguments.smoke else (arguments.seeds, arguments.rounds)
    labels = arguments.batch * np.arange(1, rounds + 1)
    axes = new_axes(WIDE)
    shown, paired = {}, {}
    for choice, (color, marker, line) in zip(CHOICES, SERIES, strict=False):
        runs = np.array(
            [
                grow(choice, seed, rounds, arguments.batch, smoke=arguments.smoke)
                for seed in range(seeds)
            ]
        )
        paired[choice] = runs
        mean, half = runs.mean(0), half_interval(runs)
        axes.fill_between(labels, mean - half, mean + half, color=color, alpha=0.2, lw=0)
        axes.plot(labels, mean, marker + line, color=color, label=choice)
        shown[choice] = [f"{m:.3f} ± {h:.3f}" for m, h in zip(mean, half, strict=True)]
    gain = paired[CHOICES[0]] - paired[CHOICES[1]]
    shown["difference"] = [
        f"{m:+.3f} ± {h:.3f}" for m, h in zip(gain.mean(0), half_interval(gain), strict=True)
    ]
    print(f"accuracy on test digits, mean over {seeds} seeds with 95% intervals\n")
    print(pd.DataFrame(shown, index=pd.Index(labels, name="labels")).to_string(), "\n")
    axes.set(xlabel="labelled digits", ylabel="accuracy on test digits", title="Labels chosen by")
    axes.legend(loc="lower right")
    print(save(axes, arguments.out / "accuracy.png"))


def half_interval(runs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return half of the 95% interval of the mean over seeds (Student's t), by column."""
    half: NDArray[np.float64] = (
        student.ppf(0.975, len(runs) - 1) * runs.std(0, ddof=1) / len(runs) ** 0.5
    )
    return half


if __name__ == "__main__":
    matplotlib.use("Agg")
    main()
