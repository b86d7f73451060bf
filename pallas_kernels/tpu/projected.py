"""Attention over cached hidden vectors that are projected on the fly, on TPU (Mosaic).

For rotary models (Apt-Serve section 4.2): a chunk of x becomes K and V of a few heads in VMEM, with
bias, norm and rotation, is attended over as in flash attention and dropped; nothing is written
back. A program holds the columns of Wk and Wv of its heads; each group of heads reads x again,
which costs little beside the arithmetic (E multiply-adds for each element of K and V).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from jaxserve.pallas_kernels.backends import Scoring
from jaxserve.pallas_kernels.batch import HIDDEN, AttentionBatch
from jaxserve.pallas_kernels.hidden import HiddenProjection
from jaxserve.pallas_kernels.pool import Pool, read_as
from jaxserve.pallas_kernels.tpu import common, softmax, tiles, tuning
from jaxserve.pallas_kernels.tpu import stream as tpu_stream
from jaxserve.pallas_kernels.tpu.stream import (
    Buffer,
    Signals,
    Stream,
    buffer_of,
    pool_spec,
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The static part of computing K and V.

    Attributes:
        heads: Heads of a program.
        norm_eps: Added to the mean square of K's RMS norm; None for no norm.
        rotary: Whether K is rotated.
    """

    heads: int
    norm_eps: float | None
    rotary: bool


def _rotation(rotation: jax.Array, chunk: common.Chunk) -> jax.Array:
    """float32 [2, max_len, D // 2] -> [2 directions, 2, chunks * tokens, D]: (cos, cos) and (-sin,
    sin), so that a rotated k is k * first + swapped k * second; the second direction's blocks
    mirrored, as its vectors lie."""
    length = -(-chunk.width // chunk.blocks) * chunk.tokens
    rotation = rotation[:, :length]
    cos, sin = jnp.pad(rotation, ((0, 0), (0, length - rotation.shape[1]), (0, 0)))
    table = jnp.stack([jnp.concatenate([cos, cos], axis=1), jnp.concatenate([-sin, sin], axis=1)])
    mirrored = table.reshape(2, -1, chunk.block_size, table.shape[2])[:, :, ::-1]
    return jnp.stack([table, mirrored.reshape(table.shape)])


def _rotations(
    recipe: Recipe,
    chunk: common.Chunk,
    items: Any,
    rotation: Any,
    turned: Any,
    arrived: Any,
    i: jax.Array,
    j: jax.Array,
    half: jax.Array,
) -> list[Any]:
    """The copy of item i's rotations for chunk j, if there are any; refs as in `_kernel`."""
    if not recipe.rotary:
        return []
    start = pl.multiple_of(j * chunk.tokens, chunk.block_size)
    source = rotation.at[items[common.SIDE, i], :, pl.ds(start, chunk.tokens)]
    return [pltpu.make_async_copy(source, turned.at[half], arrived.at[half])]


def _make(
    recipe: Recipe,
    x: Buffer,
    half: jax.Array,  # of x
    weights: tuple[Any, Any],  # Wk, Wv: VMEM [E, heads * head_dim]
    bias: Any,  # VMEM float32 [2, heads * head_dim]
    norm: Any,  # VMEM float32 [1, head_dim]
    turned: Any,  # VMEM float32 [2, tokens, head_dim], this chunk's
    own: jax.Array,  # bool [tokens, 1]
    sums: tuple[Any, Any],  # VMEM float32 [tokens, heads * head_dim]
    k: Any,  # VMEM [heads, tokens, head_dim]
    v: Any,  # like k
) -> None:
    """Fill k and v from a chunk of x; v zero where not own."""
    parts, head_dim = x.values.shape[1], x.values.shape[3]
    for which, total in enumerate(sums):
        total[...] = jnp.broadcast_to(bias[which : which + 1], total.shape)

    @pl.loop(0, parts)
    def _(part: jax.Array) -> None:
        rows = pl.ds(pl.multiple_of(part * head_dim, head_dim), head_dim)
        vectors = x.vectors((half, part), k.dtype)
        scales = x.scales_of(half, pl.ds(part, 1))
        if scales is not None:
            column = jnp.broadcast_to(scales[0], (8, vectors.shape[0])).T[:, :1]
            column = jnp.where(own, column, 0.0)
            vectors = (vectors.astype(jnp.float32) * column).astype(k.dtype)
        for weight, total in zip(weights, sums, strict=True):
            total[...] += softmax.dot(vectors, weight[rows])

    for head in range(recipe.heads):
        columns = slice(head * head_dim, (head + 1) * head_dim)
        key = sums[0][:, columns]
        if recipe.norm_eps is not None:
            mean_square = jnp.mean(key * key, axis=1, keepdims=True)
            key = key * lax.rsqrt(mean_square + recipe.norm_eps) * norm[...]
        if recipe.rotary:
            key = key * turned[0] + _swapped(key) * turned[1]
        k[head] = key.astype(k.dtype)
        v[head] = jnp.where(own, sums[1][:, columns], 0.0).astype(v.dtype)


def _swapped(key: jax.Array) -> jax.Array:
    """The halves of [tokens, head_dim] exchanged."""
    half = key.shape[1] // 2
    if key.shape[1] % common.LANES == 0:
        return pltpu.roll(key, half, 1)
    return jnp.concatenate([key[:, half:], key[:, :half]], axis=1)


def _kernel(  # refs are of the pool's dtype where none is named
    items: Any,  # SMEM int32 [7, N]
    layer: Any,  # SMEM int32 [1]
    q: Any,  # VMEM [heads, 1, tile / 16, 16, head_dim], the item's queries
    wk: Any,  # VMEM [E, heads * head_dim]
    wv: Any,  # like wk
    bias: Any,  # VMEM float32 [2, heads * head_dim]
    norm: Any,  # VMEM float32 [1, head_dim]
    rotation: Any,  # HBM float32 [2, 2, positions, head_dim]
    tables: Any,  # HBM int32 [R, 1, 2 * W]
    pool: Any,  # HBM [layers, blocks, parts, block_size, head_dim]
    out: Any,  # HBM [H, 1, units, 16, head_dim], of the output's dtype
    x: Buffer,
    turned: Any,  # VMEM float32 [2, 2, tokens, head_dim]
    k_sum: Any,  # VMEM float32 [tokens, heads * head_dim]
    v_sum: Any,  # like k_sum
    k: Any,  # VMEM [heads, tokens, head_dim]
    v: Any,  # like k
    peak: Any,  # VMEM float32 [heads, tile, 128]
    total: Any,  # like peak
    acc: Any,  # VMEM float32 [heads, tile, head_dim]
    done: Any,  # VMEM [heads, 1, tile, head_dim], of the output's dtype
    signals: Signals,
    sent: Any,  # DMA semaphore
    pending: Any,  # SMEM int32 [1]
    *,
    chunk: common.Chunk,
    options: common.Options,
    recipe: Recipe,
) -> None:
    h, i, window = pl.program_id(0), pl.program_id(1), options.sliding_window
    state, tile = (peak, total, acc), done.shape[2]
    beside = functools.partial(_rotations, recipe, chunk, items, rotation, turned, signals.arrived)
    count = pl.num_programs(1)
    stream = Stream(chunk, window, (items, layer), tables, pool, (x,), signals, 0, 0, count, beside)
    outputs = tiles.Outputs(items, done, out, sent, pending, recipe.heads)
    low, high = common.bounds(items, i, window)
    softmax.reset(state)

    def use(j: jax.Array, half: jax.Array) -> None:
        at = chunk.positions(j, items[common.SIDE, i], 0)
        own = (at >= low) & (at < high)
        _make(recipe, x, half, (wk, wv), bias, norm, turned.at[half], own, (k_sum, v_sum), k, v)
        at = chunk.positions(j, items[common.SIDE, i], 1)
        seen = tiles.seen_by(items, i, at, 1, tile, window)[None]

        @pl.loop(0, recipe.heads)
        def _(n: jax.Array) -> None:
            one = pl.ds(n, 1)
            queries = q[one].reshape(1, tile, chunk.head_dim)
            softmax.update(state, one, queries, k[one], v[one], seen, options)

    stream.walk(i, use)
    outputs.put(h, i, softmax.finished(state))


def _cut(
    shape: tuple[int, ...], dtype: DTypeLike, width: int, decode_only: bool, interpret: bool
) -> tuple[common.Chunk, int]:
    """The chunks of a pool of this shape, for tables of `width` entries, and the queries of a
    tile."""
    sizes = tuning.sizes(dtype, interpret)
    tile = tiles.ALIGNED if decode_only else sizes.tile
    return common.make_chunk(shape, dtype, shape[2], width, sizes), tile


def plan(
    batch: AttentionBatch,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    *,
    sliding_window: int | None,
    decode_only: bool,
    interpret: bool,
) -> tiles.Tiles:
    """Plans `projected`: all hidden rows, decodes and chunks.

    Args:
        batch: The batch that will attend.
        shape: The pool's.
        dtype: The pool's.
        sliding_window: Positions that a token sees; None for all.
        decode_only: T == R, and token i is row i's only token.
        interpret: Run in the interpreter.
    """
    chunk, tile = _cut(shape, dtype, batch.table_width, decode_only, interpret)
    live = (batch.kind == HIDDEN) & (batch.query_lens > 0)
    live &= jnp.arange(batch.max_rows) < batch.num_rows
    return tiles.make_tiles(batch, live, tile, chunk, sliding_window)


def projected(
    q: jax.Array,
    pool: Pool,
    layer: jax.Array | int,
    batch: AttentionBatch,
    projection: HiddenProjection,
    plan: tiles.Tiles,
    *,
    scoring: Scoring,
    decode_only: bool,
    interpret: bool,
) -> jax.Array:
    """See `attention.projected_attention`: q [T, H, D] -> the same."""
    options = common.Options.from_scoring(scoring, interpret)
    sizes = tuning.sizes(pool.dtype, interpret)
    num_heads, head_dim = q.shape[1:]
    parts = pool.shape[2]
    width = parts * head_dim
    dtype = read_as(pool.dtype, q.dtype)
    most = sizes.weight_bytes // (width * head_dim * dtype.itemsize)
    heads = common.most_a_program(
        num_heads, most, sizes.cores, common.LANES // math.gcd(common.LANES, head_dim)
    )
    chunk, tile = _cut(pool.shape, pool.dtype, batch.table_width, decode_only, interpret)
    layout, work = plan
    queries = layout.gather(q.astype(dtype), num_heads)
    recipe, made = _operands(projection, dtype, chunk, heads, head_dim)
    call = pl.pallas_call(
        functools.partial(_kernel, chunk=chunk, options=options, recipe=recipe),
        out_shape=jax.ShapeDtypeStruct(queries.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_heads // heads, work.number),
            in_specs=[
                tiles.query_spec(heads, 1, tile, head_dim),
                *_specs(width, heads, head_dim),
                common.HBM,
                pool_spec(pool),
            ],
            out_specs=common.ANY,
            scratch_shapes=[
                buffer_of(chunk, pool),
                *_scratch(chunk, recipe, tile, dtype, q.dtype),
            ],
        ),
        compiler_params=common.compiler(sizes, 1),
        interpret=common.interpreted(interpret),
        name="projected",
    )
    return layout.scatter(call(*work.scalars(layer), queries, *made, work.tables, pool))


def _operands(
    projection: HiddenProjection, dtype: Any, chunk: common.Chunk, heads: int, head_dim: int
) -> tuple[Recipe, tuple[jax.Array, ...]]:
    """The recipe, and wk, wv, bias, norm and rotation as the kernel takes them."""
    columns = projection.wk.shape[1]
    biases = [
        jnp.zeros(columns, jnp.float32) if b is None else b.astype(jnp.float32)
        for b in (projection.bk, projection.bv)
    ]
    norm, rotation = projection.k_norm, projection.rotation
    recipe = Recipe(heads, None if norm is None else projection.norm_eps, rotation is not None)
    if norm is None:
        norm = jnp.ones(head_dim, jnp.float32)
    if rotation is None:
        turned = jnp.zeros((1, 1, 8, common.LANES), jnp.float32)
    else:
        turned = _rotation(rotation, chunk)
    made = projection.wk.astype(dtype), projection.wv.astype(dtype), jnp.stack(biases)
    return recipe, (*made, norm.reshape(1, head_dim), turned)


def _specs(width: int, heads: int, head_dim: int) -> list[pl.BlockSpec]:
    """Block specs of wk, wv, bias, norm and rotation."""
    weight = pl.BlockSpec((width, heads * head_dim), lambda h, i, *_: (0, h))
    bias = pl.BlockSpec((2, heads * head_dim), lambda h, i, *_: (0, h))
    norm = pl.BlockSpec((1, head_dim), lambda h, i, *_: (0, 0))
    return [weight, weight, bias, norm, common.ANY]


def _scratch(
    chunk: common.Chunk, recipe: Recipe, tile: int, dtype: Any, out_dtype: Any
) -> list[Any]:
    """Scratch shapes behind x, in the order of the kernel's arguments."""
    heads, head_dim = recipe.heads, chunk.head_dim
    sums = pltpu.VMEM((chunk.tokens, heads * head_dim), jnp.float32)
    made = pltpu.VMEM((heads, chunk.tokens, head_dim), dtype)
    return [
        pltpu.VMEM((2, 2, chunk.tokens, head_dim), jnp.float32),
        sums,
        sums,
        made,
        made,
        *softmax.scratch(heads, tile, head_dim),
        pltpu.VMEM((heads, 1, tile, head_dim), out_dtype),
        tpu_stream.signals(chunk),
        pltpu.SemaphoreType.DMA,
        pltpu.SMEM((1,), jnp.int32),
    ]
