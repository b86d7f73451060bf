"""What programs do when, for the picture of docs/programs.md, by a simulation whose pool is far too
small."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxserve.simulator.results import SimulationResult
from jaxserve.simulator.settings import EngineOptions, RunOptions
from jaxserve.simulator.simulator import simulate
from jaxserve.simulator.systems.systems import system
from jaxserve_lab.experiments.programs.timeline import Doing, Span, spans
from jaxserve_lab.experiments.programs.workloads import PLACE, make_workload

POOL = 36_000  # tokens


@pytest.fixture(scope="module")
def result() -> SimulationResult:
    place = system(PLACE)
    workload = make_workload("agents", "above", 0, place, share=0.1)
    engine = EngineOptions(kv_tokens=POOL, prefix_caching=True)
    return simulate("autellix", workload, place, engine=engine, run=RunOptions(record_rows=True))


@pytest.fixture(scope="module")
def found(result: SimulationResult) -> dict[int, list[Span]]:
    by_program: dict[int, list[Span]] = {}
    for span in spans(result):
        by_program.setdefault(span.program, []).append(span)
    return by_program


def test_a_program_does_one_thing_after_another_from_start_to_end(
    result: SimulationResult, found: dict[int, list[Span]]
) -> None:
    programs = result.programs
    assert programs is not None and sorted(found) == programs.number.tolist()
    for number, start, end in zip(programs.number, programs.start, programs.end, strict=True):
        mine = found[int(number)]
        assert (mine[0].begin, mine[-1].end) == pytest.approx((start, end))
        assert all(one.end == two.begin for one, two in itertools.pairwise(mine))


def test_a_call_that_loses_its_cache_is_paused_and_reads_again(
    result: SimulationResult, found: dict[int, list[Span]]
) -> None:
    after = []
    for mine in found.values():
        for one, two, three in zip(mine, mine[1:], mine[2:], strict=False):
            if one.doing in (Doing.READING, Doing.WRITING) and two.doing is Doing.PAUSED:
                after.append(three.doing)
    assert len(after) == result.requests.preemptions.sum() > 0
    assert set(after) == {Doing.READING}


def test_who_loses_its_cache_to_others_reads_for_longer_than_who_keeps_it(
    result: SimulationResult, found: dict[int, list[Span]]
) -> None:
    took: dict[Doing, list[float]] = {Doing.KEPT: [], Doing.GIVEN_AWAY: []}
    tools = 0.0
    for mine in found.values():
        before = None
        for span in mine:
            if span.doing in took:
                before, tools = span.doing, tools + span.end - span.begin
            elif span.doing is Doing.READING and before is not None:
                took[before].append(span.end - span.begin)
                before = None
    assert np.median(took[Doing.KEPT]) < np.median(took[Doing.GIVEN_AWAY]) / 2
    assert tools == pytest.approx(result.requests.workload.programs.wait.sum())
