"""Notebooks as Colab runs them: no clone around, and pip installs what the first cell says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.notebooks.books import NAMES, code_of, read
from tests.notebooks.packages import clone, with_source

pytestmark = pytest.mark.slow

VERSION = "99.0"  # so that pip does not take what this interpreter has for the wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = clone(tmp_path_factory.mktemp("source"))
    init = tree / "jaxserve" / "__init__.py"
    changed = re.sub(r'(?m)^__version__ = ".*"', f'__version__ = "{VERSION}"', init.read_text())
    init.write_text(changed)
    folder = tmp_path_factory.mktemp("wheel")
    script = f"from setuptools import build_meta as b; b.build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", script], cwd=tree, check=True, capture_output=True)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture
def colab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, and the kernel `colab`: a Python with pip and without jaxserve, which has
    the other packages of this one, so that they need not be downloaded again."""
    environment = tmp_path / "python"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    shown = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    site = Path(shown.stdout.strip())
    # A folder that a .pth file names comes after the environment's own, and its own .pth files,
    # which lead to this clone, are not read.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    spec = tmp_path / "jupyter" / "kernels" / "colab"
    spec.mkdir(parents=True)
    argv = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel = {"argv": argv, "display_name": "colab", "language": "python"}
    (spec / "kernel.json").write_text(json.dumps(kernel))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    empty = tmp_path / "content"
    empty.mkdir()
    return empty


@pytest.mark.parametrize("notebook", NAMES)
def test_the_first_cell_installs_a_wheel(notebook: str, wheel: Path, colab: Path) -> None:
    """And what the notebook imports is there then."""
    code = code_of(read(notebook))
    first = code[0]
    imports = re.findall(r"(?m)^(?:import|from) .*$", "\n".join(code))
    cells = [
        with_source(first, str(wheel)),
        "import jaxserve as j, sys\nprint(j.__version__, j.__file__.startswith(sys.prefix))",
        "\n".join(each for each in imports if not each.endswith("(")),
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in cells])
    resources = {"metadata": {"path": str(colab)}}
    NotebookClient(book, timeout=600, kernel_name="colab", resources=resources).execute()
    assert book.cells[1].outputs[0].text == f"{VERSION} True\n"
