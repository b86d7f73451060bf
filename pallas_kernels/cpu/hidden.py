"""Attention over hidden vectors on CPUs. The kernels for new tokens turn them into blocks of K and
V in the pool's dtype, which the attention over K and V then reads. So a row has the same bits with
either kind of cache."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.pallas_kernels.backends import Scoring
from jaxserve.pallas_kernels.batch import HIDDEN, KV, AttentionBatch
from jaxserve.pallas_kernels.cpu.attention import paged_attention
from jaxserve.pallas_kernels.hidden import HiddenProjection, project
from jaxserve.pallas_kernels.pool import Pool, ScaledPool, quantize_vectors, saturating_cast
from jaxserve.pallas_kernels.xla.gather import chunk_blocks, gather_runs, in_token_order, runs

CONTEXT = 128  # tokens projected at once


def projected_attention(
    q: jax.Array,
    pool: Pool,
    layer: jax.Array | int,
    batch: AttentionBatch,
    projection: HiddenProjection,
    *,
    scoring: Scoring,
    decode_only: bool,
) -> jax.Array:
    """See `attention.projected_attention`: q [T, H, D] -> the same. Rows are processed one after
    another: the K and V of a row are overwritten by the next row's."""
    heads, (parts, block_size, head_dim) = q.shape[1], pool.shape[2:]
    chunk = chunk_blocks(CONTEXT, block_size, batch)
    width, chunks = chunk * block_size, -(-batch.table_width // chunk)
    blocks = chunks * chunk
    block_runs = runs(pool, layer, chunk)
    tables = jnp.pad(batch.tables[:, 0], ((0, 0), (0, blocks - batch.table_width)))
    places = jnp.arange(2 * blocks, dtype=jnp.int32).reshape(1, 2, blocks)

    def made(row: jax.Array, room: Pool) -> Pool:
        """The room, filled with K and then V of everything that the row's queries can see."""
        context, first = batch.context_lens[row], jnp.int32(0)
        if scoring.sliding_window is not None:
            first = jnp.maximum(context - batch.query_lens[row] - scoring.sliding_window + 1, 0)
        slots = in_token_order(chunk, block_size, batch.direction[row][None])[0]

        def one_chunk(j: jax.Array, room: Pool) -> Pool:
            ids = lax.dynamic_slice_in_dim(tables[row], j * chunk, chunk)
            shape, all_of_it = (1, parts, width, head_dim), jnp.ones((width, 1), bool)
            (x,) = gather_runs(
                block_runs,
                [block_runs.of(ids[None])],
                shape,
                all_of_it,
                jnp.bool_(True),
                jnp.float32,
            )
            x = x[0].transpose(1, 0, 2).reshape(width, parts * head_dim)
            for plane, vectors in enumerate(project(x, j * width + slots, projection, heads)):
                vectors = vectors.reshape(heads, chunk, block_size, head_dim)
                room = _put(room, vectors.transpose(1, 0, 2, 3), plane * blocks + j * chunk)
            return room

        return lax.fori_loop(first // width, -(-context // width), one_chunk, room)

    def one_row(row: jax.Array, state: tuple[jax.Array, Pool]) -> tuple[jax.Array, Pool]:
        def add(state: tuple[jax.Array, Pool]) -> tuple[jax.Array, Pool]:
            out, room = state
            room = made(row, room)
            alone = dataclasses.replace(
                batch,
                tables=places,
                **{name: getattr(batch, name)[row][None] for name in _OF_ROWS},
                kind=jnp.full(1, KV, jnp.int32),
                token_row=jnp.where(batch.token_row == row, 0, 1),
            )
            done = paged_attention(q, room, 0, alone, scoring=scoring, decode_only=decode_only)
            return out + done, room

        hidden = (batch.kind[row] == HIDDEN) & (batch.query_lens[row] > 0)
        return lax.cond(hidden, add, lambda state: state, state)

    room = jax.tree.map(
        lambda one: jnp.zeros((1, 2 * blocks, heads, *one.shape[3:]), one.dtype), pool
    )
    return lax.fori_loop(0, batch.num_rows, one_row, (jnp.zeros_like(q), room))[0]


_OF_ROWS = ("context_lens", "query_start", "query_lens", "direction")


def _put(room: Pool, vectors: jax.Array, at: jax.Array) -> Pool:
    """The room with vectors [blocks, heads, block_size, D] from this block on."""

    def put(array: jax.Array, new: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(array, new[None], at, axis=1)

    if not isinstance(room, ScaledPool):
        return put(room, saturating_cast(vectors, room.dtype))
    values, scales = quantize_vectors(vectors)
    return ScaledPool(put(room.values, values), put(room.scales, scales))
