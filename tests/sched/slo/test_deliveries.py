"""Tokens that come at once share the time since those before."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.request import SLO, Request, SamplingParams
from jaxserve.sched.slo.deliveries import spread, spread_all
from jaxserve.sched.state.request_table import RequestTable

# When each token of a request comes, from its first.
deliveries = st.lists(
    st.tuples(st.sampled_from([0.125, 0.5, 1.0, 2.5]), st.integers(1, 8)), max_size=30
)


def token_times(came: list[tuple[float, int]]) -> list[float]:
    """The first token comes alone, at 1 s."""
    times, now = [1.0], 1.0
    for gap, count in came:
        now += gap
        times += [now] * count
    return times


def slowly(times: list[float]) -> list[float]:
    """Gap by gap: what came at once is counted for each of its tokens."""
    found = []
    for i in range(1, len(times)):
        before = max(time for time in times if time < times[i])
        found.append((times[i] - before) / times.count(times[i]))
    return found


@settings(deadline=None, max_examples=60)
@given(st.lists(deliveries, min_size=1, max_size=5))
def test_all_ways_to_spread_them_agree(requests: list[list[tuple[float, int]]]) -> None:
    all_times = [token_times(came) for came in requests]
    wanted = [slowly(times) for times in all_times]
    for times, gaps in zip(all_times, wanted, strict=True):
        assert spread([b - a for a, b in itertools.pairwise(times)]) == gaps
    flat = np.concatenate(all_times)
    first = np.concatenate([np.arange(len(times)) == 0 for times in all_times])
    together = spread_all(np.diff(flat, prepend=0.0), first)
    assert together[~first].tolist() == list(itertools.chain(*wanted))


@settings(deadline=None, max_examples=100)
@given(came=deliveries, target=st.sampled_from([0.1, 0.25, 0.5, 1.0]))
def test_the_table_counts_what_verdicts_count(came: list[tuple[float, int]], target: float) -> None:
    table = RequestTable(2)
    table.add(Request("other", (1,)))
    output = 1 + sum(count for _, count in came)
    for _ in range(2):  # the second time in a row that another one had
        row = table.add(Request("a", (1,), SamplingParams(max_tokens=output), SLO(tbt=target)))
        seen = (table.first_token[row], table.late_gaps[row], table.longest_gap[row])
        assert seen == (np.inf, 0, 0.0)
        table.receive(np.array([row]), 1.0)
        now = 1.0
        for gap, count in came:
            now += gap
            table.receive(np.array([row]), now, np.array([count]))
        gaps = slowly(token_times(came))
        assert (table.first_token[row], table.last_token[row]) == (1.0, now)
        assert table.received[row] == output
        assert table.late_gaps[row] == sum(gap > target for gap in gaps)
        assert table.longest_gap[row] == max(gaps, default=0.0)
        table.remove(row)
    assert table.first_token[0] == np.inf and table.received[0] == 0
