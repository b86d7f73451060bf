"""What is kept of responses, and who leaves when there is too much."""

from __future__ import annotations

import random

import pytest

from jaxserve.server.http.openai.responses.store import OWN_BYTES, ResponseStore, StoredResponse
from jaxserve.server.requests.options import ResponseLimits

SIZE = OWN_BYTES + 100


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def turn(name: str, previous: StoredResponse | None = None, size: int = SIZE) -> StoredResponse:
    return StoredResponse(name, b"r" * (size - OWN_BYTES - 10), b"i" * 5, b"o" * 5, 2, previous)


def kept(store: ResponseStore, tenant: str, names: str) -> str:
    return "".join(name for name in names if store.get(tenant, name) is not None)


def test_its_own_oldest_leave_first() -> None:
    store = ResponseStore(ResponseLimits(count=3, bytes=100 * SIZE))
    for name in "abcde":
        store.put("", turn(name))
    assert kept(store, "", "abcde") == "cde"
    assert (len(store), store.bytes) == (3, 3 * SIZE)
    store = ResponseStore(ResponseLimits(count=100, bytes=2 * SIZE))
    for name in "abcde":
        store.put("", turn(name))
    assert kept(store, "", "abcde") == "de"
    assert not store.put("", turn("f", size=2 * SIZE + 1))
    assert kept(store, "", "abcdef") == "de"
    assert not ResponseStore(ResponseLimits(bytes=0)).put("", turn("a"))


def test_a_tenant_has_its_share_and_leaves_others_theirs() -> None:
    store = ResponseStore(ResponseLimits(count=100, bytes=8 * SIZE, key_share=0.5))
    for name in "abc":
        store.put("small", turn(name))
    for name in "defghijk":
        store.put("large", turn(name))
    assert kept(store, "large", "defghijk") == "hijk"
    assert kept(store, "small", "abc") == "abc"
    assert kept(store, "small", "defghijk") == kept(store, "large", "abc") == ""
    for name in "lmno":  # together they have too much: whoever has most gives
        assert store.put("third", turn(name))
    assert kept(store, "small", "abc") == "abc"
    assert kept(store, "large", "hijk") == "ijk"
    assert kept(store, "third", "lmno") == "no"
    assert not store.put("small", turn("p", size=4 * SIZE + 1))
    assert not store.put("fourth", turn("q", size=4 * SIZE)), "others have less"
    assert kept(store, "small", "abc") == "abc" and kept(store, "large", "hijk") == "ijk"


def test_what_is_old_is_forgotten() -> None:
    clock = Clock()
    store = ResponseStore(ResponseLimits(keep_s=10.0), clock)
    store.put("a", turn("x"))
    clock.now = 6.0
    store.put("b", turn("y"))
    assert store.get("a", "x") is not None
    clock.now = 10.0
    assert store.get("a", "x") is None and store.get("b", "y") is not None
    assert (len(store), store.bytes) == (1, SIZE)
    clock.now = 99.0
    store.put("b", turn("z"))
    assert (len(store), store.bytes) == (1, SIZE)


def test_a_turn_counts_as_long_as_its_conversation_needs_it() -> None:
    store = ResponseStore(ResponseLimits(count=100, bytes=100 * SIZE))
    first = turn("a")
    second = turn("b", first)
    third = turn("c", second)
    assert [each.id for each in third.turns()] == ["a", "b", "c"]
    assert (third.count, third.read, third.whole) == (6, 30, 3 * SIZE)
    for each in (first, second, third):
        store.put("", each)
    assert store.bytes == 3 * SIZE
    assert store.delete("", "b") and not store.delete("", "b")
    assert store.get("", "b") is None and store.bytes == 3 * SIZE, "the third needs it"
    branch = turn("d", first)
    store.put("", branch)
    assert store.bytes == 4 * SIZE, "the first is kept once"
    assert store.delete("", "c")
    assert store.bytes == 2 * SIZE, "nobody needs the second any more"
    assert store.delete("", "a")
    assert store.bytes == 2 * SIZE
    assert store.delete("", "d")
    assert (len(store), store.bytes) == (0, 0)


def test_a_turn_whose_turns_before_have_left_counts_with_them() -> None:
    """It had begun while they were there."""
    store = ResponseStore(ResponseLimits(count=100, bytes=3 * SIZE))
    first = turn("a")
    store.put("", first)
    store.delete("", "a")
    store.put("", turn("b", first))
    assert store.bytes == 2 * SIZE
    assert not store.put("", turn("d", turn("c", turn("b", first))))


@pytest.mark.parametrize("seed", range(5))
def test_bounds_hold_whatever_comes(seed: int) -> None:
    rng, clock = random.Random(seed), Clock()
    limits = ResponseLimits(count=12, bytes=20 * SIZE, keep_s=40.0, key_share=0.4)
    store = ResponseStore(limits, clock)
    known: dict[str, list[StoredResponse]] = {"a": [], "b": [], "c": [], "d": []}
    for number in range(400):
        clock.now += rng.random()
        tenant = rng.choice("aab" if number < 200 else "abcd")
        mine = known[tenant]
        previous = rng.choice(mine[-4:]) if mine and rng.random() < 0.5 else None
        if previous is not None and rng.random() < 0.2:
            store.delete(tenant, previous.id)
            continue
        new = turn(str(number), previous, SIZE * rng.randint(1, 3))
        if store.put(tenant, new):
            mine.append(new)
            assert store.get(tenant, new.id) is new
        assert len(store) <= 12 and store.bytes <= 20 * SIZE
        needed = {
            each.id: each.size
            for name, turns in known.items()
            for one in turns
            if store.get(name, one.id) is not None
            for each in one.turns()
        }
        assert store.bytes == sum(needed.values())


def test_a_long_conversation_goes_at_once() -> None:
    store = ResponseStore(ResponseLimits(count=1, bytes=1 << 40))
    last = None
    for number in range(50_000):
        last = turn(str(number), last, OWN_BYTES + 10)
        store.put("", last)
    assert len(store) == 1 and store.delete("", "49999")
    del last
    assert store.bytes == 0
