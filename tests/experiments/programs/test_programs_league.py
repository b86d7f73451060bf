"""The league of programs: its workloads are what they say, and its tables come out of its
command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jaxserve.bench import cli as bench
from jaxserve.simulator.systems.systems import system
from jaxserve_lab.experiments.programs import cli
from jaxserve_lab.experiments.programs.tables import ENTRANTS
from jaxserve_lab.experiments.programs.workloads import PLACE, SLACK, make_workload, served_alone

MARKERS = "before\n<!-- begin: jaxserve bench program-league -->\nstale\n<!-- end -->\nafter\n"


def test_tools_and_people_take_what_they_take_within_a_deadline() -> None:
    place = system(PLACE)
    made = make_workload("agents", "at", 0, place, share=0.1)
    programs, served = made.programs, served_alone(made, place)
    mine = programs.program == 0
    work = served[mine].sum()
    assert programs.deadline[mine] == pytest.approx(SLACK * work + programs.wait[mine].sum())
    assert (made.ttft[mine] == 2.0).all()


def test_chats_beside_agents_are_of_no_program() -> None:
    made = make_workload("chat beside agents", "above", 0, system(PLACE), share=0.1)
    chats = made.programs.program < 0
    assert 0 < np.count_nonzero(chats) < len(made)
    assert np.isinf(made.programs.deadline[chats]).all()
    assert set(made.ttft[chats].tolist()) == {1.0}


@pytest.mark.slow
def test_the_tables_go_between_the_markers_and_are_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "ENTRANTS", [ENTRANTS[2], ENTRANTS[-1]])
    page, numbers = tmp_path / "programs.md", tmp_path / "figures" / "programs.json"
    page.write_text(MARKERS)
    flags = ["program-league", "--quick", "--jobs=1", f"--out={page}"]
    assert bench.main(flags) == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- begin") and text.endswith("<!-- end -->\nafter\n")
    assert "stale" not in text and "nan" not in text
    assert text.count("| `continuum`, retention `ttl` |") == 4
    assert len(json.loads(numbers.read_text())) == 2 * 2 * 3

    def refuse(case: object) -> None:
        raise AssertionError(f"{case} was done again")

    monkeypatch.setattr(cli, "run", refuse)
    assert bench.main([*flags, f"--numbers={numbers}"]) == 0
    assert page.read_text() == text


def test_a_page_without_markers_and_a_wrong_policy_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "ENTRANTS", [])
    page = tmp_path / "programs.md"
    page.write_text("nothing")
    assert bench.main(["program-league", "--quick", f"--out={page}", "--policy="]) == 1
    assert "lacks the line" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench.main(["program-league", "--policy=nothing"])
    assert "there is no policy 'nothing'" in capsys.readouterr().err
