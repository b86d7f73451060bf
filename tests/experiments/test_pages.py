"""Many runs, each once: what is asked for, known and kept."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from jaxserve_lab.experiments.bros.claims import Bros, Quick
from jaxserve_lab.experiments.common import page, runs
from jaxserve_lab.experiments.common.runs import Results


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


class Squares(page.Page[Square, Area]):
    """Of 2, and of what comes of each; of 5 it says nothing."""

    name = "squares"

    def rendered(self, quick: bool = False) -> str:
        sides = [2]
        while sides[-1] < 99 and (found := self.results.get(Square(sides[-1]))):
            sides.append(found.area)
        figure = self.figure("a.png", "A figure", lambda path: path.write_bytes(b"drawn") and None)
        rows = [[str(side), str(side**2)] for side in sides]
        areas = self.data("areas.csv", ["side", "area, m"], rows)
        return f"{self.scale}{sides} {self.results[Square(3)].area}\n{figure}\n{areas}\n"

    def kept(self) -> list[Square]:
        return [Square(5)]


def squares(results: Results[Square, Area]) -> Squares:
    return Squares("Sides: ", results)


def test_what_is_asked_for_may_depend_on_what_there_is(tmp_path: Path) -> None:
    done: list[int] = []

    def work(square: Square) -> Area:
        done.append(square.side)
        return area(square)

    numbers = tmp_path / "figures" / "squares.json"
    assert squares(Results(work, lambda _: Area)).write(tmp_path, 1) == 2
    assert done == [5, 3, 2, 4, 16]  # the longest of what is known to be missing first
    text = (tmp_path / "squares.md").read_text()
    areas = "[areas.csv](figures/areas.csv)"
    assert text == f"Sides: [2, 4, 16, 256] 9\n![A figure.](figures/a.png)\n{areas}\n"
    assert (tmp_path / "figures" / "areas.csv").read_text().startswith('side,"area, m"\n2,4\n')
    assert (tmp_path / "figures" / "a.png").read_bytes() == b"drawn"
    rows = {row["case"]["side"]: row["numbers"]["area"] for row in json.loads(numbers.read_text())}
    assert rows == {2: 4, 3: 9, 4: 16, 5: 25, 16: 256}
    # What is known is not run again.
    again = tmp_path / "again"
    squares(Results(work, lambda _: Area, numbers)).write(again, 1)
    assert done == [5, 3, 2, 4, 16]
    assert (again / "squares.md").read_text() == text
    assert (again / "figures" / "squares.json").read_text() == numbers.read_text()


def test_what_is_not_there_yet_is_nan() -> None:
    results = Results(area, lambda _: Area)
    assert results.get(Square(2)) is None and not results.complete
    assert math.isnan(results[Square(2)].area)


def test_an_interrupted_run_keeps_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "KEEP", -1.0)
    path = tmp_path / "squares.json"

    def work(square: Square) -> Area:
        if square.side == 1:
            raise KeyboardInterrupt
        return area(square)

    results = Results(work, lambda _: Area)
    for side in (1, 2, 3):
        results.get(Square(side))
    with pytest.raises(KeyboardInterrupt):
        results.run_missing(1, path)
    assert len(json.loads(path.read_text())) == 2  # the longest first


def test_processes_give_the_same(tmp_path: Path) -> None:
    results = Results(area, lambda _: Area)
    cases = [Square(side) for side in range(5)]
    for case in cases:
        results.get(case)
    results.run_missing(2, tmp_path / "squares.json")
    assert [results[case] for case in cases] == [area(case) for case in cases]


def test_a_page_is_written_or_a_line_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(args: Any, known: Path | None) -> Squares:
        return squares(Results(area, lambda _: Area, known))

    parser = page.flags("squares", "Draws squares.")
    assert page.write_page(parser, [f"--out={tmp_path}", "--jobs=1"], make) == 0
    assert capsys.readouterr().out.endswith("squares.md, its numbers and 2 figures\n")
    other = tmp_path / "other.json"
    for content in ("[1]", "{", "[{}]", '[{"case": {"side": 2}, "numbers": {"volume": 1}}]'):
        other.write_text(content)
        argv = [f"--out={tmp_path}", f"--numbers={other}", "--jobs=1"]
        assert page.write_page(parser, argv, make) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith(f"jaxserve_lab.experiments.squares: {other}: not the numbers of an")
    with pytest.raises(SystemExit):
        page.write_page(parser, ["--jobs=0"], make)
    said = "jaxserve_lab.experiments.squares: --jobs must be at least 1, got 0\n"
    assert capsys.readouterr().err.startswith(said)
    assert page.write_page(parser, [f"--out={__file__}"], make) == 2
    assert capsys.readouterr().err.endswith(f"--out: {__file__} is not a folder\n")


def test_toy_sizes_say_so() -> None:
    found = Bros(Quick(), Results(Bros.run, lambda _: dict))
    assert "**Toy sizes (`--quick`)" in found.rendered(quick=True)
    assert "Toy sizes" not in found.rendered()
    said = (
        "has the numbers of every run, under the rules `jaxserve`, without prefix caching; [bros-"
    )
    assert said in found.rendered()
