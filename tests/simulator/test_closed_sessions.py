"""Simulations in which calls wait for others: when they come, what ends, and what is recorded."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.cost.cost_model import Coefficients, LinearCostModel
from jaxserve.sched.policy import Limits
from jaxserve.sched.request import SLO, Program
from jaxserve.sched.slo.classes import with_targets
from jaxserve.simulator.optimal.problem import OptimalError, Problem
from jaxserve.simulator.replica.arrivals import Arrivals
from jaxserve.simulator.results import SimulationResult
from jaxserve.simulator.settings import Fault, Routing
from jaxserve.simulator.simulator import SimulationError
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.programs import Programs
from jaxserve.simulator.workloads.specs import WorkloadSpec
from jaxserve.simulator.workloads.workload import Lengths, Workload
from tests.simulator.grouped import simulate
from tests.simulator.workloads.test_programs import closed, programs

SECOND = LinearCostModel(Coefficients(0, 1.0, 0, 0, 0, 0, 0, 0, 0), 1)  # every batch takes 1 s
SEVEN = system("llama-2-7b@a100")
PLAIN: dict[str, Any] = {"kv_tokens": 99, "overlap": False}


def records(result: SimulationResult) -> Any:
    assert result.programs is not None
    return result.programs


def test_a_late_answer_delays_the_next_turn() -> None:
    """Each request takes 3 steps of 1 s; the second program waits for the only row."""
    made = closed(programs([0, 1, 0, 1], [(0, 2), (1, 3)], 1.5))
    alone = simulate("vllm", made.select(np.array([1, 3])), SECOND, **PLAIN)
    assert alone.requests.arrival.tolist() == [0.0, 4.5]
    result = simulate("vllm", made, SECOND, limits=Limits(64, 64, 1), **PLAIN)
    assert result.requests.arrival.tolist() == [0.0, 0.0, 4.5, 7.5]
    assert result.requests.finish.tolist() == [3.0, 6.0, 9.0, 12.0]
    found = records(result)
    assert found.start.tolist() == [0.0, 0.0] and found.end.tolist() == [9.0, 12.0]
    assert found.alone.tolist() == [7.5, 7.5] and found.slowdown.tolist() == [1.2, 1.6]
    assert found.think_time.tolist() == [1.5, 1.5] and not found.tool_time.any()


def test_a_join_waits_for_all() -> None:
    edges = [(0, 1), (0, 2), (1, 3), (2, 3)]
    made = programs([0] * 4, edges, tools=("grep",), tool=np.array([-1, 0, -1, -1]))
    made = dataclasses.replace(made, wait=np.array([0.0, 0.5, 2.0, 0.25]))
    lengths = Lengths(np.full(4, 4), np.array([1, 2, 7, 1]))
    work = Workload.create(np.zeros(4), lengths, programs=made)
    result = simulate("vllm", work, SECOND, **PLAIN)
    r = result.requests
    # The third's prompt takes a step of its own, in which the second's last token waits.
    assert r.arrival.tolist() == [0.0, 1.5, 3.0, r.finish[2] + 0.25]
    assert r.finish[3] == r.arrival[3] + 1
    found = records(result)
    assert found.tool_time.tolist() == [0.5] and found.think_time.tolist() == [2.25]
    assert found.makespan.tolist() == [r.finish[3]]


def test_a_program_begins_when_another_ends() -> None:
    made = closed(programs([0, 1, 2, 0, 3], [(0, 3)], 1.0, at_once=2))
    result = simulate("vllm", made, SECOND, **PLAIN)
    r = result.requests
    assert r.arrival.tolist() == [0.0, 0.0, 3.0, 4.0, r.finish[2]]
    assert r.workload.programs.program.tolist() == [0, 1, 2, 0, 3]
    found = records(result)
    assert found.number.tolist() == [0, 1, 2, 3] and found.summary()["finished"] == 4
    at = np.sort(np.concatenate([found.start, found.end]))
    going = [(found.start <= t).sum() - (found.end <= t).sum() for t in at[:-1]]
    assert max(going) == 2


def test_a_program_is_given_up_with_a_refused_call() -> None:
    """One row and no queue: who comes while another runs is refused."""
    made = closed(programs([0, 1, 0, 1, 2], [(0, 2), (1, 3)], 1.0), [0.0, 1.0, 5.0, 5.0, 20.0])
    result = simulate("vllm", made, SECOND, limits=Limits(64, 64, 1), max_queue=0, **PLAIN)
    assert result.requests.arrival.tolist() == [0.0, 1.0, 4.0, 20.0]
    assert result.requests.refused.tolist() == [False, True, False, False]
    found = records(result)
    assert found.given_up.tolist() == [False, True, False]
    assert found.calls.tolist() == [2, 2, 1] and found.came.tolist() == [2, 1, 1]
    assert found.end.tolist() == [7.0, 1.0, 23.0]
    assert np.isnan(found.slowdown[1]) and not found.in_time[1]
    summary = result.summary()["programs"]
    assert (summary["begun"], summary["finished"], summary["given_up"]) == (3, 2, 1)
    assert summary["calls"] == 4
    json.dumps(summary, allow_nan=False)


def test_another_program_takes_the_place_of_one_that_is_given_up() -> None:
    """The third of three is refused at once, and the fourth begins when the first ends."""
    made = closed(programs([0, 1, 2, 1], [(1, 3)], at_once=2))
    result = simulate("vllm", made, SECOND, limits=Limits(64, 64, 1), max_queue=0, **PLAIN)
    # The second is refused at 0 s, as is then the third, which begins in its place.
    assert result.requests.arrival.tolist() == [0.0, 0.0, 0.0]
    assert records(result).given_up.tolist() == [False, True, True]


def test_late_refusals_give_up_programs_too() -> None:
    made = closed(programs([0, 0, 1, 1], [(0, 1), (2, 3)]), [0.0, 1.0, 1.5, 3.0], tokens=9)
    made = made.with_terms(with_targets(made.terms, SLO(ttft=2.0)))
    result = simulate(
        "vllm", made, SECOND, limits=Limits(64, 64, 1), refuse_late=1.0, kv_tokens=99, overlap=False
    )
    assert records(result).given_up.tolist() == [False, True]
    assert len(result.requests) == 3


def test_calls_of_dead_replicas_give_their_programs_up_if_none_is_left() -> None:
    """Replica 1 dies with the first call of the second program, which has tokens already."""
    made = closed(programs([0, 1, 0, 1], [(0, 2), (1, 3)], 1.0), tokens=6)
    one = Fault(1, 2.5, notice=1.0)
    for faults, given_up in (((one,), False), ((one, Fault(0, 2.5, notice=1.0)), True)):
        routing = Routing("round_robin", faults=faults)
        result = simulate("vllm", made, SECOND, replicas=2, routing=routing, **PLAIN)
        found = records(result)
        assert found.given_up.tolist() == [given_up] * 2
        assert len(result.requests) == (2 if given_up else 4)


def test_runs_that_are_cut_off_have_programs_in_progress() -> None:
    made = closed(programs([0, 1, 0, 1], [(0, 2), (1, 3)], 1.0), tokens=3)
    made = dataclasses.replace(
        made, programs=dataclasses.replace(made.programs, deadline=np.array([9.0, 4.0, 9.0, 4.0]))
    )
    result = simulate("vllm", made, SECOND, until=5.0, **PLAIN)
    found = records(result)
    assert np.isnan(found.end).all() and found.came.tolist() == [2, 2]
    assert found.in_time.tolist() == [True, False]
    assert result.summary()["programs"]["attainment"] == 0.5
    assert result.summary()["programs"]["makespan_s"] is None
    whole = records(simulate("vllm", made, SECOND, **PLAIN))
    assert whole.end.tolist() == [7.0, 7.0] and whole.in_time.tolist() == [True, False]


def test_requests_left_out_as_too_long_take_all_that_waits_for_them() -> None:
    lengths = Lengths(np.array([4, 90, 4, 4]), np.full(4, 3))
    work = Workload.create(
        np.zeros(4), lengths, programs=programs([0, 1, 0, 1], [(0, 2), (1, 3)]), limit=np.full(4, 3)
    )
    result = simulate("vllm", work, SECOND, kv_tokens=40, overlap=False, drop_too_long=True)
    assert result.num_dropped == 2 and len(result.requests) == 2
    assert records(result).number.tolist() == [0]


@st.composite
def graphs(draw: st.DrawFn) -> Workload:
    """Some programs of any shape, and requests by themselves."""
    count = draw(st.integers(1, 14))
    program = [draw(st.integers(-1, 2)) for _ in range(count)]
    edges = list[tuple[int, int]]()
    for child, mine in enumerate(program):
        mates = [i for i in range(child) if program[i] == mine >= 0]
        for parent in draw(st.sets(st.sampled_from(mates), max_size=3)) if mates else ():
            edges.append((parent, child))
    edges.sort(key=lambda edge: (edge[1], edge[0]))
    made = programs(program, edges)
    wait = [draw(st.sampled_from([0.0, 0.01, 0.3])) for _ in range(count)]
    made = dataclasses.replace(made, wait=np.where(made.waits, wait, 0.0))
    if draw(st.booleans()) and made.closed:
        made = dataclasses.replace(made, at_once=draw(st.integers(1, 3)))
    arrival = np.cumsum([draw(st.sampled_from([0.0, 0.02, 0.5])) for _ in range(count)])
    lengths = np.array([[draw(st.integers(1, 90)), draw(st.integers(1, 20))] for _ in range(count)])
    return Workload.create(arrival, Lengths(*lengths.T), programs=made)


@given(
    work=graphs(),
    policy=st.sampled_from(["vllm", "sarathi", "edf", "goodput"]),
    replicas=st.sampled_from([1, 2]),
    overlap=st.booleans(),
    refuses=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_order_holds_and_nothing_is_lost(
    work: Workload, policy: str, replicas: int, overlap: bool, refuses: bool
) -> None:
    options: dict[str, Any] = {"limits": Limits(128, 64, 3), "kv_tokens": 2000, "record_rows": True}
    options |= {"replicas": replicas, "overlap": overlap, "max_queue": 1 if refuses else None}
    one, other = (simulate(policy, work, SEVEN, coast=coast, **options) for coast in (True, False))
    for name in ("token_times", "replica", "tokens", "arrival"):
        mine, theirs = getattr(one.requests, name), getattr(other.requests, name)
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, err_msg=name)
    r, columns = one.requests, one.requests.workload.programs
    assert (np.diff(r.arrival) >= 0).all()
    # A call comes exactly after all it waits for, with its time in between.
    for child in np.flatnonzero(columns.waits).tolist():
        parents = columns.parent[columns.child == child]
        assert r.finished[parents].all()
        due = r.finish[parents].max() + columns.wait[child]
        assert r.arrival[child] == pytest.approx(due, rel=1e-12)
    if one.programs is None:
        assert len(r) == len(work)
        return
    found = one.programs
    assert found.came.sum() + (columns.program < 0).sum() == len(r)
    assert (found.came == found.calls)[~found.given_up].all()
    assert (found.came <= found.calls).all() and np.isfinite(found.end).all()
    assert set(columns.program[r.refused].tolist()) - {-1} == set(found.number[found.given_up])
    assert found.summary()["begun"] == len(
        np.unique(work.programs.program[work.programs.program >= 0])
    )
    if work.programs.at_once:
        for start in found.start.tolist():
            assert ((found.start < start) & (found.end > start)).sum() <= work.programs.at_once
    elif not refuses:
        roots = ~work.programs.waits
        assert set(work.arrival[roots].tolist()) <= set(r.arrival.tolist())


def test_open_workloads_have_no_programs() -> None:
    made = WorkloadSpec("conversation", 30, rate=3.0).make_workload(0)
    result = simulate("sarathi", made, SEVEN, prefix_caching=True)
    assert result.programs is None and "programs" not in result.summary()
    assert "program" not in result.request_table()
    np.testing.assert_array_equal(result.requests.arrival, made.arrival)
    with pytest.raises(ValueError, match="no request is of a program"):
        result.program_table()


def test_an_idle_system_takes_as_long_as_it_is_said_to() -> None:
    """One loop at a time: nothing else is served."""
    made = WorkloadSpec("closed-agent", 12, programs=1, max_tokens="length").make_workload(3)
    found = records(simulate("sarathi", made, SEVEN, prefix_caching=True))
    assert found.slowdown == pytest.approx(np.ones(len(found)), rel=0.03)


def test_a_turn_finds_the_turn_before_in_the_cache() -> None:
    made = WorkloadSpec("closed-conversation", 30, programs=2).make_workload(1)
    result = simulate("sarathi", made, SEVEN, prefix_caching=True)
    work, found = result.requests.workload, result.requests.found
    assert found is not None
    turns = work.programs.waits
    before = work.lengths.total[work.prefix_of[turns]]
    assert (found[turns] >= before // 16 * 16 - 16).all()


def test_requests_say_which_program_they_are_of() -> None:
    made = programs([0, 0, 1, -1], [(0, 1)], told=np.array([True, True, False, False]))
    made = dataclasses.replace(made, deadline=np.array([9.0, 9.0, math.inf, math.inf]))
    said = dict[str, Any]()

    arrivals = Arrivals(closed(made), None, 0)
    for _ in range(3):
        number, request = arrivals.take_first()
        said[str(number)] = request.program
    arrivals.releases.ended(0, 5.0)
    number, request = arrivals.take_first()
    assert (number, request.arrival) == (1, 5.0)
    assert request.program == Program("0", 9.0, 0, over=True)
    assert said == {"0": Program("0", 9.0, 1), "2": Program("1"), "3": None}


def test_what_needs_all_arrivals_is_refused() -> None:
    made = closed(programs([0, 0], [(0, 1)]))
    with pytest.raises(SimulationError, match="cannot run compiled: calls of programs come as"):
        simulate("vllm", made, SECOND, compiled=True, kv_tokens=99)
    with pytest.raises(ValueError, match="policy oracle: calls of programs come when others"):
        simulate("oracle", made, SECOND, kv_tokens=99)
    with pytest.raises(OptimalError, match="arrivals must be known"):
        Problem(made, SECOND, 99, 64)


def test_programs_without_edges_are_recorded_too() -> None:
    nothing = Programs.none(2)
    made = closed(dataclasses.replace(nothing, program=np.array([0, 0])), [0.0, 5.0])
    found = records(simulate("vllm", made, SECOND, **PLAIN))
    assert found.start.tolist() == [0.0] and found.end.tolist() == [8.0]
    assert found.alone.tolist() == [8.0]
