"""The Python blocks of the pages in docs/ run, each page in a session of its own."""

import re
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
# The others are tables of what was measured, and name the script that measured it.
RUN = [path for path in PAGES if "```python" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_python_blocks_run_in_order(path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    text = path.read_text(encoding="utf-8")
    fences = re.findall(r"^```(\w+)$", text, flags=re.MULTILINE)
    assert set(fences) == {"python"}, "blocks of another kind are not run"
    session = {"__name__": path.stem}
    with warnings.catch_warnings():
        # The sizes are those of a page of documentation, and the fits say so.
        warnings.simplefilter("ignore")
        for block in re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
            exec(compile(block, path.name, "exec"), session)
    assert capsys.readouterr().out


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_links_lead_somewhere(path):
    for link in re.findall(r"\]\(((?!http)[^)#]+)\)", path.read_text(encoding="utf-8")):
        assert (path.parent / link).exists(), link
