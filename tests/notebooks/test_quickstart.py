"""The quickstart notebook is committed without outputs, and runs from top to bottom."""

from __future__ import annotations

import ast
import base64
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

from tests.compiling import CACHES

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "quickstart.ipynb"
PNG = b"\x89PNG"


@pytest.fixture
def notebook() -> NotebookNode:
    found: NotebookNode = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(found)
    return found


def test_it_is_committed_without_outputs(notebook: NotebookNode) -> None:
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None


@pytest.mark.slow
def test_it_runs(notebook: NotebookNode, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The engine keeps compiled steps in the home directory; a test keeps them with its own caches.
    home = CACHES / "home"
    home.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("HOME", str(home))
    resources = {"metadata": {"path": str(elsewhere)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    text, pictures = _outputs(notebook)
    assert "Once upon a time" in text
    assert "[5, 40, 80, 120]" in text
    same, again, other, _ = (line for line in text.splitlines() if line.startswith("- "))
    assert same == again != other
    pauses = ast.literal_eval(text.splitlines()[-1])
    assert pauses["sarathi"] < pauses["vllm"]
    assert len(pictures) == 2 and all(picture.startswith(PNG) for picture in pictures)


def _outputs(notebook: NotebookNode) -> tuple[str, list[bytes]]:
    """What was printed or shown as text, and the pictures."""
    text, pictures = [], []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if output.output_type == "stream" and output.name == "stdout":
                text.append(output.text)
            data = output.get("data", {})
            if "image/png" in data:
                pictures.append(base64.b64decode(data["image/png"]))
            elif "text/plain" in data:
                text.append(data["text/plain"] + "\n")
    return "".join(text), pictures
