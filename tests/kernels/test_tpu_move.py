"""Moves and staging by the TPU kernels, in TPU-interpret mode, against the reference, exactly."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.pallas_kernels import reference
from jaxserve.pallas_kernels.backends import get_backend

TPU = get_backend("tpu-interpret")
move, stage_out, stage_in = (jax.jit(f) for f in (TPU.move, TPU.stage_out, TPU.stage_in))
LAYERS, BLOCKS, HEADS, HEAD_DIM, PLACES = 3, 5, 2, 64, 14


def drawn_pool(block_size: int, dtype: str, rng: np.random.Generator) -> jax.Array:
    """Values of all kinds, negative zeros and NaN too: a move is a copy of bits."""
    pool = rng.standard_normal((LAYERS, BLOCKS, HEADS, block_size, HEAD_DIM)).astype(np.float32)
    for odd in (np.nan, np.inf, -0.0):
        pool[rng.random(pool.shape) < 0.05] = odd
    return jnp.asarray(pool).astype(dtype)


def drawn_slots(number: int, block_size: int, rng: np.random.Generator) -> np.ndarray:
    """Distinct (block, slot) pairs [number, 2], with runs of neighbours among them."""
    slots = rng.permutation(BLOCKS * block_size)[:number]
    slots[: number // 2] = np.sort(slots[: number // 2])
    return np.stack([slots // block_size, slots % block_size], axis=1).astype(np.int32)


def same(got: jax.Array, want: np.ndarray) -> None:
    mine = np.asarray(got).astype(np.float32)
    np.testing.assert_array_equal(mine, want.astype(np.float32))
    np.testing.assert_array_equal(np.signbit(mine), np.signbit(want.astype(np.float32)))


@pytest.mark.parametrize(("block_size", "dtype"), [(8, "float32"), (16, "bfloat16")])
@settings(max_examples=3, deadline=None)
@given(count=st.integers(0, PLACES), seed=st.integers(0, 2**16))
def test_moves_and_staging(block_size: int, dtype: str, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pool = drawn_pool(block_size, dtype, rng)
    slots = drawn_slots(2 * PLACES, block_size, rng)
    sources, targets = slots[:PLACES].copy(), slots[PLACES:].copy()
    # Entries that do not count may hold anything.
    sources[count:] = targets[count:] = rng.integers(-1000, 1000, (PLACES - count, 2))
    moves = np.concatenate([sources, targets], axis=1)
    used = jnp.int32(count)
    same(move(pool, moves, used), reference.move(pool, moves, count))
    staging = stage_out(pool, sources, used)
    same(staging, reference.stage_out(pool, sources, count))
    got = stage_in(pool, staging, targets, used)
    same(got, reference.stage_in(pool, staging, targets, count))


def test_a_whole_block_moves() -> None:
    """From one granule to one, in order and mirrored: one read for eight slots."""
    rng = np.random.default_rng(0)
    pool = drawn_pool(8, "float32", rng)
    slot = np.arange(PLACES) % 8
    block = np.where(np.arange(PLACES) < 8, 0, 1)
    moves = np.stack([block, slot, block + 2, np.where(block == 1, 7 - slot, slot)], axis=1)
    moves = moves.astype(np.int32)
    same(move(pool, moves, jnp.int32(PLACES)), reference.move(pool, moves, PLACES))
