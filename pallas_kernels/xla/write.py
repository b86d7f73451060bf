"""Writes and moves of slots in plain XLA operations: scatters that update the pool in place, or a
backend's own function for that."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxserve.pallas_kernels.batch import HIDDEN, RIGHT, AttentionBatch

Put = Callable[..., jax.Array]


def put_vectors(
    pool: jax.Array,
    layer: jax.Array | int | None,
    blocks: jax.Array,
    slots: jax.Array,
    values: jax.Array,
) -> jax.Array:
    """Writes vectors into slots of one layer, or of all.

    Args:
        pool: [layers, blocks, kv_heads, block_size, head_dim], or without the last axis, as scales
            are.
        layer: Index of the layer; None for all.
        blocks, slots: int32, broadcast to [...]. Blocks beyond the pool's are dropped.
        values: [..., kv_heads, head_dim] in the pool's dtype, or [..., layers, kv_heads, head_dim]
            for all layers.
    """
    where = slice(None) if layer is None else layer
    return pool.at[where, blocks, :, slots].set(values, mode="drop")


def write(
    pool: jax.Array,
    layer: jax.Array | int,
    k: jax.Array,
    v: jax.Array,
    x: jax.Array | None,
    batch: AttentionBatch,
    *,
    put: Put = put_vectors,
) -> jax.Array:
    """See `attention.write`: k, v and x [T, kv_heads, head_dim], or [T, kv_heads] into a pool of
    scales, into their slots of the layer, by one `put`."""
    blocks, block_size = pool.shape[1], pool.shape[3]
    rows = jnp.minimum(batch.token_row, batch.max_rows - 1)
    index = jnp.arange(batch.max_tokens, dtype=jnp.int32) - batch.query_start[rows]
    position = batch.context_lens[rows] - batch.query_lens[rows] + index
    offset = position % block_size
    slot = jnp.where(batch.direction[rows] == RIGHT, block_size - 1 - offset, offset)
    entry = jnp.clip(position // block_size, 0, batch.table_width - 1)
    ids = batch.tables[rows, :, entry]
    # Padding tokens go to a block that does not exist: the scatter drops them.
    ids = jnp.where((batch.token_row < batch.max_rows)[:, None], ids, blocks)
    if x is not None:
        hidden = batch.kind[rows] == HIDDEN
        k = jnp.where(jnp.expand_dims(hidden, range(1, k.ndim)), x, k)
        ids = ids.at[:, 1].set(jnp.where(hidden, blocks, ids[:, 1]))
    values = jnp.stack([k, v], axis=1).astype(pool.dtype)
    return put(pool, layer, ids, slot[:, None], values)


def move(
    pool: jax.Array, moves: jax.Array, count: jax.Array, *, put: Put = put_vectors
) -> jax.Array:
    """See `move.move_slots`: the first `count` of moves int32 [M, 4], staged through a copy of
    them."""
    return stage_in(pool, stage_out(pool, moves[:, :2], count), moves[:, 2:], count, put=put)


def stage_out(pool: jax.Array, slots: jax.Array, count: jax.Array) -> jax.Array:
    """See `move.stage_out`: slots int32 [M, 2] -> [M, layers, kv_heads, head_dim]."""
    blocks = jnp.where(jnp.arange(len(slots)) < count, slots[:, 0], pool.shape[1])
    return pool.at[:, blocks, :, slots[:, 1]].get(mode="fill", fill_value=0)


def stage_in(
    pool: jax.Array,
    staging: jax.Array,
    slots: jax.Array,
    count: jax.Array,
    *,
    put: Put = put_vectors,
) -> jax.Array:
    """See `move.stage_in`: staging [M, layers, kv_heads, head_dim] into slots int32 [M, 2]."""
    blocks = jnp.where(jnp.arange(len(slots)) < count, slots[:, 0], pool.shape[1])
    return put(pool, None, blocks, slots[:, 1], staging)
