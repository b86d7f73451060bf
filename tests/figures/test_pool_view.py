"""The pool as the quickstart notebook draws it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxserve.engine.output import Output
from jaxserve.figures.pool_view import FREE, PoolView, pool_view, view_of
from jaxserve.sched.cache.block_pool import BlockPool
from jaxserve.sched.cache.cache_kinds import CacheKind, Direction
from tests.engine.harness import engine, send, write_shape


def test_every_block_shows_its_owner_and_fill() -> None:
    pool = BlockPool(num_blocks=8, block_size=4, max_owners=3, width=4)
    pool.open_cache(0, CacheKind.KV)
    pool.grow(0, 6)  # two K and two V blocks
    pool.open_cache(2, CacheKind.HIDDEN)
    pool.grow(2, 3)  # one block
    view = view_of(pool, np.array([6, 0, 3]), {0: "a", 1: "waiting", 2: "b"})
    assert view.requests == ("a", "b")
    k, v = pool.tables[0, 0, :2], pool.tables[0, 1, :2]
    assert view.owner[k].tolist() == view.owner[v].tolist() == [0, 0]
    assert view.plane[k].tolist() == [0, 0] and view.plane[v].tolist() == [1, 1]
    assert view.fill[k].tolist() == view.fill[v].tolist() == [1.0, 0.5]
    hidden = pool.tables[2, 0, 0]
    assert (view.owner[hidden], view.plane[hidden], view.fill[hidden]) == (1, 0, 0.75)
    assert (view.owner == FREE).sum() == 3 and (view.plane == FREE).sum() == 3


def test_a_shared_block_shows_the_larger_owner() -> None:
    pool = BlockPool(num_blocks=2, block_size=4, max_owners=2, width=2)
    pool.open_cache(0, CacheKind.HIDDEN)
    pool.grow(0, 1)
    pool.open_cache(1, CacheKind.HIDDEN, Direction.RIGHT)
    pool.join(1, np.array([[pool.tables[0, 0, 0]]]))
    view = view_of(pool, np.array([1, 3]), {0: "a", 1: "b"})
    block = pool.tables[0, 0, 0]
    assert (view.requests[view.owner[block]], view.fill[block]) == ("b", 0.75)


def test_a_running_engine_shows_what_its_requests_hold(tmp_path: Path) -> None:
    views: list[PoolView] = []
    with engine(write_shape(tmp_path, "opt")) as running:

        def look(output: Output) -> None:
            views.append(pool_view(running))

        name, stream = send(running, range(3, 13), look, max_tokens=9, ignore_eos=True)
        stream.wait()
    after = pool_view(running)  # stopped: all is settled
    # Blocks hold 4 tokens; when the first of 10 + 9 arrives, 10 or 11 are in the cache.
    first = views[0]
    assert first.requests == (name,)
    assert (first.owner == 0).sum() == 6 and (first.plane == 1).sum() == 3
    assert first.fill.sum() * 4 in (20.0, 22.0)
    assert len(views) == 9
    assert after.requests == () and (after.owner == FREE).all()
