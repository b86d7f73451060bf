"""For how long a cache is kept while a tool runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.sched.programs.cache_lives import time_to_live
from jaxserve.sched.programs.call_counts import CallCounts
from jaxserve.sched.programs.tool_times import ToolTimes

KIND = ("", "", True)


@pytest.mark.parametrize(
    ("times", "saved", "seconds"),
    [
        ([1.0, 1.0, 1.0, 60.0], 3.0, 1.0),  # three of four for a second; all would take a minute
        ([1.0, 1.0, 1.0, 60.0], 1.0, 0.0),  # three quarters of a second are less than one
        ([1.0, 2.0], 4.0, 2.0),
        ([5.0], 4.0, 0.0),
        ([], 4.0, 4.0),  # nothing is known: no longer than it is worth
        ([], -1.0, 0.0),
    ],
)
def test_a_cache_is_kept_for_the_time_that_pays_most(
    times: list[float], saved: float, seconds: float
) -> None:
    assert time_to_live(np.array(times), saved) == seconds


@given(st.lists(st.floats(0, 1e3), max_size=20), st.floats(0, 1e3))
def test_no_cache_is_kept_longer_than_it_is_worth(times: list[float], saved: float) -> None:
    assert 0 <= time_to_live(np.sort(times), saved) <= saved


def test_programs_of_one_length_remember_and_those_that_end_by_chance_do_not() -> None:
    counts = CallCounts()
    for _ in range(7):
        counts.add(KIND, 5)
    assert counts.memory(KIND) == 0.0, "too few"
    counts.add(KIND, 5)
    assert counts.memory(KIND) == pytest.approx(1.0)
    chance, rng = CallCounts(), np.random.default_rng(0)
    for calls in rng.geometric(0.1, 128).tolist():
        chance.add(KIND, calls)
    assert abs(chance.memory(KIND)) < 0.5
    alone = CallCounts()
    for _ in range(8):
        alone.add(KIND, 1)
    assert alone.memory(KIND) == 0.0


def test_times_of_tools_that_run_at_once_are_those_of_the_slowest() -> None:
    times = ToolTimes()
    for seconds in (1.0, 2.0, 3.0, 4.0):
        times.add("", "ls", seconds)
    times.add("", "make", 9.0)
    times.add("", "", 100.0)
    assert times.times("", ["ls"]).tolist() == [1, 2, 3, 4]
    assert times.times("", ["make"]).tolist() == [1, 2, 3, 4, 9], "all tools, but no people"
    assert times.times("other", ["ls"]).tolist() == []
    for seconds in (2.5, 2.5, 2.5, 2.5):
        times.add("", "cat", seconds)
    both = times.times("", ["ls", "cat"])
    assert both.min() == 2.5 and both.max() == 4.0 and np.mean(both <= 2.5) == pytest.approx(0.5)
    assert times.overall("") == pytest.approx((4 * 2.5 + 9 + 100 + 10) / 10)
    assert times.overall("other") == 0.0
