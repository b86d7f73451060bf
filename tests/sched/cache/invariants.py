"""What always holds of a block pool and of host memory."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from jaxserve.sched.cache.block_pool import BlockPool
from jaxserve.sched.cache.block_sizes import blocks_a_plane
from jaxserve.sched.cache.cache_kinds import HIDDEN, NOBODY, Direction
from jaxserve.sched.cache.free_blocks import FreeBlocks
from jaxserve.sched.cache.groups.state_pool import StatePool
from jaxserve.sched.cache.groups.windowed_pool import WindowedPool
from jaxserve.sched.cache.kv_offload import HostMemory
from jaxserve.sched.cache.page_shares import PageShares
from jaxserve.sched.cache.pages import Page, beside_key
from jaxserve.sched.cache.prefix_cache import PrefixCache
from jaxserve.sched.step import Step
from jaxserve.simulator.replica.counted_pool import CountedPool


def check_pool(pool: BlockPool) -> None:
    """AssertionError if a slot is owned twice, a block leaked, or a count is wrong."""
    if isinstance(pool, CountedPool):
        taken = int(pool.blocks_held(np.arange(len(pool.held))).sum())
        assert pool.num_free == pool.num_blocks - taken >= 0, "free blocks are miscounted"
        return
    refs = np.zeros(len(pool.refs), np.int64)
    held = np.zeros((len(pool.held), len(refs)), bool)
    for row in np.flatnonzero(pool.held):
        ids = ids_of(pool, row)
        assert len(set(ids.tolist())) == ids.size, f"row {row} holds a block twice"
        others = pool.owners[ids, pool.direction[row]]
        assert ((others == row) | (others == NOBODY)).all(), f"row {row} is in another's slots"
        refs[ids] += 1
        held[row, ids] = True
    assert (refs == pool.refs).all(), "reference counts differ from the tables"
    assert pool.num_shared == (refs > 1).sum(), "shared blocks are miscounted"
    owned = (pool.owners != NOBODY).any(axis=1)
    assert owned[refs == 1].all(), "a block that one row holds is nobody's"
    every = np.arange(len(pool.held))
    alone = np.zeros(len(every), np.int64)
    for row in np.flatnonzero(pool.held):
        alone[row] = (refs[pool.blocks_of(row)] == 1).sum()
    for row in every if isinstance(pool, (WindowedPool, StatePool)) else ():
        if isinstance(pool, WindowedPool):
            there = pool.window_ids(row)
            assert pool._own_there[row] == (refs[there] == 1).sum(), "own blocks are miscounted"
            aside = pool.set_aside(pool.first[row], pool.held[row])
            assert aside >= there.size, "a row holds more than is set aside for it"
            alone[row] += int(aside)
        if isinstance(pool, StatePool):
            alone[row] += (refs[pool.states_of(row)] == 1).sum()
            assert pool.has[row] == (pool.held[row] > 0) >= pool.owns[row], "a state without a row"
    wrong = np.flatnonzero(pool.private(every) != alone)
    assert not wrong.size, f"own blocks of rows {wrong} are miscounted"
    assert (pool.mirrored <= pool.held).all(), "blocks are mirrored that nobody holds"
    used = refs > 0
    if pool.cache is not None:
        check_cache(pool, refs)
        used[[block for page in pool.cache.pages() for block in page.ids]] = True
    _check_free(pool._free, used)
    _check_owners(pool, held)
    if isinstance(pool, WindowedPool):
        empty = pool.held == 0
        assert not (pool.first[empty].any() or pool.ends[empty].any()), "a window without a cache"
        inside = [pool.window_ids(row).ravel() for row in np.flatnonzero(pool.held)]
        assert pool._in_windows == len(set(np.concatenate([*inside, []]).tolist()))
        assert (pool.first <= pool.ends).all() and (pool.ends <= pool.held).all()
    whole = np.arange(pool.width) >= pool.held[:, None]
    assert (pool.cap[whole] == pool.block_size).all(), "tokens are missing where there are none"


def _check_owners(pool: BlockPool, held: np.ndarray) -> None:
    """AssertionError if a block has an owner that does not hold it, or not there. held: which
    blocks each row holds, bool [rows, blocks]."""
    for side in Direction:
        blocks = np.flatnonzero(pool.owners[:, side] != NOBODY)
        owners, at = pool.owners[blocks, side], pool.at[blocks, side]
        there = pool.tables[owners, :, at % pool.width] == blocks[:, None]
        here = there.any(axis=1)
        if isinstance(pool, StatePool):
            there = pool.states[owners, :, at % pool.groups.planes] == blocks[:, None]
            here |= there.any(axis=1)
        lost = blocks[~(here & held[owners, blocks])]
        assert not lost.size, f"blocks {lost} have owners that do not hold them there"


def ids_of(pool: BlockPool, row: int | np.integer) -> np.ndarray:
    """All blocks that the row holds."""
    return np.concatenate([ids for _, ids in pool.planes_of(int(row))])


class TableMirror:
    """A copy of a pool's tables that gets what is new with each step, as a device's does."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._copies: dict[int, np.ndarray] = {}

    def follow(self, step: Step) -> None:
        """Copies what the step needs and the copy lacks; AssertionError if it then differs."""
        pool = self._pool
        if isinstance(pool, CountedPool):
            return
        needed = blocks_a_plane(step.start + step.plan.num_tokens, pool.block_size)
        for row, end in zip(step.rows.tolist(), needed.tolist(), strict=True):
            copy = self._copies.setdefault(row, np.zeros_like(pool.tables[row]))
            first = int(pool.mirrored[row])
            copy[:, first:end] = pool.tables[row, :, first:end]
            pool.mirrored[row] = end
            planes = len(pool.blocks_of(row))
            same = copy[:planes, :end] == pool.tables[row, :planes, :end]
            assert same.all(), f"row {row}'s table has changed behind its mirror"
            if isinstance(pool, WindowedPool):
                first = pool.first[row]
                same = copy[2:, first:end] == pool.tables[row, 2:, first:end]
                assert same.all(), f"row {row}'s tables of windows differ from their mirror"


def check_cache(pool: BlockPool, refs: np.ndarray) -> None:
    """AssertionError if a page is not what somebody holds, or nobody reads, or if somebody who
    waits is told something else than it would find."""
    cache = pool.cache
    assert cache is not None
    pages = {page.key: page for page in cache.pages()}
    ids = [block for page in pages.values() for block in page.ids]
    assert len(set(ids)) == len(ids), "a block is in two pages"
    counts = refs.tolist()
    for page in pages.values():
        before = page.before
        assert before is None or pages.get(before.key) is before, "a page has lost what is before"
        assert before is None or page in before.after
        assert all(other.before is page for other in page.after)
        assert bool(page.ids) == (page.host is None), "a page is nowhere, or in both places"
        if not page.ids:
            continue
        assert len({counts[block] for block in page.ids}) == 1, "K is read where V is not"
        assert before is None or before.ids, "a page in the pool is behind one on the host"
        assert before is None or counts[before.ids[0]] >= counts[page.ids[0]], (
            "read without a prefix"
        )
        assert cache.page_of(page.ids[0]) is page
    _check_unread(cache, counts)
    _check_shares(cache._unread, [page for page in pages.values() if page.ids])
    finders: dict[bytes, set[int]] = {key: set() for key in pages}
    for row, most in cache._most.items():
        keys = cache._keys[row][:most]
        hidden = [key + b"X" for key in keys]
        depth, other = _known(keys, pages), _known(hidden, pages)
        chain = cache.chain(row)
        known = depth
        if pool.groups is not None:
            beside = [pages[key].beside is not None for key in keys[:depth]]
            depth = pool.groups.valid(depth, pool.block_size, beside.__getitem__)
        # It is told before either goes on beyond what it finds. What is on the host and does not
        # pay yet may, once more of it is in the pool.
        wanted = [keys[depth if cache.host is None else 0 : len(chain) + 1]]
        wanted += [hidden[other : len(chain) + 1]] if cache._hidden else []
        if pool.groups is not None:
            wanted = _wanted_beside(pool, keys, beside)
            depth = len(chain) if len(chain) < depth < known else depth
        for each in wanted if len(chain) < most else ():
            assert any(row in cache._wanted.get(key, ()) for key in each), "it would not be told"
        kinds = {page.kind for page in chain}
        assert kinds <= {cache.kind[row]} and cache.found[row] == len(chain)
        if kinds == {HIDDEN}:
            assert other > depth or cache.host is not None, "K and V of as much are preferred"
            depth, keys = other, hidden
        assert [p.key for p in chain] == keys[: len(chain)], "a row would find something else"
        if len(chain) < depth:
            assert not pages[keys[len(chain)]].ids, "what is in the pool is always found"
            assert cache.host is not None and cache.host.least_depth, "copies always pay"
        several = sum(int(counts[page.ids[0]] > 1) for page in chain if page.ids)
        assert pool._read(np.array([row])) == several, "it would take other blocks than it is told"
        if chain:
            assert pages.get(chain[-1].key) is chain[-1]
            finders[chain[-1].key].add(row)
    for page in pages.values():
        assert finders[page.key] == cache._most.keys() & page.finders


def _check_unread(cache: PrefixCache, counts: Sequence[int]) -> None:
    """AssertionError unless the pages that nobody reads are known, in an order in which they may
    go. counts: readers of each block."""
    unread = [p for p in cache.pages() if p.ids and not counts[p.ids[0]]]
    assert set(unread) == set(cache._unread), "it is unknown who is read"
    assert cache.num_unread == sum(len(page.ids) for page in unread)
    places = {page: place for place, page in enumerate(cache._unread)}
    for page in unread:
        behind = [other for other in page.after if other.ids and other.tenant == page.tenant]
        assert all(places[other] < places[page] for other in behind), "a prefix goes first"


def _wanted_beside(
    pool: BlockPool, keys: Sequence[bytes], beside: Sequence[bool]
) -> list[list[bytes]]:
    """The next page, and what all that is known lacks beside it."""
    assert pool.groups is not None
    valid = pool.groups.valid(len(beside), pool.block_size, beside.__getitem__)
    lacking = pool.groups.lacking(len(beside), valid, pool.block_size)
    lacks = [at for at in lacking if not beside[at]]
    wanted = [[key] for key in keys[len(beside) :][:1]]
    return wanted + ([[beside_key(keys[at]) for at in lacks]] if lacks else [])


def _known(keys: Sequence[bytes], pages: Mapping[bytes, Page]) -> int:
    """How many of the first of these there are, without a gap."""
    return next((count for count, key in enumerate(keys) if key not in pages), len(keys))


def check_host_pages(cache: PrefixCache, host: HostMemory, block_size: int) -> None:
    """AssertionError if pages in host memory are miscounted, or take what is not theirs."""
    there = [page for page in cache.pages() if page.host is not None]
    assert (cache.host is None and not there) or set(there) == set(cache.host._pages)
    assert len({page.host for page in there}) == len(there), "two pages have one key"
    assert host.num_used + 2 * block_size * len(there) <= host.capacity, "more than fits"
    places = {page: place for place, page in enumerate(there and cache.host._pages)}
    for page in there:
        behind = [other for other in page.after if other.tenant == page.tenant]
        assert all(places[other] < places[page] for other in behind), "a prefix goes first"
    if cache.host is not None:
        _check_shares(cache.host._pages, there, host=True)


def _check_shares(shares: PageShares, there: Sequence[Page], *, host: bool = False) -> None:
    """AssertionError if tenants have other pages than is counted, or another one loses first."""
    has = Counter[int]()
    for page in there:
        has[page.tenant] += 1 if host else len(page.ids)
    assert shares._has == has, "tenants' blocks are miscounted"
    if not shares:
        return
    tenants, may = shares._tenants, {page.tenant for page in shares}
    loser = next(iter(shares.first())).tenant
    if not tenants.is_idle(loser):
        most = max(has[tenant] / tenants.weight.get(tenant, 1.0) for tenant in may)
        assert has[loser] / tenants.weight.get(loser, 1.0) == most, "who has less loses first"


def _check_free(blocks: FreeBlocks, used: np.ndarray) -> None:
    """AssertionError unless exactly the unused ids are free. used: bool, at least up to
    `fresh`."""
    assert 0 <= blocks.fresh <= blocks.num_blocks, "more blocks are out than there are"
    free = np.arange(len(used)) >= blocks.fresh
    free[blocks._stack[: blocks._top]] = True
    assert blocks._top == free[: blocks.fresh].sum(), "a block is in the free stack twice"
    assert blocks.count == blocks._top + blocks.num_blocks - blocks.fresh, (
        "free blocks are miscounted"
    )
    assert (free == ~used).all(), "a block leaked or is free while in use"


def check_host(host: HostMemory) -> None:
    """AssertionError if counts or segments do not add up."""
    rows = range(len(host.tokens))
    every = {row: mine for row in rows if (mine := host.segments(row))}
    slots = sum(host.slots(s) for mine in every.values() for s in mine)
    assert host.num_used == slots, "host slots are miscounted"
    assert 0 <= host.num_used <= host.capacity, "more on the host than fits"
    keys = [s.key for mine in every.values() for s in mine]
    assert len(set(keys)) == len(keys), "two segments have one key"
    tokens = np.zeros_like(host.tokens)
    for row, mine in every.items():
        tokens[row] = sum(s.end - s.first for s in mine)
        assert all(s.kind == host.kind[row] for s in mine), "a row's tokens are of two kinds"
        for before, after in itertools.pairwise(mine):
            assert before.end <= after.first, "segments overlap"
    assert (host.tokens == tokens).all(), "tokens are miscounted"
