"""Pallas-Triton writes, moves and staging, in interpret mode, against the references, exactly."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.pallas_kernels import HIDDEN, KV, LEFT, RIGHT, AttentionBatch, reference
from jaxserve.pallas_kernels.triton_backend import INTERPRET_BACKEND
from tests.kernels.batches import Shape, make_batch, make_pool, mixed_batches, vectors

DECODE = Shape(num_heads=5, kv_heads=5, head_dim=40)
MIXED = Shape(num_heads=4, kv_heads=2, tokens=40, width=8)
MOVES = 12

write = jax.jit(INTERPRET_BACKEND.write, donate_argnums=0)
move = jax.jit(INTERPRET_BACKEND.move, donate_argnums=0)
stage_out = jax.jit(INTERPRET_BACKEND.stage_out)
stage_in = jax.jit(INTERPRET_BACKEND.stage_in, donate_argnums=0)


def same(got: jax.Array, want: np.ndarray) -> None:
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(np.asarray(got).astype(np.float32), want.astype(np.float32))


def check_write(
    shape: Shape, batch: AttentionBatch, seed: int, dtype: jnp.dtype, with_x: bool
) -> None:
    """Every slot that is not written keeps what it has, NaN included."""
    rng = np.random.default_rng(seed)
    pool = make_pool(shape, batch, rng, dtype)
    padding = (batch.token_row == shape.rows)[:, None, None]
    k, v, x = (
        jnp.where(padding, jnp.nan, vectors(shape, shape.kv_heads, rng, jnp.float32))
        for _ in range(3)
    )
    given_x = x if with_x else None
    layer = seed % shape.layers
    want = reference.write(pool, layer, k, v, given_x, batch)
    same(write(pool, jnp.int32(layer), k, v, given_x, batch), want)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [DECODE, MIXED], ids=str)
@settings(max_examples=8)
@given(data=st.data())
def test_write(shape: Shape, dtype: jnp.dtype, data: st.DataObject) -> None:
    with_x = data.draw(st.booleans())
    batch, seed = data.draw(mixed_batches(shape, (KV, HIDDEN) if with_x else (KV,)))
    check_write(shape, batch, seed, dtype, with_x)


@pytest.mark.parametrize("kind", [KV, HIDDEN])
def test_two_owners_write_one_block_in_one_step(kind: int) -> None:
    rng = np.random.default_rng(1)
    rows = [(9, 5), (7, 4)]
    batch = make_batch(MIXED, rows, [LEFT, RIGHT], 0, rng, kinds=[kind] * 2)
    batch = dataclasses.replace(batch, tables=batch.tables.at[1, :, 0].set(batch.tables[0, :, 1]))
    check_write(MIXED, batch, 1, jnp.float32, True)


def drawn_slots(shape: Shape, data: st.DataObject, count: int) -> np.ndarray:
    """Different (block, slot) pairs: int32 [count, 2]."""
    seed = data.draw(st.integers(0, 2**16))
    total = shape.blocks * shape.block_size
    picked = np.random.default_rng(seed).choice(total, count, replace=False)
    return np.stack(np.divmod(picked, shape.block_size), axis=1).astype(np.int32)


def full_pool(shape: Shape, dtype: jnp.dtype) -> jax.Array:
    size = (shape.layers, shape.blocks, shape.kv_heads, shape.block_size, shape.head_dim)
    return jnp.asarray(np.random.default_rng(0).standard_normal(size)).astype(dtype)


@pytest.mark.parametrize("shape", [DECODE, MIXED], ids=str)
@settings(max_examples=8)
@given(data=st.data())
def test_move(shape: Shape, data: st.DataObject) -> None:
    pool = full_pool(shape, jnp.bfloat16)
    moves = drawn_slots(shape, data, 2 * MOVES).reshape(MOVES, 4)
    count = data.draw(st.integers(0, MOVES))
    want = reference.move(pool, moves, count)
    same(move(pool, jnp.asarray(moves), jnp.int32(count)), want)


@pytest.mark.parametrize("shape", [DECODE, MIXED], ids=str)
@settings(max_examples=8)
@given(data=st.data())
def test_staging(shape: Shape, data: st.DataObject) -> None:
    """Out of some slots and into others; what is past the count moves nowhere."""
    pool = full_pool(shape, jnp.float32)
    both = drawn_slots(shape, data, 2 * MOVES)
    sources, targets = jnp.asarray(both[:MOVES]), jnp.asarray(both[MOVES:])
    count = data.draw(st.integers(0, MOVES))
    staged = stage_out(pool, sources, jnp.int32(count))
    same(staged, reference.stage_out(pool, sources, count))
    # Unused rows of the staging buffer are anything.
    staged = staged.at[count:].set(jnp.nan)
    want = reference.stage_in(pool, staged, targets, count)
    same(stage_in(pool, staged, targets, jnp.int32(count)), want)
