"""ArviZ's own plots on pbnn's files, with the arguments that suit a network: a page of PNGs.

python examples/arviz_gallery.py                     fits SVI and NUTS first, a few minutes
python examples/arviz_gallery.py nuts.nc normal.nc   draws from files; needs no torch
python examples/arviz_gallery.py --smoke             seconds, for tests

Weights are not plotted: hidden units permute and flip sign, so that a trace or an R-hat of a weight
means nothing. The noise scale, lp and f(x) can be compared, between chains and between posteriors.
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import arviz as az
import matplotlib
import numpy as np

from pbnn.inference_data import group, groups, read_netcdf, write_netcdf

MODEL = Path(__file__).parents[1] / "models" / "regression.py"
ARVIZ1 = int(az.__version__.split(".")[0]) >= 1
ROWS = list(range(12))

Draw = Callable[[], Any]


def fitted(folder: Path, smoke: bool) -> list[Path]:
    """Fit a guide and NUTS to diabetes, and write one file for each."""
    import pbnn
    from pbnn.data import prepare
    from pbnn.runs import model_for

    steps, warmup, draws = (50, 20, 20) if smoke else (5000, 500, 500)
    data = prepare("diabetes", target_kind="real")
    model = model_for(MODEL, data.preprocessor, {"hidden": 2 if smoke else 10})
    train = data.x_train, data.y_train
    fits = {
        "nuts": pbnn.fit_nuts(
            model, *train, warmup=warmup, draws=draws, max_tree_depth=4 if warmup < 100 else 10
        ),
        "normal": pbnn.fit_svi(model, *train, guide="normal", steps=steps),
    }
    return [
        write_netcdf(
            pbnn.to_inference_data(
                posterior,
                model=model,
                x=data.x_train,
                y=data.y_train,
                units=data.preprocessor.target_units,
                feature_names=data.preprocessor.feature_names,
                prior=4 * draws,
            ),
            folder / f"{name}.nc",
        )
        for name, posterior in fits.items()
    ]


def plots_of_one(data: Any) -> dict[str, Draw]:
    """The plots of one posterior, by name; LOO and the plots of chains only where chains are."""
    chains = bool(data.attrs["pbnn_markov"])
    rows = {"obs_id": ROWS}
    plots: dict[str, Draw] = {
        "posterior predictive": lambda: (
            az.plot_ppc_dist(data) if ARVIZ1 else az.plot_ppc(data, num_pp_samples=50)
        ),
    }
    if "prior_predictive" in groups(data):
        plots["prior predictive"] = lambda: (
            az.plot_ppc_dist(data, group="prior_predictive")
            if ARVIZ1
            else az.plot_ppc(data, group="prior", num_pp_samples=50)
        )
    if chains:
        plots |= {
            "loo_pit": lambda: az.plot_loo_pit(data) if ARVIZ1 else az.plot_loo_pit(data, y="y"),
            "pareto_k": lambda: az.plot_khat(az.loo(data, pointwise=True)),
            "trace": lambda: az.plot_trace(data, var_names=["scale"]),
            "rank": lambda: az.plot_rank(data, var_names=["scale"]),
            "ess": lambda: az.plot_ess(data, var_names=["f"], coords={"obs_id": ROWS[:4]}),
            "autocorrelation": lambda: az.plot_autocorr(data, var_names=["scale"]),
            "forest": lambda: az.plot_forest(data, var_names=["f"], coords=rows),
        }
    if "energy" in group(data, "sample_stats"):
        plots["energy"] = lambda: az.plot_energy(data)
    return plots


def plots_of_all(fits: Mapping[str, Any]) -> dict[str, Draw]:
    """The plots that hold posteriors against each other, in function space."""
    coords = {"obs_id": ROWS}
    plots: dict[str, Draw] = {}
    if len(fits) > 1 and ARVIZ1:
        plots["noise scale"] = lambda: az.plot_dist(dict(fits), var_names=["scale"])
        plots["f at rows"] = lambda: az.plot_forest(dict(fits), var_names=["f"], coords=coords)
    elif len(fits) > 1:
        names, data = list(fits), list(fits.values())
        plots["noise scale"] = lambda: az.plot_density(data, data_labels=names, var_names=["scale"])
        plots["f at rows"] = lambda: az.plot_forest(
            data, model_names=names, var_names=["f"], coords=coords, combined=True
        )
    # az.loo favours a guide that is too narrow, so only chains are ranked by it.
    ranked = {name: data for name, data in fits.items() if data.attrs["pbnn_markov"]}
    if len(ranked) > 1:
        plots["compare"] = lambda: az.plot_compare(az.compare(ranked))
    else:
        print("compare: left out, it needs two fits by NUTS")
    return plots


def save(result: Any, path: Path) -> None:
    """Write what one of ArviZ's plots returned."""
    from matplotlib import pyplot as plt

    if ARVIZ1:
        result.savefig(path)
    else:
        np.ravel(result)[0].get_figure().savefig(path, dpi=110, bbox_inches="tight")
    plt.close("all")


def main() -> None:
    """Draw each plot to a file of its own, and a page that shows them all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="*", help="netCDF files of pbnn")
    parser.add_argument("--out", type=Path, default=Path("runs/gallery"))
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    files = arguments.files or fitted(arguments.out, arguments.smoke)
    fits = {path.stem: read_netcdf(path) for path in files}
    for name, data in fits.items():
        print(f"{name}: {', '.join(groups(data))}")
        print(az.summary(data, var_names=["scale", "f"], coords={"obs_id": ROWS}))
        print(az.loo(data) if data.attrs["pbnn_markov"] else data.attrs["pbnn_loo"])

    drawn = {f"{name}: {k}": v for name, d in fits.items() for k, v in plots_of_one(d).items()}
    page = [
        "<!doctype html><meta charset=utf-8><title>ArviZ gallery</title>",
        "<style>img { max-width: 100% }</style>",
    ]
    for title, draw in {**drawn, **plots_of_all(fits)}.items():
        path = arguments.out / f"{title.replace(': ', '_').replace(' ', '_')}.png"
        save(draw(), path)
        page.append(f"<h2>{title}</h2><img src='{path.name}' alt='{title}'>")
    index = arguments.out / "index.html"
    index.write_text("\n".join(page), encoding="utf-8")
    print(index)


if __name__ == "__main__":
    matplotlib.use("Agg")
    main()
