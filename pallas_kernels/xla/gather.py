"""Reading chunks of a row's blocks with gathers that XLA's CPU compiler turns into plain copies."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.pallas_kernels.batch import RIGHT, AttentionBatch

RunsOf = Callable[[jax.Array], jax.Array]


def chunk_blocks(tokens: int, block_size: int, batch: AttentionBatch) -> int:
    """Blocks of a chunk of about `tokens` tokens of context."""
    return min(max(1, tokens // block_size), batch.table_width)


def in_token_order(chunk: int, block_size: int, direction: jax.Array) -> jax.Array:
    """The token that each slot of a chunk of blocks holds, counted from the chunk's first, int32
    [N, chunk * block_size], for directions [N]."""
    slot = jnp.arange(chunk * block_size, dtype=jnp.int32)
    mirrored = slot + block_size - 1 - 2 * (slot % block_size)
    return jnp.where(direction[:, None] == RIGHT, mirrored, slot)


def runs(pool: jax.Array, layer: jax.Array | int, chunk: int) -> tuple[jax.Array, RunsOf]:
    """How to gather chunks of blocks as [N, kv_heads, chunk * block_size, D]: (flat, runs_of).

    flat [X, E] is the pool as runs to copy, runs_of(ids [N, chunk]) their indices in order. A
    single block is one run already; of more, each head's part is one.
    """
    layers, blocks, kv_heads, block_size, head_dim = pool.shape
    parts = 1 if chunk == 1 else kv_heads
    flat = pool.reshape(layers * blocks * parts, kv_heads // parts * block_size * head_dim)

    def runs_of(ids: jax.Array) -> jax.Array:
        part = jnp.arange(parts, dtype=jnp.int32)[:, None]
        return ((ids[:, None, :] + layer * blocks) * parts + part).reshape(-1)

    return flat, runs_of


def _gather(flat: jax.Array, ids: jax.Array) -> jax.Array:
    """flat [X, E], ids [N] in [0, X) -> [N, E], a copy of N contiguous runs."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    promise = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return lax.gather(flat, ids[:, None], numbers, (1, flat.shape[1]), mode=promise)


def gather_runs(
    flat: jax.Array,
    ids: list[jax.Array],
    shape: tuple[int, int, int, int],
    own: jax.Array,
    all_own: jax.Array,
) -> list[jax.Array]:
    """Gathers K and V, or hidden vectors, of a chunk of context.

    Both branches end in a flat copy, which the reshape outside cannot be fused into; that alone
    saves a quarter of the time.

    Args:
        flat: [X, E], the pool as runs (see `runs`).
        ids: Indices of the runs, int32, for each array to gather.
        shape: [N, kv_heads, S, D] of each array.
        own: bool, broadcasts to shape: slots that hold the row's tokens. Others are zeroed in the
            last array, since a weight of 0 times NaN is NaN.
        all_own: bool [], whether `own` is true throughout: then, as usual, nothing is zeroed.
    """

    def plain(_: None) -> list[jax.Array]:
        return [_gather(flat, i) for i in ids]

    def cleaned(_: None) -> list[jax.Array]:
        v = _gather(flat, ids[-1])
        clean = jnp.where(own, v.reshape(shape), 0).reshape(v.shape)
        return [*(_gather(flat, i) for i in ids[:-1]), clean]

    return [found.reshape(shape) for found in lax.cond(all_own, plain, cleaned, None)]
