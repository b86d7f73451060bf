"""What is learned of programs: times of tools, and numbers of calls."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.sched.programs import call_counts, tool_times
from jaxserve.sched.programs.call_counts import CallCounts
from jaxserve.sched.programs.tool_times import ToolTimes


def test_a_tools_times_are_not_its_extremes() -> None:
    times = ToolTimes()
    for seconds in (*range(1, 100), 1e9):
        times.add("a", "search", float(seconds))
    assert times.mean("a", ["search"]) == pytest.approx(50.5, abs=0.5)
    assert times.quantile("a", ["search"], 0.99) == 99
    assert times.quantile("a", ["search"], 0.5) == 50
    assert times.quantile("a", ["search"], 0.0) == 1


@given(st.lists(st.floats(0.0, 1e6), min_size=tool_times.ENOUGH, max_size=3 * tool_times.KEPT))
def test_the_latest_times_count_whatever_came_before(seconds: list[float]) -> None:
    times = ToolTimes()
    for one in seconds:
        times.add("a", "search", one)
        times.mean("a", ["search"])
    latest = sorted(seconds[-tool_times.KEPT :])
    assert times.times("a", ["search"]).tolist() == latest
    assert times.quantile("a", ["search"], 1.0) == latest[-1]
    cut = math.ceil(tool_times.EXTREME * len(latest)) - 1
    kept = np.clip(latest, latest[cut], latest[math.ceil(0.95 * len(latest)) - 1])
    assert times.mean("a", ["search"]) == pytest.approx(kept.mean())
    assert times.overall("a") == pytest.approx(kept.mean())


def test_the_slowest_of_several_tools_counts() -> None:
    times = ToolTimes()
    for _ in range(tool_times.ENOUGH):
        times.add("a", "fast", 1.0)
        times.add("a", "slow", 5.0)
    assert times.mean("a", ["fast", "slow", "unknown"]) == 5.0
    assert times.quantile("a", ["fast", "unknown"], 0.9) == 1.0


def test_few_times_and_other_tenants_times_are_not_used() -> None:
    times = ToolTimes()
    for _ in range(tool_times.ENOUGH - 1):
        times.add("a", "search", 1.0)
    assert times.mean("a", ["search"]) is None
    times.add("a", "search", 1.0)
    assert times.mean("a", ["search"]) == 1.0 and times.mean("b", ["search"]) is None


def test_names_and_tenants_are_bounded() -> None:
    times = ToolTimes()
    for number in range(3 * tool_times.MOST_TOOLS):
        times.add("a", str(number), 1.0)
        times.add("a", "used", 1.0)
    assert len(times) == tool_times.MOST_TOOLS
    assert times.mean("a", ["used"]) == 1.0
    for number in range(tool_times.MOST_TENANTS):
        times.add(f"t{number}", "", 1.0)
    assert len(times) == tool_times.MOST_TENANTS and times.mean("a", ["used"]) is None


def test_calls_left() -> None:
    counts, kind = CallCounts(), ("a", "default", True)
    for calls in (1, 2, 3, 4, 5, 6, 7, 8):
        assert counts.left(kind, 1) == 0.0, "too few"
        counts.add(kind, calls)
    assert counts.left(kind, 1) == 3.5
    assert counts.left(kind, 7) == 0.5
    assert counts.left(kind, 9) == 0.0, "none was as long"
    assert counts.left(("b", "default", True), 1) == 0.0
    for number in range(call_counts.MOST_KINDS):
        counts.add((str(number), "", False), 1)
    assert len(counts) == call_counts.MOST_KINDS and counts.left(kind, 1) == 0.0
