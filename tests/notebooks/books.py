"""Notebooks as they are read and run: without a clone, and with nothing but what they install."""

from __future__ import annotations

import base64
import importlib.metadata
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.notebooks.packages import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = [path.stem for path in NOTEBOOKS]
PNG = b"\x89PNG"


def read(name: str) -> NotebookNode:
    book: NotebookNode = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    nbformat.validate(book)
    return book


def code_of(book: NotebookNode) -> list[str]:
    return [cell.source for cell in book.cells if cell.cell_type == "code"]


def first_cell(name: str) -> str:
    return code_of(read(name))[0]


def text_of(book: NotebookNode) -> str:
    """Its words, without line breaks."""
    return " ".join(" ".join(c.source for c in book.cells if c.cell_type == "markdown").split())


def run(name: str, folder: Path, claims: Mapping[str, str]) -> tuple[str, int]:
    """Runs the notebook, and then looks whether what it claims came out.

    Args:
        name: Of the notebook.
        folder: Where its kernel starts.
        claims: By a sentence of the notebook, an expression of its variables that is true then.

    Returns:
        What it printed, and how many pictures it showed.
    """
    book = read(name)
    checks = ", ".join(f"bool({each})" for each in claims.values())
    book.cells.append(nbformat.v4.new_code_cell(f"import json\nprint(json.dumps([{checks}]))"))
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(book, timeout=600, kernel_name="python3", resources=resources).execute()
    held = json.loads(book.cells.pop().outputs[0].text)
    failed = [claim for claim, one in zip(claims.items(), held, strict=True) if not one]
    assert not failed
    outputs = [out for cell in book.cells for out in cell.get("outputs", ())]
    text = "".join(
        out.text for out in outputs if out.output_type == "stream" and out.name == "stdout"
    )
    pictures = [out.data["image/png"] for out in outputs if "image/png" in out.get("data", {})]
    assert all(base64.b64decode(picture).startswith(PNG) for picture in pictures)
    return text, len(pictures)


def installed_by(cell: str, requirements: Iterable[str]) -> set[str]:
    """Distributions that a first cell installs, by their names.

    Args:
        cell: Which says the extras.
        requirements: Of the wheel, with its extras.
    """
    extras = re.search(r"jaxserve-llm\[([\w,]+)\] @", cell)
    assert extras is not None
    own = list(map(Requirement, requirements))
    found: set[str] = set()
    todo = [("jaxserve-llm", extra) for extra in ["", *extras[1].split(",")]]
    done = set(todo)
    while todo:
        name, extra = todo.pop()
        found.add(name)
        needs = own if name == "jaxserve-llm" else _needs(name)
        for each in needs:
            if each.marker is None or each.marker.evaluate({"extra": extra}):
                for one in ["", *each.extras]:
                    key = (str(canonicalize_name(each.name)), one)
                    if key not in done:
                        done.add(key)
                        todo.append(key)
    return found


def _needs(name: str) -> list[Requirement]:
    try:
        return list(map(Requirement, importlib.metadata.requires(name) or ()))
    except importlib.metadata.PackageNotFoundError:
        return []  # of another platform


def foreign(allowed: set[str]) -> set[str]:
    """Top-level modules that are here, and not of these distributions or of what runs kernels."""
    for name in ("ipykernel", "pip", "setuptools"):
        allowed = allowed | {name} | {n for n in _closure(name)}
    modules = importlib.metadata.packages_distributions()
    return {
        module
        for module, owners in modules.items()
        if module != "jaxserve" and not allowed & {str(canonicalize_name(one)) for one in owners}
    }


def _closure(name: str) -> set[str]:
    found, todo = set(), [name]
    while todo:
        for each in _needs(todo.pop()):
            key = str(canonicalize_name(each.name))
            if key not in found and (each.marker is None or each.marker.evaluate({"extra": ""})):
                found.add(key)
                todo.append(key)
    return found
