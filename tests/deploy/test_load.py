"""How many replicas there should be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.deploy.load import ATTAINED, ENOUGH, LATE, QUEUED, Load, attainment, wanted_replicas

IDLE = Load()
FULL = Load(busy=0.9)


def missing(busy: float, met: int, count: int = 100) -> Load:
    return Load(busy=busy, ended={"chat": count, "batch": count}, met={"chat": met, "batch": count})


@pytest.mark.parametrize(
    ("loads", "now", "count"),
    [
        ([], 3, 3),  # nobody has said anything
        ([IDLE], 1, 1),
        ([IDLE, IDLE, IDLE], 3, 2),  # one at a time
        ([FULL, FULL], 2, 2),
        ([FULL, IDLE], 2, 2),  # the other one has no room
        ([Load(busy=0.2), Load(busy=0.2)], 2, 1),
        ([Load(busy=0.2)], 2, 2),  # one of them says nothing yet
        ([Load(wait_share=1.5 * LATE)], 1, 2),
        ([Load(wait_share=1.5 * LATE)] * 4, 4, 6),
        ([Load(wait_share=100.0)] * 4, 4, 8),  # twice as many at most
        ([Load(waiting=3 * QUEUED, busy=1.0), FULL], 2, 3),
        ([Load(waiting=0.01), IDLE], 2, 2),  # somebody waits
        ([Load(wait_share=LATE / 2), IDLE], 2, 2),
        ([missing(0.9, 90)], 1, 2),
        ([missing(0.9, 96)], 1, 1),
        ([missing(0.1, 10)], 1, 1),  # not for want of room
        ([missing(0.9, 0, ENOUGH - 1)], 1, 1),  # too few to say
    ],
)
def test_wanted(loads: list[Load], now: int, count: int) -> None:
    assert wanted_replicas(loads, now) == count


def test_attainment_is_that_of_all_replicas_together() -> None:
    loads = [missing(0.5, 100), missing(0.5, 50, 50), missing(0.5, 0, 50)]
    assert attainment(loads) == {"chat": 0.75, "batch": 1.0}
    assert min(attainment(loads).values()) < ATTAINED


@given(
    st.builds(
        Load,
        *(st.floats(0, 10) for _ in range(3)),
        st.dictionaries(st.sampled_from(["a", "b:c"]), st.integers(0, 9)),
        st.dictionaries(st.sampled_from(["a", "b:c"]), st.integers(0, 9)),
    )
)
def test_metrics_say_all_of_it(load: Load) -> None:
    assert Load.from_metrics(load.as_metrics()) == load
