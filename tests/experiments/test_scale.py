"""docs/scale.md: the page comes out of its command, and says what the numbers carry."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from jaxserve.sched.request import Rule
from jaxserve.sched.routing.routers import ROUTERS
from jaxserve.sched.slo.metrics import attained
from jaxserve.simulator.results import SimulationResult
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.workload import Workload
from jaxserve_lab.experiments.common.runs import Results
from jaxserve_lab.experiments.scale import cell, page
from jaxserve_lab.experiments.scale.apart import WAYS, Apart, ServedApart
from jaxserve_lab.experiments.scale.cell import Cell, Decision, Numbers
from jaxserve_lab.experiments.scale.page import QUICK, Fleets
from jaxserve_lab.experiments.scale.talks import Said, Talk
from jaxserve_lab.experiments.scale.traffic import HOUR, KINDS, traffic
from tests.simulator.grouped import simulate

SMALL = ["--quick", "--jobs=1", "--requests=300", "--few=200"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scale")
    assert page.main([*SMALL, f"--out={folder}"]) == 0
    return folder


def test_the_page_has_all_routers_and_its_figures(made: Path) -> None:
    text = (made / "scale.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in ROUTERS)
    for words in ("seen as they are", "as published", "stale", "one slow", "one dead"):
        assert text.count(f"| {words} |") == len(QUICK.replicas)
    assert "python -m jaxserve_lab.experiments.scale --requests=300 --few=200" in text
    assert "4 replicas get 200 requests in" in text and "; 300 in" in text
    for name in ("scale-load.png", "scale-decision.png"):
        assert (made / "figures" / name).is_file() and name in text


def test_it_goes_on_where_it_was(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (made / "scale.md").read_text(encoding="utf-8")

    def run(case: object) -> None:
        raise AssertionError(f"{case} is known")

    monkeypatch.setattr(page, "run", run)
    argv = [*SMALL, f"--numbers={made}/figures/scale.json", f"--out={made}"]
    assert page.main(argv) == 0
    assert (made / "scale.md").read_text(encoding="utf-8") == before


def test_wrong_input_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert page.main([f"--azure={tmp_path}", f"--out={tmp_path}"]) == 2
    assert capsys.readouterr().err.endswith(f"there is no {tmp_path / KINDS[0].file}\n")
    for name in ("requests", "few"):
        assert page.main([f"--{name}=0", f"--out={tmp_path}"]) == 2
        assert f"--{name} must be at least 1, got 0" in capsys.readouterr().err


def test_a_sentence_that_does_not_hold_is_not_written(tmp_path: Path) -> None:
    even = Numbers(0.9, 0.9, 0.9, 0.1, 1.0, 0, 9.0, 9e3)
    high = QUICK.loads[-1]

    def write(router: str, **where: object) -> None:
        """A page on which that router does worse in one run."""
        worse = Cell(router, **where)  # type: ignore[arg-type]

        def run(case: cell.Case) -> cell.Found:
            if isinstance(case, Decision):
                return cell.Cost(1e-5)
            if isinstance(case, Apart):
                return ServedApart(0.9, 1.0, 1.0, 9.0)
            if isinstance(case, Talk):
                mine = case.router == worse.router and case.replicas == worse.replicas
                return Said(0.5 if mine and worse.scene == "talk" else 0.9, 9.0, 0.5, 0.6, 0.1, 1.0)
            return dataclasses.replace(even, attainment=0.5) if case == worse else even

        results = Results(run, lambda case: cell.KINDS_OF[type(case)])
        Fleets(QUICK, results, checked=True).write(tmp_path, 1)

    at = {"scene": "published", "requests": QUICK.requests}
    write("round_robin", replicas=QUICK.replicas[0], load=QUICK.loads[0], **at)
    with pytest.raises(ValueError, match="do not carry it any more: `slo` attains at least"):
        write("slo", replicas=QUICK.replicas[0], load=QUICK.loads[0], **at)
    with pytest.raises(ValueError, match="do not carry it any more: \\*Found\\*"):
        write("slo", replicas=4, load=0.6, scene="talk", requests=1)
    at["requests"] = QUICK.few
    with pytest.raises(ValueError, match="do not carry it any more: At 80%, `slo` is ahead"):
        write("slo", replicas=QUICK.replicas[-1], load=high, **at)


def test_traffic_is_the_hours_from_other_minutes_on() -> None:
    made = traffic(60_000, 31.0, 3)
    assert len(made) == 60_000 and made.arrival[0] == 0
    assert 59_999 / made.arrival[-1] == pytest.approx(31.0)
    again = traffic(60_000, 31.0, 3)
    np.testing.assert_array_equal(made.arrival, again.arrival)
    share = KINDS[0].size / (KINDS[0].size + KINDS[1].size)
    assert (made.slo_class == 0).mean() == pytest.approx(share, abs=0.03)
    other = traffic(60_000, 31.0, 4)
    assert (made.prompt_len != other.prompt_len).mean() > 0.9
    longer = made.lengths.prompt_len
    assert np.percentile(longer, 99) > 4 * np.median(longer), "heavy-tailed"
    assert made.arrival[-1] < HOUR, "four streams beside each other"


@pytest.mark.parametrize("seed", range(4))
def test_as_many_come_as_are_asked_for_though_they_begin_with_a_lull(seed: int) -> None:
    made = traffic(100, 1.0, seed)
    assert len(made) == 100 and 99 / made.arrival[-1] == pytest.approx(1.0)


def test_what_a_replica_serves_is_of_every_request_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the hours may have half of their share of code."""
    seen: list[np.ndarray] = []

    def served(policy: str, flood: Workload, *_: object, **__: object) -> SimulationResult:
        seen.append(flood.slo_class)
        assert not flood.arrival.any()
        return simulate(policy, flood.select(np.arange(50)), system(cell.SYSTEM))

    monkeypatch.setattr(cell, "simulate", served)
    cell.most.__wrapped__("")
    assert np.bincount(seen[0]).tolist() == [kind.size for kind in KINDS]


def test_judged_in_parts_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = traffic(500, 40.0, 0)
    requests = simulate("sarathi", workload, system(cell.SYSTEM), limits=cell.LIMITS).requests
    monkeypatch.setattr(cell, "PART", 64)
    met = cell._met(requests)
    np.testing.assert_array_equal(met, attained(requests.times, workload.terms).slo(Rule.PAPERS))
    assert 0 < met.mean() < 1


def test_nobody_fails_with_a_dead_replica_of_the_grid() -> None:
    found = cell.run(Cell("least_loaded", 4, 0.9, "dead", 1500))
    whole = cell.run(Cell("least_loaded", 4, 0.9, "published", 1500))
    assert isinstance(found, Numbers) and isinstance(whole, Numbers)
    assert found.failed == 0 and found.attainment < whole.attainment


def test_requests_that_move_on_the_grid() -> None:
    together, moves = (cell.run(Apart("long prompts", 2, 2.5, way, 60)) for way in WAYS[:2])
    assert isinstance(together, ServedApart) and isinstance(moves, ServedApart)
    assert together.finished == moves.finished == 1.0
