"""Writes and moves of slots in plain XLA operations: scatters that update the pool in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.pallas_kernels.batch import HIDDEN, RIGHT, AttentionBatch


def write(
    pool: jax.Array,
    layer: jax.Array | int,
    k: jax.Array,
    v: jax.Array,
    x: jax.Array | None,
    batch: AttentionBatch,
) -> jax.Array:
    """See `attention.write`: k, v and x [T, kv_heads, head_dim] into their slots of the layer, by
    one scatter."""
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
        k = jnp.where(hidden[:, None, None], x, k)
        ids = ids.at[:, 1].set(jnp.where(hidden, blocks, ids[:, 1]))
    values = jnp.stack([k, v], axis=1).astype(pool.dtype)
    return pool.at[layer, ids, :, slot[:, None]].set(values, mode="drop")


def move(pool: jax.Array, moves: jax.Array, count: jax.Array) -> jax.Array:
    """See `move.move_slots`: the first `count` of moves int32 [M, 4], staged through a copy of
    them."""
    return stage_in(pool, stage_out(pool, moves[:, :2], count), moves[:, 2:], count)


def stage_out(pool: jax.Array, slots: jax.Array, count: jax.Array) -> jax.Array:
    """See `move.stage_out`: slots int32 [M, 2] -> [M, layers, kv_heads, head_dim]."""
    blocks = jnp.where(jnp.arange(len(slots)) < count, slots[:, 0], pool.shape[1])
    return pool.at[:, blocks, :, slots[:, 1]].get(mode="fill", fill_value=0)


def stage_in(pool: jax.Array, staging: jax.Array, slots: jax.Array, count: jax.Array) -> jax.Array:
    """See `move.stage_in`: staging [M, layers, kv_heads, head_dim] into slots int32 [M, 2]."""
    blocks = jnp.where(jnp.arange(len(slots)) < count, slots[:, 0], pool.shape[1])
    return pool.at[:, blocks, :, slots[:, 1]].set(staging, mode="drop")
