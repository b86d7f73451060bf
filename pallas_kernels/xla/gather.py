"""Reading chunks of a row's blocks with gathers that XLA's CPU compiler turns into plain copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxserve.pallas_kernels.batch import RIGHT, AttentionBatch
from jaxserve.pallas_kernels.pool import Pool, ScaledPool, join_halves, widen


class Runs(NamedTuple):
    """A layer's blocks as contiguous runs.

    Attributes:
        values: [X, E], the pool.
        scales: float32 [X, E'], its scales; None if it has none.
        of: (block ids [N, chunk]) -> the indices of their runs, in order.
    """

    values: jax.Array
    scales: jax.Array | None
    of: Callable[[jax.Array], jax.Array]


def chunk_blocks(tokens: int, block_size: int, batch: AttentionBatch) -> int:
    """Blocks of a chunk of about `tokens` tokens of context."""
    return min(max(1, tokens // block_size), batch.table_width)


def in_token_order(chunk: int, block_size: int, direction: jax.Array) -> jax.Array:
    """The token in each slot of a chunk of blocks, counted from the chunk's first token, int32 [N,
    chunk * block_size], for directions [N]."""
    slot = jnp.arange(chunk * block_size, dtype=jnp.int32)
    mirrored = slot + block_size - 1 - 2 * (slot % block_size)
    return jnp.where(direction[:, None] == RIGHT, mirrored, slot)


def runs(pool: Pool, layer: jax.Array | int, chunk: int) -> Runs:
    """How to gather chunks of blocks as [N, kv_heads, chunk * block_size, D]. A single block is one
    run; with several blocks, each head's part of a block is a run."""
    layers, blocks, kv_heads, block_size, head_dim = pool.shape
    parts = 1 if chunk == 1 else kv_heads
    number, vectors = layers * blocks * parts, kv_heads // parts * block_size

    def of(ids: jax.Array) -> jax.Array:
        part = jnp.arange(parts, dtype=jnp.int32)[:, None]
        return ((ids[:, None, :] + layer * blocks) * parts + part).reshape(-1)

    if isinstance(pool, ScaledPool):
        values = pool.values.reshape(number, vectors * head_dim)
        return Runs(values, pool.scales.reshape(number, vectors), of)
    return Runs(pool.reshape(number, vectors * head_dim), None, of)


def _gather(flat: jax.Array, ids: jax.Array) -> jax.Array:
    """flat [X, E], ids [N] in [0, X) -> [N, E], a copy of N contiguous runs."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    promise = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return lax.gather(flat, ids[:, None], numbers, (1, flat.shape[1]), mode=promise)


def gather_runs(
    block_runs: Runs,
    ids: list[jax.Array],
    shape: tuple[int, int, int, int],
    own: jax.Array,
    all_own: jax.Array,
    dtype: DTypeLike,
    halves: int = 0,
) -> list[jax.Array]:
    """Gathers K and V, or hidden vectors, of a chunk of context.

    Both branches end in a flat copy, which the reshape outside cannot be fused into; that alone
    saves a quarter of the time.

    Args:
        block_runs: From `runs`.
        ids: Indices of the runs, int32, for each array to gather.
        shape: [N, kv_heads, S, D] of each array.
        own: bool, broadcasts to shape [..., 1]: slots that hold the row's tokens. Other slots of
            values are zeroed, those of the last array, or of all with `halves`, since a weight of 0
            times NaN is NaN.
        all_own: bool [], whether `own` is true throughout: then, as usual, nothing is zeroed.
        dtype: Dtype of the result.
        halves: See `Scoring`; the result are then the keys alone, in which values come first.
    """
    last = len(ids) if halves else 1
    values, scales, _ = block_runs
    # A NaN is in the vector's scale, if it has one, else in its values.
    telling, cut, mine = (
        (values, shape, own) if scales is None else (scales, shape[:3], own[..., 0])
    )

    def plain(_: None) -> list[jax.Array]:
        return [_gather(telling, i) for i in ids]

    def cleaned(_: None) -> list[jax.Array]:
        def clean(v: jax.Array) -> jax.Array:
            return jnp.where(mine, v.reshape(cut), jnp.zeros((), v.dtype)).reshape(v.shape)

        keys = [_gather(telling, i) for i in ids[:-last]]
        return [*keys, *(clean(_gather(telling, i)) for i in ids[-last:])]

    gathered_scales = [array.reshape(cut) for array in lax.cond(all_own, plain, cleaned, None)]
    found: list[tuple[jax.Array, jax.Array | None]]
    if scales is None:
        found = [(array, None) for array in gathered_scales]
    else:
        gathered = (_gather(values, i).reshape(shape) for i in ids)
        found = list(zip(gathered, gathered_scales, strict=True))
    if halves:
        k, v = found
        return [join_halves(k, v, dtype, halves)]
    return [widen(*vectors, dtype) for vectors in found]
