"""Programs: which calls belong together, what policies see of them, and one verdict for each."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.programs import program_table
from jaxserve.sched.programs.program_table import (
    MOST_LINKS,
    MOST_NAME,
    MOST_SILENCE,
    ProgramTable,
)
from jaxserve.sched.programs.verdict import ProgramEnd, ProgramVerdict
from jaxserve.sched.request import Program, Request
from jaxserve.sched.state.request_table import RequestTable

INF = float("inf")


class Calls:
    """Calls of programs, without a scheduler. Each is named by its number."""

    def __init__(self, rows: int = 8, **options: Any) -> None:
        self.table = RequestTable(rows)
        self.programs = ProgramTable(self.table, **options)
        self.verdicts: list[ProgramVerdict] = []
        self.pauses: list[float] = []
        self.programs.on_verdict = self.verdicts.append
        self.count = 0

    def begin(
        self,
        name: str | None = None,
        now: float = 0.0,
        tenant: str = "",
        continues: tuple[tuple[str, str], ...] = (),
        keys: tuple[bytes, ...] | None = None,
        prompt: tuple[int, ...] = (1,),
        **said: Any,
    ) -> int:
        """Begins a call and returns its row; its id is r and its number."""
        program = None if name is None else Program(name, **said)
        request = Request(
            f"r{self.count}",
            prompt,
            arrival=now,
            tenant=tenant,
            program=program,
            continues=continues,
            block_keys=keys,
        )
        self.count += 1
        row = self.table.add(request)
        self.programs.begin(row, request)
        about = self.programs.call_of(row)
        if about is not None and about.pause is not None:
            self.pauses.append(about.pause)
        return row

    def end(
        self,
        row: int,
        now: float,
        answer: bytes = b"",
        tail: tuple[int, ...] = (),
        *,
        complete: bool = True,
    ) -> None:
        self.programs.end(row, now, complete=complete, answer=(answer, tail))
        self.table.remove(row)

    def call(self, name: str | None = None, now: float = 0.0, took: float = 1.0, **of: Any) -> None:
        self.end(self.begin(name, now, **of), now + took)

    def seen(self, row: int, *columns: str) -> tuple[float, ...]:
        return tuple(float(getattr(self.table, name)[row]) for name in columns)


def test_policies_see_what_is_known_of_a_program() -> None:
    calls = Calls()
    calls.call("a", 1.0, deadline=10.0, expected_calls=5)
    other = calls.begin("b", 4.0)
    row = calls.begin("a", 5.0)
    names = ("program_start", "program_deadline", "calls_before", "calls_after")
    assert calls.seen(row, *names) == (1.0, 11.0, 1, 4)
    assert calls.seen(other, *names) == (4.0, INF, 0, 0)
    assert calls.table.program[row] != calls.table.program[other]
    calls.end(row, 6.0)
    assert calls.seen(calls.begin("a", 7.0, expected_calls=1), "calls_after") == (1,)


def test_a_request_without_a_program_has_none() -> None:
    calls = Calls()
    row = calls.begin(now=3.0)
    assert calls.seen(row, "program", "program_start", "program_deadline") == (-1, 3.0, INF)
    calls.end(row, 4.0)
    assert len(calls.programs) == 0 and not calls.programs.num_calls


def test_the_tightest_deadline_counts_and_a_classs_only_without() -> None:
    calls = Calls()
    first = calls.begin("a", 1.0, usual_deadline=5.0)
    assert calls.seen(first, "program_deadline") == (6.0,)
    second = calls.begin("a", 2.0, deadline=20.0, usual_deadline=5.0)
    assert (
        calls.seen(first, "program_deadline") == calls.seen(second, "program_deadline") == (21.0,)
    )
    calls.begin("a", 3.0, deadline=30.0)
    third = calls.begin("a", 3.0, deadline=8.0)
    for row in (first, second, third):
        assert calls.seen(row, "program_deadline") == (9.0,)
    told = [calls.programs.call_of(row) for row in (first, second, third)]
    assert [call and call.deadline for call in told] == [5.0, 20.0, 8.0]


def test_service_is_counted_for_all_calls_of_a_program() -> None:
    calls = Calls()
    calls.begin("x", 0.0)
    first, second, other = calls.begin("a", 0.0), calls.begin("a", 0.0), calls.begin(now=0.0)
    rows = np.array([first, second, other])
    calls.programs.charge(rows, np.array([7, 5, 100]))
    assert calls.table.attained[rows].tolist() == [12, 12, 0]
    calls.end(first, 1.0)
    calls.end(second, 1.0)
    assert calls.seen(calls.begin("a", 2.0), "attained") == (12,)


def test_a_program_is_over_once_its_last_call_has_ended() -> None:
    calls = Calls()
    row = calls.begin("a", 1.0, deadline=10.0)
    last = calls.begin("a", 2.0, over=True)
    calls.end(last, 3.0)
    assert not calls.verdicts, "the first call runs"
    calls.end(row, 8.0)
    verdict = ProgramVerdict("", "a", "default", ProgramEnd.OVER, 2, 7.0, 10.0, given_up=False)
    assert calls.verdicts == [verdict] and verdict.met
    calls.programs.expire(1e9)
    assert len(calls.verdicts) == 1 and len(calls.programs) == 0


@pytest.mark.parametrize(
    ("deadline", "met"), [(None, None), (1e-300, False), (6.9, False), (7.0, True), (1e300, True)]
)
def test_a_verdict_by_the_deadline(deadline: float | None, met: bool | None) -> None:
    calls = Calls()
    calls.call("a", 1.0, took=7.0, deadline=deadline, over=True)
    assert [verdict.met for verdict in calls.verdicts] == [met]


@pytest.mark.parametrize("over", [True, False])
def test_a_program_whose_last_call_did_not_end_by_itself_is_given_up(over: bool) -> None:
    calls = Calls()
    calls.call("a", deadline=100.0)
    calls.end(calls.begin("a", 2.0, over=over), 3.0, complete=False)
    calls.programs.expire(1e9)
    assert [(verdict.given_up, verdict.met) for verdict in calls.verdicts] == [(True, False)]


def test_a_program_is_given_up_if_the_calls_that_it_expected_do_not_come() -> None:
    calls = Calls()
    calls.call("short", deadline=100.0, expected_calls=2)
    calls.call("whole", deadline=100.0, expected_calls=1)
    calls.call("whole", 2.0)
    calls.programs.expire(1e9)
    assert {verdict.id: verdict.met for verdict in calls.verdicts} == {
        "short": False,
        "whole": True,
    }


def test_a_call_after_the_verdict_begins_another_program() -> None:
    calls = Calls()
    calls.call("a", 0.0, deadline=10.0, over=True)
    row = calls.begin("a", 100.0, over=True)
    assert calls.seen(row, "program_start", "calls_before", "program_deadline") == (100.0, 0, INF)
    calls.end(row, 101.0)
    assert [(verdict.calls, verdict.took) for verdict in calls.verdicts] == [(1, 1.0)] * 2


def test_continuations_of_a_request_are_one_call() -> None:
    calls = Calls()
    request = Request("n", (1,), program=Program("a", over=True))
    first = calls.table.add(request)
    calls.programs.begin(first, request)
    second = calls.table.add(request)
    calls.programs.begin(second, request, first)
    calls.end(first, 1.0, complete=False)
    assert not calls.verdicts
    calls.end(second, 2.0)
    assert [(one.calls, one.given_up) for one in calls.verdicts] == [(1, False)]


def test_a_silent_program_ends_after_its_time() -> None:
    calls = Calls(silence=10.0)
    calls.call("a", 0.0)
    assert calls.programs.next_check == 11.0
    calls.programs.expire(10.9)
    assert not calls.verdicts
    row = calls.begin("a", 10.95)
    calls.programs.expire(1000.0)
    assert not calls.verdicts, "a call runs"
    calls.end(row, 2000.0)
    calls.programs.expire(2010.0)
    assert [one.end for one in calls.verdicts] == [ProgramEnd.SILENT]
    assert calls.verdicts[0].took == 2000.0
    calls.programs.expire(2020.0)
    assert calls.programs.next_check == INF


def test_slow_tools_are_waited_for() -> None:
    calls = Calls(silence=10.0)
    for number in range(5):  # a tool that takes 8 s
        calls.call("a", 9.0 * number)
        calls.programs.note_tools(f"r{number}", {f"c{number}": "build"})
    assert calls.pauses == [8.0] * 4
    assert calls.programs.tool_times.mean("", ["build"]) == 8.0
    [waits] = calls.programs.waiting()
    assert (waits.tools, waits.since, waits.pause) == (("build",), 37.0, 8.0)
    calls.programs.expire(37.0 + 15.9)
    assert not calls.verdicts
    calls.programs.expire(37.0 + 16.1)
    assert len(calls.verdicts) == 1


def test_what_is_said_of_waiting_programs_is_up_to_date() -> None:
    """Though little of it is made anew."""
    calls = Calls()
    for number in range(4):
        calls.call("a", 10.0 * number)
        calls.programs.note_tools(f"r{number}", {f"c{number}": "build"})
    calls.call("b", 50.0)
    assert [(one.since, one.tools, one.pause) for one in calls.programs.waiting()] == [
        (31.0, ("build",), None), (51.0, (), None)
    ]  # fmt: skip
    calls.call("a", 60.0)  # the fourth time that is known of the tool
    assert [(one.since, one.tools, one.pause) for one in calls.programs.waiting()] == [
        (51.0, (), None), (61.0, (), None)
    ]  # fmt: skip
    calls.programs.note_tools("r4", {"c": "build"})
    mean = calls.programs.tool_times.mean("", ["build"])
    assert mean is not None
    [first, _] = calls.programs.waiting()
    assert (first.tools, first.pause) == (("build",), mean)


def test_no_tool_is_waited_for_longer_than_for_the_most() -> None:
    calls = Calls(silence=2 * MOST_SILENCE)
    for number in range(5):
        calls.call("a", (MOST_SILENCE + 1.0) * number)
    last = (MOST_SILENCE + 1.0) * 4 + 1.0
    calls.programs.expire(last + 2 * MOST_SILENCE)
    assert len(calls.verdicts) == 1


def test_times_of_several_tools_at_once_teach_nothing() -> None:
    calls = Calls()
    for number in range(6):
        calls.call("a", 3.0 * number)
        calls.programs.note_tools(f"r{number}", {"x": "search", "y": "build"})
    assert len(calls.programs.tool_times) == 0


def test_calls_to_come_are_learned_from_programs_that_have_ended() -> None:
    calls = Calls()
    for number in range(8):
        for call in range(4):
            calls.call(str(number), call, over=call == 3)
    row = calls.begin("new", 100.0)
    assert calls.seen(row, "calls_after") == (3,)
    assert calls.seen(calls.begin("new", 101.0), "calls_after") == (2,)
    assert calls.seen(calls.begin("other", 101.0, tenant="other"), "calls_after") == (0,)


# Calls that name no program.


def test_a_call_belongs_to_the_program_whose_tool_call_it_answers() -> None:
    calls = Calls(infers=True)
    row = calls.begin()
    calls.programs.note_tools("r0", {"call_1": "search", "call_2": "search"})
    calls.end(row, 1.0)
    second = calls.begin(now=3.0, continues=(("tool", "call_2"),))
    assert calls.seen(second, "program_start", "calls_before") == (0.0, 1)
    assert calls.pauses == [2.0]
    stranger = calls.begin(now=3.0, continues=(("tool", "call_2"),), tenant="other")
    assert calls.seen(stranger, "calls_before") == (0,)


def test_a_call_belongs_to_the_program_of_the_response_that_it_continues() -> None:
    calls = Calls(infers=True)
    calls.call("named", 0.0)
    row = calls.begin(now=2.0, continues=(("request", "r0"),))
    assert calls.seen(row, "program_start", "calls_before") == (0.0, 1)
    assert calls.seen(calls.begin(now=2.0, continues=(("request", "r9"),)), "calls_before") == (0,)


def test_a_call_belongs_to_the_program_whose_answer_its_prompt_contains() -> None:
    calls = Calls(infers=True)
    calls.end(calls.begin(keys=(b"sys", b"q1")), 1.0, b"a1")
    calls.end(calls.begin(keys=(b"sys", b"q2")), 1.0, b"a2")
    row = calls.begin(now=2.0, keys=(b"sys", b"q1", b"a1", b"q3"))
    assert calls.seen(row, "calls_before") == (1,)
    branch = calls.begin(now=2.0, keys=(b"sys", b"q1", b"a1", b"q4"))
    assert calls.seen(branch, "calls_before") == (2,)
    for tenant, keys in (("other", (b"sys", b"q2", b"a2")), ("", (b"sys", b"q2"))):
        assert calls.seen(calls.begin(now=2.0, keys=keys, tenant=tenant), "calls_before") == (0,)


def test_short_answers_are_known_by_their_tokens() -> None:
    """Where the last full block has none of the answer, what is behind it tells."""
    calls = Calls(infers=True, block_size=4)
    system = (1, 2, 3, 4)
    for tail in ((5, 6, 7), (5, 8, 7), (5,)):
        row = calls.begin(keys=(b"sys",), prompt=(*system, *tail[:-1]))
        calls.end(row, 1.0, b"sys", tail)
    starts = []
    for tail in ((5, 6, 7, 9, 9), (5, 8, 7, 9, 9), (5, 9, 9, 9, 9), (6, 9, 9, 9, 9)):
        row = calls.begin(now=2.0, keys=(b"sys", b"new"), prompt=(*system, *tail))
        starts.append((*calls.seen(row, "calls_before"), int(calls.table.program[row])))
    assert [before for before, _ in starts] == [1, 1, 1, 0]
    assert len({number for _, number in starts}) == 4


def test_a_cache_key_names_a_program_only_if_its_prompt_goes_on() -> None:
    calls, key = Calls(infers=True), (("key", "k"),)
    calls.call(continues=key, keys=(b"sys", b"q1"))
    other = calls.begin(now=2.0, continues=key, keys=(b"sys", b"q2", b"x"))
    assert calls.seen(other, "calls_before") == (0,)
    calls.end(other, 3.0)
    row = calls.begin(now=4.0, continues=key, keys=(b"sys", b"q2", b"x", b"y"))
    assert calls.seen(row, "calls_before") == (1,)
    beside = calls.begin(now=4.0, continues=key, keys=(b"sys", b"q2", b"x", b"y"))
    assert calls.seen(beside, "calls_before") == (0,), "calls of a session follow each other"


def test_nothing_is_inferred_unless_asked_for() -> None:
    calls = Calls()
    calls.call(continues=(("key", "k"),))
    assert calls.seen(calls.begin(continues=(("key", "k"),)), "program") == (-1,)


def test_only_programs_that_are_known_to_be_some_are_counted() -> None:
    calls = Calls(infers=True)
    calls.call()
    running = calls.begin(now=1.0)
    assert (calls.programs.num_running, calls.programs.num_waiting) == (0, 0)
    second = calls.begin(now=2.0, continues=(("request", "r0"),))
    named = calls.begin("a", now=2.0)
    assert (calls.programs.num_running, calls.programs.num_waiting) == (2, 0)
    for row in (running, second, named):
        calls.end(row, 3.0)
    assert (calls.programs.num_running, calls.programs.num_waiting) == (0, 2)
    assert len(calls.programs.waiting()) == 2
    calls.programs.expire(1e9)
    assert sorted(one.calls for one in calls.verdicts) == [1, 2]
    assert (calls.programs.num_running, calls.programs.num_waiting) == (0, 0)


# Hostile clients.


@pytest.mark.promise(46)
def test_an_id_a_call_costs_that_tenant_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_table, "MOST_PROGRAMS", 400)
    calls = Calls(infers=True)
    calls.call("mine", 0.0, tenant="good", deadline=1e9)
    for number in range(5000):
        calls.call(f"{number}", 1.0, tenant="bad", continues=(("key", f"{number}"),) * 5)
    assert len(calls.programs) == 101 and calls.programs.num_links <= 101 * MOST_LINKS
    assert len(calls.verdicts) == 4900
    assert {(one.tenant, one.end) for one in calls.verdicts} == {("bad", ProgramEnd.FORGOTTEN)}
    row = calls.begin("mine", 2.0, tenant="good")
    assert calls.seen(row, "calls_before", "program_start") == (1, 0.0)


def test_the_tenant_with_the_most_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_table, "MOST_PROGRAMS", 40)
    calls = Calls()
    for tenant, count in (("a", 10), ("b", 10), ("c", 10), ("d", 9), ("e", 1)):
        for number in range(count):
            calls.call(str(number), tenant=tenant)
    calls.call("one more", tenant="e")
    assert [(one.tenant, one.id) for one in calls.verdicts] == [("a", "0")]


def test_memory_does_not_grow_with_a_million_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes after many ids are those after few: nothing is kept of those forgotten."""
    monkeypatch.setattr(program_table, "MOST_PROGRAMS", 64)
    calls, sizes = Calls(infers=True), list[int]()
    calls.programs.on_verdict = lambda verdict: None
    for rounds in (1, 20):
        for number in range(200 * rounds):
            row = calls.begin(f"{rounds}-{number}", tenant=f"t{number % 3}")
            calls.end(row, 1.0, b"%d" % number, (number,))
        calls.programs.note_tools("r0", {"x" * 100: "y" * 10**6})
        assert len(calls.programs._tails) <= len(calls.programs)
        sizes.append(sum(sys.getsizeof(value) for value in vars(calls.programs).values()))
    assert sizes[1] <= 1.1 * sizes[0]
    assert len(calls.programs.call_counts) == 0, "programs that are forgotten teach nothing"


def test_what_a_tool_is_called_is_bounded() -> None:
    calls = Calls(infers=True)
    row = calls.begin()
    calls.programs.note_tools("r0", {str(number): str(number) * 1000 for number in range(100)})
    calls.end(row, 1.0)
    calls.programs.note_tools("r-unknown", {"a": "b"})
    second = calls.begin("a", 1.0)
    calls.end(second, 2.0)
    [waits] = calls.programs.waiting()
    assert waits.tools == ()
    calls.begin(now=2.0, continues=(("tool", "1"),))
    assert calls.programs.num_links <= 3 * MOST_LINKS
    assert all(len(name) <= MOST_NAME for one in calls.programs.waiting() for name in one.tools)


@pytest.mark.promise(47)
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("bcde"), st.integers(0, 3), st.booleans()), max_size=60))
def test_each_program_has_one_verdict(events: list[tuple[str, int, bool]]) -> None:
    """Whatever begins, ends, is silent or over in any order: each call is in one verdict."""
    calls, running, begun = Calls(rows=64, silence=5.0), dict[int, list[int]](), 0
    for now, (kind, name, flag) in enumerate(events):
        if kind == "b":
            running.setdefault(name, []).append(calls.begin(str(name), now, over=flag))
            begun += 1
        elif kind == "c" and running.get(name):
            calls.end(running[name].pop(), now, b"key", (now,), complete=flag)
        elif kind == "d":
            calls.programs.expire(now + (10.0 if flag else 0.0))
        else:
            rows = np.array([row for rows in running.values() for row in rows], np.int64)
            calls.programs.charge(rows, np.ones(len(rows), np.int64))
    for rows in running.values():
        for row in rows:
            calls.end(row, 100.0)
    calls.programs.expire(1e9)
    assert sum(one.calls for one in calls.verdicts) == begun
    assert len(calls.programs) == calls.programs.num_links == calls.programs.num_calls == 0
    assert (calls.programs.num_running, calls.programs.num_waiting) == (0, 0)
    assert not calls.programs._tails and not calls.programs._by_id and not calls.programs._silent
    assert Counter(one.id for one in calls.verdicts).keys() == {str(name) for name in running}
