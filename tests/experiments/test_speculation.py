"""The simulated part of docs/speculation.md comes out of its command."""

from __future__ import annotations

from pathlib import Path

from jaxserve_lab.experiments.common.page import BEGIN, END
from jaxserve_lab.experiments.speculation.cli import main


def test_the_part_goes_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "speculation.md"
    page.write_text(f"before\n{BEGIN.format('speculation', 'simulated')}stale\n{END}\nafter\n")
    assert main(["--quick", "--jobs=1", f"--out={page}"]) == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- begin") and text.endswith("<!-- end -->\nafter\n")
    assert "stale" not in text and text.count("| `humaneval` | `sarathi` |") == 3
    page.write_text("nothing")
    assert main(["--quick", "--jobs=1", f"--out={page}"]) == 2
