"""The command line: files, one table, one line for each mistake, exit statuses."""

import functools
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import pbnn
from pbnn import cli
from pbnn.cli import roads
from pbnn.errors import FileError
from pbnn.runs import Run

MODELS = Path(__file__).parents[1] / "models"
SMALL = ["--set", "hidden=3", "--steps", "20", "--quiet"]
NUTS = ["--chains", "2", "--warmup", "5", "--draws", "8"]


@pytest.fixture
def table(tmp_path):
    """A CSV of 40 rows with numbers, a text column and two targets."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=40), "b": rng.normal(size=40)})
    frame["colour"] = np.where(np.arange(40) % 3 == 0, "red", "blue")
    frame["y"] = 5.0 + 3.0 * frame["a"] + 0.1 * rng.normal(size=40)
    frame["kind"] = np.where(frame["a"] > 0, "high", "low")
    path = tmp_path / "table.csv"
    frame.to_csv(path, index=False)
    return path


def run(*arguments):
    return cli.main([str(a) for a in arguments])


def fit(table, out, *more, model="regression.py", target="y", drop="kind"):
    return run(
        "fit", MODELS / model, "--dataset", table, "--target", target, "--drop", drop,
        "--out", out, *SMALL, *more,
    )  # fmt: skip


def test_fit_then_predict_in_the_users_units(table, tmp_path, capsys):
    assert fit(table, tmp_path / "run", "--steps", "800") == 0
    printed = capsys.readouterr().out
    assert "colour" in printed
    assert "layers.0.weight" in printed
    shuffled = pd.read_csv(table)[["colour", "b", "a"]].iloc[:7]
    shuffled.to_csv(tmp_path / "new.csv", index=False)
    assert run("predict", tmp_path / "run", tmp_path / "new.csv", "--out", tmp_path / "p.csv") == 0
    predicted = pd.read_csv(tmp_path / "p.csv")
    assert len(predicted) == 7
    truth = pd.read_csv(table)["y"].iloc[:7]
    # Means of y lie near 5, far from the standardised 0; the function is all but linear.
    assert np.abs(predicted["mean"] - truth).mean() < 1.5
    assert (predicted["q0.05"] < predicted["q0.95"]).all()


def test_compare_prints_the_verdict_before_the_table_and_leaves_a_folder(table, tmp_path, capsys):
    out = tmp_path / "run"
    status = run(
        "compare", MODELS / "regression.py", "--dataset", table, "--target", "y", "--drop", "kind",
        "--out", out, "--repeat", *SMALL, *NUTS,
    )  # fmt: skip
    assert status == 0
    printed = capsys.readouterr().out
    assert printed.index("reference 'nuts' not converged") < printed.index("lpd")
    scores = pd.read_csv(out / "table.csv", index_col=0)
    guides = ["normal", "lowrank", "kronecker"]
    floors = ["nuts (half)", *(f"{guide} (other seed)" for guide in guides)]
    assert list(scores.index) == [*guides, "nuts", *floors]
    apart = pd.read_csv(out / "distances.csv", index_col=[0, 1])
    assert set(apart.index.unique("inputs")) == {"held out", "shifted", "far"}
    assert {"epistemic_ratio", "epistemic_ratio_low", "wasserstein"} <= set(apart.columns)
    assert {"lpd", "rmse", "coverage_90", "scale_ratio", "seconds"} <= set(scores.columns)
    for name in ("normal", "lowrank", "kronecker", "nuts"):
        assert (out / f"{name}.nc").is_file()
        assert pbnn.Posterior.load(out / f"{name}.pt").draws
    assert {"calibration.png", "posterior_predictive.png", "scales.png"} <= {
        path.name for path in out.glob("*.png")
    }
    record = json.loads((out / "run.json").read_text())
    assert record["model"]["options"] == {"in_features": 4, "out_features": 1, "hidden": 3}
    assert not list(out.glob(".*"))


def test_classes_keep_their_names(table, tmp_path):
    out = tmp_path / "run"
    assert fit(table, out, model="classification.py", target="kind", drop="y") == 0
    pd.read_csv(table)[["a", "b", "colour"]].to_csv(tmp_path / "new.csv", index=False)
    assert run("predict", out, tmp_path / "new.csv", "--out", tmp_path / "p.csv") == 0
    predicted = pd.read_csv(tmp_path / "p.csv")
    assert list(predicted.columns[:3]) == ["prediction", "probability_high", "probability_low"]
    assert (out / "reliability_normal.png").is_file()


def test_no_rows_give_a_table_without_rows(table, tmp_path):
    assert fit(table, tmp_path / "run") == 0
    (tmp_path / "new.csv").write_text("a,b,colour\n")
    assert run("predict", tmp_path / "run", tmp_path / "new.csv", "--out", tmp_path / "p.csv") == 0
    assert len(pd.read_csv(tmp_path / "p.csv")) == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["fit", "nowhere.py", "--dataset", "diabetes"], "nowhere.py"),
        (["fit", MODELS / "regression.py", "--dataset", "nowhere.csv"], "nowhere.csv"),
        (["fit", MODELS / "regression.py", "--dataset", "diabetes", "--set", "hiden=3"], "hiden"),
        (["fit", MODELS / "regression.py", "--dataset", "wine", "--set", "hidden"], "NAME=VALUE"),
        (["fit", MODELS / "regression.py", "--dataset", "iris", "--target", "nope"], "nope"),
        (["fit", MODELS / "regression.py", "--dataset", "diabetes", "--steps", "0"], "steps=0"),
        (["fit", MODELS / "regression.py", "--dataset", "diabetes", "--rank", "2"], "rank"),
        (["compare", MODELS / "regression.py", "--dataset", "diabetes", "--test-fraction", "0"],
         "--test-fraction"),
        (["predict", "nowhere", "new.csv", "--out", "p.csv"], "nowhere"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_status_2(arguments, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert named in captured.err
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("pbnn: error: ")


def test_a_text_target_for_numbers_names_the_column(table, tmp_path, capsys):
    assert fit(table, tmp_path / "run", target="kind", drop="y") == 2
    assert "kind" in capsys.readouterr().err


def test_an_existing_folder_is_never_written_over(table, tmp_path, capsys):
    assert fit(table, tmp_path / "run") == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    assert fit(table, tmp_path / "run", "--seed", "5") == 2
    assert "--out" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_a_changed_model_file_is_refused(table, tmp_path, capsys):
    assert fit(table, tmp_path / "run") == 0
    path = tmp_path / "run" / "model.py"
    path.write_text(path.read_text() + "\n# changed\n")
    with pytest.raises(FileError, match="hash"):
        Run.load(tmp_path / "run")
    assert run("predict", tmp_path / "run", table, "--out", tmp_path / "p.csv") == 2
    assert "hash" in capsys.readouterr().err


def test_new_rows_without_a_column_name_it(table, tmp_path, capsys):
    assert fit(table, tmp_path / "run") == 0
    pd.read_csv(table)[["a", "colour"]].to_csv(tmp_path / "new.csv", index=False)
    assert run("predict", tmp_path / "run", tmp_path / "new.csv", "--out", tmp_path / "p.csv") == 2
    assert "'b'" in capsys.readouterr().err
    assert not (tmp_path / "p.csv").exists()


def test_ctrl_c_between_fits_keeps_what_is_done(table, tmp_path, monkeypatch, capsys):
    @functools.wraps(pbnn.fit_nuts)
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(pbnn, "fit_nuts", interrupted)
    status = run(
        "compare", MODELS / "regression.py", "--dataset", table, "--target", "y", "--drop", "kind",
        "--out", tmp_path / "run", *SMALL,
    )  # fmt: skip
    assert status == 130
    assert Run.load(tmp_path / "run").posteriors() == ["kronecker", "lowrank", "normal"]
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("map", ["--steps", "20"]),
        ("ensemble", ["--option", "members=2", "--steps", "20"]),
        ("sgmcmc", ["--steps", "40", "--draws", "5", "--option", "algorithm=sgld"]),
    ],
)
def test_fit_takes_any_road(method, more, table, tmp_path, capsys):
    status = run(
        "fit", MODELS / "regression.py", "--dataset", table, "--target", "y", "--drop", "kind",
        "--out", tmp_path / "run", "--set", "hidden=3", "--quiet", "--method", method, *more,
    )  # fmt: skip
    assert status == 0, capsys.readouterr().err
    assert Run.load(tmp_path / "run").posteriors() == [method]
    assert (tmp_path / "run" / f"{method}.nc").is_file()
    assert (tmp_path / "run" / "sharpness.csv").is_file() == (method == "map")


def test_compare_takes_any_roads(table, tmp_path, capsys):
    status = run(
        "compare", MODELS / "regression.py", "--dataset", table, "--target", "y", "--drop", "kind",
        "--out", tmp_path / "run", *SMALL, "--roads", "normal", "swag",
        "--option", "swag.steps=20", "--option", "swag.snapshots=3", "--option", "swag.every=2",
    )  # fmt: skip
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert "no MCMC reference" in printed.out
    assert list(pd.read_csv(tmp_path / "run" / "table.csv", index_col=0).index) == [
        "normal",
        "swag",
    ]


def test_options_take_python_literals_and_words():
    assert roads.named_values(
        "--set", ["hidden=64", "activation=relu", "weight_scale=0.5", "flag=True"]
    ) == {
        "hidden": 64,
        "activation": "relu",
        "weight_scale": 0.5,
        "flag": True,
    }


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from pbnn.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'pandas', 'pyro', 'arviz', 'sklearn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_answers_at_once():
    def seconds():
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "pbnn.cli", "--help"], check=True, capture_output=True
        )
        return time.perf_counter() - started

    # The best of some tries, since the machine may be busy; half a second is the promise.
    assert min(seconds() for _ in range(5)) < 0.5


def test_threads_and_seed_are_recorded(table, tmp_path):
    assert fit(table, tmp_path / "run", "--seed", "7") == 0
    provenance = pbnn.Posterior.load(tmp_path / "run" / "normal.pt").provenance
    assert provenance["seed"] == 7
    assert provenance["threads"] == torch.get_num_threads()
