"""What a request is told of its targets: the definitions of load tests, one request at a time."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxserve.sched.request import NO_CLASS, SLO, Request, Rule, Tier
from jaxserve.sched.slo.classes import with_targets
from jaxserve.sched.slo.metrics import Times, attained, percentile_99
from jaxserve.sched.slo.slo_columns import ALL_TARGETS, SloColumns
from jaxserve.sched.slo.verdict import judge, tbt_that_counts

CHAT = SLO(ttft=1.0, tbt=0.2, jct=3.0)


def asking(slo: SLO, arrival: float = 0.0) -> Request:
    return Request("a", (1,), slo=slo, tier=Tier.BEST_EFFORT, arrival=arrival, slo_class="chat")


def test_each_target_is_judged_by_itself_and_all_of_them_together() -> None:
    found = judge(asking(CHAT, 10.0), [11.0, 11.5, 12.0], 12.0, complete=True)
    assert found is not None
    assert (found.ttft, found.tbt, found.jct) == (True, False, True)
    assert not found.met
    assert (found.slo, found.slo_class) == (dataclasses.replace(CHAT, max_tbt=2.0), "chat")
    assert found.tier is Tier.BEST_EFFORT and found.max_tbt


def test_as_text_it_says_what_was_missed_and_by_how_much() -> None:
    late = judge(asking(CHAT, 10.0), [11.52, 11.6, 12.0], 12.0, complete=True)
    assert str(late) == "missed: ttft 1.52 s > 1 s, tbt 0.3968 s > 0.2 s"
    assert str(judge(asking(CHAT), [0.5, 0.6], 0.6, complete=True)) == "met"
    failed = judge(asking(SLO(ttft=1.0)), [0.5], 0.6, complete=False, failed=True)
    assert str(failed) == "missed: ttft of 1 s"


@pytest.mark.parametrize(
    ("slo", "longest"),
    [
        (SLO(ttft=1.0, jct=9.0), None),
        (SLO(tbt=0.05), 2.0),
        (SLO(tbt=0.5), 5.0),
        (SLO(tbt=0.5, max_tbt=0.6), 0.6),
        (SLO(max_tbt=7.0), 7.0),
    ],
)
def test_the_longest_gap_has_a_limit_where_gaps_have_a_target(
    slo: SLO, longest: float | None
) -> None:
    assert slo.with_max_tbt() == dataclasses.replace(slo, max_tbt=longest)
    gap = longest or 1000.0
    # Beside 200 gaps of next to nothing, one does not show in the 99th percentile.
    times = [*np.linspace(0.5, 0.6, 201).tolist(), 0.6 + gap]
    for more in (0.0, 1.0):
        times[-1] = 0.6 + gap + more
        found = judge(asking(dataclasses.replace(slo, jct=None)), times, times[-1], complete=True)
        assert found is not None and found.tbt in (None, True)
        if longest is None:
            assert found.max_tbt is None and found.met
        elif more:
            assert found.max_tbt is False and not found.met


def test_a_stream_that_stands_still_has_missed_before_it_goes_on() -> None:
    times = np.linspace(0.0, 1.0, 301).tolist()
    for end, met in ((3.0, True), (3.1, False)):
        found = judge(asking(SLO(tbt=0.05)), times, end, complete=False)
        assert found is not None and found.tbt and (found.max_tbt, found.met) == (met, met)


def test_a_target_that_is_met_exactly_is_met_and_one_that_is_not_there_is_not_judged() -> None:
    found = judge(asking(SLO(ttft=1.0)), [1.0, 9.0], 9.0, complete=True)
    assert found is not None and found.met
    assert (found.ttft, found.tbt, found.jct) == (True, None, None)


def test_without_targets_there_is_no_verdict() -> None:
    assert judge(Request("a", (1,)), [5.0], 5.0, complete=True) is None
    assert Request("a", (1,)).slo_class == NO_CLASS


def test_a_cancelled_request_is_judged_as_if_its_next_token_came_then() -> None:
    in_time = judge(asking(CHAT), [0.5, 0.6], 0.7, complete=False)
    assert in_time is not None and in_time.met
    stuck = judge(asking(CHAT), [0.5, 0.6], 2.5, complete=False)
    assert stuck is not None and (stuck.ttft, stuck.tbt, stuck.jct) == (True, False, True)
    never_begun = judge(asking(CHAT), [], 2.0, complete=False)
    assert never_begun is not None
    assert (never_begun.ttft, never_begun.tbt, never_begun.jct) == (False, True, True)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=300))
@settings(deadline=None, max_examples=200)
def test_the_percentile_is_numpys(values: list[float]) -> None:
    assert percentile_99(values) == np.percentile(values, 99)


def test_the_tbt_that_counts_needs_two_tokens() -> None:
    assert tbt_that_counts([]) is None and tbt_that_counts([3.0]) is None
    assert tbt_that_counts([3.0, 3.5]) == 0.5
    # Of 100 gaps, the 99th percentile lies between the two longest: 0.01 of the way.
    times = np.cumsum([0.0, *[1.0] * 99, 2.0])
    assert tbt_that_counts(times.tolist()) == pytest.approx(1.01)


_target = st.sampled_from([0.25, 0.5, 1.0, 4.0, 30.0, None])


@given(
    arrival=st.integers(0, 8),
    gaps=st.lists(st.sampled_from([0.0, 0.0, 0.0625, 0.25, 0.5, 1.0, 2.5]), max_size=120),
    slo=st.builds(SLO, ttft=_target, tbt=_target, jct=_target, max_tbt=_target),
    after=st.sampled_from([0.0, 0.25, 2.0]),
    complete=st.booleans(),
)
@example(arrival=0, gaps=[0.25, 1.0, 0.0], slo=SLO(tbt=0.5), after=0.0, complete=True)
@settings(deadline=None, max_examples=300)
def test_what_is_told_is_what_load_tests_and_simulations_count(
    arrival: int, gaps: list[float], slo: SLO, after: float, complete: bool
) -> None:
    complete &= bool(gaps)
    tokens = (arrival + np.cumsum(gaps)).tolist()
    end = tokens[-1] if complete else arrival + sum(gaps) + after
    request = asking(slo, float(arrival))
    told = judge(request, tokens, end, complete=complete)
    counted = attained(
        Times(
            np.array([arrival], np.float64),
            np.array(tokens),
            np.array([len(tokens)]),
            np.array([complete]),
            going=np.array([not complete]),
            end=math.inf if complete else end,
        ),
        with_targets(SloColumns.none(1), slo),
    )
    if told is None:
        assert slo == SLO() and counted.slo().all()
        return
    for name in ALL_TARGETS:
        met = getattr(told, name)
        assert (met is None) == (getattr(slo.with_max_tbt(), name) is None)
        assert (met is None or met) == getattr(counted, name)[0]
    assert told.met == counted.slo()[0]
    assert (False not in (told.ttft, told.tbt, told.jct)) == counted.slo(Rule.PAPERS)[0]
