"""A pool that only counts agrees with the one that names its blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxserve.sched.cache.block_pool import BlockPool
from jaxserve.sched.cache.cache_kinds import CacheKind, Direction
from jaxserve.sched.cache.free_blocks import OutOfBlocks
from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.policies.sarathi import sarathi
from jaxserve.sched.policy import Limits, View
from jaxserve.sched.unified.unified_policy import UnifiedPolicy
from jaxserve.simulator.replica.counted_pool import CountedPool
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.workload import Lengths, Workload
from tests.sched.cache.invariants import check_pool
from tests.simulator.grouped import simulate

ROWS, WIDTH = 6, 8
row_sets = st.lists(st.integers(0, ROWS - 1), min_size=1, unique=True).map(np.array)


class BothPools(RuleBasedStateMachine):
    """Whatever is done is done to both, and goes the same way."""

    @initialize(blocks=st.integers(1, 40), block_size=st.integers(1, 5))
    def start(self, blocks: int, block_size: int) -> None:
        self.pools = (
            BlockPool(blocks, block_size, ROWS // 2, WIDTH),
            CountedPool(blocks, block_size, ROWS // 2, WIDTH),
        )
        self.both(lambda pool: pool.follow(ROWS))

    def both(self, act: Callable[[BlockPool], Any]) -> None:
        outcomes = []
        for pool in self.pools:
            try:
                outcomes.append((None, act(pool)))
            except (OutOfBlocks, ValueError) as error:
                outcomes.append((type(error), str(error)))
        named, counted = outcomes
        np.testing.assert_equal(counted, named)

    @rule(
        rows=row_sets,
        kind=st.sampled_from(CacheKind),
        side=st.sampled_from(Direction),
        data=st.data(),
    )
    def begin(
        self, rows: np.ndarray, kind: CacheKind, side: Direction, data: st.DataObject
    ) -> None:
        self.both(lambda pool: pool.open_caches(rows, kind, side))
        self.grow(rows, data)

    @rule(rows=row_sets, data=st.data())
    def grow(self, rows: np.ndarray, data: st.DataObject) -> None:
        most = WIDTH * self.pools[0].block_size + 1
        tokens = np.array([data.draw(st.integers(0, most)) for _ in rows])
        kinds = self.pools[0].kind[rows]
        self.both(lambda pool: pool.needed(rows, tokens, kinds).tolist())
        self.both(lambda pool: pool.grow_all(rows, tokens))

    @rule(rows=row_sets)
    def project_to_kv(self, rows: np.ndarray) -> None:
        self.both(lambda pool: pool.project_to_kv(rows))

    @rule(rows=row_sets, tokens=st.integers(0, 40))
    def give_back(self, rows: np.ndarray, tokens: int) -> None:
        self.both(lambda pool: pool.private(rows).tolist())
        self.both(lambda pool: pool.truncate(int(rows[0]), tokens))
        self.both(lambda pool: pool.release(int(rows[0])))
        self.both(lambda pool: pool.release_all(rows))

    @rule(row=st.integers(0, ROWS - 1), first=st.integers(0, 3))
    def ask_where(self, row: int, first: int) -> None:
        room = int(self.pools[0].room(np.array([row]))[0])
        if first < room:
            self.both(lambda pool: pool.slots_of(row, first, room).shape)

    @invariant()
    def agree(self) -> None:
        if hasattr(self, "pools"):
            named, counted = self.pools
            assert (counted.num_free, counted.num_used) == (named.num_free, named.num_used)
            for column in ("held", "kind", "direction"):
                assert getattr(counted, column).tolist() == getattr(named, column).tolist()
            check_pool(named)
            check_pool(counted)


TestBothPools = BothPools.TestCase
TestBothPools.settings = settings(max_examples=40, deadline=None)


def test_who_is_in_which_block_is_not_known() -> None:
    pool = CountedPool(8, 4, 2, 4)
    pool.open_cache(0, CacheKind.KV)
    pool.grow(0, 9)
    with pytest.raises(ValueError, match="blocks are only counted here"):
        pool.blocks_of(0)


class _Asks(UnifiedPolicy):
    """Looks at its blocks."""

    def plan(self, view: View, now: float) -> BatchPlan:
        for row in view.table.in_state(2).tolist():
            view.pool.blocks_of(row)
        return super().plan(view, now)


def test_a_policy_that_asks_is_told_unless_it_says_it_counts() -> None:
    workload = Workload.create(np.zeros(4), Lengths(np.full(4, 9), np.full(4, 5)))
    options: dict[str, Any] = {"kv_tokens": 640, "limits": Limits(400, 64, 12)}
    plain = sarathi()
    asks = _Asks(plain.groups, plain.mixed_batches, plain.chunked)
    named = simulate(asks, workload, system("opt-13b@a100-40g"), **options)
    assert len(named.requests) == 4, "plans are checked, with ids"
    with pytest.raises(ValueError, match="a policy with counts_blocks asked for ids"):
        simulate(asks, workload, system("opt-13b@a100-40g"), checked=False, **options)
    object.__setattr__(asks, "counts_blocks", False)
    found = simulate(asks, workload, system("opt-13b@a100-40g"), checked=False, **options)
    np.testing.assert_array_equal(found.requests.token_times, named.requests.token_times)
