"""Absorbed attention over cached hidden vectors on Pallas-Triton.

One x for all heads, as key and as value: scores q_h . x_i, then sum_i a_i x_i (the hidden cache of
Apt-Serve section 4.2, with the projections folded into the query and the output as in DeepSeek-V2,
section 2.1.2). The accumulator [heads, E] fits in no SM, so there are two passes over x: scores by
tiles of tokens; weights; weighted sums by slices of E, which leaves no partial results to merge.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxserve.pallas_kernels import online_softmax, tuned
from jaxserve.pallas_kernels.batch import HIDDEN, AttentionBatch
from jaxserve.pallas_kernels.triton_common import (
    BatchRefs,
    Geometry,
    Ref,
    as_rows,
    batch_arguments,
    cdiv,
    context_of,
    decode_row,
    geometry_of,
    load_rows,
    power_of_two,
)

KERNELS = ("absorbed_scores", "absorbed_weights", "absorbed_sums")
MAX_HEADS = 128  # all of them are one tile of a matrix unit


class Options(NamedTuple):
    """What the kernels are compiled for, besides shapes."""

    geometry: Geometry
    num_heads: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    tile: int  # tokens of context a program (scores) or an iteration (weighted sums) takes
    slice: int  # elements of x of one program of the weighted sums, at most the padded head_dim

    @property
    def padded_heads(self) -> int:
        """Heads as a matrix unit's tile has them."""
        return max(16, power_of_two(self.num_heads))

    @property
    def slices_per_head(self) -> int:
        """Slices of the head_dim elements that lie together in a block."""
        return cdiv(self.geometry.head_dim, self.slice)


def _lower(length: jax.Array, options: Options) -> jax.Array:
    """The first position that the newest of `length` tokens sees."""
    if options.sliding_window is None:
        return jnp.int32(0)
    return jnp.maximum(length - options.sliding_window, 0)


def _scores_kernel(*refs: Ref, options: Options) -> None:
    """refs: the batch, qx [T * H, E], the pool's rows; raw scores out, float32 [R * H, C]."""
    fields = len(BatchRefs._fields)
    batch = BatchRefs(*refs[:fields])
    qx_ref, pool_ref, scores_ref = refs[fields:]
    tile, row = pl.program_id(0), pl.program_id(1)
    length, token = decode_row(batch, row, HIDDEN)
    begin = tile * options.tile

    @pl.when((begin < length) & (begin + options.tile > _lower(length, options)))
    def _score() -> None:
        _scores_of_tile(batch, row, begin, length, token, qx_ref, pool_ref, scores_ref, options)


def _scores_of_tile(
    batch: BatchRefs,
    row: jax.Array,
    begin: jax.Array,
    length: jax.Array,
    token: jax.Array,
    qx_ref: Ref,  # [T * H, E]
    pool_ref: Ref,  # [rows, D]
    scores_ref: Ref,  # [R * H, C]
    options: Options,
) -> None:
    geometry = options.geometry
    width, padded = geometry.head_dim, geometry.padded_dim
    member = jnp.arange(options.padded_heads, dtype=jnp.int32)[:, None]
    column = jnp.arange(padded, dtype=jnp.int32)[None, :]
    wanted = (member < options.num_heads) & (column < width)
    position = begin + jnp.arange(options.tile, dtype=jnp.int32)
    inside = position < length
    first_rows = context_of(batch, geometry, row).pool_rows(0, 0, position, inside)

    def one_head(head: jax.Array, acc: jax.Array) -> jax.Array:
        at = qx_ref.at[token * options.num_heads + member, head * width + column]
        q = plgpu.load(at, mask=wanted, other=0).astype(pool_ref.dtype)
        x = load_rows(pool_ref, first_rows + head * geometry.block_size, inside, width, padded)
        return acc + online_softmax.dot(q, x, transposed=True)

    acc = jnp.zeros((options.padded_heads, options.tile), jnp.float32)
    acc = lax.fori_loop(0, geometry.kv_heads, one_head, acc)
    at = scores_ref.at[row * options.num_heads + member, position[None, :]]
    plgpu.store(at, acc, mask=jnp.broadcast_to(member < options.num_heads, acc.shape))


def _weights_kernel(*refs: Ref, options: Options, tile: int) -> None:
    """One head of one row. refs: the batch, raw scores [R * H, C]; exp2 of the scores less their
    peak out, [R * H, C], and their sum, float32 [R * H]."""
    fields = len(BatchRefs._fields)
    scores_ref, weights_ref, total_ref = refs[fields:]
    head, row = pl.program_id(0), pl.program_id(1)
    length, _ = decode_row(BatchRefs(*refs[:fields]), row, HIDDEN)
    lower, at = _lower(length, options), row * options.num_heads + head

    def load(j: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        position = j * tile + jnp.arange(tile, dtype=jnp.int32)
        seen = (position >= lower) & (position < length)
        products = plgpu.load(scores_ref.at[at, position], mask=seen, other=0)
        scores = online_softmax.prepare(products, options.scale, options.soft_cap)
        return jnp.where(seen, scores, -jnp.inf), position, seen

    def highest(j: jax.Array, peak: jax.Array) -> jax.Array:
        return jnp.maximum(peak, load(j)[0])

    begin, end = lax.div(lower, jnp.int32(tile)), cdiv(length, tile)
    start = jnp.full((tile,), online_softmax.NOTHING_SEEN, jnp.float32)
    peak = lax.fori_loop(begin, end, highest, start).max(axis=0)

    def weigh(j: jax.Array, total: jax.Array) -> jax.Array:
        scores, position, seen = load(j)
        # Summed as they are stored, so that rounding does not shift the mean.
        weights = jnp.exp2(scores - peak).astype(weights_ref.dtype)
        plgpu.store(weights_ref.at[at, position], weights, mask=seen)
        return total + weights.astype(jnp.float32)

    total = lax.fori_loop(begin, end, weigh, jnp.zeros((tile,), jnp.float32))
    total_ref[at] = total.sum(axis=0)


def _sums_kernel(*refs: Ref, options: Options) -> None:
    """One slice of one token's output. refs: the batch, weights [R * H, C], their sums [R * H], the
    pool's rows; the output [T * H, E]."""
    fields = len(BatchRefs._fields)
    batch = BatchRefs(*refs[:fields])
    weights_ref, total_ref, pool_ref, out_ref = refs[fields:]
    geometry = options.geometry
    part, token = pl.program_id(0), pl.program_id(1)
    row = batch.token_row[token]
    used = row < batch.context_lens.shape[0]
    row = jnp.where(used, row, 0)
    length = jnp.where(used, decode_row(batch, row, HIDDEN)[0], 0)
    lower = _lower(length, options)
    head = lax.div(part, jnp.int32(options.slices_per_head))
    column = lax.rem(part, jnp.int32(options.slices_per_head)) * options.slice
    column = column + jnp.arange(options.slice, dtype=jnp.int32)[None, :]
    member = jnp.arange(options.padded_heads, dtype=jnp.int32)
    is_head, in_width = member < options.num_heads, column < geometry.head_dim
    context = context_of(batch, geometry, row)

    def one_tile(j: jax.Array, acc: jax.Array) -> jax.Array:
        position = j * options.tile + jnp.arange(options.tile, dtype=jnp.int32)
        seen = (position >= lower) & (position < length)
        at = weights_ref.at[(row * options.num_heads + member)[:, None], position[None, :]]
        weights = plgpu.load(at, mask=is_head[:, None] & seen[None, :], other=0)
        rows = context.pool_rows(0, head, position, seen)
        x = plgpu.load(pool_ref.at[rows[:, None], column], mask=seen[:, None] & in_width, other=0)
        return acc + online_softmax.dot(weights, x)

    begin, end = lax.div(lower, jnp.int32(options.tile)), cdiv(length, options.tile)
    acc = jnp.zeros((options.padded_heads, options.slice), jnp.float32)
    acc = lax.fori_loop(begin, end, one_tile, acc)
    active = is_head & (length > 0)
    total = plgpu.load(total_ref.at[row * options.num_heads + member], mask=active, other=1.0)
    at = out_ref.at[
        (token * options.num_heads + member)[:, None], head * geometry.head_dim + column
    ]
    mask = is_head[:, None] & in_width
    plgpu.store(at, (acc / total[:, None]).astype(out_ref.dtype), mask=mask)


def absorbed(
    qx: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    axis_name: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `backends.Backend.absorbed`: qx [T, H, E] -> the same shape, zeros for tokens that are
    not hidden decodes. axis_name: qx and the pool have a slice of E, scores are summed over it."""
    tokens, num_heads, width = qx.shape
    geometry, rows, size = geometry_of(pool), batch.max_rows, pool.dtype.itemsize
    launches = {name: tuned.launch(name, size, geometry.padded_dim) for name in KERNELS}
    scores_tile, weights_tile, sums_tile = (launch.tile for launch in launches.values())
    options = Options(
        geometry,
        num_heads,
        scale,
        sliding_window,
        soft_cap,
        tuned.absorbed_tile(rows, batch.table_width * geometry.block_size, scores_tile),
        tuned.absorbed_slice(rows * geometry.kv_heads, geometry.padded_dim),
    )
    fields = batch_arguments(layer, batch)
    tiles = cdiv(batch.table_width * geometry.block_size, options.tile)
    spread = (rows * num_heads, tiles * options.tile)
    call = functools.partial(_call, launches, options, interpret)
    scores = call(
        functools.partial(_scores_kernel, options=options),
        grid=(tiles, rows),
        out_shape=jax.ShapeDtypeStruct(spread, jnp.float32),
        name="absorbed_scores",
    )(*fields, qx.reshape(-1, width), as_rows(pool))
    if axis_name is not None:
        scores = _sum_over_shards(scores, batch, axis_name)
    weights, total = call(
        functools.partial(_weights_kernel, options=options, tile=weights_tile),
        grid=(num_heads, rows),
        out_shape=(
            jax.ShapeDtypeStruct(spread, pool.dtype),
            jax.ShapeDtypeStruct((rows * num_heads,), jnp.float32),
        ),
        name="absorbed_weights",
    )(*fields, scores)
    out = call(
        functools.partial(_sums_kernel, options=options._replace(tile=sums_tile)),
        grid=(geometry.kv_heads * options.slices_per_head, tokens),
        out_shape=jax.ShapeDtypeStruct((tokens * num_heads, width), qx.dtype),
        name="absorbed_sums",
    )(*fields, weights, total, as_rows(pool))
    return out.reshape(qx.shape)


def _sum_over_shards(scores: jax.Array, batch: AttentionBatch, axis_name: str) -> jax.Array:
    """scores [R * H, C] summed over the shards, as far as the longest context of a hidden decode
    reaches: up to an eighth, a quarter, half or all of what a table has room for."""
    mine = (batch.kind == HIDDEN) & (jnp.arange(batch.max_rows) < batch.num_decodes)
    longest = jnp.max(jnp.where(mine, batch.context_lens, 0))
    sizes = sorted({max(1, scores.shape[1] // part) for part in (8, 4, 2, 1)})

    def up_to(size: int, scores: jax.Array) -> jax.Array:
        summed = lax.psum(scores[:, :size], axis_name)
        return lax.dynamic_update_slice(scores, summed, (0, 0))

    shorter = sum((longest > size).astype(jnp.int32) for size in sizes[:-1])
    return lax.switch(shorter, [functools.partial(up_to, size) for size in sizes], scores)


def _call(
    launches: dict[str, tuned.Launch],
    options: Options,
    interpret: bool,
    kernel: Any,
    *,
    name: str,
    **more: Any,
) -> Any:
    """The pallas_call of one of KERNELS. Tiles of more than 64 heads take twice the warps, and
    leave shared memory for one stage less."""
    launch, tall = launches[name], options.padded_heads > 64
    params = plgpu.CompilerParams(
        num_warps=launch.warps * (2 if tall else 1),
        num_stages=max(1, launch.stages - 1) if tall else launch.stages,
    )
    return pl.pallas_call(kernel, compiler_params=params, interpret=interpret, name=name, **more)
