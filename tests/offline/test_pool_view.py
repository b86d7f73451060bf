"""The pool as notebooks draw it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxserve.engine.output import Output
from jaxserve.engine.pool_view import FREE, HIDDEN, PoolView, V, policy_view, pool_view, view_of
from jaxserve.sched.cache.block_pool import BlockPool
from jaxserve.sched.cache.cache_kinds import CacheKind, Direction
from jaxserve.simulator.figures import plots
from jaxserve.simulator.settings import EngineOptions, RunOptions
from jaxserve.simulator.simulator import simulate
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.specs import WorkloadSpec
from tests.engine.harness import engine, send, write_shape


def test_every_block_shows_its_owner_and_fill() -> None:
    pool = BlockPool(num_blocks=8, block_size=4, max_owners=3, width=4)
    pool.open_cache(0, CacheKind.KV)
    pool.grow(0, 6)  # two K and two V blocks
    pool.open_cache(2, CacheKind.HIDDEN)
    pool.grow(2, 3)  # one block
    view = view_of(pool, np.array([6, 0, 3]), {0: "a", 1: "waiting", 2: "b"})
    assert view.requests == ("a", "b")
    left, (k, v) = view.owner[0], (pool.tables[0, plane, :2] for plane in (0, 1))
    assert left[k].tolist() == left[v].tolist() == [0, 0]
    assert view.plane[k].tolist() == [0, 0] and view.plane[v].tolist() == [1, 1]
    assert view.fill[0, k].tolist() == view.fill[0, v].tolist() == [1.0, 0.5]
    hidden = pool.tables[2, 0, 0]
    assert (left[hidden], view.plane[hidden], view.fill[0, hidden]) == (1, HIDDEN, 0.75)
    assert (left == FREE).sum() == 3 and (view.owner[1] == FREE).all()
    assert view.used.sum() == 5


def test_a_block_that_is_filled_from_both_ends_shows_both() -> None:
    """As far as they are on the device."""
    pool = BlockPool(num_blocks=2, block_size=4, max_owners=2, width=2)
    pool.open_cache(0, CacheKind.HIDDEN)
    pool.grow(0, 1)
    pool.open_cache(1, CacheKind.HIDDEN, Direction.RIGHT)
    pool.join(1, np.array([[pool.tables[0, 0, 0]]]))
    block = pool.tables[0, 0, 0]
    view = view_of(pool, np.array([1, 3]), {0: "a", 1: "b"})
    assert [view.requests[owner] for owner in view.owner[:, block]] == ["a", "b"]
    assert view.fill[:, block].tolist() == [0.25, 0.75]
    pool.cap[1, 0] = 2  # one of its tokens is on the host
    assert view_of(pool, np.array([2, 3]), {0: "a", 1: "b"}).fill[:, block].tolist() == [0.5, 0.5]


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
    assert (first.owner == 0).sum() == 6 and (first.plane == V).sum() == 3
    assert first.fill.sum() * 4 in (20.0, 22.0)
    assert len(views) == 9
    assert after.requests == () and (after.owner == FREE).all()


def test_a_simulation_shows_what_its_policy_sees_and_ends_as_it_would() -> None:
    machine = system("opt-13b@a100-40g")
    load = WorkloadSpec("fixed:40x20x6").make_workload()
    views: list[PoolView] = []
    watched = simulate(
        "aptserve",
        load,
        machine,
        engine=EngineOptions(kv_tokens=128),
        run=RunOptions(watch=lambda view: views.append(policy_view(view))),
    )
    plain = simulate("aptserve", load, machine, engine=EngineOptions(kv_tokens=128))
    assert (watched.requests.token_times == plain.requests.token_times).all()
    assert len(views) >= len(watched.batches)
    # Four requests of 40 tokens, 3 blocks of each plane, in 16 blocks.
    assert max(view.used.sum() for view in views) == 16
    assert max(len(view.requests) for view in views) > 2
    assert any((view.plane == HIDDEN).any() for view in views)


def test_the_picture_shows_ends_kinds_and_what_is_free() -> None:
    """One box a block: red from the left, blue from the right, a dark bar for hidden vectors."""
    owner = np.array([[0, 0, FREE], [1, FREE, FREE]])
    fill = np.array([[0.4, 0.4, 0.0], [0.4, 0.0, 0.0]])
    view = PoolView(("a", "b"), owner, fill, np.array([0, HIDDEN, FREE]))
    figure = plots.block_pool([("now", view)], {"a": "#ff0000", "b": "#0000ff"}, columns=3)
    (axes,) = figure.axes
    shared, hidden, free = np.split(axes.images[0].get_array(), 3, axis=1)
    red, blue, tint = [1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.7, 0.7]
    assert shared[8, 1].tolist() == red and shared[8, -1].tolist() == blue
    assert shared[8, 8].tolist() not in (red, blue)  # nobody's
    assert hidden[8, 1].tolist() == red and np.allclose(hidden[8, -1], tint)
    assert hidden[2, 1].max() < 0.5 < hidden[8, 1].max()
    assert np.ptp(free[1:, 1:]) == 0
