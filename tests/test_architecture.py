"""Imports keep the contracts in .importlinter, folders are small, the map of packages is true."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

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
