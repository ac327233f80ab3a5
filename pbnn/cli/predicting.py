"""Commands that put a run to use on new rows."""

import argparse
from pathlib import Path

from pbnn.cli.messages import warnings_held
from pbnn.errors import FileError

__all__ = ["run_predict"]


def run_predict(arguments: argparse.Namespace) -> None:
    """Predict the rows of a table from a run folder."""
    from pbnn.data import read_features
    from pbnn.files import writing
    from pbnn.prediction import predict
    from pbnn.runs import Run, check_range

    out = Path(arguments.out)
    if out.is_dir():
        raise FileError(f"--out {out} is a folder; expected the name of a CSV file")
    if not out.parent.is_dir():
        raise FileError(f"--out {out}: there is no folder {out.parent}; make it first")
    with warnings_held():
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
