"""The first cell of each notebook: where the package is found, and what is said where it is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from jaxserve import __version__
from tests.notebooks.books import NAMES, first_cell
from tests.notebooks.packages import clone, install, with_source

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["wheel", "editable"])
def installed(
    wheel: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Path, Path, Path]:
    """A folder with a clone in it, the site-packages that has the package from a wheel or is led to
    the clone, and where the package lies."""
    parent = tmp_path_factory.mktemp("parent")
    tree = clone(parent)
    if request.param == "wheel":
        return parent, wheel, wheel
    site = install(tree, tmp_path_factory.mktemp("editable") / "site", editable=True)
    return parent, site, tree


@pytest.mark.parametrize("notebook", NAMES)
def test_beside_a_clone_the_package_is_the_installed_one(
    notebook: str, installed: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder named jaxserve is a package, too, where Python finds no other first."""
    parent, site, place = installed
    monkeypatch.setenv("PYTHONPATH", str(site))
    shown = "import jaxserve\nprint(jaxserve.__version__, jaxserve.__file__)"
    cells = [nbformat.v4.new_code_cell(source) for source in (first_cell(notebook), shown)]
    book = nbformat.v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": str(parent)}}
    NotebookClient(book, timeout=300, kernel_name="python3", resources=resources).execute()
    (output,) = book.cells[-1].outputs
    assert output.text == f"{__version__} {place / 'jaxserve' / '__init__.py'}\n"


@pytest.mark.parametrize("notebook", NAMES)
@pytest.mark.parametrize("place", ["", "clone"])
def test_where_nothing_can_be_installed_it_says_what_to_paste(
    notebook: str, place: str, tmp_path: Path
) -> None:
    """Python without its packages: pip is asked for what the notebook would have it install."""
    folder = clone(tmp_path) / "notebooks" if place else tmp_path
    command = [sys.executable, "-I", "-S", "-c", with_source(first_cell(notebook), "")]
    environment = {
        **os.environ,
        "PIP_NO_INDEX": "1",
        "PIP_DRY_RUN": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    source = (tmp_path / "jaxserve").as_uri() if place else ""
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith(f"RuntimeError: pip cannot install jaxserve from {source!r}. Paste the ")
    assert last.endswith('above: SOURCE = "https://HOST/OWNER/REPOSITORY"')
