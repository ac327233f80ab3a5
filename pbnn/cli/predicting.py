"""Commands that put a run to use on new rows: predictions, and decisions by a saved rule."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pbnn.cli.messages import warnings_held
from pbnn.errors import FileError

if TYPE_CHECKING:
    import pandas as pd

    from pbnn.runs import Run

__all__ = ["run_decide", "run_predict"]


def run_predict(arguments: argparse.Namespace) -> None:
    """Predict the rows of a table from a run folder."""
    from pbnn.prediction import predict

    out = _out(arguments)
    with warnings_held():
        run, x = _opened(arguments)
        posterior = run.posterior(arguments.posterior)
        prediction = predict(run.model, posterior, x, **_options(run, arguments))
        _write(prediction.to_frame(run.preprocessor.classes or None), out)


def run_decide(arguments: argparse.Namespace) -> None:
    """Apply a saved decision rule to the rows of a table."""
    from pbnn.evaluate.decision import DecisionRule

    out = _out(arguments)
    with warnings_held():
        rule = DecisionRule.load(arguments.rule)
        run, x = _opened(arguments)
        posterior = run.posterior(arguments.posterior)
        decisions = rule.apply(run.model, posterior, x, **_options(run, arguments))
        frame = decisions.to_frame(run.preprocessor.classes or None)
        _write(frame, out)
    print(f"{(frame['decision'] == 'review').sum()} of them for review")


def _out(arguments: argparse.Namespace) -> Path:
    """Refuse a file that could not be written, before anything is computed."""
    out = Path(arguments.out)
    if out.is_dir():
        raise FileError(f"--out {out} is a folder; expected the name of a CSV file")
    if not out.parent.is_dir():
        raise FileError(f"--out {out}: there is no folder {out.parent}; make it first")
    return out


def _opened(arguments: argparse.Namespace) -> tuple["Run", Any]:
    """Return the run, and the rows of the table as its training rows were encoded."""
    from pbnn.data import read_features
    from pbnn.runs import Run, check_range

    run = Run.load(arguments.run)
    x, _ = read_features(arguments.table, run.preprocessor)
    check_range(x, run.preprocessor.feature_names, run.model)
    return run, x


def _options(run: "Run", arguments: argparse.Namespace) -> dict[str, Any]:
    units = run.preprocessor.target_units
    return {"units": units, "seed": arguments.seed, "device": arguments.device}


def _write(frame: "pd.DataFrame", out: Path) -> None:
    from pbnn.files import writing

    with writing(out) as path:
        frame.to_csv(path, index=False)
    print(f"{len(frame)} rows: {out}")
