"""Many runs, each once: what is asked for, known and kept."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from jaxserve.experiments.common import grid, page
from jaxserve.experiments.common.claims import Section
from jaxserve.experiments.common.grid import Known, dump, run_all, run_asked


@dataclass(frozen=True)
class Square:
    side: int

    @property
    def cost(self) -> float:
        return self.side

    def named(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Area:
    area: int


def area(square: Square) -> Area:
    return Area(square.side**2)


def test_what_is_asked_for_may_depend_on_what_there_is(tmp_path: Path) -> None:
    done: list[int] = []

    def work(square: Square) -> Area:
        done.append(square.side)
        return area(square)

    def asked(results: dict[Square, Area]) -> list[Square]:
        return [Square(2), *(Square(found.area) for found in results.values() if found.area < 99)]

    path = tmp_path / "figures" / "squares.json"
    kept: list[int] = []

    def keep(results: dict[Square, Area]) -> None:
        kept.append(len(results))
        dump(results, path)

    results = run_asked(asked, 1, work, None, keep)
    assert {case.side: found.area for case, found in results.items()} == {2: 4, 4: 16, 16: 256}
    assert done == [2, 4, 16] and kept == [1, 2, 3]
    # What is known is not run again.
    assert run_asked(asked, 1, work, Known(path, Area), keep) == results
    assert done == [2, 4, 16]


def test_an_interrupted_run_keeps_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "KEEP", -1.0)
    path = tmp_path / "squares.json"

    def work(square: Square) -> Area:
        if square.side == 1:
            raise KeyboardInterrupt
        return area(square)

    with pytest.raises(KeyboardInterrupt):
        run_asked(lambda _: map(Square, (1, 2, 3)), 1, work, None, lambda some: dump(some, path))
    assert len(json.loads(path.read_text())) == 2  # the longest first


def test_processes_give_the_same() -> None:
    cases = [Square(side) for side in range(5)]
    assert run_all(cases, 2, area) == {case: area(case) for case in cases}


def test_a_page_is_written_or_a_line_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section = Section("1. One", "A setting.", [], [("a.png", "A figure")], ["A note."])

    def make(args: Any, figures: Path) -> page.Page:
        if args.numbers:
            raise ValueError("no such numbers")
        assert figures == tmp_path / "figures"
        return page.Page("Squares", "squares", ["Of sides."], [section], "more elsewhere")

    parser = page.flags("squares", "Draws squares.")
    assert page.write_page("squares", parser, [f"--out={tmp_path}", "--quick"], make) == 0
    text = (tmp_path / "squares.md").read_text()
    assert "Toy sizes" in text and text.endswith("![A figure.](figures/a.png)\n")
    assert "[squares.json](figures/squares.json)" in text and "more elsewhere.\n" in text
    assert page.write_page("squares", parser, [f"--out={tmp_path}", "--numbers=x"], make) == 2
    assert capsys.readouterr().err == "jaxserve.experiments.squares: no such numbers\n"
    with pytest.raises(SystemExit):
        page.write_page("squares", parser, ["--jobs=0"], make)
    said = "jaxserve.experiments.squares: --jobs must be at least 1, got 0\n"
    assert capsys.readouterr().err.startswith(said)
    assert page.write_page("squares", parser, [f"--out={__file__}"], make) == 2
    assert capsys.readouterr().err.endswith(f"--out: {__file__} is not a folder\n")
