"""Pool writes against the reference, exactly, and what they must leave alone."""

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
    make_pool,
    paged_attention,
    read_tokens,
    reference,
    write,
)
from tests.kernels import batches
from tests.kernels.batches import Shape, make_batch, mixed_batches, vectors
from tests.kernels.test_attention import DECODES, GQA, MIXED

write_jitted = jax.jit(write)
write_donated = jax.jit(write, donate_argnums=0)


def check(shape: Shape, batch: AttentionBatch, seed: int, dtype: jnp.dtype) -> None:
    rng = np.random.default_rng(seed)
    pool = batches.make_pool(shape, batch, rng, dtype)
    padding = (batch.token_row == shape.rows)[:, None, None]
    k, v = (
        jnp.where(padding, jnp.nan, vectors(shape, shape.kv_heads, rng, jnp.float32))
        for _ in range(2)
    )
    layer = seed % shape.layers
    x = jnp.where(padding, jnp.nan, vectors(shape, shape.kv_heads, rng, jnp.float32))
    want = reference.write(pool, layer, k, v, x, batch)
    given = {"x": x} if batch.kind.any() else {}
    got = write_donated(pool, jnp.int32(layer), k, v, batch, **given)
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got).astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_write(dtype: jnp.dtype, data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([DECODES[0], GQA, DECODES[3], *MIXED[:2]]))
    kinds = data.draw(st.sampled_from([[KV], [KV, HIDDEN]]))
    batch, seed = data.draw(mixed_batches(shape, kinds))
    check(shape, batch, seed, dtype)


def test_two_owners_of_one_block() -> None:
    """A KV row fills its K block from the left, a hidden row the same block from the right: both
    write in one step, and nothing else changes."""
    shape = Shape(num_heads=2, kv_heads=2, rows=2, tokens=8, width=1)
    rng = np.random.default_rng(6)
    batch = make_batch(shape, [(5, 5), (3, 3)], [LEFT, RIGHT], 0, rng, kinds=[KV, HIDDEN])
    tables = batch.tables.at[1, 0].set(batch.tables[0, 0])
    check(shape, dataclasses.replace(batch, tables=tables), 0, jnp.float32)


def test_what_is_written_is_read_back() -> None:
    shape = Shape(num_heads=2, kv_heads=2, rows=2, tokens=30, width=3)
    rng = np.random.default_rng(0)
    batch = make_batch(shape, [(17, 17), (13, 13)], [LEFT, RIGHT], 0, rng)
    pool = make_pool(2, shape.blocks, 2, shape.block_size, shape.head_dim, jnp.float32)
    k, v = vectors(shape, 2, rng, jnp.float32), vectors(shape, 2, rng, jnp.float32)
    pool = write_jitted(pool, 1, k, v, batch)
    for row, start, end in ((0, 0, 17), (1, 17, 30)):
        for kind, value in ((0, k), (1, v)):
            table = np.asarray(batch.tables[row, kind])
            found = read_tokens(pool, 1, table, end - start, int(batch.direction[row]))
            np.testing.assert_array_equal(found, np.asarray(value[start:end]))
    assert not np.asarray(pool[0]).any()


def test_chunks_then_decodes_equal_one_dense_attention() -> None:
    """A prompt in three uneven chunks beside a decoding row, then decode steps: each token's
    output is that of causal attention over all tokens at once."""
    shape = Shape(num_heads=4, kv_heads=2, rows=2, tokens=20, width=5, layers=1)
    rng = np.random.default_rng(1)
    total = (40, 30)
    q = [rng.standard_normal((n, 4, shape.head_dim), dtype=np.float32) for n in total]
    k, v = (
        [rng.standard_normal((n, 2, shape.head_dim), dtype=np.float32) for n in total]
        for _ in range(2)
    )
    steps = [[(7, 7), (0, 0)], [(8, 1), (19, 19)], [(9, 1), (27, 8)], [(10, 1), (28, 1)]]
    steps += [[(10 + i, 1), (28 + i, 1)] for i in (1, 2)]
    pool = jnp.full((1, shape.blocks, 2, shape.block_size, shape.head_dim), jnp.nan)
    attend = jax.jit(functools.partial(paged_attention, scale=0.25, decode_only=False))
    out = [np.zeros_like(item) for item in q]
    first = make_batch(shape, [(1, 1), (1, 1)], [RIGHT, LEFT], 0, rng)
    for rows in steps:
        decodes = sum(length == 1 for _, length in rows)
        batch = make_batch(shape, rows, [RIGHT, LEFT], decodes, rng)
        batch = dataclasses.replace(batch, tables=first.tables)

        def flat(items: list[np.ndarray], rows: list[tuple[int, int]] = rows) -> jax.Array:
            parts = [x[c - n : c] for x, (c, n) in zip(items, rows, strict=True)]
            joined = np.concatenate(parts)
            return jnp.asarray(np.pad(joined, ((0, 20 - len(joined)), (0, 0), (0, 0))))

        pool = write_jitted(pool, 0, flat(k), flat(v), batch)
        got = np.asarray(attend(flat(q), pool, 0, batch))
        start = 0
        for row, (context, length) in enumerate(rows):
            out[row][context - length : context] = got[start : start + length]
            start += length
    for row, done in enumerate((12, 30)):
        for i in range(done):
            want = reference._one_token(
                q[row][i].astype(np.float64), k[row][: i + 1], v[row][: i + 1], 0.25, None
            )
            assert np.linalg.norm(out[row][i] - want) < 1e-5 * np.linalg.norm(want)


def test_writes_in_a_scan_are_in_place() -> None:
    """The engine's pattern: layers scanned with the donated pool as carry. A copy of the pool
    would show as temporary memory of its size."""
    shape = Shape(num_heads=2, kv_heads=2, rows=4, tokens=4, width=4, layers=3)
    batch = make_batch(shape, [(9, 1), (32, 1)], [LEFT, RIGHT], 2, np.random.default_rng(2))
    x = jax.ShapeDtypeStruct((4, 2, shape.head_dim), jnp.float32)

    def step(pool: jax.Array, x: jax.Array, batch: AttentionBatch) -> tuple[jax.Array, jax.Array]:
        def layer(
            carry: tuple[jax.Array, jax.Array], i: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], None]:
            pool, x = carry
            pool = write(pool, i, x, x, batch)
            return (pool, paged_attention(x, pool, i, batch, scale=1.0, decode_only=True)), None

        (pool, x), _ = jax.lax.scan(layer, (pool, x), jnp.arange(3))
        return pool, x

    pool = jax.ShapeDtypeStruct((3, 4000, 2, shape.block_size, shape.head_dim), jnp.float32)
    memory = jax.jit(step, donate_argnums=0).lower(pool, x, batch).compile().memory_analysis()
    size = pool.size * 4
    assert memory is not None
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size // 4
