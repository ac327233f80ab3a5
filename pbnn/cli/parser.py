"""What can be written on the command line: commands, their arguments, and what they call."""

import argparse
from typing import TYPE_CHECKING, NoReturn

from pbnn._version import __version__
from pbnn.cli.checking import run_check
from pbnn.cli.fitting import run_compare, run_fit
from pbnn.cli.predicting import run_decide, run_predict
from pbnn.cli.prior import run_prior
from pbnn.cli.roads import COMPARED_ROADS, GUIDES, METHODS

__all__ = ["make_parser"]

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction["_Parser"]


def make_parser() -> argparse.ArgumentParser:
    """Return the parser; the attribute `command` of what it parses is the function to call."""
    parser = _Parser(
        prog="pbnn",
        description="Bayesian neural networks as Pyro models: fit one model file by SVI and NUTS, "
        "and see which fit to trust. A model file is code, and it is executed.",
    )
    parser.add_argument("--version", action="version", version=f"pbnn {__version__}")
    commands: Commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_compare(commands)
    _add_fit(commands)
    _add_predict(commands)
    _add_check(commands)
    _add_decide(commands)
    _add_prior(commands)
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line, as all of pbnn's are."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where help is, and exit with status 2."""
        self.exit(2, f"pbnn: error: {message}; see {self.prog} --help\n")


def _add_compare(commands: "Commands") -> None:
    parser = commands.add_parser(
        "compare",
        help="fit three guides and NUTS, or other roads, and print one table",
        description="Fit the model by several roads, by default SVI with three guides and NUTS, "
        "and compare them on held-out rows. Leaves a run folder.",
    )
    _add_problem(parser)
    parser.add_argument(
        "--roads",
        nargs="+",
        default=[*COMPARED_ROADS],
        metavar="ROAD",
        help=f"guides and methods; default: {' '.join(COMPARED_ROADS)}",
    )
    _add_option(parser, "ROAD.NAME=VALUE", "option of one road's fit, such as swag.rank=5")
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
    parser.add_argument("--method", choices=METHODS, default="svi", help="default: svi")
    parser.add_argument("--guide", choices=GUIDES, help="guide of SVI; default: normal")
    parser.add_argument("--rank", type=int, help="rank of the low-rank guide, or of SWAG")
    _add_option(parser, "NAME=VALUE", "any other option of the method's fit, as Python has it")
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


def _add_check(commands: "Commands") -> None:
    parser = commands.add_parser(
        "check",
        help="ask whether a posterior of a run may be used; exit status 3 if not",
        description="Check the posterior of a run on its held-out rows: whether its uncertainty "
        "ranks rows out of distribution, points the right way and carries probability, and whether "
        "a threshold on its error probability may decide which rows a person reviews. Writes a "
        "report and a decision rule. Exit status 3 where a requirement does not hold.",
    )
    parser.add_argument("run", help="run folder, or a posterior in it, such as RUN/nuts.nc")
    parser.add_argument("--posterior", help="which posterior of the run, such as nuts")
    parser.add_argument(
        "--ood",
        action="append",
        default=[],
        metavar="NAME=ROWS",
        help="rows out of distribution: a CSV, Parquet or .npz file; held-out, what the fit held "
        "out; or the test rows moved by noise, columns or rotation, such as noise:5 for severity "
        "5; may be repeated",
    )
    parser.add_argument(
        "--shift",
        action="append",
        default=[],
        choices=("noise", "columns", "rotation"),
        help="metrics of the test rows at severities 0 to 5 of a shift; may be repeated",
    )
    parser.add_argument(
        "--image", metavar="HEIGHTxWIDTH", help="shape of the image whose pixels are the columns"
    )
    parser.add_argument(
        "--costs",
        default="10,1",
        metavar="ERROR,REVIEW",
        help="of an automatic error and of a review; default: 10,1",
    )
    parser.add_argument(
        "--tolerance", type=float, help="distance from y beyond which a number is wrong"
    )
    parser.add_argument(
        "--two-stages", action="store_true", help="review rows unlike the training rows, too"
    )
    parser.add_argument("--layer", help="module whose features a density is of; default: x itself")
    parser.add_argument("--dataset", help="where the table of the run lies now")
    parser.add_argument("--out", help="report, .html or .md; default: in the run folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device")
    parser.set_defaults(command=run_check)


def _add_decide(commands: "Commands") -> None:
    parser = commands.add_parser(
        "decide",
        help="apply a saved decision rule to new rows",
        description="Answer the rows of a table, and say which of them a person should review, by "
        "a rule that `pbnn check` saved.",
    )
    _add_new_rows(parser)
    parser.add_argument("--rule", required=True, help="rule that `pbnn check` saved")
    parser.set_defaults(command=run_decide)


def _add_prior(commands: "Commands") -> None:
    parser = commands.add_parser(
        "prior",
        help="say what a model's prior says about functions, and what is wrong with it",
        description="Draw functions and data from a model's prior, and hold them against the data: "
        "the scale of f, saturated units, the KL to expect, and faults with why. No fit is needed.",
    )
    _add_data(parser)
    parser.add_argument("--draws", type=int, default=400, help="from the prior; default: 400")
    parser.add_argument("--posterior", help="a fit such as RUN/normal.pt, to see what became of it")
    parser.add_argument("--out", help="picture of f over one input, such as prior.png")
    parser.add_argument("--feature", help="column of the picture; default: the first")
    parser.set_defaults(command=run_prior)


def _add_new_rows(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run folder")
    parser.add_argument("table", help="CSV, Parquet or .npz file with the feature columns")
    parser.add_argument("--out", required=True, help="CSV file to write")
    parser.add_argument("--posterior", help="which posterior of the run, such as nuts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device")


def _add_problem(parser: argparse.ArgumentParser) -> None:
    _add_data(parser)
    held = parser.add_mutually_exclusive_group()
    held.add_argument(
        "--hold-out-class",
        action="append",
        default=[],
        metavar="CLASS",
        help="class that the fit never sees, for `check`; may be repeated",
    )
    held.add_argument(
        "--hold-out-gap",
        metavar="COLUMN[:LOW:HIGH]",
        help="hold out the rows between two quantiles of a column, by default its middle third",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="of the arithmetic; default: 1, best for small networks",
    )
    parser.add_argument("--out", help="run folder; default: runs/MODEL-DATASET, numbered")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")


def _add_data(parser: argparse.ArgumentParser) -> None:
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


def _add_option(parser: argparse.ArgumentParser, metavar: str, text: str) -> None:
    parser.add_argument(
        "--option", action="append", default=[], metavar=metavar, help=f"{text}; may be repeated"
    )


def _add_svi(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("optimisation")
    group.add_argument("--steps", type=int, help="at most; of SVI 5000 by default")
    group.add_argument("--lr", type=float, help="learning rate; of SVI 0.01 by default")
    group.add_argument("--batch-size", type=int, help="rows in each step; default: all")


def _add_nuts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--chains", type=int, help="of NUTS 4 by default")
    group.add_argument("--warmup", type=int, help="of NUTS 500 by default")
    group.add_argument("--draws", type=int, help="of each chain; of NUTS 500 by default")
