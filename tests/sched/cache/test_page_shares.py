"""Tenants share the prefix cache by weight: nobody's flood takes what others use."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.sched.cache.page_shares import IDLE, PageShares, Tenants
from jaxserve.sched.cache.pages import Page
from jaxserve.sched.registry import RETENTIONS, make_retention
from tests.sched.cache.invariants import check_host_pages, check_pool
from tests.sched.cache.test_retention import Cache, keys_of, named
from tests.sched.driver import Drive

SIZE = 4  # tokens of a block
PAGES = 128  # of the pool
DEPTH = 12  # pages of a chat that come back


class Flood:
    """One tenant has chats that go on, one request at a time; another keeps so many prompts open
    that nobody sends twice. hits, asked: pages of the first one's."""

    def __init__(
        self, retention: str, weight: float = 1.0, host_slots: int = 0, shared: int = 0
    ) -> None:
        self.shared = shared  # pages with which all prompts begin
        options = {"blocks": 2 * PAGES, "block_size": SIZE, "host_slots": host_slots}
        self.drive = Drive("sarathi", prefix_caching=True, retention=retention, c=256, **options)
        self.unique, self.now, self.hits, self.asked = count(), 0.0, 0, 0
        self.weight = weight
        self.rows: dict[int, int] = {}  # by row, tokens that it lacks

    def send(self, tenant: str, keys: list[str]) -> int:
        keys = [f"shared {page}" for page in range(self.shared)] + keys
        prompt = SIZE * len(keys) + 1
        who = {"tenant": tenant, "weight": self.weight if tenant == "chats" else 1.0}
        row = self.drive.add(prompt, 3, keys=tuple(named(*keys)), arrival=self.now, **who)
        self.rows[row] = 3
        return row

    def step(self) -> None:
        scheduler = self.drive.scheduler
        step = scheduler.schedule(self.now)
        for row in step.emitting.tolist():
            scheduler.receive(np.array([row]), self.now)
            self.rows[row] -= 1
        for row in [row for row, lacks in self.rows.items() if not lacks]:
            scheduler.finish(row, complete=True)
            del self.rows[row]
        check_pool(self.drive.pool)
        assert scheduler.cache is not None
        check_host_pages(scheduler.cache, scheduler.host, SIZE)
        self.now += 1.0

    def chat(self, keys: list[str], flood: int, pages: int) -> None:
        row = self.send("chats", keys)
        found = 0
        while row in self.rows:
            while len(self.rows) <= flood:
                self.send("flood", [f"{next(self.unique)}" for _ in range(pages)])
            found = max(found, int(self.drive.scheduler.cache.found[row]))
            self.step()
        self.hits += max(found - self.shared, 0)
        self.asked += len(keys)


def chats(flood: Flood, rounds: int, open_: int, pages: int = 7) -> float:
    """The share of their pages that three chats find, in turn."""
    flood.hits = flood.asked = 0
    for turn in range(rounds):
        flood.chat([f"chat {turn % 3} {page}" for page in range(DEPTH)], open_, pages)
    return flood.hits / flood.asked


@pytest.mark.promise(37)
@pytest.mark.parametrize(("host_slots", "shared"), [(0, 3), (512, 0)])
@pytest.mark.parametrize("retention", RETENTIONS)
def test_a_flood_of_prompts_takes_no_hits_of_another_tenant(
    retention: str, host_slots: int, shared: int
) -> None:
    """Eight at a time, with twice the pool between two turns of a chat."""
    flood = Flood(retention, host_slots=host_slots, shared=shared)
    chats(flood, 3, 0)
    assert chats(flood, 12, 0) == 1.0
    alone = flood.drive.scheduler.cache.num_evicted
    assert chats(flood, 24, 7) >= 0.9
    assert flood.drive.scheduler.cache.num_evicted > alone + 4 * PAGES, "it is a flood"


def serve(cache: Cache, tenant: int, name: str, pages: int = 1) -> int:
    """A request that nobody of another tenant finds, in a pool of 12 pages."""
    keys = named(*(f"{name} {page}" for page in range(pages)))
    return cache.serve(keys, cache.tenants.now, room=12, tenant=tenant)


def has(cache: Cache, tenant: int) -> int:
    return cache._unread.has(tenant)


@pytest.mark.parametrize("name", RETENTIONS)
def test_who_has_most_for_its_weight_loses_first(name: str) -> None:
    cache = Cache(1, make_retention(name))
    cache.tenants.weight |= {0: 1.0, 1: 2.0, 2: 1.0}
    for number in range(20):
        serve(cache, 0, f"a {number}")
    assert has(cache, 0) == 12, "all of it where there is nobody else"
    for number in range(20):
        serve(cache, 1, f"b {number}")
    assert has(cache, 0) in (3, 4), "a third of it, but for the page that comes next"
    serve(cache, 2, "c")
    for number in range(20):
        serve(cache, number % 2, f"d {number}")
    assert has(cache, 2) == 1 and serve(cache, 2, "c") == 1, "it has less than its share"
    assert has(cache, 0) + has(cache, 1) == 11
    assert abs(has(cache, 1) - 2 * has(cache, 0)) <= 2


@pytest.mark.parametrize("name", RETENTIONS)
def test_who_uses_none_for_a_while_has_no_share(name: str) -> None:
    cache = Cache(1, make_retention(name))
    for number in range(6):
        serve(cache, 1, f"gone {number}")
    for number in range(30):
        serve(cache, 0, f"now {number}")
    assert has(cache, 1) == 6, "it is as likely to come back as the other"
    cache.tenants.now += IDLE + 1
    for number in range(6):
        serve(cache, 0, f"later {number}")
    assert has(cache, 1) == 0


@pytest.mark.parametrize("name", RETENTIONS)
def test_a_page_that_several_read_counts_for_the_last(name: str) -> None:
    cache = Cache(1, make_retention(name))
    serve(cache, 0, "ours", 4)
    assert serve(cache, 1, "ours", 3) == 3
    assert (has(cache, 0), has(cache, 1)) == (1, 3)


@pytest.mark.parametrize("name", RETENTIONS)
def test_what_another_has_behind_a_shared_page_does_not_go_with_it(name: str) -> None:
    """It takes the page over, up to as much as the others have."""
    cache = Cache(1, make_retention(name))
    serve(cache, 0, "ours", 5)
    assert serve(cache, 1, "ours", 4) == 4
    for number in range(20):
        serve(cache, 1, f"junk {number}")
    assert serve(cache, 0, "ours", 5) == 5, "the other one has more for its weight"
    assert serve(cache, 1, "ours", 4) == 4
    assert (has(cache, 0), has(cache, 1)) == (1, 11)
    cache.evict(10)  # nothing else is left, and the chain goes from its end
    assert keys_of(cache) == {b"ours 0", b"ours 1"}
    assert abs(has(cache, 0) - has(cache, 1)) <= 1
    cache.evict(2)
    assert not len(cache) and not cache._unread


@given(data=st.data())
def test_the_heap_says_what_a_search_would(data: st.DataObject) -> None:
    tenants = Tenants()
    tenants.weight |= {number: data.draw(st.sampled_from([0.5, 1.0, 3.0])) for number in range(4)}
    shares, there = PageShares(tenants), list[Page]()
    for number in range(data.draw(st.integers(1, 60))):
        tenant = data.draw(st.integers(0, 3))
        tenants.use(tenant)
        if there and data.draw(st.booleans()):
            page = there.pop(data.draw(st.integers(0, len(there) - 1)))
            shares.remove(page)
            shares.count(page.tenant, -2)
        elif data.draw(st.booleans()):
            shares.count(tenant, 2)  # of one that may not go
        else:
            page = Page(b"%d" % number, (number,), None, 0)
            page.tenant = tenant
            shares.count(tenant, 2)
            shares.add(page)
            there.append(page)
        assert set(shares) == set(there) and bool(shares) == bool(there)
        if there:
            values = {
                page.tenant: shares.has(page.tenant) / tenants.weight[page.tenant] for page in there
            }
            first = shares.first()
            (loser,) = {page.tenant for page in first}
            assert values[loser] == max(values.values())
            assert list(first) == [page for page in there if page.tenant == loser]


def test_tenants_that_come_and_go_leave_nothing() -> None:
    shares = PageShares(Tenants())
    for tenant in range(1000):
        page = Page(b"%d" % tenant, (tenant,), None, 0)
        page.tenant = tenant
        shares.count(tenant, 1)
        shares.add(page)
        if tenant:
            shares.remove(page)
            shares.count(tenant, -1)
    assert len(shares._listed) < 100 and len(shares._most) < 100
