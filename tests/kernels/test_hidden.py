"""Attention over hidden vectors, absorbed and projected, against the float64 references; batches of
both cache kinds."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.pallas_kernels import (
    HIDDEN,
    KV,
    LEFT,
    RIGHT,
    AttentionBatch,
    HiddenProjection,
    absorbed_attention,
    paged_attention,
    projected_attention,
    reference,
)
from tests.kernels.batches import (
    Shape,
    make_batch,
    make_pool,
    make_projection,
    mixed_batches,
    vectors,
)

DECODE = Shape(num_heads=3, kv_heads=3, rows=9, tokens=9, width=12)
BIG_BLOCKS = Shape(num_heads=2, kv_heads=2, block_size=128, rows=2, tokens=2, width=2)
MIXED = Shape(num_heads=3, kv_heads=3, tokens=150, width=25)
OPTIONS = [(None, None), (11, None), (20, 3.0)]
PROJECTIONS = [
    {"bias": True},  # OPT
    {"rotary": True},  # Llama 2
    {"bias": True, "norm": True, "rotary": True},
]


@functools.partial(jax.jit, static_argnames=("window", "cap"))
def absorbed(
    qx: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    batch: AttentionBatch,
    window: int | None,
    cap: float | None,
) -> jax.Array:
    return absorbed_attention(
        qx, pool, layer, batch, scale=0.1, sliding_window=window, soft_cap=cap
    )


@functools.partial(jax.jit, static_argnames=("window", "cap", "decode_only"))
def projected(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    batch: AttentionBatch,
    projection: HiddenProjection,
    window: int | None,
    cap: float | None,
    decode_only: bool,
) -> jax.Array:
    return projected_attention(
        q,
        pool,
        layer,
        batch,
        projection,
        scale=0.3,
        sliding_window=window,
        soft_cap=cap,
        decode_only=decode_only,
    )


def compare(got: jax.Array, want: np.ndarray, counted: np.ndarray, limit: float) -> None:
    """Within limit of the reference, and nothing for the tokens that do not count."""
    found = np.asarray(got).astype(np.float64)
    assert np.all(found[~counted] == 0)
    assert np.linalg.norm(found - want) <= limit * np.linalg.norm(want)


def tokens_of(batch: AttentionBatch, rows: np.ndarray) -> np.ndarray:
    """bool [T]: tokens of these rows (bool [R])."""
    return np.append(rows, False)[np.asarray(batch.token_row)]


def check(
    shape: Shape,
    batch: AttentionBatch,
    seed: int,
    *,
    dtype: jnp.dtype | type = jnp.float32,
    limit: float = 1e-5,
    option: tuple[int | None, float | None] = (None, None),
    kinds: dict[str, bool] | None = None,
) -> None:
    """Both ways to read a batch's hidden rows; queries of tokens that do not count are NaN."""
    window, cap = option
    rng = np.random.default_rng(seed)
    pool = make_pool(shape, batch, rng, dtype, window)
    layer = seed % shape.layers
    index = np.arange(shape.rows)
    hidden = (np.asarray(batch.kind) == HIDDEN) & (index < int(batch.num_rows))

    counted = tokens_of(batch, hidden & (index < int(batch.num_decodes)))
    wide = dataclasses.replace(shape, head_dim=shape.head_dim * shape.kv_heads)
    qx = jnp.where(counted[:, None, None], vectors(wide, shape.num_heads, rng, dtype), jnp.nan)
    got = absorbed(qx, pool, jnp.int32(layer), batch, window, cap)
    assert got.dtype == dtype
    want = reference.absorbed_attention(
        qx, pool, layer, batch, scale=0.1, sliding_window=window, soft_cap=cap
    )
    compare(got, want, counted, limit)

    counted = tokens_of(batch, hidden)
    projection = make_projection(shape, rng, dtype, **(kinds or {}))
    q = jnp.where(counted[:, None, None], vectors(shape, shape.num_heads, rng, dtype), jnp.nan)
    only = shape.tokens == shape.rows
    got = projected(q, pool, jnp.int32(layer), batch, projection, window, cap, only)
    assert got.dtype == dtype
    want = reference.projected_attention(
        q, pool, layer, batch, projection, scale=0.3, sliding_window=window, soft_cap=cap
    )
    compare(got, want, counted, limit)


@pytest.mark.parametrize("shape", [DECODE, BIG_BLOCKS, MIXED], ids=str)
@settings(max_examples=10)
@given(data=st.data())
def test_hidden(shape: Shape, data: st.DataObject) -> None:
    batch, seed = data.draw(mixed_batches(shape, [KV, HIDDEN]))
    check(shape, batch, seed, kinds=PROJECTIONS[1])


@pytest.mark.parametrize("option", OPTIONS[1:], ids=str)
@settings(max_examples=6)
@given(data=st.data())
def test_window_and_cap(option: tuple[int | None, float | None], data: st.DataObject) -> None:
    batch, seed = data.draw(mixed_batches(MIXED, [KV, HIDDEN]))
    check(MIXED, batch, seed, option=option, kinds=PROJECTIONS[1])


@pytest.mark.parametrize("kinds", [PROJECTIONS[0], PROJECTIONS[2]], ids=str)
def test_biases_and_norms(kinds: dict[str, bool]) -> None:
    rows = [(9, 1), (40, 1), (41, 40), (16, 16), (200, 90)]
    batch = make_batch(
        MIXED,
        rows,
        [LEFT, RIGHT, RIGHT, LEFT, RIGHT],
        2,
        np.random.default_rng(0),
        kinds=[HIDDEN, KV, HIDDEN, KV, HIDDEN],
    )
    check(MIXED, batch, 1, kinds=kinds)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision(dtype: jnp.dtype) -> None:
    rows = [(9, 1), (96, 1), (41, 1), (2, 1)]
    sides, kinds = [LEFT, RIGHT, RIGHT, LEFT], [HIDDEN, HIDDEN, KV, HIDDEN]
    batch = make_batch(DECODE, rows, sides, 4, np.random.default_rng(1), kinds=kinds)
    check(DECODE, batch, 2, dtype=dtype, limit=5e-3, kinds=PROJECTIONS[1])


def test_both_kinds_in_one_block() -> None:
    """A KV row's K block filled from the left, and from the right by a hidden row (BROS 5.1)."""
    shape = Shape(num_heads=2, kv_heads=2, rows=2, tokens=2, width=1)
    rng = np.random.default_rng(6)
    batch = make_batch(shape, [(5, 1), (3, 1)], [LEFT, RIGHT], 2, rng, kinds=[KV, HIDDEN])
    tables = batch.tables.at[1, 0].set(batch.tables[0, 0])
    batch = dataclasses.replace(batch, tables=tables)
    check(shape, batch, 6, kinds=PROJECTIONS[1])
    pool = make_pool(shape, batch, rng, jnp.float32)
    q = vectors(shape, 2, rng, jnp.float32)
    got = paged_attention(q, pool, 0, batch, scale=0.3, decode_only=True)
    want = reference.paged_attention(q, pool, 0, batch, scale=0.3)
    compare(got, want, np.array([True, False]), 1e-5)


@settings(max_examples=10)
@given(data=st.data())
def test_kv_rows_beside_hidden_ones(data: st.DataObject) -> None:
    """A hidden row's table of V blocks names nobody's: the pool is NaN there."""
    shape = data.draw(st.sampled_from([DECODE, MIXED]))
    batch, seed = data.draw(mixed_batches(shape, [KV, HIDDEN]))
    rng = np.random.default_rng(seed)
    pool = make_pool(shape, batch, rng, jnp.float32)
    index = np.arange(shape.rows)
    counted = tokens_of(batch, (np.asarray(batch.kind) == KV) & (index < int(batch.num_rows)))
    q = jnp.where(
        counted[:, None, None], vectors(shape, shape.num_heads, rng, jnp.float32), jnp.nan
    )
    only = shape.tokens == shape.rows
    attend = jax.jit(functools.partial(paged_attention, scale=0.3, decode_only=only))
    got = attend(q, pool, jnp.int32(0), batch)
    compare(got, reference.paged_attention(q, pool, 0, batch, scale=0.3), counted, 1e-5)


def test_the_decodes_of_a_batch_alone() -> None:
    """Absorbed queries are wide, so they are made for a batch's decodes, not for all its tokens."""
    shape = dataclasses.replace(MIXED, tokens=20)
    rows = [(9, 1), (40, 1), (41, 1), (16, 13)]
    sides, kinds = [LEFT, RIGHT, RIGHT, LEFT], [HIDDEN, KV, HIDDEN, HIDDEN]
    placing = [3, 2, 0, 1]
    rng = np.random.default_rng(3)
    batch = make_batch(shape, rows, sides, 3, rng, placing=placing, kinds=kinds)
    alone = batch.decodes()
    alone.validate()
    assert alone.max_tokens == alone.max_rows == shape.rows
    pool = make_pool(shape, batch, rng, jnp.float32)
    qx = jnp.asarray(rng.standard_normal((20, 3, 48), dtype=np.float32))
    whole = absorbed(qx, pool, jnp.int32(0), batch, None, None)
    picked = absorbed(qx[batch.query_start], pool, jnp.int32(0), alone, None, None)
    for row in range(3):
        token = int(batch.query_start[row])
        np.testing.assert_allclose(picked[row], whole[token], rtol=1e-6)
        assert np.any(picked[row]) == (kinds[row] == HIDDEN)
    assert not np.asarray(picked[3:]).any()


def test_absorbing_equals_projecting() -> None:
    """For keys without rotation: fold wk into q, apply wv to the result (design section 4)."""
    shape = dataclasses.replace(DECODE, rows=3, tokens=3, width=6)
    rng = np.random.default_rng(4)
    rows = [(9, 1), (48, 1), (17, 1)]
    batch = make_batch(shape, rows, [LEFT, RIGHT, LEFT], 3, rng, kinds=[HIDDEN] * 3)
    pool = make_pool(shape, batch, rng, jnp.float32)
    projection = make_projection(shape, rng, jnp.float32, bias=True)
    q = vectors(shape, shape.num_heads, rng, jnp.float32)
    by_head = (-1, shape.num_heads, shape.head_dim)
    assert projection.bv is not None
    qx = jnp.einsum("thd,ehd->the", q, projection.wk.reshape(by_head))
    mixed = absorbed_attention(qx, pool, 0, batch, scale=0.3)
    got = jnp.einsum("the,ehd->thd", mixed, projection.wv.reshape(by_head))
    got += projection.bv.reshape(by_head[1:])
    want = reference.projected_attention(q, pool, 0, batch, projection, scale=0.3)
    compare(got, want, np.ones(3, bool), 1e-5)
