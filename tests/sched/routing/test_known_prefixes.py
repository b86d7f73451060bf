"""Routers and prefixes: what a sketch says, what was sent since, and who gets a request for it."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.cache.prefix_sketch import (
    FULL,
    KEY_BYTES,
    MARKS,
    PLACES,
    PrefixSketch,
    marks_of,
    unfolded,
)
from jaxserve.sched.policy import Limits
from jaxserve.sched.registry import make_policy
from jaxserve.sched.routing import known_prefixes
from jaxserve.sched.routing.fleet import Fleet, RoutingRequest
from jaxserve.sched.routing.known_prefixes import KnownPrefixes
from jaxserve.sched.routing.routers import Router
from jaxserve.sched.routing.snapshot import Snapshot
from jaxserve.sched.routing.take_snapshot import constant_fields, idle_snapshot
from tests.sched.routing.test_routing import MODEL

FIXED = constant_fields(MODEL, make_policy("sarathi"), Limits(4096, 512, 64), 1000, 16)
EMPTY = PrefixSketch().text()


def chain(seed: int, blocks: int = 60) -> list[bytes]:
    drawn = random.Random(seed)
    return [drawn.randbytes(KEY_BYTES) for _ in range(blocks)]


def sketch_of(*chains: list[bytes]) -> str:
    sketch = PrefixSketch()
    for keys in chains:
        sketch.add(keys)
    return sketch.text()


def busy(time: float = 0.0, sketch: str = EMPTY, **numbers: Any) -> Snapshot:
    return dataclasses.replace(idle_snapshot(FIXED, time), sketch=sketch, **numbers)


def ask_for(keys: list[bytes], hint: bytes = b"", **more: Any) -> RoutingRequest:
    return RoutingRequest(16 * len(keys) + 1, marks=marks_of(keys, len(keys)), hint=hint, **more)


def fleet_of(*snapshots: Snapshot) -> Fleet:
    fleet = Fleet(len(snapshots))
    fleet.watch_prefixes()
    for replica, snapshot in enumerate(snapshots):
        fleet.hear(replica, snapshot)
    return fleet


@given(blocks=st.integers(0, 300), most=st.integers(0, 300))
def test_marks_are_of_a_quarter_more_each(blocks: int, most: int) -> None:
    keys, limit = chain(blocks, blocks), min(blocks, most)
    marks = marks_of(keys, most)
    depths = [n for n in MARKS if n <= limit]
    assert marks == b"".join(keys[n - 1] for n in depths)
    assert limit == 0 or depths[-1] >= 0.8 * limit - 1


@settings(max_examples=30)
@given(data=st.data())
def test_what_is_taken_out_is_gone_and_the_rest_is_there(data: st.DataObject) -> None:
    sketch, known = PrefixSketch(), KnownPrefixes(1)
    parts = data.draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), max_size=12))
    out = data.draw(st.lists(st.booleans(), min_size=len(parts), max_size=len(parts)))
    for (seed, blocks), _ in zip(parts, out, strict=True):
        for depth in range(blocks):  # as pages come, one by one
            sketch.add(chain(seed)[depth : depth + 1], depth)
    for (seed, blocks), goes in zip(parts, out, strict=True):
        if goes:
            sketch.add(chain(seed)[:blocks], count=-1)
    known.hear(0, sketch.text(), [])
    left = [part for part, goes in zip(parts, out, strict=True) if not goes]
    for seed in range(10):
        deepest = max((blocks for one, blocks in left if one == seed), default=0)
        there = max((n for n in MARKS if n <= deepest), default=0)
        assert known.blocks(marks_of(chain(seed), 60))[0] >= there
    if not left:
        assert sketch.text() == EMPTY


@pytest.mark.parametrize("count", [1, 20, 150])
def test_a_sketch_is_as_large_as_it_takes_and_says_little_that_is_not_so(count: int) -> None:
    text = sketch_of(*(chain(seed) for seed in range(count)))
    bits = np.unpackbits(unfolded(text))
    assert bits.mean() <= FULL and len(text) <= PLACES // 6 + 4
    known = KnownPrefixes(1)
    known.hear(0, text, [])
    others = [known.blocks(marks_of(chain(seed), 60))[0] for seed in range(10_000, 12_000)]
    assert np.mean(np.array(others) > 0) < 0.03  # 1.2% at the most by design
    assert all(known.blocks(marks_of(chain(seed), 60))[0] >= 51 for seed in range(count))


@pytest.mark.parametrize("text", ["!", "AAAA", "A" * 10_000])
def test_what_is_no_sketch_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        unfolded(text)


def test_keys_of_another_side_are_left_out() -> None:
    sketch = PrefixSketch()
    sketch.add([key + b"R" for key in chain(1)])
    assert sketch.text() == EMPTY


@settings(max_examples=25)
@given(data=st.data())
def test_a_router_knows_what_the_last_sketch_says_and_what_was_sent_since(
    data: st.DataObject,
) -> None:
    """Also where snapshots are lost, or come late, and replicas come and go."""
    count = data.draw(st.sampled_from([1, 3, 70]))
    known = KnownPrefixes(count)
    has: list[dict[int, int]] = [{} for _ in range(count)]  # blocks by chain
    for _ in range(data.draw(st.integers(1, 12))):
        replica = data.draw(st.integers(0, count - 1))
        what = data.draw(st.sampled_from(["send", "hear", "nothing", "forget", "grow"]))
        seed, blocks = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 60))
        if what == "send":
            known.send(replica, marks_of(chain(seed), blocks))
            has[replica][seed] = max(blocks, has[replica].get(seed, 0))
        elif what == "hear":
            known.hear(replica, sketch_of(chain(seed)[:blocks]), [marks_of(chain(9), 8)])
            has[replica] = {seed: blocks, 9: 8}
        elif what == "nothing":
            known.hear(replica, EMPTY, [])
            has[replica] = {}
        elif what == "forget":
            known.forget(replica)
            has[replica] = {}
        else:
            known.grow(2)
            count += 2
            has += [{}, {}]
    for seed in (*range(5), 9):
        deepest = [max((n for n in MARKS if n <= each.get(seed, 0)), default=0) for each in has]
        found = known.blocks(marks_of(chain(seed), 60))
        assert found.shape == (count,) and (found >= deepest).all()
        assert (found == deepest).mean() >= 0.9, "places are shared by chance"


def test_a_replica_without_a_prefix_cache_finds_nothing() -> None:
    fleet = fleet_of(busy(sketch=""), busy())
    ask = ask_for(chain(1))
    for replica in (0, 1):
        fleet.send(replica, ask, 0.5)
    found = fleet.found(ask)
    assert isinstance(found, np.ndarray) and found[0] == 0 and found[1] == 16 * 51


def test_what_was_sent_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_prefixes, "MOST_SENT", 3)
    monkeypatch.setattr(known_prefixes, "MOST_HINTS", 3)
    known = KnownPrefixes(1)
    known.hear(0, sketch_of(chain(0)), [])
    for seed in range(1, 5):
        known.send(0, marks_of(chain(seed), 60), b"%d" % seed)
    assert [known.blocks(marks_of(chain(s), 60))[0] > 0 for s in range(5)] == [1, 0, 0, 0, 1]
    assert [known.hinted(b"%d" % seed) for seed in range(1, 5)] == [None, 0, 0, 0]


@pytest.mark.parametrize("name", ["slo", "prefix_affinity"])
def test_a_prompt_goes_where_its_beginning_is_unless_others_wait_there(name: str) -> None:
    keys = chain(3)
    ask = ask_for(keys, ttft=1.0)
    fleet = fleet_of(busy(), busy(sketch=sketch_of(keys)), busy())
    router = Router(name, fleet)
    for replica, snapshot in enumerate((busy(), busy(sketch=sketch_of(keys)), busy())):
        fleet.hear(replica, snapshot)
    assert router.choose(ask, 0.0) == 1
    late = busy(1.0, sketch_of(keys), unfinished=40, waiting=40, realtime_tokens=60_000)
    fleet.hear(1, late)
    assert router.choose(ask, 1.0) != 1, "a queue costs more than what is found saves"
    fleet.hear(1, busy(2.0))  # evicted
    assert router.choose(ask, 2.0) == 0


@pytest.mark.parametrize("name", ["slo", "prefix_affinity"])
def test_a_hint_decides_between_those_who_are_alike(name: str) -> None:
    fleet = fleet_of(busy(), busy(), busy())
    router = Router(name, fleet)
    hinted, other = RoutingRequest(100, hint=b"h"), RoutingRequest(100, hint=b"o")
    fleet.send(2, hinted, 0.0)
    for replica in range(3):
        fleet.hear(replica, busy(1.0))
    assert router.choose(hinted, 1.0) == 2 and router.choose(other, 1.0) == 0
    fleet.hear(2, busy(2.0, unfinished=90, waiting=90, realtime_tokens=90_000))
    assert router.choose(RoutingRequest(100, ttft=1.0, hint=b"h"), 2.0) != 2
    fleet.lose(2)
    assert router.choose(hinted, 2.0) == 0
    fleet.forget(2)
    fleet.hear(2, busy(3.0))
    assert router.choose(hinted, 3.0) == 0, "another replica has its number now"


def test_a_call_gets_its_share_of_what_its_program_has_left() -> None:
    fleet = Fleet(2)
    ask = RoutingRequest(9, hint=b"a", program_deadline=60.0, calls_left=2)
    assert fleet.in_program(ask, 100.0).jct == 20.0, "nothing is known of earlier calls"
    fleet.watch_prefixes()
    assert fleet.in_program(ask, 100.0).jct == 20.0
    fleet.send(0, ask, 100.0)
    fleet.send(1, ask._replace(calls_left=1), 130.0)
    assert fleet.in_program(ask._replace(calls_left=0), 145.0).jct == 15.0
    assert fleet.in_program(ask._replace(jct=1.0), 145.0).jct == 1.0
    assert fleet.in_program(ask, 160.0).jct == np.inf, "late"
    assert fleet.in_program(ask._replace(hint=b"b"), 160.0).jct == 20.0
    assert fleet.in_program(RoutingRequest(9, hint=b"a"), 145.0).jct == np.inf


def test_a_program_stays_together_unless_that_costs_much() -> None:
    fleet = fleet_of(busy(), busy())
    router = Router("slo", fleet)
    fleet.send(1, RoutingRequest(100, hint=b"h"), 0.0)
    some = busy(1.0, unfinished=3, waiting=3, realtime_tokens=30_000)
    fleet.hear(0, busy(1.0))
    fleet.hear(1, some)
    ask = RoutingRequest(100, ttft=1.0, hint=b"h")
    assert router.choose(ask, 1.0) == 0, "a hint is worth less than this wait"
    assert router.choose(ask._replace(of_program=True), 1.0) == 1
    fleet.hear(1, busy(2.0, unfinished=90, waiting=90, realtime_tokens=90_000))
    assert router.choose(ask._replace(of_program=True), 2.0) == 0


def test_what_would_be_found_is_not_work() -> None:
    keys = chain(5)
    with_it, without = (fleet_of(busy(sketch=one)) for one in (sketch_of(keys), EMPTY))
    for fleet in (with_it, without):
        fleet.send(0, ask_for(keys), 0.001)
    saved = without.columns.realtime_work[0] - with_it.columns.realtime_work[0]
    assert saved > 0.8 * without.columns.realtime_work[0]
    with_it.hear(0, busy(0.0005, sketch_of(keys)))  # taken before it was sent
    assert with_it.columns.realtime_work[0] < 0.3 * without.columns.realtime_work[0]


def test_a_late_snapshot_does_not_forget_what_was_sent_after_it() -> None:
    fleet, ask = fleet_of(busy(), busy()), ask_for(chain(1))
    fleet.send(1, ask, 1.0)

    def there() -> list[bool]:
        found = fleet.found(ask)
        assert isinstance(found, np.ndarray)
        return [bool(one) for one in found]

    fleet.hear(1, busy(0.5))
    assert there() == [False, True]
    fleet.hear(1, busy(1.5))  # whoever has come is in the sketch, and it has not
    assert there() == [False, False]
    fleet.hear(1, busy(1.4, sketch_of(chain(1))))  # older than the last
    assert there() == [False, False]
