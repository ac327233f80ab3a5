"""The command that asks a prior what it says about functions, before a fit or after one."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pbnn.cli.roads import named_values
from pbnn.errors import DataError, FileError

if TYPE_CHECKING:
    from pbnn.data import Dataset
    from pbnn.evaluate.prior_report import PriorReport

__all__ = ["run_prior"]


def run_prior(arguments: argparse.Namespace) -> None:
    """Print the report of a model's prior, and draw its functions over one input."""
    import torch

    from pbnn.cli.tables import read_tables
    from pbnn.data import prepare
    from pbnn.evaluate.prior_report import prior_report
    from pbnn.infer.posterior import Posterior
    from pbnn.runs import model_for, target_kind_of

    torch.set_num_threads(1)
    out = None if arguments.out is None else Path(arguments.out)
    if out is not None and not out.parent.is_dir():
        raise FileError(f"--out {out}: there is no folder {out.parent}; make it first")
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
    posterior = None if arguments.posterior is None else Posterior.load(arguments.posterior)
    report = prior_report(
        model,
        data.x_train,
        data.y_train,
        posterior=posterior,
        draws=arguments.draws,
        seed=arguments.seed,
        device=arguments.device,
    )
    print(f"{data.name}: {len(report.rows)} of {len(data.x_train)} training rows")
    print(report)
    if out is not None:
        _draw(report, model, data, arguments, out)


def _draw(
    report: "PriorReport", model: Any, data: "Dataset", arguments: argparse.Namespace, out: Path
) -> None:
    """Draw f over one column of x, the others at their means."""
    import numpy as np
    import torch

    from pbnn.plots import plot_prior, save
    from pbnn.prediction import function_draws, sample_prior

    names = list(data.preprocessor.feature_names)
    name = arguments.feature or names[0]
    if name not in names:
        raise DataError(f"--feature {name}: no such column of x; it has {', '.join(names)}")
    column = names.index(name)
    x = np.asarray(data.x_train)
    grid = np.linspace(x[:, column].min(), x[:, column].max(), 200)
    rows = np.tile(x.mean(0), (len(grid), 1)).astype(x.dtype)
    rows[:, column] = grid
    prior = sample_prior(model, rows, draws=arguments.draws, seed=arguments.seed)
    f = function_draws(model, prior, torch.from_numpy(rows))[..., 0]
    y = np.asarray(data.y_train)
    # Only where y is on the scale of f is it a part of the picture.
    shown = report.f.shape[2] == 1 and y.ndim == 1 and np.issubdtype(y.dtype, np.floating)
    points = (x[:, column], y) if shown else None
    save(plot_prior(f, grid, points=points, name=f"{name} (standardised)"), out)
    print(f"picture: {out}")
