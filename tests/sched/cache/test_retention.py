"""Which pages that nobody reads go first, by `lru` and by `worth`."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.cache.pages import Page
from jaxserve.sched.cache.prefix_cache import PrefixCache
from jaxserve.sched.cache.retention import Retention
from jaxserve.sched.cache.worth import Worth
from jaxserve.sched.registry import RETENTIONS, make_retention
from jaxserve.sched.request import Tier


class Cache(PrefixCache):
    """Requests one after the other, each with one block a page."""

    made = 0

    def serve(
        self,
        keys: list[bytes],
        now: float,
        tier: int = Tier.REALTIME,
        room: int = 1_000_000,
        tenant: int = 0,
    ) -> int:
        """Serves a request, in a pool of so many pages. Returns how many it found."""
        self.retention.now = self.tenants.now = now
        self.add(0, keys, tier=tier, tenant=tenant)
        self.watch_row(0, len(keys))
        chain = self.claim_hit(0)
        for page in chain:
            self.read(page, 0)
        held = [page.ids[0] for page in chain]
        for index in range(len(chain), len(keys)):
            self.made += 1
            if len(self) == room:
                self.evict(1)
            held.append(self.register(0, index, (self.made,)).ids[0])
        self.remove(0)
        self.release_readers(held)
        return len(chain)


def named(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def keys_of(cache: PrefixCache) -> set[bytes]:
    return {page.key for page in cache.pages()}


def test_lru_lets_go_what_was_read_first_and_ends_first() -> None:
    cache = Cache(1)
    cache.serve(named("a", "b"), 0.0)
    cache.serve(named("x"), 1.0)
    cache.evict(1)
    assert keys_of(cache) == {b"a", b"x"}
    cache.evict(1)
    assert keys_of(cache) == {b"x"}


@pytest.mark.parametrize("name", RETENTIONS)
@given(data=st.data())
def test_ends_go_before_beginnings_and_only_unread_ones(name: str, data: st.DataObject) -> None:
    cache, now = Cache(1, make_retention(name)), 0.0
    for _ in range(data.draw(st.integers(1, 12))):
        now += data.draw(st.floats(0, 100))
        path, keys = b"", []
        for _ in range(data.draw(st.integers(1, 4))):
            path += bytes([data.draw(st.integers(0, 2))])
            keys.append(path)
        cache.serve(keys, now, data.draw(st.sampled_from(Tier)))
        count = data.draw(st.integers(0, 3))
        before = len(cache)
        assert len(cache.evict(count)) == min(count, before)
        assert all(page.before is None or page in page.before.after for page in cache.pages())
        assert all(
            page.before is None or page.before.key in keys_of(cache) for page in cache.pages()
        )
        assert cache.num_unread == len(cache)
    left = len(cache)
    assert len(cache.evict(1000)) == left
    assert not len(cache)


def cold(cache: Cache, tier: int = Tier.REALTIME, now: float = 0.0) -> None:
    cache.serve(named(f"cold {tier}"), now, tier)


def test_what_saves_a_real_time_request_stays_before_what_saves_best_effort_ones() -> None:
    cache = Cache(1, Worth())
    cold(cache, Tier.REALTIME)
    cold(cache, Tier.BEST_EFFORT, 1.0)
    cache.retention.now = 100.0
    cache.evict(1)
    assert keys_of(cache) == {b"cold 0"}
    cache = Cache(1, Worth(best_effort=4.0))
    cold(cache, Tier.REALTIME)
    cold(cache, Tier.BEST_EFFORT, 1.0)
    cache.retention.now = 100.0
    cache.evict(1)
    assert keys_of(cache) == {b"cold 1"}


def test_what_takes_longer_to_compute_stays() -> None:
    retention = Worth()
    retention.seconds = lambda before: 1.0 + 9.0 * (before > 0)
    cache = Cache(1, retention)
    cache.serve(named("a", "b"), 0.0)
    cache.serve(named("x"), 1.0)
    cache.evict(1)
    assert keys_of(cache) == {b"a", b"b"}


def test_it_learns_who_comes_back() -> None:
    """Prompts come back 50 s after their first time, and never after the third."""
    cache = Cache(2, Worth())
    for turn in range(600):
        cache.serve(named(f"p{turn}"), 10.0 * turn)
        if turn >= 5:
            cache.serve(named(f"p{turn - 5}"), 10.0 * turn + 1)
            cache.serve(named(f"p{turn - 5}"), 10.0 * turn + 2)
        while len(cache) > 60:
            cache.evict(1)
    newest, twice = f"p{599}".encode(), f"p{594}".encode()  # will, and will not come back
    while {newest, twice} <= keys_of(cache):
        cache.evict(1)
    assert newest in keys_of(cache)


def test_what_a_waiting_request_has_found_stays() -> None:
    cache = Cache(2, Worth())
    cache.serve(named("old"), 0.0)
    cache.serve(named("new"), 90.0)
    cache.add(1, named("old"))
    cache.watch_row(1, 1)
    cache.retention.now = 100.0
    cache.evict(1)
    assert keys_of(cache) == {b"old"}
    cache.remove(1)  # and is no pin
    cache.serve(named("newer"), 100.0)
    cache.evict(1)
    assert len(cache) == 1
    cache.evict(1)
    assert not len(cache)


def test_what_only_those_wait_for_who_are_given_up_goes_before_what_others_do() -> None:
    cache = Cache(4, Worth())
    cache.serve(named("in time"), 0.0)
    cache.serve(named("late"), 0.0)
    for row, key in enumerate(["late", "in time", "in time"], 1):
        cache.add(row, named(key))
        cache.watch_row(row, 1)
    cache.hopeless |= {1, 2}
    cache.retention.now = 1.0
    cache.evict(1)
    assert keys_of(cache) == {b"in time"}
    cache.remove(1)
    assert cache.hopeless == {2}


@given(data=st.data())
def test_it_knows_what_lru_would_save(data: st.DataObject) -> None:
    lru, worth = Cache(1), Cache(1, retention := Worth(risk=1e9))
    room, saved, found = data.draw(st.integers(3, 8)), 0, 0
    for now in range(data.draw(st.integers(1, 30))):
        path, keys = b"", []
        for _ in range(data.draw(st.integers(1, 3))):
            path += bytes([data.draw(st.integers(0, 2))])
            keys.append(path)
        saved += lru.serve(keys, now, room=room)
        found += worth.serve(keys, now, room=room)
        assert retention._lead == pytest.approx(found - 0.99 * saved)
        assert list(retention._recent) == [page.key for page in lru._unread]


@given(st.randoms(use_true_random=False))
@settings(max_examples=10)
def test_lru_decides_where_it_saves_more(random: Random) -> None:
    """However bad the other choices are."""

    class Wrong(Worth):
        def _least(self, group: int, queue: Any) -> tuple[float, Page | None]:
            return 0.0, queue.end(young=True)

    lru, wrong, room = Cache(1), Cache(1, Wrong(risk=1.0)), 6
    saved = found = 0
    for now in range(300):
        keys = named(f"p{random.randrange(now // 10, now // 10 + 8)}")
        saved += lru.serve(keys, now, room=room)
        found += wrong.serve(keys, now, room=room)
    assert found >= 0.99 * saved - 2 * room


def test_all_is_forgotten_and_found_again() -> None:
    cache = Cache(1, Worth())
    for number in range(50):
        cache.serve(named("s", f"p{number % 7}"), float(number))
        if number == 25:
            cache.clear()
    assert len(cache) == 8 and len(cache.evict(9)) == 8


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("wort", "there is no retention 'wort'; did you mean 'worth'"),
        ("worth:best_effort=0", "retention 'worth': best_effort must be above 0"),
        ("worth:memory=1", "retention 'worth': memory must be at least 0 and below 1"),
        ("worth:doubt=-1", "retention 'worth': doubt must be at least 0"),
        ("worth:risk=-1", "retention 'worth': risk must be at least 0"),
        ("lru:doubt=1", "retention 'lru' has no parameter 'doubt'"),
        ("worth:doubt", "retention 'worth:doubt': parameters are :NAME=VALUE"),
    ],
)
def test_names_that_are_wrong_say_how(name: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make_retention(name)


def test_each_scheduler_gets_its_own() -> None:
    assert type(make_retention("lru")) is Retention
    one, two = make_retention("worth:doubt=0.1"), make_retention("worth:doubt=0.1")
    assert isinstance(one, Worth) and one is not two and one.doubt == 0.1
    assert np.isfinite(one._index).all()
