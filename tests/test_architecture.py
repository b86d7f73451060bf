"""The tree is what docs/architecture.md says: its parts, and who imports whom; and its files and
functions are short."""

from __future__ import annotations

from pathlib import Path

import pytest

from .architecture import (
    MAX_FILE,
    MAX_FUNCTION,
    PAGE,
    Page,
    Tree,
    circles,
    forbidden,
    module_circles,
    read_page,
    too_long,
    unlisted,
    upward,
)

ROOT = Path(__file__).resolve().parents[1]
# Long because they hold words, not logic.


@pytest.fixture(scope="module")
def tree() -> Tree:
    return Tree(ROOT)


@pytest.fixture(scope="module")
def page() -> Page:
    return read_page((ROOT / PAGE).read_text(encoding="utf-8"))


def test_the_page_lists_what_there_is(tree: Tree, page: Page) -> None:
    assert unlisted(tree, page) == []


def test_the_page_goes_from_the_top_down(page: Page) -> None:
    assert upward(page) == []


def test_imports_go_where_the_page_allows(tree: Tree, page: Page) -> None:
    assert forbidden(tree, page) == []


def test_no_modules_import_each_other(tree: Tree) -> None:
    assert module_circles(tree) == []


def test_files_and_functions_are_short(tree: Tree) -> None:
    assert too_long(tree) == []


# The checks themselves, on small trees.

SMALL_PAGE = """
| part | what it does | imports | libraries |
|---|---|---|---|
| `serve.py` | serves | `jaxserve/engine/` | none |
| `jaxserve/engine/` | steps | `sched/` | `numpy` |
| `sched/` | plans | nothing | `numpy` |
| `tests/**` | tests | anything | anything |

| module | what it holds |
|---|---|
| `sched/plan.py` | plans |
| `sched/table.py` | the table |
"""
SMALL_TREE = {
    "serve.py": "from jaxserve.engine.loop import run",
    "jaxserve/engine/loop.py": "import sys\nimport numpy\nfrom jaxserve.sched.plan import Plan",
    "sched/plan.py": "import numpy\nfrom jaxserve.sched import table",
    "sched/table.py": "",
    "tests/engine/test_loop.py": "import pytest\nimport serve",
}


def small(root: Path, files: dict[str, str]) -> Tree:
    """SMALL_TREE with `files` added or changed."""
    for name, text in {**SMALL_TREE, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    (root / "jaxserve" / "sched").symlink_to("../sched")
    return Tree(root)


def complaints(tree: Tree, text: str = SMALL_PAGE) -> list[str]:
    """All that is wrong, in one list."""
    page = read_page(text)
    rings = [" <-> ".join(ring) for ring in module_circles(tree)]
    return unlisted(tree, page) + upward(page) + forbidden(tree, page) + rings + too_long(tree)


def test_a_tree_in_order_gets_no_complaint(tmp_path: Path) -> None:
    assert complaints(small(tmp_path, {})) == []


IN_A_FUNCTION = "def run():\n    from jaxserve.engine.loop import run\n    return run()"
FOR_TYPES = """
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxserve.{module} import Plan
"""


@pytest.mark.parametrize(
    "files, complaint",
    [
        ({"sched/table.py": "import jaxserve.engine.loop"}, "sched/table.py:1 imports jaxserve/en"),
        ({"sched/table.py": IN_A_FUNCTION}, "sched/table.py:2 imports jaxserve/engine/"),
        ({"sched/table.py": "from ..engine import loop"}, "sched/table.py:1 imports"),
        ({"sched/table.py": FOR_TYPES.format(module="engine.loop")}, "sched/table.py:5 imports"),
        ({"sched/table.py": "import jax.numpy"}, "sched/table.py:1 imports jax:"),
        ({"serve.py": "from jaxserve.sched.plan import Plan"}, "serve.py:1 imports sched/"),
        ({"sched/table.py": "from jaxserve.sched import plan"}, "sched/plan.py <-> sched/table.py"),
        (
            {"sched/table.py": "def f():\n    import jaxserve.sched.plan"},
            "sched/plan.py <-> sched/table.py",
        ),
        ({"jaxserve/models/opt.py": ""}, "jaxserve/models/ is not listed"),
        ({"jaxserve/assets/words.txt": ""}, "jaxserve/assets/ is not listed"),
        ({"sched/request.py": ""}, "sched/request.py is not listed"),
        ({"train.py": ""}, "train.py is not listed"),
        ({"sched/table.py": "\n" * MAX_FILE}, "sched/table.py has 701 lines"),
        (
            {"tests/test_a.py": "def f():\n" + "    0\n" * MAX_FUNCTION},
            "test_a.py:1 f has 61 lines",
        ),
    ],
)
def test_a_fault_is_found(tmp_path: Path, files: dict[str, str], complaint: str) -> None:
    found = complaints(small(tmp_path, files))
    assert any(complaint in line for line in found), found


def test_a_circle_for_type_checkers_alone_is_none(tmp_path: Path) -> None:
    text = FOR_TYPES.format(module="sched.plan")
    assert complaints(small(tmp_path, {"sched/table.py": text})) == []


def test_a_circle_of_three_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": set[str]()}
    assert circles(graph) == [["a", "b", "c"]]


@pytest.mark.parametrize(
    "old, new, complaint",
    [
        (
            "| `sched/` | plans | nothing |",
            "| `sched/` | plans | `jaxserve/engine/` |",
            "not below",
        ),
        ("| nothing |", "| `sched/table.py` |", "not below it"),
        ("| `sched/table.py`", "| `sched/blocks.py`", "lists sched/blocks.py, which is not there"),
        ("`tests/**`", "`tools/**`", "lists tools/**, which is not there"),
        ("`jaxserve/engine/` | steps", "`jaxserve/loop/` | steps", "lists jaxserve/loop/, which"),
    ],
)
def test_a_fault_of_the_page_is_found(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    assert old in SMALL_PAGE
    found = complaints(small(tmp_path, {}), SMALL_PAGE.replace(old, new, 1))
    assert any(complaint in line for line in found), found


def test_a_part_listed_twice_is_refused() -> None:
    line = "| `sched/` | plans | nothing | `numpy` |"
    with pytest.raises(ValueError, match=r"sched/ is listed twice"):
        read_page(SMALL_PAGE.replace(line, f"{line}\n{line}"))
