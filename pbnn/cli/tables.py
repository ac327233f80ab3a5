"""The table of a run: read as the fit read it, parted from what it never saw."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pbnn.errors import DataError, FileError

if TYPE_CHECKING:
    from pbnn.data import Dataset, Table
    from pbnn.runs import Run

__all__ = ["read_again", "read_tables"]


def read_tables(settings: Mapping[str, Any]) -> "tuple[Table, Table | None]":
    """Read a table, and part it from what is held out of the fit and its test rows.

    Args:
        settings: Arguments of `fit` or `compare`, by name.

    Returns:
        The table, and the rows held out; None where nothing is.
    """
    from pbnn.data import read_table
    from pbnn.data.shifts import hold_out_classes, hold_out_gap

    table = read_table(
        settings["dataset"], settings["target"], categorical=settings["categorical"]
    ).without(settings["drop"])
    classes, gap = settings.get("hold_out_class"), settings.get("hold_out_gap")
    if classes:
        return hold_out_classes(table, classes)
    if gap is None:
        return table, None
    column, *between = gap.rsplit(":", 2)
    if not between:
        return hold_out_gap(table, column)
    try:
        low, high = map(float, between)
    except ValueError:
        raise DataError(
            f"--hold-out-gap {gap}: expected COLUMN or COLUMN:LOW:HIGH, such as age:0.4:0.6"
        ) from None
    return hold_out_gap(table, column, (low, high))


def read_again(run: "Run", dataset: str | None) -> "tuple[Dataset, Table, Table | None]":
    """Read the table of a run again, and split it as the fit did.

    Args:
        run: The run.
        dataset: Where the table lies now; where it was by default.

    Returns:
        Training and test rows; the table that they come from; and the rows held out.

    Raises:
        FileError: The table is not there, or not the one that was fitted.
    """
    from pbnn.data import SHIPPED, prepare

    settings = {**run.record["settings"]}
    settings["dataset"] = dataset or settings["dataset"]
    if settings["dataset"] not in SHIPPED and not Path(settings["dataset"]).exists():
        raise FileError(
            f"{settings['dataset']}: the table of the run is not there; say where it lies now with "
            "--dataset"
        )
    table, outside = read_tables(settings)
    data = prepare(
        table,
        target_kind=run.preprocessor.target_kind,
        test_fraction=settings["test_fraction"],
        seed=settings["seed"],
        impute=settings["impute"],
    )
    if data.preprocessor.to_json() != run.preprocessor.to_json():
        raise FileError(
            f"{settings['dataset']} is not the table that was fitted: its training rows have other "
            "statistics; pass the same table with --dataset, or fit again"
        )
    return data, table, outside
