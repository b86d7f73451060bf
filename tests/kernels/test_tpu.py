"""The TPU kernels over K and V blocks, in TPU-interpret mode, against the float64 reference.

The interpreter fills what was never written with NaN and refuses reads out of bounds, so a stray
read shows in a result, as the poison of `batches.make_pool` does. It is slow: few examples, of few
static shapes.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.pallas_kernels import HIDDEN, KV, LEFT, RIGHT, AttentionBatch, reference
from jaxserve.pallas_kernels.backends import get_backend
from tests.kernels.batches import Shape, make_batch, make_pool, vectors

TPU = get_backend("tpu-interpret")
GQA = Shape(num_heads=4, kv_heads=2, head_dim=64, block_size=8, rows=5, width=9, tokens=40)
MHA = Shape(num_heads=2, kv_heads=2, head_dim=128, block_size=16, rows=4, width=4, tokens=24)
DECODE = Shape(num_heads=3, kv_heads=1, head_dim=128, block_size=24, rows=4, width=3, tokens=4)
FLOAT32, BFLOAT16 = (jnp.float32, 1e-5), (jnp.bfloat16, 5e-3)


@functools.partial(jax.jit, static_argnames=("window", "cap", "decode_only"))
def attend(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    batch: AttentionBatch,
    window: int | None,
    cap: float | None,
    decode_only: bool,
) -> jax.Array:
    return TPU.attend(
        q,
        pool,
        layer,
        batch,
        scale=0.3,
        sliding_window=window,
        soft_cap=cap,
        decode_only=decode_only,
    )


write = jax.jit(TPU.write)


def lengths(shape: Shape) -> st.SearchStrategy[int]:
    """Context lengths: 1, the longest, at and around the edges of blocks, and any other."""
    size = shape.block_size
    edges = [n for k in range(shape.width + 1) for n in (k * size - 1, k * size, k * size + 1)]
    some = st.sampled_from([n for n in edges if 1 <= n <= shape.longest])
    return some | st.integers(1, shape.longest)


@st.composite
def steps(
    draw: st.DrawFn, shape: Shape, kinds: tuple[int, ...] = (KV,)
) -> tuple[AttentionBatch, int]:
    """Decodes first, then chunks; rows and tokens may be left over; tokens lie in any order of the
    rows. Chunks may have no cached context, and hidden rows stand between the others."""
    if shape.tokens == shape.rows:
        rows = [(draw(lengths(shape)), 1) for _ in range(draw(st.integers(0, shape.rows)))]
        decodes, placing = len(rows), None
    else:
        decodes = draw(st.integers(0, shape.rows))
        rows = [(draw(lengths(shape)), 1) for _ in range(decodes)]
        left = shape.tokens - decodes
        for _ in range(draw(st.integers(0, shape.rows - decodes))):
            context = draw(lengths(shape))
            length = min(context, left, draw(lengths(shape)))
            rows.append((context, length))
            left -= length
        placing = draw(st.permutations(range(len(rows)))) or None
    directions = [draw(st.sampled_from([LEFT, RIGHT])) for _ in rows]
    mixed = [draw(st.sampled_from(kinds)) for _ in rows]
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    return make_batch(shape, rows, directions, decodes, rng, placing, mixed), seed


def check_attention(
    shape: Shape,
    batch: AttentionBatch,
    seed: int,
    precision: tuple[jnp.dtype, float],
    window: int | None = None,
    cap: float | None = None,
) -> None:
    dtype, limit = precision
    rng = np.random.default_rng(seed)
    pool = make_pool(shape, batch, rng, dtype, window)
    q = vectors(shape, shape.num_heads, rng, dtype)
    row = np.asarray(batch.token_row)
    mine = np.append(np.asarray(batch.kind) == KV, False)[row]
    q = jnp.where(mine[:, None, None], q, jnp.nan)
    layer = seed % shape.layers
    decode_only = shape.tokens == shape.rows
    got = attend(q, pool, jnp.int32(layer), batch, window, cap, decode_only)
    want = reference.paged_attention(
        q, pool, layer, batch, scale=0.3, sliding_window=window, soft_cap=cap
    )
    assert got.dtype == dtype
    got64 = np.asarray(got).astype(np.float64)
    assert np.all(got64[~mine] == 0)
    assert np.linalg.norm(got64 - want) <= limit * np.linalg.norm(want)


@settings(max_examples=5, deadline=None)
@given(step=steps(GQA, (KV, KV, HIDDEN)))
def test_mixed_steps(step: tuple[AttentionBatch, int]) -> None:
    check_attention(GQA, *step, FLOAT32)


@settings(max_examples=4, deadline=None)
@given(step=steps(MHA))
def test_mixed_steps_with_window_and_cap_in_bfloat16(step: tuple[AttentionBatch, int]) -> None:
    check_attention(MHA, *step, BFLOAT16, window=20, cap=1.5)


@pytest.mark.parametrize(("window", "cap"), [(None, None), (11, 3.0)])
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_decodes(window: int | None, cap: float | None, data: st.DataObject) -> None:
    check_attention(DECODE, *data.draw(steps(DECODE)), FLOAT32, window=window, cap=cap)


def test_two_owners_of_one_block_and_junk_in_tables() -> None:
    """Rows fill a block from both ends; entries past a row's last block name poison."""
    batch = make_batch(DECODE, [(5, 1), (17, 1)], [LEFT, RIGHT], 2, np.random.default_rng(6))
    tables = np.array(batch.tables)
    tables[1, :, 0] = tables[0, :, 0]
    tables[:, :, 1:] = DECODE.blocks - 1
    batch = dataclasses.replace(batch, tables=jnp.asarray(tables))
    check_attention(DECODE, batch, 6, FLOAT32)


def check_write(shape: Shape, batch: AttentionBatch, seed: int, hidden: bool) -> None:
    dtype = BFLOAT16[0] if shape is MHA else FLOAT32[0]
    rng = np.random.default_rng(seed)
    pool = make_pool(shape, batch, rng, dtype)
    padding = (batch.token_row == shape.rows)[:, None, None]
    values = [
        jnp.where(padding, jnp.nan, vectors(shape, shape.kv_heads, rng, jnp.float32))
        for _ in range(2 + hidden)
    ]
    k, v, x = [*values, None][:3]
    layer = seed % shape.layers
    want = reference.write(pool, layer, k, v, x, batch)
    got = np.asarray(write(pool, jnp.int32(layer), k, v, x, batch))
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


@settings(max_examples=5, deadline=None)
@given(step=steps(GQA, (KV, HIDDEN)))
def test_write(step: tuple[AttentionBatch, int]) -> None:
    check_write(GQA, *step, hidden=True)


@settings(max_examples=4, deadline=None)
@given(step=steps(MHA))
def test_write_without_hidden_rows_in_bfloat16(step: tuple[AttentionBatch, int]) -> None:
    check_write(MHA, *step, hidden=False)


@pytest.mark.parametrize("plane", [0, 1])
def test_writes_from_both_ends_of_a_block_survive(plane: int) -> None:
    """In one step, into one granule of 8 slots: row 0's K or V from the left, row 1's hidden
    vectors from the right."""
    rows, kinds = [(12, 12), (11, 3)], [KV, HIDDEN]
    batch = make_batch(GQA, rows, [LEFT, RIGHT], 0, np.random.default_rng(plane), None, kinds)
    tables = np.array(batch.tables)
    tables[1, 0, 1] = tables[0, plane, 1]
    check_write(GQA, dataclasses.replace(batch, tables=jnp.asarray(tables)), plane, hidden=True)


def test_what_the_kernels_take() -> None:
    shape = {"num_heads": 8, "kv_heads": 2, "head_dim": 128, "block_size": 16, "dtype": "bfloat16"}
    assert TPU.supports(KV, **shape) is None
    for change, reason in (
        ({"dtype": "float16"}, "dtype float16"),
        ({"head_dim": 80}, "head_dim 80"),
        ({"block_size": 12}, "block_size 12"),
        ({"kv_heads": 3}, "num_heads 8"),
    ):
        assert reason in str(TPU.supports(KV, **{**shape, **change}))


def test_tables_that_scalar_memory_cannot_hold() -> None:
    shape = dataclasses.replace(DECODE, width=40_000)
    batch = make_batch(DECODE, [(5, 1)], [LEFT], 1, np.random.default_rng(0))
    batch = dataclasses.replace(batch, tables=jnp.zeros((shape.rows, 2, shape.width), jnp.int32))
    pool = jnp.zeros((1, 3, 1, DECODE.block_size, DECODE.head_dim))
    q = jnp.zeros((DECODE.tokens, 3, DECODE.head_dim))
    with pytest.raises(ValueError, match="scalar memory"):
        attend(q, pool, jnp.int32(0), batch, None, None, True)
