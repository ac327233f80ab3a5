"""Imports point one way, and each module is a page with a title and a list of what it offers."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "pbnn"
MODULES = sorted(PACKAGE.rglob("*.py"))
# Each layer may import itself and those above it in this list, never those below.
LAYERS = [
    {"_version"},
    {"errors"},
    {"files", "progress"},
    {"data", "priors", "model"},
    {"checks"},
    {"front_door"},
    {"infer"},
    {"prediction"},
    {"evaluate", "inference_data"},
    {"plots"},
    {"runs"},
    {"cli"},
    {"__main__"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
LINES = 520


def part(dotted):
    """Return the part of the package that a module name lies in, `pbnn.data.rows` → `data`."""
    return dotted.split(".")[1] if "." in dotted else ""


def name_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path):
    """Yield the pbnn modules that a file imports anywhere, with their lines."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: imports are absolute"
            # `from pbnn import data` names a part, `from pbnn.data import Units` does not.
            names = (
                [f"pbnn.{a.name}" for a in node.names] if node.module == "pbnn" else [node.module]
            )
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from ((name, node.lineno) for name in names if name.split(".")[0] == "pbnn")


@pytest.fixture(params=MODULES, ids=name_of)
def path(request):
    return request.param


def test_imports_point_one_way(path):
    own = part(name_of(path))
    if own == "":
        return  # pbnn/__init__.py looks names up everywhere, when they are first used
    assert own in RANK, f"{own} has no layer; give it one here"
    wrong = [
        f"line {line}: {name}"
        for name, line in imports(path)
        if part(name) and part(name) != own and RANK[part(name)] >= RANK[own]
    ]
    assert wrong == []


def test_module_has_a_title_and_a_surface(path):
    if path.name == "_version.py":
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), "no docstring"
    bound = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    only_docstring = len(tree.body) == 1
    assert only_docstring or "__all__" in bound, "no __all__"


def test_module_is_short_and_not_a_drawer(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LINES
    assert path.stem not in {"utils", "util", "helpers", "misc", "common"}
