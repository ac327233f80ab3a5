"""Split digits: yesterday's posterior as today's prior, against plain fine-tuning.

Five tasks come one after another: 0 or 1, 2 or 3, …, 8 or 9; each asks which of the two a digit is,
and the rows of earlier tasks are gone. One network with one head learns them all.

    continual    the posterior of task t is the prior of task t + 1 (Nguyen et al. 2018)
    fine-tuning  the weights of task t are where the training of task t + 1 starts

Prints the accuracy on held-out digits of each task after the last one, its mean, and, for the mean,
what a fit of all tasks at once reaches.

python examples/continual.py              minutes
python examples/continual.py --smoke      seconds, for tests
"""

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import pbnn
from pbnn.errors import PbnnWarning
from pbnn.infer.posterior import Posterior
from pbnn.priors import from_posterior

MODEL = Path(__file__).parents[1] / "models" / "classification.py"
TASKS = ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))
Rows = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
Start = str | dict[str, torch.Tensor]


def tasks(seed: int) -> list[tuple[Rows, Rows]]:
    """Return training and test rows of each task; y says which of the two digits it is."""
    x, digit = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    found = []
    for pair in TASKS:
        rows = np.isin(digit, pair)
        parts = train_test_split(
            x[rows], digit[rows] % 2, test_size=0.3, random_state=seed, stratify=digit[rows]
        )
        found.append(((parts[0], parts[2]), (parts[1], parts[3])))
    return found


def network(hidden: int) -> Any:
    """Return the network, with the priors of its model file."""
    return pbnn.load_model(MODEL, in_features=64, out_features=2, hidden=hidden)


def accuracies(model: Any, posterior: Posterior, tests: list[Rows]) -> list[float]:
    """Return the share of right answers on the test rows of each task."""
    found = []
    for x, y in tests:
        p = pbnn.predict(model, posterior, x, quantiles=()).probabilities
        assert p is not None
        found.append(float((p.argmax(1).numpy() == y).mean()))
    return found


def continual(trains: list[Rows], hidden: int, steps: int, seed: int) -> tuple[Any, Posterior]:
    """Fit task after task, each with the posterior of the last one as its prior."""
    model, posterior = network(hidden), None
    start: Start = "fan_in"
    for rows in trains:
        if posterior is not None:
            model = network(hidden)
            pbnn.place_priors(model, from_posterior(posterior))
            start = {name: value[0].mean(0) for name, value in posterior.draws.items()}
        posterior = pbnn.fit_svi(
            model, *rows, init=start, steps=steps, draws=200, seed=seed,
            progress=False,
        )  # fmt: skip
    assert posterior is not None
    return model, posterior


def fine_tuned(trains: list[Rows], hidden: int, steps: int, seed: int) -> tuple[Any, Posterior]:
    """Train on task after task, each from the weights of the last one."""
    model, posterior = network(hidden), None
    start: Start = "fan_in"
    for rows in trains:
        posterior = pbnn.fit_map(model, *rows, init=start, steps=steps, seed=seed, progress=False)
        start = {name: value[0, 0] for name, value in posterior.draws.items()}
    assert posterior is not None
    return model, posterior


def together(trains: list[Rows], hidden: int, steps: int, seed: int) -> tuple[Any, Posterior]:
    """Fit all tasks at once, which no later task can make worse."""
    x, y = (np.concatenate(parts) for parts in zip(*trains, strict=True))
    return continual([(x, y)], hidden, steps, seed)


ROADS: dict[str, Callable[..., tuple[Any, Posterior]]] = {
    "continual": continual,
    "fine-tuning": fine_tuned,
    "all at once": together,
}


def main() -> None:
    """Go through the tasks by each road, for each seed; print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=800, help="of each task")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seeds, steps, hidden = arguments.seeds, arguments.steps, 50
    if arguments.smoke:
        seeds, steps, hidden = 1, 20, 4
    roads = dict(list(ROADS.items())[: 2 if arguments.smoke else None])
    rows = []
    for seed in range(seeds):
        parts = tasks(seed)[: 2 if arguments.smoke else None]
        trains, tests = ([part[k] for part in parts] for k in (0, 1))
        for name, road in roads.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PbnnWarning)
                model, posterior = road(trains, hidden, steps, seed)
            found = accuracies(model, posterior, tests)
            for pair, accuracy in zip(TASKS, found, strict=False):
                rows.append({"road": name, "task": f"{pair[0]} or {pair[1]}", "accuracy": accuracy})
    frame = pd.DataFrame(rows)
    table = frame.pivot_table("accuracy", "road", "task")
    table["mean"] = table.mean(axis=1)
    print(f"accuracy on held-out digits after {len(trains)} tasks, mean of {seeds} seeds")
    print(table.loc[list(roads)].to_string(float_format=lambda v: f"{v:.3f}"))


if __name__ == "__main__":
    main()
