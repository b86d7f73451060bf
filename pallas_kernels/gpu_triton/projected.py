"""Projected attention over cached hidden vectors on Pallas-Triton (Apt-Serve section 4.2).

K = rotate(norm(x Wk + bk)) and V = x Wv + bv of a tile of context are computed in registers, used
and dropped. K is kept as two halves of head_dim, which the rotation pairs element by element:
neither the rotation nor the scores (q1 . k1 + q2 . k2) then move anything between lanes.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxserve.pallas_kernels import online_softmax
from jaxserve.pallas_kernels.backends import Scoring
from jaxserve.pallas_kernels.batch import HIDDEN, AttentionBatch
from jaxserve.pallas_kernels.gpu_triton import common, tuning
from jaxserve.pallas_kernels.gpu_triton.merge import Parts, run_shares, store_segment
from jaxserve.pallas_kernels.gpu_triton.stream_k import Segment, for_each_segment, unpacked
from jaxserve.pallas_kernels.gpu_triton.tiles import (
    QueryTiles,
    Sizes,
    Tile,
    Work,
    place_in_tile,
    plan_work,
    seen_by,
    tile_of,
)
from jaxserve.pallas_kernels.hidden import HiddenProjection
from jaxserve.pallas_kernels.online_softmax import Softmax, dot
from jaxserve.pallas_kernels.pool import Pool, read_as


@dataclasses.dataclass(frozen=True)
class Options(common.Options):
    """The options of all kernels, and those of the projection.

    Attributes:
        norm_eps: Added to the mean square of K's RMS norm.
        queries: Rows of a query tile.
        members: How many of these rows can be query tokens.
        chunk: Elements of x in one step of the projection, a power of two.
    """

    norm_eps: float
    queries: int
    members: int
    chunk: int

    @property
    def half(self) -> int:
        """Elements of half a head."""
        return self.geometry.head_dim // 2

    @property
    def padded_half(self) -> int:
        """`half` padded for Triton to a power of two, at least 16."""
        return max(16, common.power_of_two(self.half))

    @property
    def chunks_per_head(self) -> int:
        """Chunks of head_dim elements of x, which are contiguous in a block."""
        return common.cdiv(self.geometry.head_dim, self.chunk)


class Weights(NamedTuple):
    """The arrays of a `HiddenProjection` as refs.

    Attributes:
        wk, wv: [E, N * D].
        bk, bv: [N * D], or None.
        k_norm: float32 [D], or None.
        rotation: float32 [2, max_len, D / 2], or None.
    """

    wk: common.Ref
    wv: common.Ref
    bk: common.Ref | None
    bv: common.Ref | None
    k_norm: common.Ref | None
    rotation: common.Ref | None


def _columns(size: int, padded: int) -> tuple[jax.Array, jax.Array]:
    """(0 to padded - 1 as int32 [1, padded], which of them are below size)."""
    column = lax.broadcasted_iota(jnp.int32, (1, padded), 1)
    return column, column < size


def _load_row(ref: common.Ref, first: jax.Array | int, size: int, padded: int) -> jax.Array:
    """ref [X] from `first` on, float32 [1, padded]; zeros past size."""
    column, mask = _columns(size, padded)
    return plgpu.load(ref.at[first + column], mask=mask, other=0).astype(jnp.float32)


def _project(
    weights: Weights,
    pool: common.PoolRefs,
    first_rows: jax.Array,  # int32 [N], of head 0
    inside: jax.Array,  # bool [N]
    head: jax.Array,
    dtype: jnp.dtype,
    options: Options,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x Wk, in halves, and x Wv of a tile: float32 [N, padded half] twice and [N, padded D]."""
    geometry = options.geometry
    width, half = geometry.head_dim, options.half
    k_column, in_half = _columns(half, options.padded_half)
    v_column, in_width = _columns(width, geometry.padded_dim)
    steps = jnp.int32(options.chunks_per_head)
    within = jnp.arange(options.chunk, dtype=jnp.int32)

    def one_chunk(c: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        block_head, column = lax.div(c, steps), lax.rem(c, steps) * options.chunk + within
        real = column < width
        rows = first_rows + block_head * geometry.block_size
        at = pool.values.at[rows[:, None], column[None, :]]
        x = common.widened(plgpu.load(at, mask=inside[:, None] & real[None, :], other=0), dtype)
        scales = pool.load_scales(rows, inside)
        if scales is not None:
            x = online_softmax.scaled(x.astype(jnp.float32), scales, axis=0).astype(dtype)
        row = (block_head * width + column)[:, None]

        def part(
            ref: common.Ref, first: jax.Array, place: jax.Array, exists: jax.Array
        ) -> jax.Array:
            at, mask = ref.at[row, first + place], real[:, None] & exists
            return dot(x, plgpu.load(at, mask=mask, other=0).astype(x.dtype))

        first, second, v = state
        return (
            first + part(weights.wk, head * width, k_column, in_half),
            second + part(weights.wk, head * width + half, k_column, in_half),
            v + part(weights.wv, head * width, v_column, in_width),
        )

    zeros = jnp.zeros((options.tile, options.padded_half), jnp.float32)
    start = (zeros, zeros, jnp.zeros((options.tile, geometry.padded_dim), jnp.float32))
    chunks = geometry.kv_heads * options.chunks_per_head
    first, second, v = lax.fori_loop(0, chunks, one_chunk, start)
    return first, second, v


def _finish_k(
    weights: Weights,
    first: jax.Array,
    second: jax.Array,
    position: jax.Array,
    inside: jax.Array,
    head: jax.Array,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """Bias, norm and rotation of K's halves, float32 [N, padded half]."""
    width, half, padded = options.geometry.head_dim, options.half, options.padded_half
    if weights.bk is not None:
        first = first + _load_row(weights.bk, head * width, half, padded)
        second = second + _load_row(weights.bk, head * width + half, half, padded)
    if weights.k_norm is not None:
        squares = (first * first + second * second).sum(axis=1)
        fade = lax.rsqrt(squares / width + options.norm_eps)[:, None]
        first = first * fade * _load_row(weights.k_norm, 0, half, padded)
        second = second * fade * _load_row(weights.k_norm, half, half, padded)
    if weights.rotation is not None:
        column, in_half = _columns(half, padded)
        mask = inside[:, None] & in_half
        cos, sin = (
            plgpu.load(
                weights.rotation.at[jnp.int32(which), position[:, None], column],
                mask=mask,
                other=0,
            )
            for which in (0, 1)
        )
        first, second = first * cos - second * sin, second * cos + first * sin
    return first, second


def _load_q(
    q_ref: common.Ref, tile: Tile, options: Options, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """The tile's queries, in halves: [M, padded half] twice."""
    column, in_half = _columns(options.half, options.padded_half)
    rows, mask = tile.rows[:, None], tile.used[:, None] & in_half
    first = plgpu.load(q_ref.at[rows, column], mask=mask, other=0).astype(dtype)
    second = plgpu.load(q_ref.at[rows, column + options.half], mask=mask, other=0).astype(dtype)
    return first, second


def _attend(
    batch: common.BatchRefs,
    tile: Tile,
    bounds: tuple[jax.Array, jax.Array],
    head: jax.Array,
    weights: Weights,
    q_ref: common.Ref,  # [T * N, D]
    pool: common.PoolRefs,
    options: Options,
) -> Softmax:
    """The softmax of a tile's queries over tiles of context [bounds)."""
    geometry, dtype = options.geometry, read_as(pool.dtype, q_ref.dtype)
    q_first, q_second = _load_q(q_ref, tile, options, dtype)
    context = common.context_of(batch, geometry, tile.row)

    def walk(j: jax.Array, state: Softmax) -> Softmax:
        position = j * options.tile + jnp.arange(options.tile, dtype=jnp.int32)
        inside = (position >= tile.lower) & (position < tile.upper)
        rows = context.pool_rows(0, 0, position, inside)
        first, second, v = _project(weights, pool, rows, inside, head, dtype, options)
        first, second = _finish_k(weights, first, second, position, inside, head, options)
        if weights.bv is not None:
            width, padded = geometry.head_dim, geometry.padded_dim
            v = v + _load_row(weights.bv, head * width, width, padded)
        products = dot(q_first, first.astype(dtype), transposed=True)
        products += dot(q_second, second.astype(dtype), transposed=True)
        scores = online_softmax.prepare(products, options.scoring)
        scores = jnp.where(
            seen_by(tile, position, options.scoring.sliding_window), scores, -jnp.inf
        )
        return online_softmax.step(state, scores, v.astype(dtype))

    return lax.fori_loop(*bounds, walk, online_softmax.start(options.queries, geometry.padded_dim))


def _kernel(*refs: common.Ref, options: Options, given: tuple[str, ...]) -> None:
    """refs: the batch, the tiles, the shares, q [T * N, D], the pool, the weights that are `given`,
    the output [T * N, D] and the parts. Programs after those with shares write zeros."""
    batch, tiles, shares, (q_ref, *rest) = unpacked(refs, 2)
    pool, arrays = common.take_pool(rest, options.geometry)
    by_name = dict(zip(given, arrays, strict=False))
    weights = Weights(*(by_name.get(name) for name in Weights._fields))
    out_ref, *parts = arrays[len(given) :]
    behind = pl.program_id(0) - shares.first.shape[0]

    def attend(segment: Segment) -> None:
        tile = tile_of(
            batch,
            QueryTiles(*tiles),
            segment.item,
            segment.head,
            queries=options.queries,
            group=1,
            num_heads=options.num_heads,
            sliding_window=options.scoring.sliding_window,
        )
        first = lax.div(tile.lower, jnp.int32(options.tile))
        bounds = first + segment.begin, first + segment.end
        state = _attend(batch, tile, bounds, segment.head, weights, q_ref, pool, options)
        used = tile.used & (jnp.arange(options.queries, dtype=jnp.int32) < options.members)
        store_segment(out_ref, Parts(*parts), segment, state, tile.rows, used, options.members)

    for_each_segment(shares, attend)

    @pl.when(behind >= 0)
    def _zeros() -> None:
        common.store_zeros(batch, out_ref, behind, HIDDEN, options.num_heads)


def _tile_sizes(tokens: int, launch: tuning.Launch, decode_only: bool) -> tuple[int, int]:
    """(rows of a tile of queries, how many can be query tokens) in a bucket of so many tokens."""
    queries = max(16, min(launch.queries, common.power_of_two(tokens)))
    return queries, 1 if decode_only else queries


def _launch(itemsize: int, geometry: common.Geometry, decode_only: bool) -> tuning.Launch:
    name = "projected_decode" if decode_only else "projected"
    return tuning.launch(name, itemsize, geometry.padded_dim)


def plan(
    batch: AttentionBatch,
    geometry: common.Geometry,
    itemsize: int,
    num_heads: int,
    *,
    sliding_window: int | None,
    decode_only: bool,
) -> Work:
    """Plans `projected`: all hidden rows, decodes and chunks.

    Args:
        batch: The batch that will attend.
        geometry: The pool's geometry.
        itemsize: Bytes of the pool's elements.
        num_heads: Query heads of one shard.
        sliding_window: Positions that a token sees; None for all.
        decode_only: T == R, and token i is row i's only token.
    """
    launch = _launch(itemsize, geometry, decode_only)
    _, tokens = _tile_sizes(batch.max_tokens, launch, decode_only)
    sizes = Sizes(tokens, launch.tile, batch.table_width * geometry.block_size, sliding_window)
    row = jnp.arange(batch.max_rows, dtype=jnp.int32)
    hidden = (batch.kind == HIDDEN) & (row < batch.num_rows)
    return plan_work(batch, jnp.where(hidden, batch.query_lens, 0), num_heads, sizes, launch)


def projected(
    q: jax.Array,
    pool: Pool,
    layer: jax.Array | int,
    batch: AttentionBatch,
    projection: HiddenProjection,
    work: Work,
    *,
    scoring: Scoring,
    decode_only: bool,
    interpret: bool = False,
) -> jax.Array:
    """See `backends.Backend.projected`: q [T, N, D] -> the same shape; zeros for tokens of rows
    that are not hidden. work: what `plan` gives for this batch and these options."""
    tokens, num_heads, head_dim = q.shape
    geometry = common.geometry_of(pool)
    launch = _launch(pool.dtype.itemsize, geometry, decode_only)
    queries, members = _tile_sizes(tokens, launch, decode_only)
    options = Options(
        geometry,
        num_heads,
        scoring,
        launch.tile,
        projection.norm_eps,
        queries=queries,
        members=members,
        chunk=min(launch.chunk, geometry.padded_dim),
    )
    arrays = {name: getattr(projection, name) for name in Weights._fields}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    out = jax.ShapeDtypeStruct((tokens * num_heads, head_dim), q.dtype)
    done = run_shares(
        functools.partial(_kernel, options=options, given=tuple(arrays)),
        layer,
        batch,
        work.shares,
        (q.reshape(out.shape), *common.pool_arguments(pool), *arrays.values()),
        out,
        launch,
        functools.partial(place_in_tile, group=1, num_heads=num_heads),
        others=work.tiles,
        members=members,
        width=geometry.padded_dim,
        zeros=common.zero_programs(tokens, num_heads),
        interpret=interpret,
        name="projected",
    )
    return done.reshape(q.shape)
