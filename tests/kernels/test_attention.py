"""Paged attention against the float64 reference, over drawn lengths, tables and directions."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.pallas_kernels import LEFT, RIGHT, AttentionBatch, paged_attention, reference
from tests.kernels.batches import (
    Shape,
    decode_batches,
    make_batch,
    make_pool,
    mixed_batches,
    vectors,
)

MHA = Shape(num_heads=3, kv_heads=3)
GQA = Shape(num_heads=8, kv_heads=2, rows=9, tokens=9, width=7)
ONE = Shape(num_heads=4, kv_heads=1, rows=1, tokens=1, width=12)
# Blocks wider than a chunk of the running softmax, and tables of many chunks.
BIG_BLOCKS = Shape(num_heads=2, kv_heads=1, block_size=128, rows=2, tokens=2, width=3)
LONG = Shape(num_heads=2, kv_heads=2, block_size=16, rows=3, tokens=3, width=40)
DECODES = [MHA, GQA, ONE, BIG_BLOCKS, LONG]
MIXED = [
    Shape(num_heads=3, kv_heads=3, tokens=40),
    Shape(num_heads=8, kv_heads=2, rows=4, tokens=150, width=25),
    Shape(num_heads=4, kv_heads=1, block_size=16, rows=2, tokens=600, width=40),
]
OPTIONS = [(None, None), (11, None), (None, 3.0), (20, 1.5)]


@functools.partial(jax.jit, static_argnames=("window", "cap", "decode_only"))
def attend(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    batch: AttentionBatch,
    window: int | None = None,
    cap: float | None = None,
    decode_only: bool = False,
) -> jax.Array:
    return paged_attention(
        q,
        pool,
        layer,
        batch,
        scale=0.3,
        sliding_window=window,
        soft_cap=cap,
        decode_only=decode_only,
    )


def check(
    shape: Shape,
    batch: AttentionBatch,
    seed: int,
    dtype: jnp.dtype | type = jnp.float32,
    limit: float = 1e-5,
    window: int | None = None,
    cap: float | None = None,
    decode_only: bool = False,
) -> None:
    rng = np.random.default_rng(seed)
    pool = make_pool(shape, batch, rng, dtype, window)
    q = vectors(shape, shape.num_heads, rng, dtype)
    padding = (batch.token_row == shape.rows)[:, None, None]
    q = jnp.where(padding, jnp.nan, q)
    layer = seed % shape.layers
    got = attend(q, pool, jnp.int32(layer), batch, window, cap, decode_only)
    want = reference.paged_attention(
        q, pool, layer, batch, scale=0.3, sliding_window=window, soft_cap=cap
    )
    assert got.dtype == q.dtype
    got64 = np.asarray(got).astype(np.float64)
    assert np.all(got64[np.asarray(batch.token_row) == shape.rows] == 0)
    assert np.linalg.norm(got64 - want) <= limit * np.linalg.norm(want)


@pytest.mark.parametrize("shape", DECODES, ids=str)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_decode(shape: Shape, data: st.DataObject) -> None:
    batch, seed = data.draw(decode_batches(shape))
    check(shape, batch, seed, decode_only=True)


@pytest.mark.parametrize("shape", MIXED, ids=str)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_mixed(shape: Shape, data: st.DataObject) -> None:
    batch, seed = data.draw(mixed_batches(shape))
    check(shape, batch, seed)


@pytest.mark.parametrize("option", OPTIONS[1:], ids=str)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_window_and_cap(option: tuple[int | None, float | None], data: st.DataObject) -> None:
    batch, seed = data.draw(decode_batches(GQA))
    check(GQA, batch, seed, window=option[0], cap=option[1], decode_only=True)
    batch, seed = data.draw(mixed_batches(MIXED[1]))
    check(MIXED[1], batch, seed, window=option[0], cap=option[1])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_half_precision(dtype: jnp.dtype, data: st.DataObject) -> None:
    batch, seed = data.draw(decode_batches(GQA))
    check(GQA, batch, seed, dtype, limit=5e-3, decode_only=True)
    batch, seed = data.draw(mixed_batches(MIXED[0]))
    check(MIXED[0], batch, seed, dtype, limit=5e-3)


def test_a_long_window_far_into_the_context() -> None:
    """A window that skips whole chunks of context, for decodes and for chunks."""
    rng = np.random.default_rng(3)
    batch = make_batch(LONG, [(640, 1), (17, 1), (333, 1)], [0, 1, 1], 3, rng)
    check(LONG, batch, 3, window=20, decode_only=True)
    shape = MIXED[2]
    batch = make_batch(shape, [(600, 1), (640, 300)], [1, 0], 1, rng)
    check(shape, batch, 4, window=100)


def test_rows_tokens_in_any_order() -> None:
    """A chunk's last tile may not disturb the tokens that follow, whoever's they are."""
    shape = MIXED[0]
    rows = [(9, 1), (20, 13), (11, 11), (5, 2)]
    batch = make_batch(shape, rows, [0, 1, 1, 0], 1, np.random.default_rng(8), [3, 2, 0, 1])
    check(shape, batch, 8)


def test_one_row_cannot_see_another_rows_blocks() -> None:
    """Changing every value of row 1 leaves row 0's result bit for bit as it was."""
    rng = np.random.default_rng(5)
    batch = make_batch(MHA, [(20, 1), (41, 1)], [LEFT, RIGHT], 2, rng)
    pool = make_pool(MHA, batch, rng, jnp.float32)
    q = vectors(MHA, MHA.num_heads, rng, jnp.float32)
    before = attend(q, pool, jnp.int32(0), batch, decode_only=True)
    other = np.asarray(batch.tables[1]).ravel()
    after = attend(q, pool.at[:, other].set(jnp.nan), jnp.int32(0), batch, decode_only=True)
    assert np.array_equal(before[0], after[0])
    assert np.isfinite(before[1]).all() and np.isnan(after[1]).all()


def test_two_owners_of_one_block() -> None:
    """Row 0 fills a block from the left, row 1 the same block from the right (BROS 5.1)."""
    shape = Shape(num_heads=2, kv_heads=2, rows=2, tokens=2, width=1)
    rng = np.random.default_rng(6)
    batch = make_batch(shape, [(5, 1), (3, 1)], [LEFT, RIGHT], 2, rng)
    batch = dataclasses.replace(batch, tables=batch.tables.at[1].set(batch.tables[0]))
    check(shape, batch, 6, decode_only=True)


def test_junk_table_entries_are_never_read() -> None:
    """Entries past a row's last block may name a block full of NaN, or another row's."""
    rng = np.random.default_rng(7)
    batch = make_batch(GQA, [(9, 1), (56, 1)], [LEFT, RIGHT], 2, rng)
    nobodys = GQA.blocks - 1

    for junk in (nobodys, batch.tables[1, 0, 0]):
        tables = batch.tables.at[0, :, 2:].set(junk).at[2:].set(junk)
        check(GQA, dataclasses.replace(batch, tables=tables), 7, decode_only=True)
