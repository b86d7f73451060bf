"""Paged decode attention on Pallas-Triton: one query token per row, in equal shares of all
contexts. FlashAttention's running softmax (Dao et al. 2022, Algorithm 1) over tiles gathered by the
block table. A program takes a fixed number of tokens, wherever rows begin and end, and the parts of
a row are merged by their log-sum-exp (flash-decoding, Dao et al. 2023).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxserve.pallas_kernels import online_softmax
from jaxserve.pallas_kernels.backends import Scoring
from jaxserve.pallas_kernels.batch import KV, AttentionBatch
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


@dataclasses.dataclass(frozen=True)
class Options(common.Options):
    """The options of all kernels.

    Attributes:
        decode_only: T == R, and token i is row i's only token.
        sinks: Whether there are sinks.
        in_place: Whether there is an output so far.
    """

    decode_only: bool
    sinks: bool
    in_place: bool = False

    @property
    def padded_group(self) -> int:
        """The group padded to a matrix unit's tile."""
        return max(16, common.power_of_two(self.group))


def plan(
    batch: AttentionBatch,
    geometry: common.Geometry,
    itemsize: int,
    *,
    sliding_window: int | None,
    decode_only: bool,
) -> Shares:
    """Plans `paged_decode`. An item is a row of the batch.

    Args:
        batch: The batch that will attend.
        geometry: The pool's geometry.
        itemsize: Bytes of the pool's elements.
        sliding_window: Positions that a token sees; None for all.
        decode_only: T == R; rows without work then get one tile, which writes zeros.
    """
    launch = tuning.launch("decode", itemsize, geometry.padded_dim)
    tokens = tuning.DECODE_TOKENS
    return decode_shares(batch, geometry, launch, sliding_window, decode_only, tokens=tokens)


def decode_shares(
    batch: AttentionBatch,
    geometry: common.Geometry,
    launch: tuning.Launch,
    window: int | None,
    decode_only: bool,
    **cutting: int,
) -> Shares:
    """See `plan`. cutting: options of `tuning.cutting`."""
    mine = (batch.kind == KV) & (batch.query_lens > 0)
    if not decode_only:
        mine &= jnp.arange(batch.max_rows, dtype=jnp.int32) < batch.num_decodes
    tiles = common.context_tiles(jnp.where(mine, batch.context_lens, 0), launch.tile, window)
    if decode_only:
        tiles = jnp.maximum(tiles, 1)
    # A token of KV takes two slots. If rows share blocks there are more tokens than slots allow,
    # and each program has more of them.
    slots = min(2 * batch.max_rows * batch.table_width, geometry.blocks) * geometry.block_size
    most = (common.cdiv(slots // 2, launch.tile) + batch.max_rows) * geometry.kv_heads
    return cut(tiles, geometry.kv_heads, tuning.cutting(launch, most, **cutting))


def _attend(
    refs: common.BatchRefs,
    segment: Segment,
    q_ref: common.Ref,  # [T * H, D]
    pool: common.PoolRefs,
    options: Options,
) -> tuple[Softmax, jax.Array, jax.Array]:
    """A segment: (softmax of the group's heads, their rows in q and the output [G], which of these
    are heads [G])."""
    geometry, tile = options.geometry, options.tile
    head, row = segment.head, segment.item
    # Positions [lower, length) of the row's context are seen.
    length, token = common.decode_row(refs, row, KV, decode_only=options.decode_only)
    lower = options.lower(length)
    # Queries: the heads that share this KV head, [padded_group, padded_dim], padded to the matrix
    # unit's 16 rows. They stay in registers.
    member = jnp.arange(options.padded_group, dtype=jnp.int32)
    rows = token * options.num_heads + head * options.group + member
    is_head = member < options.group
    width, padded = geometry.head_dim, geometry.padded_dim
    dtype = read_as(pool.dtype, q_ref.dtype)
    q = common.load_rows(q_ref, rows, is_head, width, padded).astype(dtype)
    context = common.context_of(refs, geometry, row)

    def one_tile(j: jax.Array, state: Softmax) -> Softmax:
        position = j * tile + jnp.arange(tile, dtype=jnp.int32)
        inside = (position >= lower) & (position < length)
        # Gather K and V, [tile, padded_dim] each, through the row's block table.
        k_rows = context.pool_rows(0, head, position, inside)
        v_rows = context.pool_rows(1, head, position, inside)
        k = pool.load(k_rows, inside, geometry, dtype)
        v = pool.load(v_rows, inside, geometry, dtype)
        # Scores, [padded_group, tile]: products, times the scales of K in a pool of int8, then
        # scale and soft cap; masked outside of the context.
        products = online_softmax.dot(q, k, transposed=True)
        products = online_softmax.scaled(products, pool.load_scales(k_rows, inside))
        scores = online_softmax.prepare(products, options.scoring)
        scores = jnp.where(inside[None, :], scores, -jnp.inf)
        # Rescale the sums so far to the new maximum, and add this tile's weights @ V.
        return online_softmax.step(state, scores, v, pool.load_scales(v_rows, inside))

    # The segment's tiles count from the first one that is seen.
    first = lax.div(lower, jnp.int32(tile))
    state = online_softmax.start(options.padded_group, padded)
    state = lax.fori_loop(first + segment.begin, first + segment.end, one_tile, state)
    return state, rows, is_head


def _kernel(*refs: common.Ref, options: Options) -> None:
    """refs: the batch, the shares, the sinks if there are any, q [T * H, D], the pool, the output
    [T * H, D] and the parts. Programs after those with shares write zeros."""
    # Inputs: the batch's columns, this launch's shares, optional sinks, then q and the pool.
    batch, _, shares, given = unpacked(refs)
    sinks, (q_ref, *rest) = (given[0], given[1:]) if options.sinks else (None, given)
    # Outputs: finished rows, and parts of rows that several programs share.
    pool, rest = common.take_pool(rest, options.geometry)
    out_ref, *parts = rest[1:] if options.in_place else rest
    behind = pl.program_id(0) - shares.first.shape[0]

    def attend(segment: Segment) -> None:
        state, rows, is_head = _attend(batch, segment, q_ref, pool, options)
        into = out_ref, Parts(*parts)
        store_segment(*into, segment, state, rows, is_head, options.group, sinks)

    for_each_segment(shares, attend)
    if not options.decode_only:

        @pl.when(behind >= 0)
        def _zeros() -> None:
            common.store_zeros(batch, out_ref, behind, KV, options.num_heads)


def _place(
    batch: common.BatchRefs,
    _: tuple[common.Ref, ...],
    row: jax.Array,
    head: jax.Array,
    member: jax.Array,
    *,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """See `merge.Place`: a member is a head of the group."""
    length, token = common.decode_row(batch, row, KV, decode_only=options.decode_only)
    return token * options.num_heads + head * options.group + member, length > 0


def paged_decode(
    q: jax.Array,
    pool: Pool,
    layer: jax.Array | int,
    batch: AttentionBatch,
    shares: Shares,
    *,
    scoring: Scoring,
    decode_only: bool,
    sinks: jax.Array | None = None,
    out: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention of the KV decodes of a batch.

    Args:
        q: [T, H, D].
        pool: [layers, blocks, kv_heads, block_size, D].
        layer: Index into the whole pool; may be traced.
        batch: The step's rows and tokens.
        shares: From `plan` for this batch and these options.
        scoring: How products become scores.
        decode_only: T == R, and token i is row i's only token.
        sinks: float32 [H], see `attention.paged_attention`; None for none.
        out: [T, H, D], the output so far, in q's dtype: that of KV chunks. None for none.
        interpret: Run in the interpreter.

    Returns:
        [T, H, D] in q's dtype; zeros for padding and tokens of hidden rows. Those of KV chunks are
        those of `out`, or may hold anything: `paged_prefill` fills them in.
    """
    tokens, num_heads, head_dim = q.shape
    geometry = common.geometry_of(pool)
    launch = tuning.launch("decode", pool.dtype.itemsize, geometry.padded_dim)
    options = Options(geometry, num_heads, scoring, launch.tile, decode_only, sinks is not None)
    options = dataclasses.replace(options, in_place=out is not None)
    so_far = () if out is None else (out.reshape(-1, head_dim),)
    done = run_shares(
        functools.partial(_kernel, options=options),
        layer,
        batch,
        shares,
        (q.reshape(-1, head_dim), *common.pool_arguments(pool), *so_far),
        jax.ShapeDtypeStruct((tokens * num_heads, head_dim), q.dtype),
        launch,
        functools.partial(_place, options=options),
        members=options.group,
        width=geometry.padded_dim,
        in_place=out is not None,
        zeros=0 if decode_only else common.zero_programs(tokens, num_heads),
        sinks=common.sink_arguments(sinks),
        interpret=interpret,
        name="paged_decode",
    )
    return done.reshape(q.shape)
