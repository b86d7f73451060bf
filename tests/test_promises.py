"""docs/promises.md: each line has tests that cite it, and each citation a line."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "promises.md"
LINE = re.compile(r"^\| (\d+) \| (.+) \| (.*) \|$", re.MULTILINE)
MARK = "pytest.mark.promise"
LEFT_OUT = ("pytest.mark.slow", "pytest.mark.ray")  # by `make test`


def citations(source: str) -> list[tuple[int, bool]]:
    """The numbers that tests cite with decorators of their own, and whether `make test` runs the
    test. ValueError if a number is cited in any other way."""
    found, tree = list[tuple[int, bool]](), ast.parse(source)
    all_slow = any(
        isinstance(node, ast.Assign) and _is_one_of(LEFT_OUT, node.value) for node in tree.body
    )
    for test in ast.walk(tree):
        if isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef):
            slow = all_slow or any(_is_one_of(LEFT_OUT, mark) for mark in test.decorator_list)
            for mark in test.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == MARK:
                    (number,) = mark.args
                    found.append((ast.literal_eval(number), not slow))
    if len(found) != source.count("mark.promise("):
        raise ValueError("a promise is cited by a test's own decorator, a number each")
    return found


def _is_one_of(names: tuple[str, ...], mark: ast.expr) -> bool:
    return ast.unparse(mark) in names


def cited() -> dict[int, dict[str, bool]]:
    """By number, the files with tests that cite it, and whether `make test` runs one of them."""
    found = defaultdict[int, dict[str, bool]](dict)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        if path != Path(__file__).resolve() and "mark.promise(" in source:
            name = path.relative_to(ROOT).as_posix()
            for number, fast in citations(source):
                found[number][name] = fast or found[number].get(name, False)
    return dict(found)


def promised() -> dict[int, list[str]]:
    """By number, the files that the page names."""
    lines = LINE.findall(PAGE.read_text(encoding="utf-8"))
    assert len(lines) == len({number for number, *_ in lines}), "a number twice"
    return {int(number): re.findall(r"`(tests/[^`]+)`", files) for number, _, files in lines}


def test_every_promise_is_held_and_every_citation_is_of_one() -> None:
    page, tests = promised(), cited()
    assert page and {number: sorted(files) for number, files in tests.items()} == page


def test_make_test_holds_every_promise() -> None:
    assert not [number for number, files in cited().items() if not any(files.values())]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (f"@{MARK}(3)\n@{MARK}(4)\ndef test_a(): ...", [(3, True), (4, True)]),
        (f"@pytest.mark.slow\n@{MARK}(3)\nasync def test_a(): ...", [(3, False)]),
        (f"pytestmark = pytest.mark.ray\n@{MARK}(3)\ndef test_a(): ...", [(3, False)]),
        ("def test_a(): ...", []),
        (f"pytestmark = {MARK}(3)", None),
        (f"@pytest.mark.parametrize('a', [pytest.param(1, marks={MARK}(3))])\ndef a(a): ...", None),
        (f"@{MARK}(3, 4)\ndef test_a(): ...", None),
    ],
)
def test_citations_are_found(source: str, found: list[tuple[int, bool]] | None) -> None:
    if found is None:
        with pytest.raises(ValueError):
            citations(source)
    else:
        assert citations(source) == found
