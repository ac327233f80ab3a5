"""The command line: arguments in, files and one table out; no numerics.

Nothing heavy is imported before a command runs, so that `pbnn --help` answers at once.
"""

import argparse
import ast
import contextlib
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pbnn._version import __version__
from pbnn.errors import DataError, FileError, PbnnError, PbnnWarning

if TYPE_CHECKING:
    from pbnn.data import Dataset
    from pbnn.infer.posterior import Posterior
    from pbnn.prediction import Prediction
    from pbnn.runs import Run

__all__ = ["main"]

GUIDES = ("normal", "lowrank", "kronecker")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0, 2 for bad input, 130 for Ctrl-C.

    Args:
        argv: Arguments; those of the process by default.
    """
    arguments = _parser().parse_args(argv)
    try:
        with _warnings_shown_once():
            arguments.command(arguments)
    except PbnnError as error:
        return _say(f"error: {error}", 2)
    except OSError as error:
        return _say(f"error: {error.filename or 'a file'}: {error.strerror or error}", 2)
    except SystemExit as error:
        # The arguments are parsed by now, so that only the code of a model can end the program.
        return _say(
            f"error: the model file calls sys.exit({error.code}); expected no call of it", 2
        )
    except KeyboardInterrupt as interrupt:
        return _say(f"interrupted; {str(interrupt) or 'what was finished is kept'}", 130)
    return 0


def _say(text: str, status: int = 0) -> int:
    """Print a message as one line, without the shapes that Pyro adds to errors; return a status."""
    text = text.partition("\nTrace Shapes:")[0]
    print("pbnn:", *(line.strip() for line in text.splitlines()), file=sys.stderr)
    return status


@contextlib.contextmanager
def _warnings_shown_once() -> Iterator[None]:
    """Print each warning of pbnn the first time that a block gives it, and no others."""
    shown = set()

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, PbnnWarning) and str(message) not in shown:
            shown.add(str(message))
            _say(f"warning: {message}")

    with warnings.catch_warnings():
        warnings.simplefilter("always", PbnnWarning)
        warnings.showwarning = show
        yield


@contextlib.contextmanager
def _warnings_held() -> Iterator[None]:
    """Give the warnings of a block at its end; none where it fails, whose error is one line."""
    with warnings.catch_warnings(record=True) as held:
        yield
    for warning in held:
        if issubclass(warning.category, PbnnWarning):
            warnings.warn(warning.message, warning.category, stacklevel=2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pbnn",
        description="Bayesian neural networks as Pyro models: fit one model file by SVI and NUTS, "
        "and see which fit to trust. A model file is code, and it is executed.",
    )
    parser.add_argument("--version", action="version", version=f"pbnn {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    compare = commands.add_parser(
        "compare",
        help="fit three guides and NUTS, and print one table",
        description="Fit the model by SVI with three guides and by NUTS, and compare them on "
        "held-out rows. Leaves a run folder.",
    )
    _add_problem(compare)
    _add_svi(compare)
    _add_nuts(compare)
    compare.add_argument(
        "--repeat",
        action="store_true",
        help="fit each guide again with another seed, as a noise floor of its distance to NUTS",
    )
    compare.set_defaults(command=_compare)

    fit = commands.add_parser(
        "fit",
        help="fit a model by one road",
        description="Fit the model by one road. Leaves a run folder.",
    )
    _add_problem(fit)
    fit.add_argument("--method", choices=("svi", "nuts"), default="svi", help="default: svi")
    fit.add_argument("--guide", choices=GUIDES, default="normal", help="guide of SVI")
    fit.add_argument("--rank", type=int, help="rank of the low-rank guide")
    _add_svi(fit)
    _add_nuts(fit)
    fit.set_defaults(command=_fit)

    predict = commands.add_parser(
        "predict",
        help="predict new rows from a run",
        description="Predict the rows of a table from a run folder. Columns may be in any order.",
    )
    predict.add_argument("run", help="run folder")
    predict.add_argument("table", help="CSV, Parquet or .npz file with the feature columns")
    predict.add_argument("--out", required=True, help="CSV file to write")
    predict.add_argument("--posterior", help="which posterior of the run, such as nuts")
    predict.add_argument("--seed", type=int, default=0)
    predict.add_argument("--device")
    predict.set_defaults(command=_predict)
    return parser


def _add_problem(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="model file, such as models/regression.py")
    parser.add_argument(
        "--dataset",
        required=True,
        help="CSV, Parquet or .npz file, or diabetes, breast_cancer, wine, iris, digits",
    )
    parser.add_argument("--target", help="target column, or several, separated by commas")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="option of the model, such as hidden=64; may be repeated",
    )
    parser.add_argument("--drop", action="append", default=[], metavar="COLUMN")
    parser.add_argument("--categorical", action="append", default=[], metavar="COLUMN")
    parser.add_argument(
        "--impute", action="store_true", help="fill missing features from training statistics"
    )
    parser.add_argument("--test-fraction", type=float, default=0.2, help="default: 0.2")
    parser.add_argument("--seed", type=int, default=0, help="of the split and the fits")
    parser.add_argument("--device", help="such as cuda; default: cpu")
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="of the arithmetic; default: 1, best for small networks",
    )
    parser.add_argument("--out", help="run folder; default: runs/MODEL-DATASET, numbered")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")


def _add_svi(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("SVI")
    group.add_argument("--steps", type=int, default=5000, help="at most; default: 5000")
    group.add_argument("--lr", type=float, default=0.01, help="learning rate; default: 0.01")
    group.add_argument("--batch-size", type=int, help="rows in each step; default: all")


def _add_nuts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("NUTS")
    group.add_argument("--chains", type=int, default=4, help="default: 4")
    group.add_argument("--warmup", type=int, default=500, help="default: 500")
    group.add_argument("--draws", type=int, default=500, help="of each chain; default: 500")


def _compare(arguments: argparse.Namespace) -> None:
    from pbnn.evaluate.comparison import compare
    from pbnn.evaluate.probes import away

    if not 0 < arguments.test_fraction < 1:
        raise DataError(
            f"--test-fraction {arguments.test_fraction}: compare needs held-out rows; expected a "
            "share between 0 and 1"
        )
    run, data = _start(arguments)
    fits: dict[str, Posterior] = {}
    with run.removed_if_empty():
        for guide in GUIDES:
            fits[guide] = _kept(run, guide, _fitted(run, data, arguments, guide))
    fits["nuts"] = _kept(run, "nuts", _fitted(run, data, arguments, "nuts"))
    repeats = {}
    if arguments.repeat:
        other = argparse.Namespace(**{**vars(arguments), "seed": arguments.seed + 1})
        repeats = {guide: _fitted(run, data, other, guide) for guide in GUIDES}
    result = compare(
        fits,
        run.model,
        data.x_test,
        data.y_test,
        reference="nuts",
        repeats=repeats,
        elsewhere=away(data.x_test, data.x_train, seed=arguments.seed),
        units=data.preprocessor.target_units,
        seed=arguments.seed,
        device=arguments.device,
    )
    run.write_table("table", result.table)
    run.write_table("distances", result.distances)
    print(f"\n{result}\n")
    _export(run, data, fits, result.predictions, arguments)


def _fit(arguments: argparse.Namespace) -> None:
    from pbnn.prediction import predict

    run, data = _start(arguments)
    name = "nuts" if arguments.method == "nuts" else arguments.guide
    with run.removed_if_empty():
        posterior = _kept(run, name, _fitted(run, data, arguments, name))
    if arguments.method == "svi":
        _report(run, data, posterior, arguments)
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


def _predict(arguments: argparse.Namespace) -> None:
    from pbnn.data import read_features
    from pbnn.files import writing
    from pbnn.prediction import predict
    from pbnn.runs import Run, check_range

    out = Path(arguments.out)
    if out.is_dir():
        raise FileError(f"--out {out} is a folder; expected the name of a CSV file")
    if not out.parent.is_dir():
        raise FileError(f"--out {out}: there is no folder {out.parent}; make it first")
    with _warnings_held():
        run = Run.load(arguments.run)
        posterior = run.posterior(arguments.posterior)
        x, _ = read_features(arguments.table, run.preprocessor)
        check_range(x, run.preprocessor.feature_names, run.model)
        prediction = predict(
            run.model,
            posterior,
            x,
            units=run.preprocessor.target_units,
            seed=arguments.seed,
            device=arguments.device,
        )
        frame = prediction.to_frame(run.preprocessor.classes or None)
        with writing(out) as path:
            frame.to_csv(path, index=False)
    print(f"{len(frame)} rows: {out}")


def _start(arguments: argparse.Namespace) -> tuple["Run", "Dataset"]:
    """Read the data, build the model, open the run folder, and print the table of sites."""
    import torch

    from pbnn.data import prepare, read_table
    from pbnn.front_door import check_model
    from pbnn.runs import Run, check_range, free_folder, model_for, target_kind_of

    if arguments.threads < 1:
        raise DataError(f"--threads {arguments.threads}: expected 1 or more")
    torch.set_num_threads(arguments.threads)
    options = _options(arguments.set)
    table = read_table(arguments.dataset, arguments.target, categorical=arguments.categorical)
    data = prepare(
        table,
        target_kind=target_kind_of(arguments.model, options, table),
        test_fraction=arguments.test_fraction,
        seed=arguments.seed,
        impute=arguments.impute,
        drop=arguments.drop,
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


def _options(pairs: Sequence[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise DataError(f"--set {pair}: expected NAME=VALUE, such as --set hidden=64")
        try:
            options[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            options[name] = text
    return options


def _fitted(run: "Run", data: "Dataset", arguments: argparse.Namespace, name: str) -> "Posterior":
    """Fit by NUTS or by SVI with a guide; stop the command where Ctrl-C cut the fit short."""
    with _warnings_held():
        if name == "nuts":
            posterior = _fit_nuts(run, data, arguments)
        else:
            posterior = _fit_svi(run, data, arguments, name)
        # Fits take Ctrl-C as the wish to see what there is.
        told = posterior.provenance
        if told.get("interrupted") or told.get("ended") == "interrupted":
            path = posterior.save(run.folder / f"{name}_interrupted.pt")
            raise KeyboardInterrupt(f"the draws of {name} so far are in {path}")
    return posterior


def _fit_svi(run: "Run", data: "Dataset", arguments: argparse.Namespace, guide: str) -> "Posterior":
    from pbnn.infer.svi import fit_svi

    return fit_svi(
        run.model,
        data.x_train,
        data.y_train,
        guide=guide,
        rank=getattr(arguments, "rank", None),
        steps=arguments.steps,
        lr=arguments.lr,
        batch_size=arguments.batch_size,
        seed=arguments.seed,
        device=arguments.device,
        progress=not arguments.quiet,
    )


def _fit_nuts(run: "Run", data: "Dataset", arguments: argparse.Namespace) -> "Posterior":
    from pbnn.infer.nuts import fit_nuts

    return fit_nuts(
        run.model,
        data.x_train,
        data.y_train,
        chains=arguments.chains,
        warmup=arguments.warmup,
        draws=arguments.draws,
        seed=arguments.seed,
        device=arguments.device,
        progress=not arguments.quiet,
    )


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


if __name__ == "__main__":
    sys.exit(main())
