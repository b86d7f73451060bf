"""Writing a step's K, V or hidden vectors into their slots on TPU: the slot of each token."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxserve.pallas_kernels.batch import HIDDEN, RIGHT, AttentionBatch
from jaxserve.pallas_kernels.tpu.common import granule_of
from jaxserve.pallas_kernels.tpu.granules import NOBODY, PLANES, Puts, granules, put_vectors


class WritePlan(NamedTuple):
    """The plan of a write.

    Attributes:
        values: Writes to the values of a pool, by its granules.
        scales: Writes to its scales, by blocks; None if it has none.
    """

    values: Puts
    scales: Puts | None


def _candidates(batch: AttentionBatch, size: int) -> int:
    """The most granules of one plane, of `size` slots each, that a batch can touch."""
    spread = batch.max_tokens // size + 2 * min(batch.max_rows, batch.max_tokens)
    return min(batch.max_tokens, spread)


def plan(
    batch: AttentionBatch, shape: tuple[int, ...], dtype: DTypeLike, *, hidden: bool
) -> WritePlan:
    """See `backends.Backend.plan_write`: a plan for `granules.put_vectors`, with k, v and x as its
    arrays."""
    scales = _puts(batch, shape[3], shape[3], hidden) if jnp.dtype(dtype) == jnp.int8 else None
    return WritePlan(_puts(batch, shape[3], granule_of(dtype), hidden), scales)


def _puts(batch: AttentionBatch, block_size: int, size: int, hidden: bool) -> Puts:
    # A row's tokens touch consecutive granules, in units counted along its positions.
    start = batch.context_lens - batch.query_lens
    used = jnp.arange(batch.max_rows) < batch.num_rows
    lens = jnp.where(used, batch.query_lens, 0)
    first = start // size
    touched = jnp.where(lens > 0, (start + lens - 1) // size - first + 1, 0)
    ends = jnp.cumsum(touched)
    item = jnp.arange(_candidates(batch, size), dtype=jnp.int32)
    row = jnp.searchsorted(ends, item, side="right").astype(jnp.int32)
    valid = row < batch.max_rows
    row = jnp.minimum(row, batch.max_rows - 1)
    stretch = first[row] + item - (ends - touched)[row]

    position = stretch[:, None] * size + jnp.arange(size, dtype=jnp.int32)
    index = position - start[row][:, None]
    brings = valid[:, None] & (index >= 0) & (index < lens[row][:, None])
    token = batch.query_start[row][:, None] + index
    mirrored = batch.direction[row] == RIGHT
    offset = position % size
    slot = jnp.where(mirrored[:, None], size - 1 - offset, offset)
    entry = jnp.clip(stretch * size // block_size, 0, batch.table_width - 1)
    granule = stretch % (block_size // size)
    granule = jnp.where(mirrored, block_size // size - 1 - granule, granule)

    is_hidden = (batch.kind[row] == HIDDEN) & hidden
    targets, sources = [], []
    for plane in (0, 1):
        mine = valid & ~(is_hidden & (plane == 1))
        block = batch.tables[row, plane, entry]
        targets.append(jnp.where(mine, block * (block_size // size) + granule, NOBODY))
        which = jnp.where(is_hidden, 2, plane)[:, None]
        sources.append(jnp.where(brings & mine[:, None], token * PLANES + which, NOBODY))
    return granules(
        jnp.concatenate(targets), jnp.tile(slot, (2, 1)), jnp.concatenate(sources), size
    )


def write(
    pool: jax.Array,
    layer: jax.Array | int,
    k: jax.Array,
    v: jax.Array,
    x: jax.Array | None,
    batch: AttentionBatch,
    plan: WritePlan,
    *,
    interpret: bool,
) -> jax.Array:
    """See `attention.write`: k, v and x [T, kv_heads, head_dim] into their slots of the layer, a
    granule at a time."""
    values = [value.astype(pool.dtype)[:, None] for value in (k, v, x) if value is not None]
    return put_vectors(pool, layer, values, plan.values, interpret=interpret)
