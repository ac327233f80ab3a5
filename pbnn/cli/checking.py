"""The command that asks whether a posterior may be used, and writes the report of it."""

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pbnn.cli.messages import warnings_held
from pbnn.errors import DataError, FileError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pbnn.data import Dataset, Table
    from pbnn.evaluate.acceptance import Check
    from pbnn.evaluate.costs import Costs
    from pbnn.plots import Section
    from pbnn.runs import Run

__all__ = ["run_check"]

FAILED = 3


def run_check(arguments: argparse.Namespace) -> int:
    """Check a posterior of a run; return 0, or 3 where a requirement does not hold."""
    from pbnn.cli.tables import read_again
    from pbnn.evaluate.acceptance import check_posterior
    from pbnn.evaluate.convergence import check_convergence
    from pbnn.plots import write_report

    folder, name = _folder_and_posterior(Path(arguments.run), arguments.posterior)
    costs = _costs(arguments.costs)
    with warnings_held():
        run, name, posterior = _opened(folder, name)
        report = Path(arguments.out or folder / f"check_{name}.html")
        if report.suffix.lower() not in (".html", ".htm", ".md"):
            raise FileError(f"--out {report}: a report ends in .html or .md")
        data, table, outside = read_again(run, arguments.dataset)
        validation, test = _halves(data, arguments.seed)
        rows = _Rows(run, data, table, outside, test, _image(arguments.image), arguments.seed)
        notes = []
        if run.preprocessor.target_kind != "class" and arguments.tolerance is None:
            notes.append("decisions are not judged: pass --tolerance, beyond which y is wrong")
        found = check_posterior(
            run.model,
            posterior,
            (data.x_test[validation], data.y_test[validation]),
            (data.x_test[test], data.y_test[test]),
            x_train=data.x_train,
            ood=_by_name(rows.outside_of(spec) for spec in arguments.ood),
            costs=None if notes else costs,
            tolerance=arguments.tolerance,
            two_stages=arguments.two_stages,
            layer=arguments.layer,
            shifts={kind: rows.series(kind) for kind in arguments.shift},
            units=run.preprocessor.target_units,
            seed=arguments.seed,
            device=arguments.device,
        )
    if posterior.markov:
        convergence = check_convergence(
            run.model, posterior, data.x_test[test], device=arguments.device
        )
        notes.insert(0, f"chains {convergence}")
    head = [
        f"posterior {name} of {folder}: {len(data.x_train)} training rows; of the "
        f"{len(data.x_test)} held-out rows {len(validation)} calibrate and {len(test)} judge",
        *notes,
    ]
    print("\n".join([*head, "", str(found), ""]))
    if found.rule is not None:
        print(f"rule: {found.rule.save(folder / f'rule_{name}.json')}")
    print(f"report: {write_report(report, f'Check of {name}', _sections(head, found))}")
    return 0 if found.passed else FAILED


def _folder_and_posterior(path: Path, posterior: str | None) -> tuple[Path, str | None]:
    """Return the run folder, and the posterior that a file in it stands for."""
    if path.is_dir() or not path.exists():
        return path, posterior
    return path.parent, posterior or path.stem


def _opened(folder: Path, name: str | None) -> tuple["Run", str, Any]:
    from pbnn.runs import Run

    run = Run.load(folder)
    posterior = run.posterior(name)
    return run, name or run.posteriors()[0], posterior


def _costs(text: str) -> "Costs":
    from pbnn.evaluate.costs import Costs

    try:
        error, review = (float(part) for part in text.split(","))
    except ValueError:
        raise DataError(f"--costs {text}: expected ERROR,REVIEW, such as --costs 50,1") from None
    return Costs(error=error, review=review)


def _image(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    height, _, width = text.partition("x")
    if not (height.isdigit() and width.isdigit()):
        raise DataError(f"--image {text}: expected HEIGHTxWIDTH, such as --image 8x8")
    return int(height), int(width)


def _halves(data: "Dataset", seed: int) -> "tuple[NDArray[np.int64], NDArray[np.int64]]":
    """Split the held-out rows into those that calibrate and those that judge."""
    import numpy as np

    from pbnn.data import split_rows

    if len(data.x_test) < 2:
        raise DataError(
            f"the run has {len(data.x_test)} held-out rows; a check needs rows that calibrate and "
            "rows that judge: fit with a larger --test-fraction"
        )
    strata = None
    if data.preprocessor.target_kind == "class":
        counts = np.unique(data.y_test, return_counts=True)[1]
        strata = data.y_test if counts.min() >= 2 and len(counts) <= len(data.y_test) // 2 else None
    return split_rows(len(data.x_test), test_fraction=0.5, seed=seed, stratify=strata)


def _by_name(sets: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return sets of rows by name; refuse a name that comes twice."""
    found: dict[str, Any] = {}
    for name, rows in sets:
        if name in found:
            raise DataError(f"--ood {name} is given twice; choose another name, NAME=ROWS")
        found[name] = rows
    return found


class _Rows:
    """Rows unlike the training rows, as the command line names them."""

    def __init__(
        self,
        run: "Run",
        data: "Dataset",
        table: "Table",
        outside: "Table | None",
        test: "NDArray[np.int64]",
        image: tuple[int, int] | None,
        seed: int,
    ) -> None:
        import numpy as np

        part = data.test_rows[test]
        raw = table.features
        self._test = raw[part] if isinstance(raw, np.ndarray) else raw.iloc[part]
        self._run, self._outside = run, outside
        self._options: Any = {"image": image, "seed": seed}

    def series(self, kind: Any) -> Mapping[float, Any]:
        """Return the test rows at severities 0 to 5 of a shift."""
        from pbnn.data.shifts import shift_series

        return shift_series(self._test, self._run.preprocessor, kind, **self._options)

    def outside_of(self, spec: str) -> tuple[str, Any]:
        """Return the name of a set, and its rows, with their y where it is known."""
        from pbnn.data import read_features
        from pbnn.runs import check_range

        given, equals, what = spec.partition("=")
        what = what if equals else spec
        name = given if equals else Path(what).stem.partition(":")[0]
        if not name or not what:
            raise DataError(f"--ood {spec}: expected NAME=FILE, NAME=held-out or NAME=noise:5")
        kind, _, severity = what.partition(":")
        if what == "held-out":
            return name, self._held_out()
        if kind in ("noise", "columns", "rotation"):
            return name, self._shifted(spec, kind, severity or "5")
        x, _ = read_features(what, self._run.preprocessor)
        check_range(x, self._run.preprocessor.feature_names, self._run.model)
        return name, x

    def _held_out(self) -> Any:
        outside, preprocessor = self._outside, self._run.preprocessor
        if outside is None:
            raise DataError(
                "held-out: the fit held nothing out; fit with --hold-out-class or --hold-out-gap"
            )
        x, _ = preprocessor.encode(outside.features, outside.rows)
        if self._run.record["settings"].get("hold_out_class"):
            return x  # their classes are none of the model's
        return x, preprocessor.encode_target(outside.target, outside.rows)

    def _shifted(self, spec: str, kind: Any, severity: str) -> Any:
        from pbnn.data import Rows
        from pbnn.data.shifts import shift

        try:
            size = float(severity)
        except ValueError:
            raise DataError(f"--ood {spec}: severity {severity!r}; expected a number") from None
        moved = shift(self._test, self._run.preprocessor, kind, size, **self._options)
        return self._run.preprocessor.encode(moved, Rows.counted(len(moved)))[0]


def _sections(head: list[str], found: "Check") -> "list[Section]":
    """Lay the report out: what was found, with its pictures, and the checklist at the end."""
    import pandas as pd

    from pbnn.plots import (
        Section,
        plot_cost_curve,
        plot_rejection,
        plot_scores,
        plot_shift,
    )

    out = [Section("What was checked", head)]
    if found.ood is not None:
        ood = found.ood
        scores = {name: of_set["epistemic"] for name, of_set in ood.scores.items()}
        lines = [f"{k}: {v.name} ({v.reason}); {v.next_step}" for k, v in ood.verdicts.items()]
        pictures = []
        if any((spread > 0).any() for spread in scores.values()):  # one draw has none to show
            caption = "Epistemic spread of the test rows (id) and of each set."
            pictures.append((plot_scores(scores), caption))
        out.append(Section("Out of distribution", lines, [ood.table], pictures))
    if found.decisions is not None:
        decisions = found.decisions
        pictures = [
            (plot_cost_curve(decisions), "Cost of a row, with 95% intervals."),
            (plot_rejection(decisions), "Accuracy of the rows that are not rejected."),
        ]
        lines = [decisions.verdict, *decisions.rule.notes, decisions.account]
        out.append(Section("Decisions", lines, [decisions.costs], pictures))
    for name, table in found.shifts.items():
        shown = ["nll", "auroc_epistemic"]
        pictures = [(plot_shift(table, number), f"{number}, {name}.") for number in shown]
        out.append(Section(f"Shift: {name}", (), [table], pictures))
    checklist = pd.DataFrame(
        [(r.text, r.number, r.bound, "pass" if r.passed else "FAIL") for r in found.checklist],
        columns=["requirement", "number", "bound", "result"],
    )
    verdict = "All requirements hold." if found.passed else "Some requirements do not hold."
    return [*out, Section("Acceptance checklist", [verdict], [checklist])]
