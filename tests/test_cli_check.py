"""`pbnn check` and `pbnn decide`: report, checklist, exit status, rule, and rows held out."""

import contextlib
import io
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from pbnn import cli
from pbnn.evaluate.decision import DecisionRule

MODELS = Path(__file__).parents[1] / "models"
FIT = ["--set", "hidden=4", "--quiet", "--test-fraction", "0.5"]


def run(*arguments):
    return cli.main([str(a) for a in arguments])


def rows(n, seed=0):
    """Two noisy classes along a, beside a third one far away in b."""
    rng = np.random.default_rng(seed)
    a = 2.0 * rng.normal(size=n)
    kind = np.where(a + rng.normal(size=n) > 0, "high", "low")
    frame = pd.DataFrame({"a": a, "b": rng.normal(size=n), "y": a, "kind": kind})
    frame.loc[: n // 6, ["b", "kind"]] = [30.0, "odd"]
    return frame


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "table.csv"
    rows(240).to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def fitted(table, tmp_path_factory):
    """A run of a classifier that never saw class "odd"; tests write only beside it."""
    out = tmp_path_factory.mktemp("fitted") / "run"
    more = ["--target", "kind", "--drop", "y", "--hold-out-class", "odd", "--steps", "150"]
    model = MODELS / "classification.py"
    assert run("fit", model, "--dataset", table, *more, *FIT, "--out", out) == 0
    return out


@pytest.fixture(scope="module")
def checked(fitted):
    """Exit status, what is printed and the report of a check with everything."""
    other = fitted.parent / "other.csv"
    rows(40, seed=2).drop(columns=["y", "kind"]).to_csv(other, index=False)
    arguments = [
        "check", fitted / "normal.nc", "--ood", "near=held-out", "--ood", "noise:5",
        "--ood", other, "--two-stages", "--costs", "5,1",
    ]  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = run(*arguments)
    return status, printed.getvalue(), (fitted / "check_normal.html").read_text()


def test_a_report_holds_its_figures_and_ends_with_the_checklist(checked):
    status, printed, page = checked
    assert status == (3 if "FAIL" in printed else 0)
    assert page.rindex("Acceptance checklist") > page.rindex("data:image/png;base64,")
    assert page.count("<figure>") == 3
    assert {"near", "noise", "other"} <= set(printed.split("'"))


def test_the_saved_rule_decides_for_new_rows(fitted, checked, tmp_path):
    rule = fitted / "rule_normal.json"
    assert DecisionRule.load(rule).costs.error == 5.0
    arguments = decide(fitted, tmp_path)
    assert run(*arguments, "--rule", rule) == 0
    decided = pd.read_csv(tmp_path / "d.csv")
    assert set(decided["answer"]) <= {"high", "low"}
    assert (decided["reason"][:3] == "never seen").all(), "far away in b"
    assert (decided["decision"] == "review").eq(decided["reason"].notna()).all()


def decide(fitted, folder):
    new = rows(12, seed=1).drop(columns=["y", "kind"])
    new.to_csv(folder / "new.csv", index=False)
    return ["decide", fitted, folder / "new.csv", "--out", folder / "d.csv"]


def test_status_3_where_a_requirement_fails(fitted, checked, tmp_path, capsys):
    """Rows as they are do not differ from themselves: no signal."""
    report = tmp_path / "report.md"
    assert run("check", fitted, "--ood", "same=noise:0", "--out", report, "--seed", "1") == 3
    printed = capsys.readouterr().out
    assert "FAIL  A, epistemic spread ranks 'same'" in printed
    text = report.read_text()
    assert text.rstrip().endswith("|")
    assert "![" in text
    assert "| FAIL |" in text


def test_one_draw_and_one_row_have_a_report_that_does_not_pass(table, tmp_path, capsys):
    out, one = tmp_path / "run", tmp_path / "one.csv"
    more = ["--target", "kind", "--drop", "y", "--method", "map", "--steps", "20", "--out", out]
    assert run("fit", MODELS / "classification.py", "--dataset", table, *more, *FIT) == 0
    pd.DataFrame({"a": [0.0], "b": [30.0]}).to_csv(one, index=False)
    capsys.readouterr()
    assert run("check", out, "--ood", one, "--ood", "noise:5") == 3
    printed = capsys.readouterr()
    assert "one draw has no epistemic spread" in printed.out
    assert "of too few rows (1)" in printed.out
    assert "fewer than 10 rows: 'one' (1)" in printed.err
    page = (out / "check_map.html").read_text()
    assert "no spread" in page
    assert page.count("<figure>") == 2, "none of a spread that is 0"


def test_numbers_need_a_tolerance_for_decisions(table, tmp_path, capsys):
    out = tmp_path / "run"
    more = ["--target", "y", "--drop", "kind", "--hold-out-gap", "b:0.8:1", "--steps", "20"]
    model = MODELS / "regression.py"
    assert run("fit", model, "--dataset", table, *more, *FIT, "--out", out) == 0
    capsys.readouterr()
    check = ["check", out, "--ood", "gap=held-out", "--shift", "columns"]
    assert run(*check) in (0, 3)
    printed = capsys.readouterr().out
    assert "pass --tolerance" in printed
    assert "coverage_90" in printed
    assert not (out / "rule_normal.json").exists()
    assert run(*check[:2], "--tolerance", "0.5") in (0, 3)
    assert DecisionRule.load(out / "rule_normal.json").tolerance == 0.5


def test_another_table_is_refused(fitted, tmp_path, capsys):
    other = tmp_path / "other.csv"
    rows(240, seed=5).to_csv(other, index=False)
    assert run("check", fitted, "--ood", "noise:5", "--dataset", other) == 2
    assert "not the table that was fitted" in capsys.readouterr().err


def test_a_rule_of_another_posterior_is_refused(fitted, checked, tmp_path, capsys):
    rule = DecisionRule.load(fitted / "rule_normal.json")
    rule.provenance["posterior"]["seed"] = 99
    path = rule.save(tmp_path / "rule.json")
    assert run(*decide(fitted, tmp_path), "--rule", path) == 2
    assert "another posterior" in capsys.readouterr().err
    assert not (tmp_path / "d.csv").exists()


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--ood", "x=nowhere.csv"], "nowhere.csv"),
        (["--ood", "x=noise:much"], "'much'"),
        (["--ood", "=noise"], "expected NAME=FILE"),
        (["--ood", "rotation"], "no images"),
        (["--dataset", "nowhere.csv"], "--dataset"),
        (["--costs", "1"], "ERROR,REVIEW"),
        (["--costs", "1,5"], "0 < review < error"),
        (["--image", "8"], "HEIGHTxWIDTH"),
        (["--out", "report.pdf"], ".html or .md"),
        (["--posterior", "nuts"], "nuts"),
        (["--tolerance", "1"], "leave it out"),
        (["--layer", "nope", "--two-stages"], "nope"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(more, named, fitted, capsys):
    assert run("check", fitted, *more) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert named in err


@pytest.mark.parametrize("gap", ["b:0.2", "b:x:y"])
def test_a_gap_that_cannot_be_read_is_named(gap, table, tmp_path, capsys):
    more = ["--target", "y", "--drop", "kind", "--hold-out-gap", gap, "--out", tmp_path / "run"]
    assert run("fit", MODELS / "regression.py", "--dataset", table, *more, *FIT) == 2
    assert gap.partition(":")[0] in capsys.readouterr().err


def test_chains_that_have_not_converged_are_told(table, tmp_path, capsys):
    out = tmp_path / "nuts"
    status = run(
        "fit", MODELS / "classification.py", "--dataset", table, "--target", "kind", "--drop", "y",
        *FIT, "--method", "nuts", "--chains", "2", "--warmup", "5", "--draws", "8", "--out", out,
    )  # fmt: skip
    assert status == 0
    assert "nuts not converged" in capsys.readouterr().out
    run("check", out, "--ood", "far=noise:5")
    printed = capsys.readouterr().out
    assert printed.index("chains not converged") < printed.index("far")
