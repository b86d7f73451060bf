"""Writes the map of packages into docs/architecture.md: the first sentence of each one's docstring.

python docs/package_map.py
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/architecture.md"
TOPS = ("jaxserve", "sched", "pallas_kernels", "configs", "lab/jaxserve_lab")
BEGIN, END = "<!-- begin: python docs/package_map.py -->\n", "<!-- end -->\n"


def packages() -> Iterator[tuple[str, str]]:
    """The path and the first sentence of every package, parents before their children."""
    for top in TOPS:
        for file in sorted((ROOT / top).rglob("__init__.py"), key=lambda file: file.parent.parts):
            text = " ".join((ast.get_docstring(ast.parse(file.read_text())) or "").split())
            yield file.parent.relative_to(ROOT).as_posix(), re.split(r"\.(?:\s|$)", text)[0]


def with_map(page: str) -> str:
    """`page` with the map as it is now."""
    rows = "".join(f"| `{path}/` | {sentence} |\n" for path, sentence in packages())
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}| package | what it is for |\n|---|---|\n{rows}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_map(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
