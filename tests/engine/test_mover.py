"""Slots to host memory and back: what is kept, where, and how much of the device it takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.moves import ON_THE_WAY, PIECE, Mover
from jaxserve.pallas_kernels import row_major

LAYERS, BLOCKS, HEADS, SIZE, DIM = 2, 400, 1, 8, 4
STAGED = (PIECE, LAYERS, HEADS, DIM)


@pytest.fixture
def mover() -> Mover:
    model: Any = SimpleNamespace(mesh=None, backend="xla")
    return Mover(model, row_major(filled().sharding), jax.devices()[0])


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
    """Pieces that are on the device now. A copy to the host under way is an array of its own, of
    the same buffer."""
    pieces = [a for a in jax.live_arrays() if a.shape == STAGED]
    return len({piece.unsafe_buffer_pointer() for piece in pieces})


@pytest.mark.parametrize("count", [3, PIECE, 5 * PIECE + 7])
def test_what_was_saved_comes_back_elsewhere(mover: Mover, count: int) -> None:
    pool = filled()
    source, target = places(0, count), places(1600, count)
    expected = contents(pool, source)
    mover.save(pool, (1,), (count,), source)
    assert staged() <= ON_THE_WAY
    pool = mover.load(pool, (1,), (count,), target)
    np.testing.assert_array_equal(contents(pool, target), expected)
    mover.discard((1,))
    jax.block_until_ready(pool)
    assert staged() == 0 and not mover._saved


def test_many_small_saves_take_no_more_than_what_was_saved(mover: Mover) -> None:
    pool, keys = filled(), range(40)
    for key in keys:
        mover.save(pool, (key,), (3,), places(7 * key, 3))
        assert staged() <= ON_THE_WAY
    pool.block_until_ready()
    on_host = [
        piece for key in keys for piece in mover._saved[key] if isinstance(piece, np.ndarray)
    ]
    assert len(on_host) >= len(keys) - ON_THE_WAY
    for piece in on_host:
        assert piece.shape == (3, *STAGED[1:]) and piece.base is None
    expected = [contents(pool, places(7 * key, 3)) for key in keys]
    for key in keys:
        pool = mover.load(pool, (key,), (3,), places(1600, 3))
        np.testing.assert_array_equal(contents(pool, places(1600, 3)), expected[key])


def test_what_is_discarded_on_its_way_is_forgotten(mover: Mover) -> None:
    pool = filled()
    for key in range(3 * ON_THE_WAY):
        mover.save(pool, (key,), (PIECE + 1,), places(0, PIECE + 1))
        mover.discard((key,))
    mover.save(pool, (100,), (1,), places(0, 1))
    assert list(mover._saved) == [100] and staged() <= ON_THE_WAY
