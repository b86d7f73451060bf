"""Notebooks are committed without outputs, and use only what is stable and what they install."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from typing import Any

import pytest
from packaging.utils import canonicalize_name

import jaxserve
from tests.notebooks import test_four_papers, test_quickstart, test_scheduling_lab
from tests.notebooks.books import NAMES, code_of, first_cell, installed_by, read, text_of
from tests.notebooks.packages import ROOT

STABLE = set(re.findall(r"`([\w.]+)`", (ROOT / "docs" / "stability.md").read_text()))


def imports(name: str) -> list[tuple[str, str]]:
    """Modules and the names that are taken of them, "" for the module itself."""
    found = []
    for source in code_of(read(name)):
        for node in ast.walk(ast.parse(re.sub(r"(?m)^%.*$", "", source))):
            if isinstance(node, ast.Import):
                found += [(each.name, "") for each in node.names]
            if isinstance(node, ast.ImportFrom):
                found += [(node.module or "", each.name) for each in node.names]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_it_is_committed_without_outputs(name: str) -> None:
    for cell in read(name).cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None


@pytest.mark.parametrize("module", [test_four_papers, test_quickstart, test_scheduling_lab])
def test_what_is_checked_is_what_it_says(module: Any) -> None:
    text = text_of(read(module.NOTEBOOK))
    assert [sentence for sentence in module.CLAIMS if sentence not in text] == []


@pytest.mark.parametrize("name", NAMES)
def test_what_it_takes_of_jaxserve_is_stable(name: str) -> None:
    taken = {one for module, one in imports(name) if module.partition(".")[0] == "jaxserve"}
    assert taken and taken <= STABLE


def test_what_jaxserve_exports_is_stable() -> None:
    assert set(jaxserve.__all__) - {"__version__"} <= STABLE


@pytest.mark.parametrize("name", NAMES)
def test_what_it_imports_is_what_its_first_cell_installs(
    name: str, requirements: list[str]
) -> None:
    installed = installed_by(first_cell(name), requirements)
    # Compiled simulations, and optimal schedules.
    assert {"numba", "ortools", "matplotlib"} <= installed
    owners = importlib.metadata.packages_distributions()
    for module, _ in imports(name):
        top = module.partition(".")[0]
        if top in sys.stdlib_module_names or top in ("jaxserve", "IPython"):
            continue
        assert {str(canonicalize_name(one)) for one in owners[top]} & installed, module
