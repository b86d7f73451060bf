"""Absorbed attention over cached hidden vectors on Pallas-Triton.

One x for all heads, as key and as value: scores q_h . x_i, then sum_i a_i x_i (the hidden cache of
Apt-Serve section 4.2, with the projections folded into the query and the output as in DeepSeek-V2,
section 2.1.2). The accumulator [heads, E] does not fit in an SM, so there are two passes over x:
scores, then for each slice of E a running softmax over them and its weighted sums. Both are cut
into equal shares of all contexts (`stream_k`); partial sums of a slice are merged.
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
from jaxserve.pallas_kernels.gpu_triton.stream_k import (
    Segment,
    Shares,
    cut,
    for_each_segment,
    unpacked,
)
from jaxserve.pallas_kernels.online_softmax import Softmax
from jaxserve.pallas_kernels.pool import Pool, read_as
from jaxserve.pallas_kernels.sharding import sum_as_far

MAX_HEADS = 128  # all of them are one tile of a matrix unit
PIECES = 4  # of scores; shards sum pieces up to the longest context
MAX_SLICE = 128  # elements of x for which all heads' sums fit into registers


@dataclasses.dataclass(frozen=True)
class Options(common.Options):
    """The options of all kernels, and how x is sliced.

    Attributes:
        dtype: Dtype of sums over x.
    """

    dtype: jnp.dtype

    @property
    def padded_heads(self) -> int:
        """Heads, padded to a matrix unit's tile."""
        return _padded_heads(self.num_heads)

    @property
    def slices(self) -> int:
        """Slices of the whole of x."""
        return _slices(self.geometry)


class Plan(NamedTuple):
    """The work of both passes.

    Attributes:
        scores: Of the first pass. Items are rows; one tile serves all heads.
        sums: Of the second pass. Items are rows; slices of x take the place of heads.
    """

    scores: Shares
    sums: Shares


def _padded_heads(num_heads: int) -> int:
    return max(16, common.power_of_two(num_heads))


def _slice(geometry: common.Geometry) -> int:
    """Elements of x of one accumulator, contiguous in a block."""
    return MAX_SLICE if geometry.head_dim % MAX_SLICE == 0 else geometry.head_dim


def _slices(geometry: common.Geometry) -> int:
    return geometry.kv_heads * (geometry.head_dim // _slice(geometry))


def _launch(kernel: str, itemsize: int, geometry: common.Geometry, num_heads: int) -> tuning.Launch:
    """The sizes of a kernel. Tiles of more than 64 heads take twice the warps, and leave shared
    memory for one stage less."""
    launch = tuning.launch(kernel, itemsize, geometry.padded_dim)
    if _padded_heads(num_heads) <= 64:
        return launch
    return dataclasses.replace(
        launch, warps=2 * launch.warps, stages=max(1, launch.stages - 1), resident=1
    )


def plan(
    batch: AttentionBatch,
    geometry: common.Geometry,
    itemsize: int,
    num_heads: int,
    *,
    sliding_window: int | None,
) -> Plan:
    """Plans `absorbed`. An item is a row of the batch.

    Args:
        batch: The batch that will attend.
        geometry: The pool's geometry.
        itemsize: Bytes of the pool's elements.
        num_heads: Query heads.
        sliding_window: Positions that a token sees; None for all.
    """
    row = jnp.arange(batch.max_rows, dtype=jnp.int32)
    mine = (batch.kind == HIDDEN) & (batch.query_lens > 0) & (row < batch.num_decodes)
    length = jnp.where(mine, batch.context_lens, 0)
    # A token takes one slot, since hidden caches are not shared.
    tokens = min(batch.max_rows * batch.table_width, geometry.blocks) * geometry.block_size

    def shares(kernel: str, heads: int, least: int) -> Shares:
        launch = _launch(kernel, itemsize, geometry, num_heads)
        tiles = common.context_tiles(length, launch.tile, sliding_window)
        most = (common.cdiv(tokens, launch.tile) + batch.max_rows) * heads
        return cut(tiles, heads, tuning.cutting(launch, most, least=least))

    # A tile of scores takes all of x, which is enough for a program.
    return Plan(
        shares("absorbed_scores", 1, least=1),
        shares("absorbed_sums", _slices(geometry), least=2),
    )


def _scores_kernel(*refs: common.Ref, options: Options) -> None:
    """refs: the batch, the shares, qx [T * H, E], the pool; raw scores out, float32 [R * H, C]."""
    batch, _, shares, (qx_ref, *rest) = unpacked(refs)
    pool, (scores_ref,) = common.take_pool(rest, options.geometry)

    def score(segment: Segment) -> None:
        row = segment.item
        length, token = common.decode_row(batch, row, HIDDEN)

        def one_tile(j: jax.Array, _: None) -> None:
            begin = j * options.tile
            _scores_of_tile(batch, row, begin, length, token, qx_ref, pool, scores_ref, options)

        first = lax.div(options.lower(length), jnp.int32(options.tile))
        lax.fori_loop(first + segment.begin, first + segment.end, one_tile, None)

    for_each_segment(shares, score)


def _scores_of_tile(
    batch: common.BatchRefs,
    row: jax.Array,
    begin: jax.Array,
    length: jax.Array,
    token: jax.Array,
    qx_ref: common.Ref,  # [T * H, E]
    pool: common.PoolRefs,
    scores_ref: common.Ref,  # float32 [R * H, C]
    options: Options,
) -> None:
    geometry = options.geometry
    width, padded, dtype = geometry.head_dim, geometry.padded_dim, options.dtype
    member = jnp.arange(options.padded_heads, dtype=jnp.int32)[:, None]
    column = jnp.arange(padded, dtype=jnp.int32)[None, :]
    wanted = (member < options.num_heads) & (column < width)
    position = begin + jnp.arange(options.tile, dtype=jnp.int32)
    inside = position < length
    first_rows = common.context_of(batch, geometry, row).pool_rows(0, 0, position, inside)

    def one_head(head: jax.Array, acc: jax.Array) -> jax.Array:
        at = qx_ref.at[token * options.num_heads + member, head * width + column]
        q = plgpu.load(at, mask=wanted, other=0).astype(dtype)
        rows = first_rows + head * geometry.block_size
        products = online_softmax.dot(q, pool.load(rows, inside, geometry, dtype), transposed=True)
        return acc + online_softmax.scaled(products, pool.load_scales(rows, inside))

    acc = jnp.zeros((options.padded_heads, options.tile), jnp.float32)
    acc = lax.fori_loop(0, geometry.kv_heads, one_head, acc)
    at = scores_ref.at[row * options.num_heads + member, position[None, :]]
    plgpu.store(at, acc, mask=jnp.broadcast_to(member < options.num_heads, acc.shape))


def _sum(
    batch: common.BatchRefs,
    segment: Segment,
    scores_ref: common.Ref,  # float32 [R * H, C]
    pool: common.PoolRefs,
    options: Options,
) -> Softmax:
    """The softmax of all heads [H'] over a segment, with a slice of x as values."""
    geometry, tile, width = options.geometry, options.tile, _slice(options.geometry)
    row, in_head = segment.item, jnp.int32(geometry.head_dim // width)
    head, first_column = lax.div(segment.head, in_head), lax.rem(segment.head, in_head) * width
    length, _ = common.decode_row(batch, row, HIDDEN)
    lower = options.lower(length)
    padded = max(16, common.power_of_two(width))
    column = jnp.arange(padded, dtype=jnp.int32)[None, :]
    member = jnp.arange(options.padded_heads, dtype=jnp.int32)[:, None]
    context = common.context_of(batch, geometry, row)

    def one_tile(j: jax.Array, state: Softmax) -> Softmax:
        position = j * tile + jnp.arange(tile, dtype=jnp.int32)
        seen = (position >= lower) & (position < length)
        at = scores_ref.at[row * options.num_heads + member, position[None, :]]
        products = plgpu.load(at, mask=(member < options.num_heads) & seen[None, :], other=0)
        scores = online_softmax.prepare(products, options.scoring)
        rows = context.pool_rows(0, head, position, seen)
        at = pool.values.at[rows[:, None], first_column + column]
        x = plgpu.load(at, mask=seen[:, None] & (column < width), other=0)
        scores = jnp.where(seen[None, :], scores, -jnp.inf)
        x, scales = common.widened(x, options.dtype), pool.load_scales(rows, seen)
        return online_softmax.step(state, scores, x, scales)

    first = lax.div(lower, jnp.int32(tile))
    state = online_softmax.start(options.padded_heads, padded)
    return lax.fori_loop(first + segment.begin, first + segment.end, one_tile, state)


def _sums_kernel(*refs: common.Ref, options: Options) -> None:
    """refs: the batch, the shares, scores [R * H, C], the pool, the output [T * H * slices, slice]
    and the parts. Programs after those with shares write zeros."""
    batch, _, shares, (scores_ref, *rest) = unpacked(refs)
    pool, (out_ref, *parts) = common.take_pool(rest, options.geometry)
    behind = pl.program_id(0) - shares.first.shape[0]

    def attend(segment: Segment) -> None:
        state = _sum(batch, segment, scores_ref, pool, options)
        member = jnp.arange(options.padded_heads, dtype=jnp.int32)
        rows, _ = _place(batch, (), segment.item, segment.head, member, options=options)
        used = member < options.num_heads
        store_segment(out_ref, Parts(*parts), segment, state, rows, used, options.num_heads)

    for_each_segment(shares, attend)

    @pl.when(behind >= 0)
    def _zeros() -> None:
        count = options.num_heads * options.slices
        common.store_zeros(batch, out_ref, behind, HIDDEN, count, decodes=True)


def _place(
    batch: common.BatchRefs,
    _: tuple[common.Ref, ...],
    row: jax.Array,
    part: jax.Array,
    member: jax.Array,
    *,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """See `merge.Place`: a member is a head, and a slice of x takes the place of a head."""
    length, token = common.decode_row(batch, row, HIDDEN)
    return (token * options.num_heads + member) * options.slices + part, length > 0


def absorbed(
    qx: jax.Array,
    pool: Pool,
    layer: jax.Array | int,
    batch: AttentionBatch,
    plan: Plan,
    *,
    scoring: Scoring,
    axis_name: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `backends.Backend.absorbed`: qx [T, H, E] -> the same shape, zeros for tokens that are
    not hidden decodes. plan: what `plan` gives for this batch and these options. axis_name: qx and
    the pool have a slice of E, scores are summed over it."""
    tokens, num_heads, width = qx.shape
    geometry, itemsize = common.geometry_of(pool), pool.dtype.itemsize
    launch = _launch("absorbed_scores", itemsize, geometry, num_heads)
    options = Options(geometry, num_heads, scoring, launch.tile, read_as(pool.dtype, qx.dtype))
    longest = batch.table_width * geometry.block_size
    piece = common.cdiv(common.cdiv(longest, PIECES), launch.tile) * launch.tile
    columns = common.cdiv(longest, piece) * piece
    scores = pl.pallas_call(
        functools.partial(_scores_kernel, options=options),
        out_shape=jax.ShapeDtypeStruct((batch.max_rows * num_heads, columns), jnp.float32),
        grid=plan.scores.first.shape,
        compiler_params=plgpu.CompilerParams(num_warps=launch.warps, num_stages=launch.stages),
        interpret=interpret,
        name="absorbed_scores",
    )(
        *common.batch_arguments(layer, batch),
        *plan.scores,
        qx.reshape(-1, width),
        *common.pool_arguments(pool),
    )
    if axis_name is not None:
        scores = sum_as_far(scores, 1, piece, _longest(batch), axis_name)

    launch = _launch("absorbed_sums", itemsize, geometry, num_heads)
    options = dataclasses.replace(options, tile=launch.tile)
    shape = (tokens * num_heads * options.slices, _slice(geometry))
    done = run_shares(
        functools.partial(_sums_kernel, options=options),
        layer,
        batch,
        plan.sums,
        (scores, *common.pool_arguments(pool)),
        jax.ShapeDtypeStruct(shape, qx.dtype),
        launch,
        functools.partial(_place, options=options),
        members=num_heads,
        width=max(16, common.power_of_two(shape[1])),
        zeros=common.zero_programs(tokens, num_heads * options.slices),
        interpret=interpret,
        name="absorbed_sums",
    )
    return done.reshape(qx.shape)


def _longest(batch: AttentionBatch) -> jax.Array:
    """Tokens of the longest context of a hidden decode, int32 []."""
    mine = (batch.kind == HIDDEN) & (jnp.arange(batch.max_rows) < batch.num_decodes)
    return jnp.max(jnp.where(mine, batch.context_lens, 0))
