"""Imports keep the contracts in .importlinter, folders are small, the map of packages is true, and
docstrings have sections where there is more to describe than one sentence can."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.package_map import PAGE, packages, with_map

ROOT = Path(__file__).resolve().parents[1]
MAX_FILES = 18
LISTS = {
    "configs",
    "jaxserve/models",
    "jaxserve/server/proto",
    "sched/policies",
    "jaxserve/simulator/workloads",
}


def test_imports_keep_the_contracts() -> None:
    """In a process of its own, since import-linter changes how everybody logs."""
    script = "from importlinter.cli import lint_imports as f; exit(f(no_cache=True, no_logo=True))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_folders_are_small() -> None:
    """Unless they are lists of like things."""
    tops = ("jaxserve", "sched", "pallas_kernels", "configs", "lab", "tests", "tools", "docs")
    files = (file for top in tops for file in (ROOT / top).rglob("*.py"))
    count = Counter(file.parent.relative_to(ROOT).as_posix() for file in files)
    full = {folder for folder, number in count.items() if number > MAX_FILES}
    assert full - LISTS == set()


def test_the_map_of_packages_is_true() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_map(page) == page, "run python docs/package_map.py"


def test_every_package_says_what_it_is_for() -> None:
    assert [path for path, sentence in packages() if not sentence] == []


TOPS = ("jaxserve", "sched", "pallas_kernels", "lab", "tools")
MAX_FIELDS, MAX_PARAMETERS = 2, 3
SECTIONS = ("Args:", "Attributes:", "See `")
# Parameters of policies are described by `jaxserve policies` and docs/policies.md.
DESCRIBED_ELSEWHERE = "sched/policies/"

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def without_sections(source: str, *, policies: bool = False) -> Iterator[str]:
    """Public classes and functions that lack them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Definition) and not node.name.startswith("_"):
            text = ast.get_docstring(node) or ""
            if isinstance(node, ast.ClassDef):
                long = not policies and (_fields(node) > MAX_FIELDS)
                long |= _parameters(_init(node)) > MAX_FIELDS
            else:
                long = bool(text) and _parameters(node) > MAX_PARAMETERS
            if long and not any(section in text for section in SECTIONS):
                yield node.name


def _fields(node: ast.ClassDef) -> int:
    """Public fields of a dataclass or a named tuple."""
    made = " ".join(ast.unparse(one) for one in (*node.decorator_list, *node.bases))
    if "dataclass" not in made and "NamedTuple" not in made:
        return 0
    targets = [line.target for line in node.body if isinstance(line, ast.AnnAssign)]
    return sum(isinstance(one, ast.Name) and not one.id.startswith("_") for one in targets)


def _init(node: ast.ClassDef) -> ast.FunctionDef | None:
    found = (line for line in node.body if isinstance(line, ast.FunctionDef))
    return next((one for one in found if one.name == "__init__"), None)


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef | None) -> int:
    if node is None:
        return 0
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return sum(one.arg not in ("self", "cls") for one in every)


@pytest.mark.parametrize("top", TOPS)
def test_what_has_many_parts_has_sections(top: str) -> None:
    found = []
    for path in sorted((ROOT / top).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if "/proto/" not in name:
            policies = name.startswith(DESCRIBED_ELSEWHERE)
            source = path.read_text(encoding="utf-8")
            found += [f"{name}: {one}" for one in without_sections(source, policies=policies)]
    assert not found


def test_a_class_of_three_fields_needs_them() -> None:
    record = "@dataclass\nclass Record:\n    '''{}'''\n    a: int\n    b: int\n    c: int\n"
    assert list(without_sections(record.format("Three numbers."))) == ["Record"]
    assert not list(without_sections(record.format("Three numbers.\n\n    Attributes:\n")))
    call = "def call(a, b, c, d):\n    '''Adds.'''\n"
    assert list(without_sections(call)) == ["call"]
