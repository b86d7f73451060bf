"""Servers that tests start leave the ports alone that a server of the user's own has."""

from __future__ import annotations

import ast
from pathlib import Path

from jaxserve.config import Config
from tests.server.processes import ROOT, serve_command

TESTS = ROOT / "tests"
STARTER = TESTS / "server" / "processes.py"
HANDS_IT_ONE = TESTS / "server" / "test_installed.py"


def starts(source: str) -> list[int]:
    """Lines of command lines: lists and tuples with sys.executable and serve.py."""
    found = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.List | ast.Tuple))
    return [
        each.lineno
        for each in found
        if "sys.executable" in (text := ast.unparse(each)) and "serve.py" in text
    ]


def test_only_one_function_of_the_tests_starts_serve_py() -> None:
    texts = {path: path.read_text() for path in TESTS.rglob("*.py")}
    found = {path: starts(text) for path, text in texts.items() if "serve.py" in text}
    assert {path for path, lines in found.items() if lines} == {STARTER, HANDS_IT_ONE}
    assert len(found[STARTER]) == 1


def test_it_takes_no_port_that_another_server_has_by_default() -> None:
    flags = dict(part.lstrip("-").split("=") for part in serve_command() if part.startswith("--"))
    ports = {name for name in Config().as_dict()["server"] if name.endswith("port")}
    assert flags == dict.fromkeys(ports, "0")


def test_a_command_line_is_seen(tmp_path: Path) -> None:
    assert starts('x = 1\nrun([sys.executable, "serve.py", "--port=0"])') == [2]
