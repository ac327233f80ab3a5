"""The README is executed: its Python blocks in one session, its shell blocks one after another."""

import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROSE = re.sub(r"^```.*?^```", "", README, flags=re.DOTALL | re.MULTILINE)
# The two set-up lines make virtual environments; .ci/run runs them as they stand.
SET_UP = "python3 -m venv"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def test_every_block_is_of_a_kind_that_is_run():
    fences = re.findall(r"^```(\w*)$", README, flags=re.MULTILINE)
    assert set(fences) == {"python", "sh", ""}
    assert sum(SET_UP in block for block in blocks("sh")) == 2


def test_python_blocks_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    session = {"__name__": "readme"}
    with warnings.catch_warnings():
        # The sizes are those of a page of documentation, and the fits say so.
        warnings.simplefilter("ignore")
        for block in blocks("python"):
            exec(compile(block, "README.md", "exec"), session)
    printed = capsys.readouterr().out
    assert "not converged" in printed
    assert (tmp_path / "nuts.nc").is_file()


def test_shell_blocks_run_in_order(tmp_path):
    shutil.copytree(ROOT / "models", tmp_path / "models")
    scripts = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    for block in blocks("sh"):
        if SET_UP not in block:
            subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block],
                cwd=tmp_path,
                env=environment,
                check=True,
                capture_output=True,
                timeout=900,
            )
    header, row = (tmp_path / "predictions.csv").read_text().splitlines()
    assert header.startswith("prediction,probability_setosa")
    assert row.startswith("setosa,")


@pytest.mark.parametrize("link", re.findall(r"\]\(((?!http)[^)#]+)\)", PROSE))
def test_links_lead_somewhere(link):
    assert (ROOT / link).exists()
