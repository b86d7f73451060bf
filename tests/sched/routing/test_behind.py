"""Which requests leave a replica because they would miss their targets there."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.sched.routing.behind import AGAIN, MOST_MOVES, Sent
from jaxserve.sched.routing.fleet import Fleet, Role, RoutingRequest
from jaxserve.sched.routing.moves import Link
from jaxserve.sched.routing.routers import Router
from jaxserve.sched.routing.snapshot import KNOWN, prompt_seconds
from jaxserve.sched.routing.take_snapshot import idle_snapshot
from tests.sched.routing.test_routing import FIXED, busy

LINK = Link(0.002, 5e-6)
PROMPT = RoutingRequest(1000, ttft=1.0)


def routed(*snapshots: Any, link: Link | None = LINK) -> Router:
    fleet = Fleet(len(snapshots))
    for place, snapshot in enumerate(snapshots):
        fleet.hear(place, snapshot)
    return Router("slo", fleet, link=link)


def queued(tokens: int, time: float = 1.0, **more: Any) -> Any:
    """A replica with so many tokens of prompts."""
    return busy(time=time, realtime_tokens=tokens, realtime_quad=0, **more)


IDLE = idle_snapshot(FIXED, 1.0)


def alone(tokens: int) -> float:
    """Seconds of a prompt at a replica with nothing else."""
    return float(prompt_seconds(routed(queued(0)).fleet.row(0), RoutingRequest(tokens), 0.0))


def test_who_would_wait_too_long_leaves_and_its_load_with_it() -> None:
    count = 1 + int(1.6 / alone(1000))
    router = routed(queued(1000 * count), IDLE, IDLE)
    there = [Sent(PROMPT, 0.9, 0.9, begun=False) for _ in range(count)]
    work = router.fleet.columns.realtime_work
    before = work.copy()
    left = router.behind(0, there, 1.1)
    assert {place for _, place in left} == {1, 2} and 2 <= len(left) < count
    assert 0 not in [number for number, _ in left], "the first one is in time"
    assert [number for number, _ in left] == sorted({number for number, _ in left})
    assert work[0] == pytest.approx(before[0] - len(left) * alone(1000), rel=0.2)
    assert work[1] > before[1] and work[2] > before[2]
    # A later snapshot that is from before they left does not bring them back.
    now = work[0]
    router.fleet.hear(0, queued(1000 * count, 1.05))
    assert work[0] == pytest.approx(now, rel=0.05)
    router.fleet.hear(0, queued(1000 * (count - len(left)), 1.2))
    assert work[0] == pytest.approx(now, rel=0.05)


def test_whoever_comes_behind_a_request_does_not_delay_it() -> None:
    count = 1 + int(1.6 / alone(1000))
    router = routed(queued(1000 * count), IDLE)
    there = [Sent(PROMPT._replace(ttft=9.0), 0.9, 0.9 + i / 1e6, False) for i in range(count)]
    first = PROMPT._replace(ttft=0.1 + 2.5 * alone(1000))
    assert router.behind(0, [*there[1:], Sent(first, 0.9, 0.8, False)], 1.0) == []
    (one,) = router.behind(0, [*there[1:], Sent(first, 0.9, 0.95, False)], 1.0)
    assert one == (count - 1, 1)


def late(running: int) -> Any:
    """A replica whose steps take more than 20 ms, at 1 s."""
    return busy(time=1.0, running=running, cached=1000 * running, pace=30.0)


def test_what_runs_takes_its_cache_along() -> None:
    router = routed(late(6), IDLE)
    ask = RoutingRequest(1000, tbt=0.05)
    assert router.fleet.columns.decode[0] > 0.05
    there = [Sent(ask, 0.5, 0.6, begun=True), Sent(ask, 0.5, 0.6, begun=True)]
    decode, work = router.fleet.columns.decode.copy(), router.fleet.columns.realtime_work.copy()
    assert sorted(router.behind(0, there, 1.0)) == [(0, 1), (1, 1)]
    s = router.fleet.columns
    assert s.decode[0] < decode[0] and s.decode[1] > decode[1]
    assert s.realtime_work[1] - work[1] < alone(100), "it is not computed again"
    assert s.running[0] == 4
    # The way counts: one that takes half a second saves nothing.
    assert routed(late(6), IDLE, link=Link(0.5, 0.0)).behind(0, there, 1.0) == []


STAYS = [
    Sent(RoutingRequest(1000), 0.9, 0.9, begun=False),  # no targets
    Sent(RoutingRequest(1000), 0.5, 0.6, begun=True),
    Sent(RoutingRequest(1000, tier=1), 0.5, 0.6, begun=True),
    Sent(PROMPT, -0.5, 0.5, begun=False),  # too late already
    Sent(PROMPT, 1.0, 1.05, begun=False),  # not in the snapshot
    Sent(PROMPT, 0.9, 0.9, begun=False, moved=1),  # has just come
    Sent(PROMPT, 0.9 - AGAIN, 0.9 - AGAIN, begun=False, moved=MOST_MOVES),
]


@pytest.mark.parametrize("one", STAYS)
def test_who_stays(one: Sent) -> None:
    assert routed(queued(90_000, pace=20.0), IDLE).behind(0, [one], 1.1) == []


def test_nobody_leaves_where_nothing_is_behind_or_nowhere_is_better() -> None:
    there = [Sent(PROMPT, 0.9, 0.9, False), Sent(RoutingRequest(9, tbt=0.05), 0.5, 0.6, True)]
    behind = queued(90_000, pace=20.0)
    assert len(routed(behind, IDLE).behind(0, there, 1.0)) == 2
    assert routed(queued(2000), IDLE).behind(0, there, 1.0) == []
    assert routed(behind, behind).behind(0, there, 1.0) == []
    assert routed(behind).behind(0, there, 1.0) == []
    assert routed(behind, IDLE).behind(0, there, 1.0, besides=[1]) == []
    assert routed(behind, IDLE, link=None).behind(0, there, 1.0) == []
    apart = routed(behind, IDLE)
    apart.fleet.set_role(0, Role.PROMPTS)
    apart.fleet.set_role(1, Role.DECODES)
    assert apart.behind(0, there, 1.0) == [(1, 1)], "prompts stay where prompts are computed"


ASKS = st.tuples(
    st.integers(1, 10**5),
    st.integers(0, 1),
    st.sampled_from([0.01, 1.0, float("inf")]),
    st.sampled_from([0.001, 0.1, float("inf")]),
    st.sampled_from([0.1, 9.0, float("inf")]),
    st.integers(1, 4),
).map(lambda numbers: RoutingRequest(*numbers))
TIMES = st.floats(0, 2)
SENT = st.tuples(ASKS, TIMES, TIMES, st.booleans(), st.integers(0, 4)).map(lambda one: Sent(*one))


@given(st.lists(SENT, max_size=12), st.integers(0, 10**5), st.floats(1, 50), st.booleans())
def test_each_leaves_once_and_elsewhere(
    there: list[Sent], tokens: int, pace: float, by_tier: bool
) -> None:
    router = routed(queued(tokens, pace=pace, by_tier=by_tier), IDLE, queued(500))
    left = router.behind(0, there, 2.0)
    numbers = [number for number, _ in left]
    assert len(numbers) == len({*numbers}) and {*numbers} <= {*range(len(there))}
    assert {place for _, place in left} <= {1, 2}
    known = router.fleet.row(0)
    assert all(getattr(known, name) == getattr(known, name) for name in KNOWN.names or ())
    assert known.realtime_work >= 0 and known.best_effort_work >= 0


def stepping(seconds: float) -> Any:
    """A replica whose steps take so long."""
    of_one = float(routed(busy(time=1.0, running=4)).fleet.columns.decode[0])
    return busy(time=1.0, running=4, pace=seconds / of_one)


def test_whoever_moves_waits_for_the_steps_that_are_under_way_there() -> None:
    ask = RoutingRequest(100, tbt=0.05)
    # It would wait for two of 25 ms, which is as bad as tokens that come after 37 ms each.
    assert routed(stepping(0.037), stepping(0.025)).goes_on_at(0, ask, 1.0) == 0
    assert routed(stepping(0.037), stepping(0.01)).goes_on_at(0, ask, 1.0) == 1


def test_prompts_are_apart_only_where_tokens_would_be_late_beside_them() -> None:
    for tbt, place in ((0.02, 1), (1.0, 0)):
        router = routed(IDLE, IDLE)
        router.fleet.send(0, PROMPT, 1.0)
        router.fleet.prompts[:, 0], router.fleet.packed[0] = 1.9, True
        router.fleet.columns.tbt[0] = tbt  # of a request that runs
        begins = router.choose(RoutingRequest(100, ttft=9.0, tbt=tbt), 1.0)
        assert begins == 1 - place, "a prompt goes where prompts are, or else to the idle one"
        assert router.goes_on_at(0, RoutingRequest(100, tbt=tbt), 1.0) == place


def test_prompts_go_where_others_are_as_long_as_they_are_in_time() -> None:
    """To one more if not, to one less if those of the last minute would fill fewer."""
    router, ask = routed(*[IDLE] * 4), RoutingRequest(1000, ttft=1.0, tbt=0.02)
    fleet = router.fleet
    placed = []
    for _ in range(int(3.5 / alone(1000))):
        placed.append(router.choose(ask, 1.0))
        fleet.send(placed[-1], ask, 1.0)
        assert {*np.flatnonzero(fleet.packed)} <= {*placed}
    for count in range(1, len(placed) + 1):
        seconds = count * alone(1000)
        assert len({*placed[:count]}) <= math.ceil(seconds / 0.6), "to another only if one is full"
    assert len({*placed}) == 4, "more than the first few are in time"
    assert np.count_nonzero(fleet.packed) == 3, "one is left for decodes"

    now = 1.0
    for share, count in ((2.1, 3), (1.8, 3), (1.5, 2), (0.0, 1)):
        for _ in range(200):  # until the last minute is forgotten
            now += 1.0
            for place in range(4):
                fleet.hear(place, idle_snapshot(FIXED, now))
            fleet.columns.tbt[:] = 0.02
            fleet.prompts += share / 4
            router.choose(ask, now)
        assert np.count_nonzero(fleet.packed) == count, share
    fleet.columns.tbt[:] = 9.0
    router.choose(ask._replace(tbt=9.0), now + 2)
    assert not fleet.packed.any(), "prompts make no token late"
    fleet.grow(4)
    assert router.goes_on_at(0, ask, now + 1) in range(8)
    fleet.packed[0], fleet.coming[0] = True, 9.0
    fleet.forget(0)
    assert not fleet.packed[0] and not fleet.coming[0]


@pytest.mark.parametrize("late", range(5))
@pytest.mark.parametrize("can", [True, False])
def test_prompts_gather_only_if_they_make_tokens_late_at_most_replicas(
    late: int, can: bool
) -> None:
    """Some may be slow, and who wants a token in a microsecond is not served by that."""
    router = routed(*[stepping(0.01)] * 4)
    s = router.fleet.columns
    s.tbt[:] = [float(s.decode[0]) if can else 1e-6] * late + [9.0] * (4 - late)
    for tbt in (np.inf, 1e-6):
        router.choose(RoutingRequest(100, ttft=9.0, tbt=tbt), 1.0)
        assert router.fleet.packed.any() == (can and late > 2)


@pytest.mark.parametrize("idle", [0.0, 30.0, 3600.0])
def test_prompts_gather_in_a_burst_after_an_idle_time(idle: float) -> None:
    """As many replicas have them as from the start, and the same ones all the time."""
    router, ask = routed(*[IDLE] * 8), RoutingRequest(1000, ttft=1.0, tbt=0.02)
    fleet, seconds, now = router.fleet, alone(1000), 1.0
    placed: list[int] = []
    changes = 0
    for begin in (1.0, 11.0 + idle):
        placed, changes, now = [], 0, begin
        while now < begin + 10.0:
            before = fleet.packed.copy()
            s = fleet.columns
            s.decode[:], s.tbt[:] = s.idle, 0.02  # as if all had moved on
            placed.append(router.choose(ask, now))
            fleet.send(placed[-1], ask, now)
            changes += int((fleet.packed != before).sum())
            now += seconds / 2.5
    assert len({*placed}) <= 4 and changes <= 6


@pytest.mark.parametrize("ttft", [np.inf, 600.0, 10.0])
def test_prompts_without_haste_do_not_wait_while_others_are_idle(ttft: float) -> None:
    """For longer than a patient client would."""
    router, ask = routed(*[stepping(0.01)] * 4), RoutingRequest(1000, ttft=ttft, tbt=0.01)
    router.fleet.columns.tbt[:] = 0.01
    count = int(12.0 / alone(1000))
    for _ in range(count):
        at = router.choose(ask, 1.0)
        router.fleet.send(at, ask, 1.0)
    assert np.count_nonzero(router.fleet.columns.best_effort_work) > 1


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid")
@pytest.mark.parametrize("link", [None, LINK])
def test_a_target_of_nearly_no_time_goes_to_a_replica_that_is_up(link: Link | None) -> None:
    router, ask = routed(IDLE, IDLE, IDLE, link=link), RoutingRequest(100, ttft=5e-324, tbt=5e-324)
    router.fleet.lose(0)
    assert router.choose(ask, 1.0) in (1, 2)
    if link is not None:
        assert router.goes_on_at(1, ask, 1.0) in (1, 2)
        late = [Sent(ask, 1.0, 0.5, begun=begun) for begun in (False, True)]
        assert all(place != 0 for _, place in router.behind(1, late, 1.0))


def test_roles_that_come_late_and_go() -> None:
    """Nobody else is for prompts while some have roles; prompts gather again without."""
    router, ask = routed(*[IDLE] * 4), RoutingRequest(1000, ttft=1.0, tbt=0.02)
    fleet = router.fleet

    def gathers(now: float) -> bool:
        fleet.send(router.choose(ask, now), ask, now)
        return bool(fleet.packed.any())

    assert gathers(1.0)
    for place, role in ((2, Role.PROMPTS), (3, Role.DECODES)):
        fleet.set_role(place, role)
    assert not gathers(1.1)
    for place in (2, 3):
        fleet.forget(place)
    assert gathers(1.2)


def test_caches_come_one_after_another() -> None:
    """And a request goes where it need not wait for others'."""
    link = Link(0.0, 1e-5)
    router = Router("slo", Fleet(3), link=link)
    for place, one in enumerate((stepping(0.049), stepping(0.01), stepping(0.013))):
        router.fleet.hear(place, one)
    ask = RoutingRequest(1000, tbt=0.05)
    placed = []
    for _ in range(4):
        placed.append(router.goes_on_at(0, ask, 1.0))
        router.fleet.send(placed[-1], ask, 1.0, moves=True)
    assert placed[:2] == [1, 2] and router.fleet.coming[1:].min() >= 1.01


def test_nobody_goes_where_others_have_just_left() -> None:
    router = routed(queued(90_000, pace=20.0), IDLE)
    assert router.behind(0, [Sent(PROMPT, 0.9, 0.9, False)], 1.0) == [(0, 1)]
    for now, found in ((1.2, []), (1.1 + AGAIN, [(0, 0)])):
        router.fleet.hear(0, idle_snapshot(FIXED, now))
        router.fleet.hear(1, queued(90_000, now, pace=20.0))
        assert router.behind(1, [Sent(PROMPT, now - 0.1, now - 0.1, False)], now) == found


def test_what_runs_goes_to_nobody_who_may_not_take_it() -> None:
    """Not even to the first of all, where no other one may."""
    begun = Sent(RoutingRequest(1000, tbt=0.05), 0.0, 0.5, True)

    def left(router: Router, besides: tuple[int, ...] = ()) -> list[tuple[int, int]]:
        return router.behind(1, [begun] * 3, 1.1, besides)

    assert left(routed(IDLE, late(60))), "it goes if it may"
    assert left(routed(IDLE, late(60)), (0,)) == []
    gone = routed(IDLE, late(60))
    gone.fleet.lose(0)
    assert left(gone) == []
    recent = routed(IDLE, late(60))
    recent.fleet.left[0] = 1.0
    assert left(recent) == []
