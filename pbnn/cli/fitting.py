"""Commands that fit: one road, or several beside a reference; each leaves a run folder."""

import argparse
import contextlib
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pbnn.cli.messages import warnings_held
from pbnn.cli.roads import check_road, named_values, road_name, road_options
from pbnn.errors import DataError, PbnnWarning

if TYPE_CHECKING:
    from pbnn.data import Dataset
    from pbnn.infer.posterior import Posterior
    from pbnn.prediction import Prediction
    from pbnn.runs import Run

__all__ = ["run_compare", "run_fit"]


def run_compare(arguments: argparse.Namespace) -> None:
    """Fit several roads, and print one table."""
    from pbnn.evaluate.comparison import compare
    from pbnn.evaluate.probes import away

    if not 0 < arguments.test_fraction < 1:
        raise DataError(
            f"--test-fraction {arguments.test_fraction}: compare needs held-out rows; expected a "
            "share between 0 and 1"
        )
    roads = list(dict.fromkeys(arguments.roads))
    if len(roads) < 2:
        raise DataError(f"--roads {' '.join(roads)}: expected two or more, such as normal nuts")
    for road in roads:
        road_options(road, arguments)
    run, data = _start(arguments)
    fits: dict[str, Posterior] = {}
    for road in roads:
        with run.removed_if_empty() if not fits else contextlib.nullcontext():
            fits[road] = _kept(run, road, _fitted(run, data, arguments, road))
    repeats = {}
    if arguments.repeat:
        other = argparse.Namespace(**{**vars(arguments), "seed": arguments.seed + 1})
        repeats = {r: _fitted(run, data, other, r) for r in roads if not fits[r].markov}
    result = compare(
        fits,
        run.model,
        data.x_test,
        data.y_test,
        reference="nuts" if "nuts" in fits else None,
        repeats=repeats,
        elsewhere=away(data.x_test, data.x_train, seed=arguments.seed),
        train=(data.x_train, data.y_train),
        units=data.preprocessor.target_units,
        seed=arguments.seed,
        device=arguments.device,
    )
    run.write_table("table", result.table)
    run.write_table("distances", result.distances)
    print(f"\n{result}\n")
    _export(run, data, fits, result.predictions, arguments)


def run_fit(arguments: argparse.Namespace) -> None:
    """Fit by one road."""
    from pbnn.prediction import predict

    name = road_name(arguments)
    road_options(name, arguments)
    run, data = _start(arguments)
    with run.removed_if_empty():
        posterior = _kept(run, name, _fitted(run, data, arguments, name))
    if arguments.method == "svi":
        _report(run, data, posterior, arguments)
    if posterior.markov and len(data.x_test):
        from pbnn.evaluate.convergence import check_convergence

        found = check_convergence(run.model, posterior, data.x_test, device=arguments.device)
        print(f"\n{name} {found}\n")
    if arguments.method in ("map", "swag"):
        _report_sharpness(run, data, posterior, arguments)
    units = data.preprocessor.target_units
    prediction = predict(run.model, posterior, data.x_test, units=units, device=arguments.device)
    _export(run, data, {name: posterior}, {name: prediction}, arguments)


def _report(
    run: "Run", data: "Dataset", posterior: "Posterior", arguments: argparse.Namespace
) -> None:
    """Print what an SVI fit says about itself, and keep its table of sites."""
    from pbnn.evaluate.svi_report import svi_report

    report = svi_report(posterior, run.model, data.x_train, data.y_train, device=arguments.device)
    run.write_table("svi_sites", report.sites)
    print(f"\n{report}\n")


def _report_sharpness(
    run: "Run", data: "Dataset", posterior: "Posterior", arguments: argparse.Namespace
) -> None:
    """Print how sharp the loss is where the network was trained to, and keep the table."""
    from pbnn.evaluate.sharpness import check_sharpness

    sharpness = check_sharpness(
        run.model, posterior, data.x_train, data.y_train, device=arguments.device
    ).to_frame()
    run.write_table("sharpness", sharpness, index=False)
    text = sharpness.to_string(index=False)
    print(f"\nsharpness of -log joint / rows at the mean of the draws:\n{text}\n")


def _start(arguments: argparse.Namespace) -> tuple["Run", "Dataset"]:
    """Read the data, build the model, open the run folder, and print the table of sites."""
    import torch

    from pbnn.cli.tables import read_tables
    from pbnn.data import prepare
    from pbnn.front_door import check_model
    from pbnn.runs import Run, check_range, free_folder, model_for, target_kind_of

    if arguments.threads < 1:
        raise DataError(f"--threads {arguments.threads}: expected 1 or more")
    torch.set_num_threads(arguments.threads)
    options = named_values("--set", arguments.set)
    table, _ = read_tables(vars(arguments))
    data = prepare(
        table,
        target_kind=target_kind_of(arguments.model, options, table),
        test_fraction=arguments.test_fraction,
        seed=arguments.seed,
        impute=arguments.impute,
    )
    model = model_for(arguments.model, data.preprocessor, options)
    for part, x, y in (
        (data.train_rows, data.x_train, data.y_train),
        (data.test_rows, data.x_test, data.y_test),
    ):
        rows = table.rows.take(part)
        check_range(x, data.preprocessor.feature_names, model, rows)
        # Draws of y are kept in both units.
        for values in (y, data.preprocessor.target_units.restore(y)):
            check_range(values, data.preprocessor.target_names, model, rows)
    sites = check_model(model, data.x_train, data.y_train, device=arguments.device)
    folder = arguments.out or free_folder(arguments.model, data.name)
    settings = {k: v for k, v in vars(arguments).items() if k != "command"}
    run = Run.create(folder, arguments.model, model, data.preprocessor, settings)
    run.write_table("sites", sites, index=False)
    print(f"{data.name}: {len(data.x_train)} training rows, {len(data.x_test)} test rows")
    for note in data.preprocessor.notes:
        print(note)
    print(sites.to_string(index=False))
    return run, data


def _fitted(run: "Run", data: "Dataset", arguments: argparse.Namespace, name: str) -> "Posterior":
    """Fit by one road; stop the command where Ctrl-C cut the fit short."""
    with warnings_held():
        posterior = check_road(name)(
            run.model,
            data.x_train,
            data.y_train,
            **road_options(name, arguments),
            seed=arguments.seed,
            device=arguments.device,
            progress=not arguments.quiet,
        )
        # Fits take Ctrl-C as the wish to see what there is.
        told = posterior.provenance
        if told.get("interrupted") or told.get("ended") == "interrupted":
            path = posterior.save(run.folder / f"{name}_interrupted.pt")
            raise KeyboardInterrupt(f"the draws of {name} so far are in {path}")
    return posterior


def _kept(run: "Run", name: str, posterior: "Posterior") -> "Posterior":
    path = posterior.save(run.folder / f"{name}.pt")
    print(f"{name}: {posterior.seconds:.1f} s, {path}")
    return posterior


def _export(
    run: "Run",
    data: "Dataset",
    fits: Mapping[str, "Posterior"],
    predictions: Mapping[str, "Prediction"],
    arguments: argparse.Namespace,
) -> None:
    """Write one netCDF file for each posterior, and the pictures."""
    from pbnn.inference_data import to_inference_data, write_netcdf
    from pbnn.plots import draw_run

    exported = {}
    for name, posterior in fits.items():
        exported[name] = to_inference_data(
            posterior,
            model=run.model,
            x=data.x_train,
            y=data.y_train,
            x_new=data.x_test if len(data.x_test) else None,
            feature_names=data.preprocessor.feature_names,
            units=data.preprocessor.target_units,
            seed=arguments.seed,
            device=arguments.device,
        )
        write_netcdf(exported[name], run.folder / f"{name}.nc")
    units = data.preprocessor.target_units
    files = []
    try:
        files = draw_run(run.folder, exported, predictions, data.y_test, units)
    except (ArithmeticError, ValueError) as error:
        # Values near the end of a float's range have no axis; the fit and its table stand.
        warnings.warn(f"the pictures could not be drawn: {error}", PbnnWarning, stacklevel=2)
    print(f"pictures: {', '.join(path.name for path in files) or 'none for this target'}")
    print(f"run folder: {run.folder}")
