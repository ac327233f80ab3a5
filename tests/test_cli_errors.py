"""The command line when something is wrong: one line that names it, its status, no leftovers."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import pbnn
from pbnn import cli
from pbnn.infer.training import Training
from pbnn.runs import Run

MODELS = Path(__file__).parents[1] / "models"
SMALL = ["--set", "hidden=2", "--quiet"]
STEPS = ["--steps", "10"]


def run(*arguments):
    return cli.main([str(a) for a in arguments])


def write(path, **columns):
    pd.DataFrame(columns).to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 20))
    return write(tmp_path_factory.mktemp("table") / "table.csv", a=a, b=b, y=a - b)


@pytest.fixture(scope="module")
def fitted(table, tmp_path_factory):
    """A run folder with one posterior, which tests only read."""
    out = tmp_path_factory.mktemp("fitted") / "run"
    assert fit(table, out) == 0
    return out


def fit(table, out, *more, command="fit", model=MODELS / "regression.py"):
    steps = [] if "--method" in more else STEPS
    return run(
        command, model, "--dataset", table, "--target", "y", "--out", out, *SMALL, *steps, *more
    )


def assert_one_line(capsys, *named, starts="pbnn: error: "):
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith(starts)
    for text in named:
        assert text in err


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--lr", "-1"], "lr"),
        (["--batch-size", "0"], "batch_size"),
        (["--guide", "lowrank", "--rank", "1000"], "rank 1000"),
        (["--method", "nuts", "--chains", "0"], "chains"),
        (["--method", "nuts", "--steps", "5"], "--steps: fit_nuts has no such option"),
        (["--option", "colour=3"], "--option colour: fit_svi has no such option"),
        (["--option", "particles"], "expected NAME=VALUE"),
        (["--option", "seed=3"], "--option seed"),
        (["--option", "guide=lowrank"], "--option guide"),
        (["--option", "kl_weight=abc"], "--option kl_weight=abc: expected a number"),
        (["--option", "compile=maybe"], "expected True or False"),
        (["--option", "dtype=float16"], "expected float32 or float64"),
        (["--set", "weight_scale=-1"], "weight_scale"),
        (["--set", "hidden=0"], "'hidden': 0"),
    ],
)
def test_a_rejected_option_leaves_no_folder(more, named, table, tmp_path, capsys):
    assert fit(table, tmp_path / "run", *more) == 2
    assert_one_line(capsys, named)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--roads", "normal", "nope"], "road 'nope'"),
        (["--roads", "normal"], "two or more"),
        (["--option", "particles=2"], "expected ROAD.NAME=VALUE"),
        (["--draws", "0"], "draws"),
        (["--option", "normal.colour=2"], "--option normal.colour: fit_svi has no such option"),
    ],
)
def test_roads_and_their_options_are_checked_before_any_fit(more, named, table, tmp_path, capsys):
    assert fit(table, tmp_path / "run", *more, command="compare") == 2
    assert_one_line(capsys, named)
    assert not (tmp_path / "run").exists()


def test_two_sets_of_one_name_are_refused(fitted, capsys):
    assert run("check", fitted, "--ood", "far=noise:1", "--ood", "far=noise:5") == 2
    assert_one_line(capsys, "--ood far is given twice")


def test_what_the_parser_refuses_is_one_line(capsys):
    with pytest.raises(SystemExit, match="2"):
        run("fit", "models/regression.py", "--method", "svii")
    assert_one_line(capsys, "svii", "pbnn fit --help")


def test_a_folder_that_was_there_stays_when_nothing_is_fitted(table, tmp_path):
    (tmp_path / "run").mkdir()
    assert fit(table, tmp_path / "run", "--lr", "-1") == 2
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("method", ["svi", "nuts"])
def test_ctrl_c_in_a_fit_keeps_its_draws_and_stops(method, table, tmp_path, monkeypatch, capsys):
    """The fit gives what it has; the command does not go on with it."""
    whole = getattr(pbnn, f"fit_{method}")

    @functools.wraps(whole)
    def cut_short(*arguments, **options):
        posterior = whole(*arguments, **options)
        posterior.provenance.update({"ended": "interrupted", "interrupted": method == "nuts"})
        return posterior

    monkeypatch.setattr(pbnn, f"fit_{method}", cut_short)
    sizes = {"svi": ["--steps", "10"], "nuts": ["--chains", "1", "--warmup", "3", "--draws", "4"]}
    more = ["--method", method, *sizes[method]]
    assert fit(table, tmp_path / "run", *more) == 130
    name = "nuts" if method == "nuts" else "normal"
    assert_one_line(capsys, f"{name}_interrupted.pt", starts="pbnn: interrupted; ")
    assert Run.load(tmp_path / "run").posteriors() == [f"{name}_interrupted"]


def test_ctrl_c_in_the_first_fit_of_a_comparison_is_the_last(table, tmp_path, monkeypatch, capsys):
    step, taken = Training._take_step, []

    def interrupted(self, done):
        taken.append(done)
        if len(taken) == 8:
            raise KeyboardInterrupt
        return step(self, done)

    monkeypatch.setattr(Training, "_take_step", interrupted)
    assert fit(table, tmp_path / "run", command="compare") == 130
    assert_one_line(capsys, "normal_interrupted.pt", starts="pbnn: interrupted; ")
    assert len(taken) == 8
    assert Run.load(tmp_path / "run").posteriors() == ["normal_interrupted"]


def test_ctrl_c_before_the_first_step_leaves_nothing(table, tmp_path, monkeypatch, capsys):
    @functools.wraps(pbnn.fit_svi)
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(pbnn, "fit_svi", interrupted)
    assert fit(table, tmp_path / "run", command="compare") == 130
    assert_one_line(capsys, "what was finished is kept", starts="pbnn: interrupted; ")
    assert not (tmp_path / "run").exists()


def test_a_file_in_the_way_of_a_folder_is_named(table, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert fit(table, tmp_path / "file" / "run") == 2
    assert_one_line(capsys, str(tmp_path / "file" / "run"), "cannot be written")


def test_what_the_system_refuses_is_one_line(table, tmp_path, monkeypatch, capsys):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied", "/sealed/run.json")

    monkeypatch.setattr(Run, "create", refused)
    assert fit(table, tmp_path / "run") == 2
    assert_one_line(capsys, "/sealed/run.json: Permission denied")


@pytest.mark.parametrize(("out", "named"), [(".", "is a folder"), ("no/p.csv", "no folder")])
def test_predictions_go_to_a_file_in_a_folder(out, named, fitted, table, tmp_path, capsys):
    assert run("predict", fitted, table, "--out", tmp_path / out) == 2
    assert_one_line(capsys, named)
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_in_predict_is_one_line_whatever_was_warned_before(
    fitted, table, tmp_path, capsys
):
    assert run("predict", fitted, table, "--out", tmp_path / "p.csv", "--device", "nope") == 2
    assert_one_line(capsys, "nope")
    assert run("predict", fitted, table, "--out", tmp_path / "p.csv") == 0
    assert_one_line(capsys, "not used", starts="pbnn: warning: ")


def test_a_run_without_posterior_says_so(fitted, table, tmp_path, capsys):
    bare = tmp_path / "run"
    bare.mkdir()
    for name in ("run.json", "model.py"):
        (bare / name).write_bytes((fitted / name).read_bytes())
    assert run("predict", bare, table, "--out", tmp_path / "p.csv") == 2
    assert_one_line(capsys, "no posterior")


def test_new_rows_beyond_the_floating_type_name_column_and_row(fitted, tmp_path, capsys):
    rows = write(tmp_path / "new.csv", a=[1.0, 2.0], b=[0.0, 1e300])
    assert run("predict", fitted, rows, "--out", tmp_path / "p.csv") == 2
    assert_one_line(capsys, "column 'b' ranges too widely", "row 2", "float32")


def test_features_beyond_the_floating_type_are_refused_before_the_fit(tmp_path, capsys):
    """A row of the test rows, since the scale of the training rows takes in what they hold."""
    _, held_out = pbnn.data.split_rows(20, test_fraction=0.2, seed=0)
    a = np.arange(20.0)
    a[held_out[0]] = 1e300
    table = write(tmp_path / "table.csv", a=a, y=np.arange(20.0))
    assert fit(table, tmp_path / "run") == 2
    assert_one_line(capsys, "column 'a' ranges too widely", f"line {held_out[0] + 2}", "float32")
    assert not (tmp_path / "run").exists()


def test_targets_beyond_the_floating_type_are_refused_before_the_fit(tmp_path, capsys):
    table = write(tmp_path / "t.csv", a=np.arange(12.0), y=np.tile([1e200, -1e200, 1e199], 4))
    assert fit(table, tmp_path / "run") == 2
    assert_one_line(capsys, "column 'y' ranges too widely")
    assert not (tmp_path / "run").exists()


def test_pictures_that_fail_do_not_cost_the_fit(table, tmp_path, monkeypatch, capsys):
    def failing(*_, **__):
        raise ValueError("no axis")

    monkeypatch.setattr("pbnn.plots.draw_run", failing)
    assert fit(table, tmp_path / "run") == 0
    captured = capsys.readouterr()
    assert "pictures could not be drawn: no axis" in captured.err
    assert "run folder" in captured.out


@pytest.mark.parametrize("code", ["import sys; sys.exit(3)", "raise SystemExit"])
def test_a_model_file_that_ends_the_program(code, table, tmp_path, capsys):
    (tmp_path / "model.py").write_text(code)
    assert fit(table, tmp_path / "run", model=tmp_path / "model.py") == 2
    assert_one_line(capsys, "sys.exit")


def test_a_warning_is_shown_once(tmp_path, capsys):
    table = write(tmp_path / "t.csv", a=np.ones(10), y=np.arange(10.0))
    assert fit(table, tmp_path / "run") == 0
    lines = capsys.readouterr().err.splitlines()
    assert any("does not act on the data" in line for line in lines)
    assert len(lines) == len(set(lines))


def test_the_package_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "pbnn", "--version"],
        capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(MODELS.parent)},
    )  # fmt: skip
    assert done.stdout == f"pbnn {pbnn.__version__}\n"
