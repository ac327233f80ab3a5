"""What can be written on the command line: commands, their arguments, and what they call."""

import argparse
from typing import TYPE_CHECKING

from pbnn._version import __version__
from pbnn.cli.fitting import GUIDES, run_compare, run_fit
from pbnn.cli.predicting import run_predict

__all__ = ["make_parser"]

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def make_parser() -> argparse.ArgumentParser:
    """Return the parser; the attribute `command` of what it parses is the function to call."""
    parser = argparse.ArgumentParser(
        prog="pbnn",
        description="Bayesian neural networks as Pyro models: fit one model file by SVI and NUTS, "
        "and see which fit to trust. A model file is code, and it is executed.",
    )
    parser.add_argument("--version", action="version", version=f"pbnn {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_compare(commands)
    _add_fit(commands)
    _add_predict(commands)
    return parser


def _add_compare(commands: "Commands") -> None:
    parser = commands.add_parser(
        "compare",
        help="fit three guides and NUTS, and print one table",
        description="Fit the model by SVI with three guides and by NUTS, and compare them on "
        "held-out rows. Leaves a run folder.",
    )
    _add_problem(parser)
    _add_svi(parser)
    _add_nuts(parser)
    parser.add_argument(
        "--repeat",
        action="store_true",
        help="fit each guide again with another seed, as a noise floor of its distance to NUTS",
    )
    parser.set_defaults(command=run_compare)


def _add_fit(commands: "Commands") -> None:
    parser = commands.add_parser(
        "fit",
        help="fit a model by one road",
        description="Fit the model by one road. Leaves a run folder.",
    )
    _add_problem(parser)
    parser.add_argument("--method", choices=("svi", "nuts"), default="svi", help="default: svi")
    parser.add_argument("--guide", choices=GUIDES, default="normal", help="guide of SVI")
    parser.add_argument("--rank", type=int, help="rank of the low-rank guide")
    _add_svi(parser)
    _add_nuts(parser)
    parser.set_defaults(command=run_fit)


def _add_predict(commands: "Commands") -> None:
    parser = commands.add_parser(
        "predict",
        help="predict new rows from a run",
        description="Predict the rows of a table from a run folder. Columns may be in any order.",
    )
    _add_new_rows(parser)
    parser.set_defaults(command=run_predict)


def _add_new_rows(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run folder")
    parser.add_argument("table", help="CSV, Parquet or .npz file with the feature columns")
    parser.add_argument("--out", required=True, help="CSV file to write")
    parser.add_argument("--posterior", help="which posterior of the run, such as nuts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device")


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
