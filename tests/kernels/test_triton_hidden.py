"""Pallas-Triton attention over hidden rows, absorbed and projected, in interpret mode, against the
float64 references."""

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
    reference,
)
from jaxserve.pallas_kernels.triton_backend import INTERPRET_BACKEND
from jaxserve.pallas_kernels.triton_projected import projected as projected_kernel
from tests.kernels.batches import (
    Shape,
    decode_batches,
    make_batch,
    make_pool,
    make_projection,
    mixed_batches,
    vectors,
)

DECODE = Shape(num_heads=3, kv_heads=3, rows=4, tokens=4, width=12)
# head_dim 40: padded, in more than one chunk or slice of it, and not a whole number of them.
WIDE = Shape(num_heads=2, kv_heads=2, head_dim=40, block_size=16, rows=3, tokens=3, width=5)
MIXED = Shape(num_heads=3, kv_heads=3, rows=4, tokens=40, width=12)
BOTH = (KV, HIDDEN)
OPTIONS = [(None, None), (11, None), (20, 1.5)]
PROJECTIONS = [
    {"bias": True},
    {"rotary": True},
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
    return INTERPRET_BACKEND.absorbed(
        qx, pool, layer, batch, scale=0.1, sliding_window=window, soft_cap=cap
    )


@functools.partial(jax.jit, static_argnames=("window", "cap", "decode_only", "splits"))
def projected(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    batch: AttentionBatch,
    projection: HiddenProjection,
    window: int | None,
    cap: float | None,
    decode_only: bool,
    splits: int | None,
) -> jax.Array:
    return projected_kernel(
        q,
        pool,
        layer,
        batch,
        projection,
        scale=0.3,
        sliding_window=window,
        soft_cap=cap,
        decode_only=decode_only,
        splits=splits,
        interpret=True,
    )


def counted_tokens(batch: AttentionBatch, decodes: bool) -> np.ndarray:
    """bool [T]: tokens of hidden rows, or only of those that are decodes."""
    rows = int(batch.num_decodes if decodes else batch.num_rows)
    counted = (np.asarray(batch.kind) == HIDDEN) & (np.arange(batch.max_rows) < rows)
    return np.append(counted, False)[np.asarray(batch.token_row)]


def compare(got: jax.Array, want: np.ndarray, counted: np.ndarray, limit: float) -> None:
    found = np.asarray(got).astype(np.float64)
    assert np.all(found[~counted] == 0)
    assert np.linalg.norm(found - want) <= limit * np.linalg.norm(want)


def check_absorbed(
    shape: Shape,
    batch: AttentionBatch,
    seed: int,
    *,
    dtype: jnp.dtype | type = jnp.float32,
    limit: float = 1e-5,
    option: tuple[int | None, float | None] = (None, None),
) -> None:
    window, cap = option
    rng = np.random.default_rng(seed)
    pool = make_pool(shape, batch, rng, dtype, window)
    layer, counted = seed % shape.layers, counted_tokens(batch, decodes=True)
    wide = dataclasses.replace(shape, head_dim=shape.head_dim * shape.kv_heads)
    qx = jnp.where(counted[:, None, None], vectors(wide, shape.num_heads, rng, dtype), jnp.nan)
    got = absorbed(qx, pool, jnp.int32(layer), batch, window, cap)
    assert got.dtype == dtype
    want = reference.absorbed_attention(
        qx, pool, layer, batch, scale=0.1, sliding_window=window, soft_cap=cap
    )
    compare(got, want, counted, limit)


def check_projected(
    shape: Shape,
    batch: AttentionBatch,
    seed: int,
    *,
    dtype: jnp.dtype | type = jnp.float32,
    limit: float = 1e-5,
    option: tuple[int | None, float | None] = (None, None),
    parts: dict[str, bool] | None = None,
    splits: int | None = None,
) -> None:
    window, cap = option
    rng = np.random.default_rng(seed)
    pool = make_pool(shape, batch, rng, dtype, window)
    layer, counted = seed % shape.layers, counted_tokens(batch, decodes=False)
    projection = make_projection(shape, rng, dtype, **(parts or {"rotary": True}))
    q = jnp.where(counted[:, None, None], vectors(shape, shape.num_heads, rng, dtype), jnp.nan)
    only = shape.tokens == shape.rows
    got = projected(q, pool, jnp.int32(layer), batch, projection, window, cap, only, splits)
    assert got.dtype == dtype
    want = reference.projected_attention(
        q, pool, layer, batch, projection, scale=0.3, sliding_window=window, soft_cap=cap
    )
    compare(got, want, counted, limit)


@pytest.mark.parametrize("shape", [DECODE, WIDE], ids=str)
@settings(max_examples=5)
@given(data=st.data())
def test_decode(shape: Shape, data: st.DataObject) -> None:
    batch, seed = data.draw(decode_batches(shape, BOTH))
    check_absorbed(shape, batch, seed)
    check_projected(shape, batch, seed)


@settings(max_examples=5)
@given(data=st.data())
def test_mixed(data: st.DataObject) -> None:
    """Absorbed: only the decodes of the batch; projected: its chunks too."""
    batch, seed = data.draw(mixed_batches(MIXED, BOTH))
    check_absorbed(MIXED, batch, seed)
    check_projected(MIXED, batch, seed)


@pytest.mark.parametrize("option", OPTIONS[1:], ids=str)
@settings(max_examples=3)
@given(data=st.data())
def test_window_and_cap(option: tuple[int, float | None], data: st.DataObject) -> None:
    batch, seed = data.draw(mixed_batches(MIXED, BOTH))
    check_absorbed(MIXED, batch, seed, option=option)
    check_projected(MIXED, batch, seed, option=option)


@settings(max_examples=3)
@given(data=st.data())
def test_half_precision(data: st.DataObject) -> None:
    batch, seed = data.draw(mixed_batches(MIXED, BOTH))
    check_absorbed(MIXED, batch, seed, dtype=jnp.bfloat16, limit=5e-3)
    check_projected(MIXED, batch, seed, dtype=jnp.bfloat16, limit=5e-3)


@pytest.mark.parametrize("parts", PROJECTIONS, ids=lambda parts: "-".join(parts))
def test_parts_of_a_projection(parts: dict[str, bool]) -> None:
    rng = np.random.default_rng(4)
    batch = make_batch(
        WIDE, [(80, 1), (1, 1), (33, 1)], [LEFT, RIGHT, RIGHT], 3, rng, kinds=[1] * 3
    )
    check_projected(WIDE, batch, 4, parts=parts)


@pytest.mark.parametrize("splits", [1, 2])
@settings(max_examples=3)
@given(data=st.data())
def test_split_projection(splits: int, data: st.DataObject) -> None:
    batch, seed = data.draw(decode_batches(DECODE, BOTH))
    check_projected(DECODE, batch, seed, splits=splits)


def test_two_owners_of_one_block() -> None:
    """A hidden row from the left, a hidden row from the right, in one block (BROS 5.1)."""
    rng = np.random.default_rng(6)
    batch = make_batch(DECODE, [(5, 1), (3, 1)], [LEFT, RIGHT], 2, rng, kinds=[HIDDEN] * 2)
    batch = dataclasses.replace(batch, tables=batch.tables.at[1].set(batch.tables[0]))
    check_absorbed(DECODE, batch, 6)
    check_projected(DECODE, batch, 6)


def test_absorbed_over_shards_sums_the_scores() -> None:
    """Two shards of E, as tensor parallelism cuts it, with the sum over a mapped axis."""
    shape = dataclasses.replace(DECODE, kv_heads=4, num_heads=4)
    rng = np.random.default_rng(9)
    batch = make_batch(shape, [(70, 1), (9, 1)], [LEFT, RIGHT], 2, rng, kinds=[HIDDEN] * 2)
    pool = make_pool(shape, batch, rng, jnp.float32)
    wide = dataclasses.replace(shape, head_dim=shape.head_dim * shape.kv_heads)
    qx = vectors(wide, shape.num_heads, rng, jnp.float32)

    def one_shard(qx: jax.Array, pool: jax.Array) -> jax.Array:
        return INTERPRET_BACKEND.absorbed(
            qx,
            pool,
            jnp.int32(1),
            batch,
            scale=0.1,
            sliding_window=None,
            soft_cap=2.0,
            axis_name="tensor",
        )

    shards = jnp.stack(jnp.split(qx, 2, axis=2)), jnp.stack(jnp.split(pool, 2, axis=2))
    got = jnp.concatenate(list(jax.vmap(one_shard, axis_name="tensor")(*shards)), axis=2)
    want = reference.absorbed_attention(qx, pool, 1, batch, scale=0.1, soft_cap=2.0)
    compare(got, want, counted_tokens(batch, decodes=True), 1e-5)
