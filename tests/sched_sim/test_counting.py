"""The simulator's table and pool behave as the engine's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.blocks import BlockPool, OutOfBlocks
from jaxserve.sched.kinds import CacheKind
from jaxserve.sched.request import Request, SamplingParams
from jaxserve.sched.simulation.state import FIRST_ROWS, CountingPool, GrowingTable
from jaxserve.sched.table import RequestTable, State

ROWS, WIDTH = 4, 6


@given(
    st.integers(1, 5),
    st.lists(
        st.one_of(
            st.tuples(
                st.just("grow"),
                st.integers(0, ROWS - 1),
                st.integers(1, 30),
                st.sampled_from([0, 1]),
            ),
            st.tuples(st.just("release"), st.integers(0, ROWS - 1), st.just(0), st.just(0)),
        ),
        max_size=40,
    ),
)
@settings(max_examples=100, deadline=None)
def test_the_counting_pool_counts_as_the_real_one(
    block_size: int, operations: list[tuple[str, int, int, int]]
) -> None:
    pools = [BlockPool(12, block_size, ROWS, WIDTH), CountingPool(12, block_size, ROWS, WIDTH)]
    for what, row, tokens, kind in operations:
        outcomes = []
        for pool in pools:
            try:
                if what == "release":
                    pool.release(row)
                else:
                    if not pool.held[row]:
                        pool.open(row, CacheKind(kind))
                    pool.grow(row, tokens)
                outcomes.append("done")
            except (OutOfBlocks, ValueError) as error:
                outcomes.append(type(error).__name__)
            pool.check()
        assert outcomes[0] == outcomes[1]
        real, counting = pools
        assert real.held.tolist() == counting.held.tolist()
        assert real.num_free == counting.num_free
        assert [real.returned_by(r) for r in range(ROWS)] == [
            counting.returned_by(r) for r in range(ROWS)
        ]


def test_blocks_without_names_cannot_be_joined_or_shared() -> None:
    pool = CountingPool(4, 2, 2, 4)
    with pytest.raises(NotImplementedError):
        pool.join(0, (1, 2))
    with pytest.raises(NotImplementedError):
        pool.share(0, 1, 1)


def test_a_growing_table_gives_the_rows_of_a_large_one() -> None:
    growing, large = GrowingTable(FIRST_ROWS), RequestTable(8 * FIRST_ROWS)
    rng = np.random.default_rng(0)
    live: list[int] = []
    for i in range(6 * FIRST_ROWS):
        request = Request(str(i), (0,) * (i + 1), SamplingParams(max_tokens=i + 1))
        row = growing.add(request)
        assert row == large.add(request)
        live.append(row)
        if rng.random() < 0.3:
            gone = live.pop(int(rng.integers(len(live))))
            growing.remove(gone)
            large.remove(gone)
    assert growing.capacity > FIRST_ROWS
    rows = np.array(live)
    for name in ("prompt_len", "max_tokens", "seq", "state"):
        assert getattr(growing, name)[rows].tolist() == getattr(large, name)[rows].tolist()
    assert growing.in_state(State.WAITING).tolist() == large.in_state(State.WAITING).tolist()
