"""The block accounting holds its invariants after any sequence of operations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxserve.sched.cache.block_pool import BlockPool
from jaxserve.sched.cache.cache_kinds import NOBODY, CacheKind, Direction
from jaxserve.sched.cache.free_blocks import OutOfBlocks
from jaxserve.sched.cache.prefix_cache import PrefixCache
from tests.sched.cache.invariants import check_pool

ROWS, WIDTH = 6, 8
rows = st.integers(0, ROWS - 1)


class PoolMachine(RuleBasedStateMachine):
    """A model beside the pool: how many tokens each row asked room for."""

    @initialize(blocks=st.integers(1, 30), block_size=st.integers(1, 5))
    def start(self, blocks: int, block_size: int) -> None:
        self.cache = PrefixCache(ROWS)
        self.pool = BlockPool(blocks, block_size, ROWS, WIDTH, self.cache)

    def empty(self, row: int) -> bool:
        return self.pool.held[row] == 0

    @rule(
        row=rows,
        kind=st.sampled_from(CacheKind),
        direction=st.sampled_from(Direction),
        tokens=st.integers(1, 40),
    )
    def admit(self, row: int, kind: CacheKind, direction: Direction, tokens: int) -> None:
        if self.empty(row) and not self.cache.claim_hit(row):
            self.pool.open_cache(row, kind, direction)
            self.grow(row, tokens)

    @rule(row=rows, tokens=st.integers(1, 40))
    def grow(self, row: int, tokens: int) -> None:
        tokens = min(tokens, WIDTH * self.pool.block_size)
        before = self.pool.num_free
        one = np.array([row])
        need = int(self.pool.needed(one, np.array([tokens]), self.pool.kind[one])[0])
        if need > before:
            with pytest.raises(OutOfBlocks):
                self.pool.grow(row, tokens)
            assert self.pool.num_free == before
        else:
            self.pool.grow(row, tokens)
            assert self.pool.num_free == before - need
            assert self.pool.held[row] * self.pool.block_size >= tokens

    @rule(row=rows)
    def project_to_kv(self, row: int) -> None:
        """A hidden cache becomes a KV cache: its blocks stay, as many are added."""
        pool, before, one = self.pool, self.pool.num_free, np.array([row])
        held = int(pool.held[row])
        ids = pool.tables[row, 0, :held].copy()
        if pool.kind[row] != CacheKind.HIDDEN:
            with pytest.raises(ValueError, match="no hidden cache"):
                pool.project_to_kv(one)
        elif (pool.refs[ids] != 1).any():
            with pytest.raises(ValueError, match="shares blocks"):
                pool.project_to_kv(one)
        elif held > before:
            with pytest.raises(OutOfBlocks):
                pool.project_to_kv(one)
        else:
            tokens = np.array([held * pool.block_size])
            assert pool.needed(one, tokens, np.array([CacheKind.KV])).tolist() == [held]
            pool.project_to_kv(one)
            assert pool.num_free == before - held and pool.kind[row] == CacheKind.KV
            assert pool.tables[row, 0, :held].tolist() == ids.tolist()
            return
        assert pool.num_free == before and pool.held[row] == held

    @rule(row=rows)
    def release(self, row: int) -> None:
        """Finish, cancel and preempt are all this."""
        expected = self.pool.num_free + int(self.pool.private(row))
        self.pool.release(row)
        assert self.pool.num_free == expected and self.empty(row)

    @rule(row=rows, tokens=st.lists(st.booleans(), max_size=WIDTH), side=st.sampled_from(Direction))
    def wait(self, row: int, tokens: list[bool], side: Direction) -> None:
        """A request comes, or comes back: what would it find?"""
        if self.empty(row) and not self.cache.knows(row):
            keys = [bytes(tokens[: i + 1]) for i in range(len(tokens))]
            self.cache.add(row, keys, side)
        if self.empty(row):
            self.cache.claim_hit(row)
            self.cache.watch_row(row, WIDTH - 1)

    @rule(row=rows)
    def start_with_what_is_found(self, row: int) -> None:
        found = self.cache.claim_hit(row)
        if found and self.empty(row):
            free = self.pool.num_free
            unread = sum(len(p.ids) for p in found if not self.pool.refs[p.ids[0]])
            self.pool.share(row, found, self.cache.side(row))
            assert self.pool.num_free == free - unread
            assert self.pool.blocks_of(row).T.tolist() == [list(page.ids) for page in found]

    @rule(row=rows)
    def register(self, row: int) -> None:
        """All blocks that it holds are full."""
        free = self.pool.num_free
        for index in range(int(self.pool.held[row])):
            self.pool.register(row, index)
        assert self.pool.num_free >= free, "what others have need not be kept twice"

    @rule(row=rows)
    def end(self, row: int) -> None:
        self.cache.remove(row)
        self.pool.release(row)

    @rule()
    def forget_all(self) -> None:
        free = self.pool.num_free
        self.pool.forget_all()
        assert not len(self.cache) and self.pool.num_free == free

    @precondition(lambda self: hasattr(self, "pool"))
    @rule(row=rows, data=st.data())
    def join(self, row: int, data: st.DataObject) -> None:
        """A real-time request moves into the free ends of best-effort blocks."""
        pool, side = self.pool, self.pool.direction[row]
        if pool.held[row] == WIDTH:
            return
        half_free = np.flatnonzero(
            (pool.owners[:, side] == NOBODY) & (pool.owners[:, 1 - side] != NOBODY)
        ).tolist()
        planes = len(pool.blocks_of(row))
        if len(half_free) >= planes:
            before = pool.num_free
            chosen = data.draw(st.permutations(half_free))[:planes]
            pool.join(row, np.array([chosen]))
            assert pool.num_free == before
            assert (pool.owners[chosen, side] == row).all()

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "pool"):
            check_pool(self.pool)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for row in range(ROWS):
                self.end(row)
            check_pool(self.pool)
            assert self.pool.num_free == self.pool.num_blocks


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, deadline=None)


def test_join_refuses_blocks_without_a_free_end() -> None:
    pool = BlockPool(4, 4, 3, 4)
    for row in (0, 1):
        pool.open_cache(row, CacheKind.HIDDEN, Direction.LEFT)
    pool.grow(0, 4)
    mine = int(pool.tables[0, 0, 0])
    with pytest.raises(ValueError, match="no free end"):
        pool.join(1, np.array([[mine]]))
    with pytest.raises(ValueError, match="no free end"):
        pool.join(1, np.array([[3 - mine]]))  # nobody has the other end either
    with pytest.raises(ValueError, match="blocks at a time"):
        pool.join(1, np.zeros((0, 2), np.int64))
    pool.open_cache(2, CacheKind.HIDDEN, Direction.RIGHT)
    pool.join(2, np.array([[mine]]))
    with pytest.raises(ValueError, match="no free end"):
        pool.join(1, np.array([[mine]]))  # both ends are taken
    check_pool(pool)


def test_nobody_grows_past_the_block_table() -> None:
    pool = BlockPool(99, 4, 2, 3)
    for kind in CacheKind:
        pool.open_cache(0, kind)
        pool.grow(0, 12)
        with pytest.raises(ValueError, match="13 tokens need 4 blocks, limit 3"):
            pool.grow(0, 13)
        check_pool(pool)
        pool.release(0)
