"""Pallas-Triton attention over KV rows, in interpret mode, against the float64 reference."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl

from jaxserve.pallas_kernels import HIDDEN, KV, LEFT, RIGHT, AttentionBatch, reference
from jaxserve.pallas_kernels.triton_backend import INTERPRET_BACKEND
from jaxserve.pallas_kernels.triton_decode import paged_decode
from tests.kernels.batches import (
    Shape,
    decode_batches,
    make_batch,
    make_pool,
    mixed_batches,
    vectors,
)

MHA = Shape(num_heads=3, kv_heads=3)
# A group that is no power of two, a head_dim that is padded, many tiles of context.
GQA = Shape(num_heads=10, kv_heads=2, head_dim=40, rows=4, tokens=4, width=20)
BIG_BLOCKS = Shape(num_heads=2, kv_heads=1, block_size=128, rows=2, tokens=2, width=2)
MIXED = Shape(num_heads=6, kv_heads=2, rows=4, tokens=70, width=12)
BOTH = (KV, HIDDEN)


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
    return INTERPRET_BACKEND.attend(
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
    *,
    dtype: jnp.dtype | type = jnp.float32,
    limit: float = 1e-5,
    window: int | None = None,
    cap: float | None = None,
    splits: int | None = None,
) -> None:
    """Against the reference; queries of tokens that do not count are NaN and give zeros. splits:
    the decode kernel alone with so many parts."""
    rng = np.random.default_rng(seed)
    pool = make_pool(shape, batch, rng, dtype, window)
    used = np.append(np.asarray(batch.kind) == KV, False)[np.asarray(batch.token_row)]
    q = vectors(shape, shape.num_heads, rng, dtype)
    q = jnp.where(used[:, None, None], q, jnp.nan)
    layer, decode_only = seed % shape.layers, shape.tokens == shape.rows
    if splits is None:
        got = attend(q, pool, jnp.int32(layer), batch, window, cap, decode_only)
    else:
        got = split_decode(q, pool, jnp.int32(layer), batch, splits)
    want = reference.paged_attention(
        q, pool, layer, batch, scale=0.3, sliding_window=window, soft_cap=cap
    )
    assert got.dtype == q.dtype
    found = np.asarray(got).astype(np.float64)
    assert np.all(found[~used] == 0)
    assert np.linalg.norm(found - want) <= limit * np.linalg.norm(want)


@functools.partial(jax.jit, static_argnames="splits")
def split_decode(
    q: jax.Array, pool: jax.Array, layer: jax.Array, batch: AttentionBatch, splits: int
) -> jax.Array:
    return paged_decode(
        q,
        pool,
        layer,
        batch,
        scale=0.3,
        sliding_window=None,
        soft_cap=None,
        decode_only=True,
        splits=splits,
        interpret=True,
    )


def test_what_a_kernel_does_not_write_is_nan_here() -> None:
    """All tests here count on it: outputs are poisoned before the kernel runs."""

    def half(out_ref: jax.Array) -> None:
        out_ref[0] = 1.0

    out = pl.pallas_call(half, out_shape=jax.ShapeDtypeStruct((2,), jnp.float32), interpret=True)()
    assert out[0] == 1 and np.isnan(out[1])


@pytest.mark.parametrize("shape", [MHA, GQA, BIG_BLOCKS], ids=str)
@settings(max_examples=6)
@given(data=st.data())
def test_decode(shape: Shape, data: st.DataObject) -> None:
    batch, seed = data.draw(decode_batches(shape, BOTH))
    check(shape, batch, seed)


@pytest.mark.parametrize("splits", [1, 4])
@settings(max_examples=6)
@given(data=st.data())
def test_split_decode(splits: int, data: st.DataObject) -> None:
    """More parts than a short context has tiles, too."""
    batch, seed = data.draw(decode_batches(GQA, BOTH))
    check(GQA, batch, seed, splits=splits)


@settings(max_examples=8)
@given(data=st.data())
def test_mixed(data: st.DataObject) -> None:
    batch, seed = data.draw(mixed_batches(MIXED, BOTH))
    check(MIXED, batch, seed)


@pytest.mark.parametrize("option", [(11, None), (20, 1.5)], ids=str)
@settings(max_examples=4)
@given(data=st.data())
def test_window_and_cap(option: tuple[int, float | None], data: st.DataObject) -> None:
    batch, seed = data.draw(decode_batches(GQA))
    check(GQA, batch, seed, window=option[0], cap=option[1])
    batch, seed = data.draw(mixed_batches(MIXED))
    check(MIXED, batch, seed, window=option[0], cap=option[1])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@settings(max_examples=4)
@given(data=st.data())
def test_half_precision(dtype: jnp.dtype, data: st.DataObject) -> None:
    """The mixed step has both kernels."""
    batch, seed = data.draw(mixed_batches(MIXED, BOTH))
    check(MIXED, batch, seed, dtype=dtype, limit=5e-3)


def test_tokens_in_any_order_across_tiles() -> None:
    """Rows' tokens are not in the order of the rows, and a chunk takes more than one tile."""
    shape = dataclasses.replace(MIXED, rows=5)
    rows = [(9, 1), (60, 33), (11, 11), (5, 2)]
    batch = make_batch(shape, rows, [0, 1, 1, 0], 1, np.random.default_rng(8), [3, 2, 0, 1])
    check(shape, batch, 8)


def test_chunks_alone_of_one_token() -> None:
    """A chunk of one token is not a decode: nothing says that decodes come with it."""
    batch = make_batch(MIXED, [(1, 1), (17, 1)], [RIGHT, LEFT], 0, np.random.default_rng(2))
    check(MIXED, batch, 2)
    batch = make_batch(MHA, [(1, 1), (17, 1)], [RIGHT, LEFT], 0, np.random.default_rng(2))
    check(MHA, batch, 2)


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
    rng = np.random.default_rng(6)
    batch = make_batch(MHA, [(5, 1), (3, 1)], [LEFT, RIGHT], 2, rng)
    check(MHA, dataclasses.replace(batch, tables=batch.tables.at[1].set(batch.tables[0])), 6)


def test_junk_table_entries_are_never_read() -> None:
    """Entries past a row's last block may name a block full of NaN, or another row's."""
    rng = np.random.default_rng(7)
    batch = make_batch(GQA, [(9, 1), (56, 1)], [LEFT, RIGHT], 2, rng)
    for junk in (GQA.blocks - 1, batch.tables[1, 0, 0]):
        tables = batch.tables.at[0, :, 2:].set(junk).at[2:].set(junk)
        check(GQA, dataclasses.replace(batch, tables=tables), 7)
