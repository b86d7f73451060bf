"""Absorbed attention over cached hidden vectors on TPU (Mosaic): one shared x for all heads.

With Wk folded into the query beforehand, the raw x_i are both keys and values (absorption:
DeepSeek-V2, section 2.1.2; the hidden cache: Apt-Serve section 4.2). x [E] lies in the pool as
`parts` heads of head_dim. If the accumulator [H, E] fits in VMEM, one pass over x is enough.
Otherwise, or if E is cut over devices and scores have to be summed over them, there are two:
scores, softmax in XLA, sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from jaxserve.pallas_kernels.backends import Scoring
from jaxserve.pallas_kernels.batch import HIDDEN, AttentionBatch
from jaxserve.pallas_kernels.pool import Pool, read_as
from jaxserve.pallas_kernels.tpu import absorbed_two_pass as passes
from jaxserve.pallas_kernels.tpu import common, softmax, tuning
from jaxserve.pallas_kernels.tpu.stream import Buffer, Signals, clean_ends
from jaxserve.pallas_kernels.tpu.tuning import Sizes


def _one_pass(  # refs are of the pool's dtype where none is named
    items: Any,  # SMEM int32 [7, R]
    layer: Any,  # SMEM int32 [1]
    cuts: Any,  # SMEM int32 [cores + 1]
    q: Any,  # VMEM [1, parts, H, head_dim], the item's row
    tables: Any,  # HBM int32 [R, 1, 2 * W]
    pool: Any,  # HBM [layers, blocks, parts, block_size, head_dim]
    out: Any,  # VMEM like q, of the output's dtype
    x: Buffer,
    sums: Any,  # VMEM float32 [H, tokens]
    peak: Any,  # VMEM float32 [1, H, 128]
    total: Any,  # like peak
    acc: Any,  # VMEM float32 [parts, H, head_dim]
    signals: Signals,
    *,
    chunk: common.Chunk,
    options: common.Options,
) -> None:
    state, window = (peak, total, acc), options.sliding_window
    chunks = passes.stream(chunk, window, (items, layer, cuts), tables, pool, x, signals)

    def one_item(i: jax.Array) -> None:
        low, _ = common.bounds(items, i, window)
        softmax.reset(state)

        def use(j: jax.Array, half: jax.Array) -> None:
            clean_ends(chunk, items, i, j, x, half, window)
            at = chunk.positions(j, items[common.SIDE, i], 1)
            seen = (at >= low) & (at <= items[common.FIRST, i])
            scores = softmax.scored(passes.products(q, x, half, sums), seen, options)
            weights, fade = softmax.weigh(scores[None], peak, total, ...)

            def one(part: jax.Array) -> None:
                added = passes.weighted(weights[0], x, half, part, seen, q.dtype)
                acc[part] = acc[part] * fade[0] + added

            passes.by_parts(chunk.heads, one)

        chunks.walk(i, use)
        out[0] = (acc[...] / total[...][..., :1]).astype(out.dtype)

    passes.each_item(cuts, one_item)


def _fits(queries: jax.Array, chunk: common.Chunk, sizes: Sizes) -> bool:
    """Whether one pass fits in VMEM: q and out twice each, x twice, the accumulator, the scores."""
    _, parts, num_heads, head_dim = queries.shape
    row = parts * num_heads * common.padded(head_dim)
    x = 2 * parts * chunk.tokens * common.padded(head_dim)
    scores = 3 * num_heads * chunk.tokens * 4
    return (4 * row + x) * queries.dtype.itemsize + row * 4 + scores <= sizes.vmem * 9 // 10


class Plan(NamedTuple):
    """The work of hidden decodes, for one pass or for two. A step runs one of them, and the other's
    plan is never computed.

    Attributes:
        live: bool [R], which rows are hidden decodes.
        token: int32 [R], their tokens; past the end of the token axis for other rows.
        rows: The work of one pass, an item per row.
        chunks: The work of two passes, an item per chunk of a row.
    """

    live: jax.Array
    token: jax.Array
    rows: passes.Shares
    chunks: passes.Shares


def plan(
    batch: AttentionBatch,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    num_heads: int,
    *,
    sliding_window: int | None,
    interpret: bool,
) -> Plan:
    """See `backends.Backend.plan_absorbed`."""
    row = jnp.arange(batch.max_rows, dtype=jnp.int32)
    live = (batch.kind == HIDDEN) & (row < batch.num_decodes)
    sizes = tuning.sizes(dtype, interpret)
    chunk = common.make_chunk(shape, dtype, shape[2], batch.table_width, sizes)
    items, number = common.decode_items(live, batch, chunk, sliding_window)
    width = -(-batch.table_width // chunk.blocks)
    rows, chunks = passes.share(items, number, batch, width, sizes.cores)
    token = jnp.where(live, batch.query_start, batch.max_tokens)
    return Plan(live, token, rows, chunks)


def absorbed(
    qx: jax.Array,
    pool: Pool,
    layer: jax.Array | int,
    batch: AttentionBatch,
    plan: Plan,
    *,
    scoring: Scoring,
    axis_name: str | None = None,
    interpret: bool,
) -> jax.Array:
    """See `attention.absorbed_attention`: qx [T, H, E] -> the same. Raises ValueError if the items
    do not fit in scalar memory."""
    options = common.Options.from_scoring(scoring, interpret)
    sizes = tuning.sizes(pool.dtype, interpret)
    num_heads = qx.shape[1]
    rows, parts, head_dim = batch.max_rows, pool.shape[2], pool.shape[4]
    queries = qx.at[plan.token].get(mode="fill", fill_value=0).astype(read_as(pool.dtype, qx.dtype))
    queries = queries.reshape(rows, num_heads, parts, head_dim).transpose(0, 2, 1, 3)
    chunk = common.make_chunk(pool.shape, pool.dtype, parts, batch.table_width, sizes)
    if axis_name is not None or not _fits(queries, chunk, sizes):
        out = passes.two_passes(
            queries, pool, layer, batch, plan.live, plan.chunks, options, axis_name
        )
    else:
        spec = passes.by_item((1, *queries.shape[1:]), common.ROW)
        out = passes.launch(
            _one_pass,
            plan.rows,
            layer,
            queries,
            pool,
            (spec, spec),
            jax.ShapeDtypeStruct(queries.shape, qx.dtype),
            [
                pltpu.VMEM((num_heads, chunk.tokens), jnp.float32),
                pltpu.VMEM((1, num_heads, common.LANES), jnp.float32),
                pltpu.VMEM((1, num_heads, common.LANES), jnp.float32),
                pltpu.VMEM((parts, num_heads, head_dim), jnp.float32),
            ],
            sizes,
            chunk,
            options,
        )
    out = out.transpose(0, 2, 1, 3).reshape(rows, *qx.shape[1:]).astype(qx.dtype)
    return jnp.zeros_like(qx).at[plan.token].set(out, mode="drop")
