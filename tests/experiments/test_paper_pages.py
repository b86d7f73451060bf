"""The pages on papers: their commands at toy size, and the pages in docs/."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve_lab.experiments.accelgen.claims import AccelGen
from jaxserve_lab.experiments.aptserve.claims import AptServe
from jaxserve_lab.experiments.bros.claims import Bros
from jaxserve_lab.experiments.claims.page import ClaimsPage

DOCS = Path(__file__).parents[2] / "docs"
SECTIONS = ("In short", "Claim by claim", "How it is run", "All numbers")
BEGINS = {".svg": b"<?xml", ".png": b"\x89PNG"}


def refuse(case: object) -> None:
    raise AssertionError(f"{case} was simulated")


def check_figures(page: str, folder: Path, count: int | None = None) -> None:
    """So many, all of which are pictures."""
    named = [line.split("](")[1].rstrip(")") for line in page.splitlines() if line[:2] == "!["]
    assert named and count in (None, len(named))
    for name in named:
        assert (folder / name).read_bytes().startswith(BEGINS[Path(name).suffix])


@pytest.mark.slow
@pytest.mark.parametrize(("made", "figures"), [(AccelGen, 3), (AptServe, 3), (Bros, 2)])
def test_the_experiment_at_toy_size(
    made: type[ClaimsPage], figures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = made.name
    arguments = ["--quick", "--jobs=1"]
    assert made.main([*arguments, f"--out={tmp_path}"]) == 0
    page = (tmp_path / f"{name}.md").read_text()
    for section in SECTIONS:
        assert f"\n## {section}" in page
    assert "Toy sizes" in page and str(tmp_path) not in page
    assert made is AptServe or "nan" not in page
    check_figures(page, tmp_path, figures)
    numbers = tmp_path / "figures" / f"{name}.json"
    runs = json.loads(numbers.read_text())
    assert len({json.dumps(run["case"]) for run in runs}) == len(runs)
    # The same numbers give the same page, and nothing is simulated or timed again.
    monkeypatch.setattr(made, "run", staticmethod(refuse))
    again = tmp_path / "again"
    assert made.main([*arguments, f"--out={again}", f"--numbers={numbers}"]) == 0
    assert (again / f"{name}.md").read_text() == page
    assert (again / "figures" / f"{name}.json").read_text() == numbers.read_text()
    numbers.write_text("[1]")
    assert made.main([*arguments, f"--out={again}", f"--numbers={numbers}"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("made", [AccelGen, AptServe, Bros])
def test_the_page_is_what_its_numbers_say(
    made: type[ClaimsPage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = made.name
    monkeypatch.setattr(made, "run", staticmethod(refuse))
    numbers = DOCS / "figures" / f"{name}.json"
    assert made.main(["--jobs=1", f"--out={tmp_path}", f"--numbers={numbers}"]) == 0
    page = (DOCS / f"{name}.md").read_text()
    assert (tmp_path / f"{name}.md").read_text() == page
    assert (tmp_path / "figures" / f"{name}.json").read_text() == numbers.read_text()
    check_figures(page, DOCS)
