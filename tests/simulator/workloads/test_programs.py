"""Programs as columns: what waits for what, subsets, other rates, and the closed sessions drawn."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.sched.slo.classes import parse_classes
from jaxserve.simulator.workloads.closed_sessions import (
    CLOSED_SESSIONS,
    LONGEST_TOOL,
    Chain,
    Research,
    tool_times,
)
from jaxserve.simulator.workloads.prefixes import Prefixes
from jaxserve.simulator.workloads.programs import NO_TOOL, Programs
from jaxserve.simulator.workloads.releases import Releases
from jaxserve.simulator.workloads.sessions import SESSIONS
from jaxserve.simulator.workloads.specs import MOST_PROGRAMS, WorkloadSpec
from jaxserve.simulator.workloads.traces import read_trace
from jaxserve.simulator.workloads.workload import (
    Lengths,
    Workload,
    WorkloadError,
    all_at_once,
    fixed_lengths,
)
from tests.simulator.workloads.test_prefixes import streams, tree, workloads

NAMES = sorted(CLOSED_SESSIONS)


def programs(
    program: list[int], edges: list[tuple[int, int]], wait: Any = 0.0, **changes: Any
) -> Programs:
    """Programs with these edges, whose children wait for so long."""
    parent, child = np.array(edges, np.int64).reshape(-1, 2).T
    columns: dict[str, Any] = {"program": np.array(program), "parent": parent, "child": child}
    columns["wait"] = np.where(np.isin(np.arange(len(program)), child), wait, 0.0)
    return dataclasses.replace(Programs.none(len(program)), **{**columns, **changes})


def closed(made: Programs, arrival: list[float] | None = None, tokens: int = 3) -> Workload:
    times = all_at_once(len(made)) if arrival is None else np.array(arrival)
    return Workload.create(times, fixed_lengths(4, tokens, len(made)), programs=made)


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (programs([0, 0], [(1, 0)]), "request 1 must wait for an earlier one, not 2"),
        (programs([0, 0], [(0, 2)]), "must wait for an earlier one"),
        (programs([0, 1], [(0, 1)]), "request 2 waits for 1, which is not of its program"),
        (programs([-1, -1], [(0, 1)]), "which is not of its program"),
        (programs([0, 0], [(0, 1), (0, 1)]), "edges must be different"),
        (programs([0, 0, 0], [(0, 2), (0, 1)]), "in order of their children"),
        (programs([0, 0], [(0, 1)], math.inf), "wait must be a time of 0 or more"),
        (programs([0, 0], [(0, 1)], -1.0), "wait must be a time"),
        (
            dataclasses.replace(programs([0, 0], []), wait=np.ones(2)),
            "only requests that wait for others",
        ),
        (programs([0, 0], [(0, 1)], tool=np.array([-1, 0])), "an index into tools"),
        (programs([0, 0], [], deadline=np.zeros(2)), "deadline must be a positive time"),
        (programs([0, 0], [], at_once=-1), "at_once must be at least 0, got -1"),
        (programs([0, 0], [], told=np.zeros(3, bool)), "the same length"),
        (programs([0, 0], [], parent=np.zeros(1, np.int64)), "1 parents for 0 children"),
    ],
)
def test_impossible_programs_are_refused(made: Programs, problem: str) -> None:
    with pytest.raises(WorkloadError, match="programs: .*" + problem):
        Workload.create(
            all_at_once(2 if len(made) == 2 else 3), fixed_lengths(4, 3, len(made)), programs=made
        )


def test_requests_by_themselves_are_an_open_workload() -> None:
    made = Workload.create(all_at_once(3), fixed_lengths(4, 3, 3))
    assert not made.programs.closed and not made.programs.waits.any()
    with pytest.raises(WorkloadError, match="2 programs at a time: these requests are of no"):
        made.with_programs_at_once(2)
    with pytest.raises(WorkloadError, match="programs of 2 requests for 3"):
        dataclasses.replace(made, programs=Programs.none(2))


def test_who_loses_all_that_it_waited_for_waits_for_nobody() -> None:
    made = programs([0, 0, 0, 0], [(0, 1), (0, 2), (1, 3), (2, 3)], 2.0)
    made = dataclasses.replace(made, tools=("grep",), tool=np.array([-1, 0, 0, -1]))
    some = made.select(np.array([1, 3]))
    assert (some.parent.tolist(), some.child.tolist()) == ([0], [1])
    assert some.wait.tolist() == [0.0, 2.0] and some.tool.tolist() == [NO_TOOL, NO_TOOL]
    assert made.cut_off(np.array([False, True, False, False])).tolist() == [
        False, True, False, True
    ]  # fmt: skip
    assert made.earliest(np.full(4, 5.0), np.array([1.0, 1.0, 9.0, 1.0])).tolist() == [5, 8, 8, 19]


def test_programs_of_merged_workloads_stay_apart() -> None:
    grep, both = {"tools": ("grep",)}, {"tools": ("make", "grep")}
    one = closed(programs([0, 0], [(0, 1)], 1.0, tool=np.array([-1, 0]), **grep), [0.0, 2.0])
    other = closed(programs([0, 0], [(0, 1)], 1.0, tool=np.array([-1, 1]), **both), [1.0, 3.0])
    alone = Workload.create(np.array([0.5]), fixed_lengths(4, 3, 1))
    merged, order = Workload.merged([one, other, alone])
    assert order.tolist() == [0, 4, 2, 1, 3]
    assert merged.programs.program.tolist() == [0, -1, 1, 0, 1]
    assert merged.programs.parent.tolist() == [0, 2] and merged.programs.child.tolist() == [3, 4]
    assert [merged.programs.tools[i] for i in merged.programs.tool[[3, 4]]] == ["grep", "grep"]
    with pytest.raises(WorkloadError, match="cannot be merged with others"):
        Workload.merged([one.with_programs_at_once(1), other])
    beside, _ = Workload.merged([one.with_programs_at_once(1), alone])
    assert beside.programs.at_once == 1


@given(workloads(), st.data())
def test_in_any_order_requests_share_what_they_shared(made: Workload, data: st.DataObject) -> None:
    order = np.array(data.draw(st.permutations(range(len(made)))))
    order = order[: data.draw(st.integers(1, len(order)))]
    found = made.prefixes.in_order(order, made.prompt_len)
    moved = Workload.create(
        all_at_once(len(order)),
        Lengths(made.prompt_len[order], made.output_len[order]),
        prefixes=found,
    )
    before = tree(streams(made))[np.ix_(order, order)]
    after = tree(streams(moved))
    # What two have in common beyond a prompt, an answer that comes later cannot have been.
    for later in range(len(order)):
        most = int(before[later, :later].max(initial=0))
        assert found.prefix_len[later] == min(most, made.prompt_len[order[later]])
        assert after[later, :later].max(initial=0) >= found.prefix_len[later]


def test_at_another_rate_people_and_tools_take_as_long() -> None:
    made = closed(programs([0, 0, 1, 1], [(0, 1), (2, 3)], 4.0), [0.0, 5.0, 10.0, 16.0])
    slow, fast = made.at_rate(3 / 32), made.at_rate(3 / 1.6)
    assert slow.arrival.tolist() == [0.0, 5.0, 20.0, 26.0]
    assert fast.arrival.tolist() == pytest.approx([0.0, 1.0, 5.0, 7.0])  # 10 -> 1
    assert fast.programs.program.tolist() == [0, 1, 0, 1]
    assert fast.programs.wait.tolist() == [0.0, 0.0, 4.0, 4.0]


@pytest.mark.parametrize("name", NAMES)
def test_closed_sessions_are_whole_and_the_same_for_a_seed(name: str) -> None:
    made, again = (WorkloadSpec(name, 400, rate=3.0).make_workload(5) for _ in range(2))
    columns, family = made.programs, CLOSED_SESSIONS[name]
    for one, other in ((made.arrival, again.arrival), (columns.wait, again.programs.wait)):
        np.testing.assert_array_equal(one, other)
    assert (
        WorkloadSpec(name, 400, rate=3.0).make_workload(6).arrival[:9] != made.arrival[:9]
    ).any()
    assert len(made) >= 400 and columns.tools == tuple(tool.name for tool in family.tools)
    # No call before all it waits for could have ended.
    parent, child = columns.parent, columns.child
    assert (made.arrival[child] >= made.arrival[parent] + columns.wait[child] - 1e-9).all()
    assert ((columns.tool >= 0) <= columns.waits).all() and columns.wait.max() <= LONGEST_TOOL
    # A call goes on with one that it waits for, and has all of it.
    goes_on = np.flatnonzero(columns.waits & (made.prefix_of >= 0))
    same = columns.program[goes_on] == columns.program[made.prefix_of[goes_on]]
    same &= made.prefix_len[goes_on] != getattr(family, "worker", 0)  # branches begin alike
    before = made.prefix_of[goes_on[same]]
    assert (made.prefix_len[goes_on[same]] == made.lengths.total[before]).all()
    assert (made.prompt_len > made.prefix_len).all()
    # Whole: of each program the last call is nobody's parent, and there is one such call.
    last = np.setdiff1d(np.arange(len(made)), parent)
    assert sorted(columns.program[last].tolist()) == list(range(int(columns.program.max()) + 1))


def test_research_fans_out_and_joins() -> None:
    family = CLOSED_SESSIONS["closed-research"]
    assert isinstance(family, Research)
    made = WorkloadSpec("closed-research", 600, rate=3.0).make_workload(1)
    columns = made.programs
    parents = np.bincount(columns.child, minlength=len(made))
    plans, reports = np.flatnonzero(parents == 0), np.flatnonzero(parents > 1)
    assert len(plans) == len(reports) == len(np.unique(columns.program))
    branches = parents[reports]
    assert (branches.min(), branches.max()) == (family.branches.low, family.branches.high)
    first = np.bincount(columns.parent, minlength=len(made))[plans]
    by_program = dict(zip(columns.program[plans].tolist(), first.tolist(), strict=True))
    assert [by_program[p] for p in columns.program[reports].tolist()] == branches.tolist()
    for report in reports[:5].tolist():
        joined = columns.parent[columns.child == report]
        found = made.output_len[joined].sum()
        plan = made.prefix_of[report]
        assert made.prompt_len[report] == made.lengths.total[plan] + found
    assert columns.told.all()


def test_closed_sessions_come_at_their_rate() -> None:
    made = WorkloadSpec("closed-conversation", rate=2.0, duration=4000.0).make_workload(0)
    assert len(made) / 4000 == pytest.approx(2.0, rel=0.1)
    starts = made.arrival[~made.programs.waits]
    assert starts.max() < 4000 < made.arrival.max(), "those that have begun go on"
    together = WorkloadSpec("closed-conversation", 50).make_workload(0)
    assert not together.arrival[~together.programs.waits].any()
    bursty = WorkloadSpec("closed-conversation", 400, "gamma", 2.0, cv=4.0).make_workload(0)
    gaps = np.diff(bursty.arrival[~bursty.programs.waits])
    assert gaps.std() > 2 * gaps.mean()


def test_so_many_programs_are_drawn_that_they_last() -> None:
    spec = WorkloadSpec("closed-conversation", programs=6, duration=900.0)
    made = spec.make_workload(0)
    assert made.programs.at_once == 6 and spec.drawn()
    releases, wrote = Releases(made), 1e-3
    going: list[tuple[float, int]] = []
    while releases.next_time < 900 or going:  # a system that takes 1 ms a token
        if going and min(going)[0] <= releases.next_time:
            end, number = min(going)
            going.remove((end, number))
            releases.ended(number, end)
            continue
        if not releases.next_time < 900:
            break
        number = releases.take_first()
        going.append((releases.arrival[number] + wrote * made.output_len[number], number))
    begun = {int(made.programs.program[number]) for number in releases.came}
    assert len(begun) < made.programs.program.max() + 1, "others are left"


def test_tools_have_their_shares_and_medians() -> None:
    family = CLOSED_SESSIONS["closed-agent"]
    seconds, which = tool_times(family.tools, 40_000, np.random.default_rng(0))
    assert seconds.mean() == pytest.approx(2.1, rel=0.05)
    for index, tool in enumerate(family.tools):
        mine = seconds[which == index]
        assert len(mine) / 40_000 == pytest.approx(tool.share, abs=0.01)
        assert np.median(mine) == pytest.approx(tool.median, rel=0.1)
    with pytest.raises(WorkloadError, match="a chain starts alone, not 3"):
        Chain(SESSIONS["agent"], (), "made up")
    research = CLOSED_SESSIONS["closed-research"]
    assert isinstance(research, Research)
    with pytest.raises(WorkloadError, match="more than max_context, 1000"):
        dataclasses.replace(research, max_context=1000)


def test_calls_of_a_program_are_of_one_class_and_have_one_deadline() -> None:
    spec = WorkloadSpec(
        "closed-agent",
        300,
        rate=3.0,
        classes=parse_classes("a:0.5:ttft=1s,b:0.5:jct=9s"),
        program_deadline=40.0,
    )
    made = spec.make_workload(2)
    kinds = {
        (p, c) for p, c in zip(made.programs.program.tolist(), made.slo_class.tolist(), strict=True)
    }
    assert len(kinds) == made.programs.program.max() + 1 > len({kind for _, kind in kinds}) == 2
    assert (made.programs.deadline == 40.0).all()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"programs": 0}, f"programs must be 1 to {MOST_PROGRAMS}, got 0"),
        ({"programs": MOST_PROGRAMS + 1}, "programs must be 1 to"),
        ({"programs": 2, "rate": 1.0}, "they need no rate"),
        ({"programs": 2, "arrivals": "all"}, "they need no rate or arrivals"),
        ({"program_deadline": math.nan}, "program_deadline must be a positive time, got nan"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, float], problem: str) -> None:
    with pytest.raises(WorkloadError, match=problem):
        WorkloadSpec("closed-agent", **fields)  # type: ignore[arg-type]


def test_only_programs_can_be_programs() -> None:
    with pytest.raises(WorkloadError, match="4 programs at a time: these requests are of no"):
        WorkloadSpec("sharegpt", 9, programs=4).make_workload()
    with pytest.raises(WorkloadError, match="program_deadline: sharegpt has no programs"):
        WorkloadSpec("sharegpt", 9, program_deadline=4.0).make_workload()
    with pytest.raises(WorkloadError, match="closed-agent has no arrivals to replay"):
        WorkloadSpec("closed-agent", 9, "replay").make_workload()


CSV = """arrival_s,prompt_tokens,output_tokens,program,after,wait_ms,tool,program_deadline_ms
0,9,5,a,,,,
1,9,5,,,,,
3,20,5,a,1,1500,grep,60000
4,20,5,,2,,,
4,8,5,a,1,0,make,
9,40,5,,3+5,,,
"""


def test_a_trace_says_what_waits_for_what(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(CSV)
    found = read_trace(path).programs
    assert found.program.tolist() == [0, 1, 0, 1, 0, 0]
    assert found.parent.tolist() == [0, 1, 0, 2, 4]
    assert found.child.tolist() == [2, 3, 4, 5, 5]
    assert found.wait.tolist() == [0, 0, 1.5, 0, 0, 0]
    assert found.tools == ("grep", "make") and found.tool.tolist() == [-1, -1, 0, -1, 1, -1]
    assert found.deadline.tolist() == [60.0, math.inf, 60.0, math.inf, 60.0, 60.0]
    assert read_trace(path, 3).programs.child.tolist() == [2]
    made = WorkloadSpec(str(path), programs=1, program_deadline=7.0).make_workload()
    assert made.programs.at_once == 1
    assert made.programs.deadline.tolist() == [60.0, 7.0, 60.0, 7.0, 60.0, 60.0]
    short = WorkloadSpec(str(path), duration=2.0).make_workload()
    assert len(short) == 6, "who waits for others may come earlier"
    assert len(WorkloadSpec(str(path), duration=0.5).make_workload()) == 4


def test_so_do_lines_of_json(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = '{"timestamp": %d, "input_length": 9, "output_length": 5%s}\n'
    path.write_text(
        line % (0, ', "program": "x"')
        + line % (5, ', "after": 1, "wait_ms": 20, "tool": "grep"')
        + line % (9, ', "after": [1, 2], "program": "x"')
    )
    found = read_trace(path).programs
    assert found.program.tolist() == [0, 0, 0]
    assert found.parent.tolist() == [0, 0, 1] and found.child.tolist() == [1, 2, 2]
    assert found.wait.tolist() == [0, 0.02, 0] and found.tools == ("grep",)


@pytest.mark.parametrize(
    ("cells", "problem"),
    [
        ("a,2,,", "must wait for an earlier one, not 2"),
        ("a,9,,", "must wait for an earlier one, not 9"),
        ("a,x,,", "after must be a whole number, got 'x'"),
        ("a," + "9" * 400 + ",,", "after must be 1 to"),
        ("a," + "+".join(["1"] * 2000) + ",,", "after may have at most 1024 requests"),
        ("b,1,,", "which is not of its program"),
        ("a,,5,", "wait_ms and tool are of requests that come after others"),
        ("a,1,-5,", "wait_ms must be a time from 0"),
        ("a,1,,\u0000grep", "tool must be 1 to 128 characters"),
        ("p" * 129 + ",1,,", "program must be 1 to 128 characters"),
    ],
)
def test_a_bad_cell_is_named(tmp_path: Path, cells: str, problem: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        f"prompt_tokens,output_tokens,program,after,wait_ms,tool\n9,5,a,,,\n9,5,{cells}\n"
    )
    with pytest.raises(WorkloadError, match=problem) as caught:
        read_trace(path)
    assert len(str(caught.value)) < 300


def test_scaled_requests_go_on_with_each_other() -> None:
    made = WorkloadSpec("closed-agent", 200, rate=3.0).make_workload(0).scaled(16)
    assert made.prompt_len.max() <= 32768 / 16
    later = made.prefix_of >= 0
    assert (made.prefix_len[later] > 0).all() and not made.prefix_len[~later].any()
    with pytest.raises(WorkloadError, match="scale must be a positive number, got 0"):
        made.scaled(0)


def test_prefixes_do_not_depend_on_the_first_of_a_system_prompt() -> None:
    """Of three that begin alike, the first two change places."""
    found = Prefixes(np.array([-1, 0, 0]), np.array([0, 5, 5]))
    moved = found.in_order(np.array([1, 0, 2]), np.array([9, 9, 9]))
    assert moved.prefix_of.tolist() == [-1, 0, 1] or moved.prefix_of.tolist() == [-1, 0, 0]
    assert moved.prefix_len.tolist() == [0, 5, 5]
