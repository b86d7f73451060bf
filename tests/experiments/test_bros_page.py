"""`python -m jaxserve.experiments.bros` at toy size, and the page in docs/."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve.experiments.bros import page as bros
from jaxserve.experiments.bros.case import MixedCase, MixedNumbers

DOCS = Path(__file__).parents[2] / "docs"
NUMBERS = DOCS / "figures" / "bros.json"


def refuse(case: MixedCase) -> MixedNumbers:
    raise AssertionError(f"{case} was simulated")


def figures_of(page: str) -> list[str]:
    return [line.split("](")[1].rstrip(")") for line in page.splitlines() if line[:2] == "!["]


@pytest.mark.slow
def test_the_experiment_at_toy_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--quick", "--jobs=1"]
    assert bros.main([*arguments, f"--out={tmp_path}"]) == 0
    page = (tmp_path / "bros.md").read_text()
    assert "\n## In short\n" in page
    for number in range(1, 9):
        assert f"\n## {number}. " in page
    assert "Toy sizes" in page and str(tmp_path) not in page and "nan" not in page
    named = figures_of(page)
    assert len(named) == 4
    for name in named:
        assert "<svg" in (tmp_path / name).read_text()
    numbers = tmp_path / "figures" / "bros.json"
    runs = json.loads(numbers.read_text())
    assert len({json.dumps(run["case"]) for run in runs}) == len(runs)
    # The same numbers give the same page, and nothing is simulated or timed again.
    monkeypatch.setattr(bros, "run", refuse)
    again = tmp_path / "again"
    assert bros.main([*arguments, f"--out={again}", f"--numbers={numbers}"]) == 0
    assert (again / "bros.md").read_text() == page
    assert (again / "figures" / "bros.json").read_text() == numbers.read_text()
    numbers.write_text("[1]")
    assert bros.main([*arguments, f"--out={again}", f"--numbers={numbers}"]) == 2


@pytest.mark.slow
@pytest.mark.skipif(not NUMBERS.exists(), reason="python -m jaxserve.experiments.bros makes it")
def test_the_page_is_what_its_numbers_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bros, "run", refuse)
    assert bros.main(["--jobs=1", f"--out={tmp_path}", f"--numbers={NUMBERS}"]) == 0
    page = (DOCS / "bros.md").read_text()
    assert (tmp_path / "bros.md").read_text() == page
    for name in figures_of(page):
        assert "<svg" in (DOCS / name).read_text()
