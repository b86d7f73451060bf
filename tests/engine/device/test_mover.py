"""Slots to host memory and back: what is kept, where, how much of the device it takes, and who
waits for whom."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.device import host_copies
from jaxserve.engine.device.cache_moves import ROOM, SIZES, Mover, _parts, has_pinned
from jaxserve.pallas_kernels import pool_format
from tests.engine.harness import TIMEOUT

PATIENCE = 20  # seconds for which a copy is held at most

LAYERS, BLOCKS, HEADS, SIZE, DIM = 2, 400, 1, 8, 4
LARGEST = SIZES[-1]


def make_mover(pinned: bool | None = None) -> Mover:
    model: Any = SimpleNamespace(mesh=None, backend="xla")
    return Mover(model, pool_format(filled()), jax.devices()[0], pinned=pinned)


@pytest.fixture
def mover() -> Iterator[Mover]:
    made = make_mover()
    yield made
    made.close()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """No copy to the host is made until this is called."""
    gate, copy = threading.Event(), host_copies._copy

    def hold(*args: Any) -> None:
        assert gate.wait(PATIENCE), "somebody waits for a copy"
        copy(*args)

    monkeypatch.setattr(host_copies, "_copy", hold)
    yield gate.set
    gate.set()


def filled() -> jax.Array:
    """A pool in which no two numbers are the same."""
    numbers = jnp.arange(LAYERS * BLOCKS * HEADS * SIZE * DIM, dtype=jnp.float32)
    return numbers.reshape(LAYERS, BLOCKS, HEADS, SIZE, DIM)


def places(first: int, count: int) -> np.ndarray:
    """Slots, block by block."""
    slot = np.arange(first, first + count)
    return np.stack([slot // SIZE, slot % SIZE], axis=1).astype(np.int32)


def contents(pool: jax.Array, slots: np.ndarray) -> np.ndarray:
    return np.asarray(pool)[:, slots[:, 0], :, slots[:, 1]]


def staged() -> int:
    """Slots whose contents are on the device beside the pool. A copy to the host under way is an
    array of its own, of the same buffer."""
    pieces = [a for a in jax.live_arrays() if a.shape[1:] == (LAYERS, HEADS, DIM)]
    return sum({piece.unsafe_buffer_pointer(): len(piece) for piece in pieces}.values())


@pytest.mark.parametrize(
    ("pinned", "count"), [(False, 3), (True, LARGEST), (False, 5 * LARGEST + 7), (True, 300)]
)
def test_what_was_saved_comes_back_elsewhere(pinned: bool, count: int) -> None:
    mover, pool = make_mover(pinned), filled()
    source, target = places(0, count), places(1600, count)
    expected = contents(pool, source)
    mover.save(pool, [1], [count], source)
    pool = mover.load(pool, [1], [count], target)
    np.testing.assert_array_equal(contents(pool, target), expected)
    mover.discard([1])
    mover.close()
    jax.block_until_ready(pool)
    assert staged() == 0 and not mover._host.keys


def test_a_cpu_has_no_other_memory_to_pin() -> None:
    device: Any = SimpleNamespace(
        platform="cpu", addressable_memories=jax.devices()[0].addressable_memories
    )
    assert "pinned_host" in {memory.kind for memory in device.addressable_memories()}
    assert not has_pinned(device)
    device.platform = "tpu"
    assert has_pinned(device)


def test_many_go_at_once_and_come_back_in_any_order(mover: Mover) -> None:
    """In pieces that begin and end anywhere in them."""
    rng, pool = np.random.default_rng(0), filled()
    counts = rng.integers(1, 120, 12)
    source, behind = places(0, int(counts.sum())), np.cumsum(counts)
    expected = {
        key: contents(pool, source[end - n : end])
        for key, (n, end) in enumerate(zip(counts, behind, strict=True))
    }
    mover.save(pool, range(12), counts.tolist(), source)
    order = rng.permutation(12)
    for some in np.split(order, [3, 4]):
        target = places(1600, int(counts[some].sum()))
        pool = mover.load(pool, some.tolist(), counts[some].tolist(), target)
        there = contents(pool, target)
        for key in some.tolist():
            mine, there = np.split(there, [counts[key]])
            np.testing.assert_array_equal(mine, expected[key])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 7))
def test_pieces_have_parts_of_all(counts: list[int], piece: int) -> None:
    keys, ends, total = list(range(len(counts))), [*itertools.accumulate(counts)], sum(counts)
    found = [
        (key, slot)
        for first in range(0, total, piece)
        for key, a, b in _parts(keys, ends, first, min(first + piece, total))
        for slot in range(a, b)
    ]
    assert found == [(key, slot) for key in keys for slot in range(counts[key])]


def test_arrays_of_others_are_copied_only_if_they_stay(
    mover: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is loaded at once is read where it lies; its room is free as soon as it is discarded."""
    timers: list[threading.Timer] = []

    class Noted(threading.Timer):
        def start(self) -> None:
            timers.append(self)

    monkeypatch.setattr(threading, "Timer", Noted)
    pool, target = filled(), places(1600, SIZE)
    theirs = [contents(pool, places(SIZE * key, SIZE)).copy() for key in range(3)]
    expected = contents(pool, places(SIZE, SIZE))
    gone = weakref.ref(theirs[0])
    for each in theirs:
        each.flags.writeable = False
    mover.keep(dict(enumerate(theirs)))
    mover.keep({})
    assert len(timers) == 1 and timers[0].interval == host_copies.OWN_S and timers[0].daemon
    for key, each in enumerate(theirs):
        assert mover.saved(key).array is each
    mover.discard([0])
    del each, theirs[0]
    assert gone() is None
    timers[0].function(*timers[0].args)
    kept = mover.saved(1).array
    assert kept is not theirs[0] and kept.flags.owndata and not mover.saved(2).copied
    pool = mover.load(pool, [1], [SIZE], target)
    np.testing.assert_array_equal(contents(pool, target), expected)
    assert mover._host.keys == (1, 2)


def test_slots_are_copied_between_blocks(mover: Mover) -> None:
    pool, count = filled(), LARGEST + 5
    source, target = places(0, count), places(1600, count)[::-1]
    expected = contents(pool, source)
    pool = mover.copy_slots(pool, np.concatenate([source, target], axis=1))
    np.testing.assert_array_equal(contents(pool, target), expected)


def test_many_small_saves_take_no_more_than_what_was_saved(mover: Mover) -> None:
    pool, keys = filled(), range(40)
    for key in keys:
        mover.save(pool, [key], [3], places(7 * key, 3))
        assert staged() <= ROOM
    expected = [contents(pool, places(7 * key, 3)) for key in keys]
    for key in keys:
        kept = mover._host.get_copy(key)
        assert kept.shape == (3, LAYERS, HEADS, DIM) and kept.base is None
        pool = mover.load(pool, [key], [3], places(1600, 3))
        np.testing.assert_array_equal(contents(pool, places(1600, 3)), expected[key])
    jax.block_until_ready(pool)
    mover.close()
    assert staged() == 0


class Late:
    """Is in the pool once somebody waits for it."""

    def __init__(self, slots: int, under_way: list[int]) -> None:
        self._slots, self._under_way = slots, under_way
        under_way.append(slots)

    def is_ready(self) -> bool:
        return False

    def block_until_ready(self) -> None:
        self._under_way.remove(self._slots)


def test_loads_wait_where_too_many_are_on_their_way(
    mover: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, under_way, come_in = filled(), list[int](), mover._in

    def late(pool: jax.Array, staged: Any, *places: Any) -> tuple[jax.Array, Late]:
        return come_in(pool, staged, *places)[0], Late(len(staged), under_way)

    monkeypatch.setattr(mover, "_in", late)
    for key in range(2 * ROOM // LARGEST):
        mover.save(pool, [key], [LARGEST], places(0, LARGEST))
        pool = mover.load(pool, [key], [LARGEST], places(1600, LARGEST))
        assert sum(under_way) == min((key + 1) * LARGEST, ROOM), "none waits before it has to"


def test_what_is_saved_is_what_was_there_then(mover: Mover, held: Callable[[], None]) -> None:
    """However late it is copied: the slots have been written to since, and the pool is another."""
    pool, slots = filled(), places(0, 10)
    before = contents(pool, slots)
    mover.save(pool, [1], [10], slots)
    pool = mover.copy_slots(pool, np.concatenate([places(800, 10), slots], axis=1))
    assert (contents(pool, slots) != before).all()
    held()
    pool = mover.load(pool, [1], [10], slots)
    np.testing.assert_array_equal(contents(pool, slots), before)


def test_a_load_waits_for_its_own_copies_alone(
    mover: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, gate = host_copies._copy, threading.Event()
    pool, slots = filled(), places(0, 10)
    mover.save(pool, [1], [10], slots)
    mover._host.get_copy(1)
    monkeypatch.setattr(host_copies, "_copy", lambda *a: (gate.wait(TIMEOUT), copy(*a)))
    mover.save(pool, [2], [10], places(80, 10))
    pool = mover.load(pool, [1], [10], places(1600, 10))  # although the other is not copied yet
    loaded, second = list[np.ndarray](), contents(pool, places(80, 10))

    def load() -> None:
        there = mover.load(pool, [2], [10], places(800, 10))
        loaded.append(contents(there, places(800, 10)))

    waiting = threading.Thread(target=load)
    waiting.start()
    assert not mover.saved(2).copied[-1].done() and not loaded
    gate.set()
    waiting.join(TIMEOUT)
    np.testing.assert_array_equal(loaded, [second])


def test_what_is_discarded_on_its_way_is_forgotten(mover: Mover, held: Callable[[], None]) -> None:
    pool = filled()
    for key in range(3):
        mover.save(pool, [key], [LARGEST + 1], places(0, LARGEST + 1))
        mover.discard([key])
    mover.save(pool, [100], [1], places(8, 1))
    assert mover._host.keys == (100,)
    held()
    np.testing.assert_array_equal(mover._host.get_copy(100), contents(pool, places(8, 1)))
    assert staged() <= ROOM


def test_what_a_copy_raises_is_raised_by_the_next_call(
    mover: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    def fail(*args: Any) -> None:
        assert gate.wait(TIMEOUT)
        raise MemoryError("the host is full")

    monkeypatch.setattr(host_copies, "_copy", fail)
    for key in (1, 2, 3):
        mover.save(filled(), [key], [3], places(0, 3))
    gate.set()
    mover.saved(3).copied[-1].exception(TIMEOUT)
    with pytest.raises(MemoryError, match="the host is full"):
        mover.check()
    mover.check()  # one error for all that failed meanwhile: a step each would end the engine
    with pytest.raises(MemoryError, match="the host is full"):
        mover.load(filled(), [1], [3], places(0, 3))
    mover.discard([1, 2, 3])
    assert not mover._host.keys


def test_a_cache_of_which_one_piece_was_not_copied_does_not_come_back(
    mover: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where the last piece was."""
    copy, gate, failed = host_copies._copy, threading.Event(), list[int]()

    def fail_once(*args: Any) -> None:
        assert gate.wait(TIMEOUT)
        if not failed:
            failed.append(1)
            raise MemoryError("the host is full")
        copy(*args)

    monkeypatch.setattr(host_copies, "_copy", fail_once)
    count = LARGEST + 5
    mover.save(filled(), [1], [count], places(0, count))
    gate.set()
    with pytest.raises(MemoryError, match="the host is full"):
        mover.load(filled(), [1], [count], places(0, count))


def test_closing_ends_the_thread_after_its_copy(mover: Mover) -> None:
    mover.save(filled(), [1], [3], places(0, 3))
    (thread,) = mover._host._thread._threads
    mover.close()
    mover.close()
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="shutdown"):
        mover.save(filled(), [2], [3], places(0, 3))
