"""All roads to a posterior of one model file, side by side: what each is worth, and what it costs.

scikit-learn's diabetes (regression) and digits (classes), standardised by the training rows. For
each road one line: log density of the test rows, RMSE or accuracy, coverage of the 90% interval or
ECE, how much wider f(x) spreads on rows moved away from the data by 2 training scales than on the
test rows, seconds to fit and to predict, and memory of the posterior.

python examples/all_roads.py                              minutes
python examples/all_roads.py --datasets diabetes --roads nuts normal map
python examples/all_roads.py --smoke                      seconds, for tests

NUTS is the reference on diabetes; on digits it runs only if --roads names it. Laplace needs
laplace-torch (pip install 'pbnn[laplace]') and is left out without it.
"""

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

import pbnn
from pbnn.data import Dataset, prepare
from pbnn.errors import FitError, PbnnWarning
from pbnn.evaluate.calibration import expected_calibration_error
from pbnn.evaluate.crps import pit_normal_mixture
from pbnn.evaluate.probes import away
from pbnn.infer.posterior import Posterior
from pbnn.prediction import function_draws

MODELS = Path(__file__).parents[1] / "models"
DROPOUT = 0.1
LEVEL = 0.9
# By data set: model file, kind of target, hidden units.
DATASETS: dict[str, tuple[str, Any, int]] = {
    "diabetes": ("regression.py", "real", 10),
    "digits": ("classification.py", "class", 30),
}


def roads(smoke: bool) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return by name the fit, and its options."""
    steps, draws = (20, 10) if smoke else (3000, 400)
    chains: dict[str, Any] = {"chains": 2, "warmup": 10} if smoke else {"chains": 4, "warmup": 500}
    train = {"steps": steps, "draws": draws}
    return {
        "nuts": ("nuts", {"draws": draws, **chains}),
        "normal": ("svi", {"guide": "normal", **train}),
        "lowrank": ("svi", {"guide": "lowrank", **train}),
        "kronecker": ("svi", {"guide": "kronecker", **train}),
        "map": ("map", {"steps": steps}),
        "swag": ("swag", train),
        "ensemble": ("ensemble", {"members": 2 if smoke else 10, "steps": steps}),
        "dropout": ("dropout", train),
        "subspace": ("subspace", {"inner": {**chains, "max_tree_depth": 6}, **train}),
        "laplace": ("laplace", train),
        "last layer": ("laplace", {"layers": "last", **train}),
        "sgld": ("sgmcmc", {"algorithm": "sgld", "steps": 5 * steps, "draws": draws}),
        "sghmc": ("sgmcmc", {"algorithm": "sghmc", "steps": 5 * steps, "draws": draws}),
    }


def dropped(h: Tensor) -> Tensor:
    """Activate, then drop: `fit_dropout` alone switches the dropout on."""
    return nn.functional.dropout(torch.tanh(h), DROPOUT, training=False)


def kilobytes(posterior: Posterior) -> float:
    """Return the memory of the draws and of what belongs to them."""
    parts = (posterior.draws, posterior.constants, posterior.buffers)
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for part in parts
        for value in part.values()
    }
    return sum(storages.values()) / 1e3


def pit(model: nn.Module, posterior: Posterior, x: Any, y: Any) -> Any:
    """Return where in its predictive distribution each y lies, exactly: no draw is sampled."""
    f = function_draws(model, posterior, x).flatten(0, 1)[..., 0]
    scale = posterior.flat()["scale"][:, None].expand(f.shape)
    return pit_normal_mixture(f, scale, y)


def spread(model: nn.Module, posterior: Posterior, x: Any) -> float:
    """Return the scale of f(x) over draws, its root mean square over rows and outputs."""
    f = function_draws(model, posterior, x).double().flatten(0, 1)
    return float(f.var(0, correction=0).mean().sqrt())


def line(model: nn.Module, posterior: Posterior, data: Dataset) -> dict[str, float]:
    """Return the numbers of one road."""
    x, y = data.x_test, data.y_test
    started = time.perf_counter()
    units = data.preprocessor.target_units
    found = pbnn.predict(model, posterior, x, y, quantiles=(), units=units)
    seconds = time.perf_counter() - started
    assert found.log_predictive_density is not None
    numbers = {"log density": float(found.log_predictive_density.mean())}
    if found.probabilities is not None:
        guess = found.probabilities.argmax(1).numpy()
        numbers["accuracy"] = float((guess == y).mean())
        numbers["ECE"] = float(expected_calibration_error(found.probabilities, y))
    else:
        assert found.mean is not None
        outcome = units.restore(y)
        numbers["RMSE"] = float(((found.mean.numpy() - outcome) ** 2).mean() ** 0.5)
        numbers["coverage"] = float((abs(pit(model, posterior, x, y) - 0.5) < LEVEL / 2).mean())
    inside = spread(model, posterior, x)
    outside = spread(model, posterior, away(x, data.x_train)["shifted"])
    return {
        **numbers,
        "shifted / test": outside / inside if inside else float("nan"),
        "fit s": posterior.seconds,
        "predict s": seconds,
        "kB": kilobytes(posterior),
    }


def table(name: str, chosen: list[str] | None, smoke: bool, seed: int) -> pd.DataFrame:
    """Fit the roads to one data set; return one row for each."""
    file, kind, hidden = DATASETS[name]
    data = prepare(name, target_kind=kind, test_fraction=0.9 if smoke else 0.2, seed=seed)
    options = {"hidden": hidden, "out_features": data.preprocessor.out_features}
    rows = {}
    for road, (fit, given) in roads(smoke).items():
        if road not in (chosen or [r for r in roads(smoke) if name != "digits" or r != "nuts"]):
            continue
        model = pbnn.load_model(MODELS / file, in_features=data.x_train.shape[1], **options)
        if road == "dropout":
            model.activation = dropped  # type: ignore[assignment]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PbnnWarning)
            try:
                posterior = getattr(pbnn, f"fit_{fit}")(
                    model, data.x_train, data.y_train, seed=seed, progress=False,
                    compile=False if smoke else None, **given,
                )  # fmt: skip
            except FitError as error:
                print(f"{road}: {error}")
                continue
        rows[road] = line(model, posterior, data)
        print(f"{name}, {road}: {posterior.seconds:.0f} s", flush=True)
    return pd.DataFrame.from_dict(rows, orient="index")


def main() -> None:
    """Print one table for each data set."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--datasets", nargs="+", choices=DATASETS, default=list(DATASETS))
    parser.add_argument("--roads", nargs="+", choices=roads(False), help="these roads only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    arguments = parser.parse_args()
    names, chosen = arguments.datasets, arguments.roads
    if arguments.smoke:
        names, chosen = ["diabetes"], ["dropout", "sgld"]
    for name in names:
        print(f"\n{name}")
        print(table(name, chosen, arguments.smoke, arguments.seed).round(3).to_string())


if __name__ == "__main__":
    main()
