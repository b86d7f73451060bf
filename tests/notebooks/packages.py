"""The package as pip installs it, built from a copy of the tree."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = ("jaxserve", "sched", "pallas_kernels", "configs", "lab", "notebooks")
FILES = ("pyproject.toml", "README.md", "LICENSE")


def clone(folder: Path) -> Path:
    """The tree, as far as it is installed, as folder/jaxserve."""
    tree = folder / "jaxserve"
    tree.mkdir(parents=True)
    for part in PARTS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / part, tree / part, symlinks=True, ignore=ignored)
    for file in FILES:
        shutil.copyfile(ROOT / file, tree / file)
    return tree


def with_source(cell: str, source: str) -> str:
    """A notebook's first cell that takes the package from there."""
    changed, times = re.subn(r'(?m)^SOURCE = ".*?"', lambda _: f"SOURCE = {source!r}", cell)
    assert times == 1
    return changed


def install(tree: Path, site: Path, *, editable: bool = False) -> Path:
    """What pip puts into site-packages for the tree, without what it depends on. Returns site."""
    site.mkdir(parents=True)
    build = f"build_{'editable' if editable else 'wheel'}"
    script = f"from setuptools import build_meta as b; b.{build}({str(site)!r})"
    subprocess.run([sys.executable, "-c", script], cwd=tree, check=True, capture_output=True)
    (wheel,) = site.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    # PYTHONPATH alone leads to no .pth files, and this interpreter has a jaxserve of its own.
    (site / "sitecustomize.py").write_text(
        "import os, site, sys\n"
        "known = set(sys.path)\n"
        f"site.addsitedir({str(site)!r})\n"
        "own = lambda path: path in known and os.path.isdir(os.path.join(path, 'jaxserve'))\n"
        f"sys.path.sort(key=lambda path: own(path) and path != {str(site)!r})\n"
    )
    return site
