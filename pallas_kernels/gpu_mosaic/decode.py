"""Paged decode attention on Mosaic GPU: one query token per row, in equal shares of all contexts.
FlashAttention's running softmax (Dao et al. 2022, Algorithm 1) on sm_90: one warpgroup copies tiles
into shared memory (`ring`), the other multiplies them (wgmma), all heads of a group in one product,
padded to its 64 rows. A program takes a fixed number of tiles, wherever rows begin and end, and the
parts of a row are merged by their log-sum-exp (flash-decoding, Dao et al. 2023).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxserve.pallas_kernels import online_softmax
from jaxserve.pallas_kernels.backends import Scoring
from jaxserve.pallas_kernels.batch import KV, RIGHT, AttentionBatch
from jaxserve.pallas_kernels.gpu_mosaic.common import (
    GRID,
    QUERIES,
    TILE,
    WARPGROUP,
    Options,
    Piece,
    across,
    each_piece,
    finished,
    multiply,
    plgpu,
    start,
)
from jaxserve.pallas_kernels.gpu_mosaic.ring import Scratch, fill, scratch, stage_of
from jaxserve.pallas_kernels.gpu_triton.common import (
    BatchRefs,
    Ref,
    batch_arguments,
    decode_row,
    geometry_of,
    take_pool,
)
from jaxserve.pallas_kernels.gpu_triton.merge import Parts, merge_parts
from jaxserve.pallas_kernels.gpu_triton.stream_k import Shares, unpacked
from jaxserve.pallas_kernels.online_softmax import Softmax
from jaxserve.pallas_kernels.pool import FLOAT8, Pool, ScaledPool, read_as

WARPGROUPS = 2
MULTIPLIES, COPIES = 0, 1  # the roles of the warpgroups


def _inside(piece: Piece, tile: Any, flip: Any, shape: tuple[int, int], axis: int) -> jax.Array:
    """Which tokens of a tile, along `axis`, are visible. flip: bits of a token's place that are
    inverted in a block filled from the right."""
    place = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
    position = tile * TILE + (place ^ flip)
    return (position >= piece.lower) & (position < piece.length)


def _widened(narrow: Ref, wide: Ref) -> Ref:
    """Converts numbers of 8 bits, in shared memory, for the matrix unit."""
    numbers = plgpu.load(narrow, layout=plgpu.Layout.WGMMA)
    if numbers.dtype.name == FLOAT8:  # for sm_90 only float16 is near; it holds all of them
        numbers = numbers.astype(jnp.float16)
    wide[...] = numbers.astype(wide.dtype)
    plgpu.commit_smem()
    return wide


def _scales(memory: Scratch, stage: Any, plane: int) -> jax.Array:
    """The scales of a tile's K (plane 0) or V (1), the same in all rows: [QUERIES, TILE]."""
    assert memory.scales is not None
    columns = plgpu.Layout.WGMMA.reduce(0)
    scales = plgpu.load(memory.scales.at[stage, plane], layout=columns)
    return lax.broadcast_in_dim(scales, (QUERIES, TILE), (1,))


def _one_tile(
    state: Softmax,
    piece: Piece,
    tile: Any,
    memory: Scratch,
    stage: Any,
    flip: Any,
    options: Options,
) -> Softmax:
    """`online_softmax.step` of a tile of the context that is in the ring at this stage."""
    k, v = memory.k.at[stage], memory.v.at[stage]
    width, inside = v.shape[1], _inside(piece, tile, flip, (QUERIES, TILE), 1)
    if memory.wide is not None:
        k, v = (_widened(one, memory.wide.at[i]) for i, one in enumerate((k, v)))

    @pl.when((tile * TILE < piece.lower) | (tile * TILE + TILE > piece.length))
    def _clear() -> None:  # stale values may be NaN, and 0 * NaN is NaN
        seen = _inside(piece, tile, flip, (TILE, width), 0)
        v[...] = jnp.where(seen, v[...], jnp.zeros((), v.dtype))

    # Scores, [QUERIES, TILE] in registers: q and K are read from shared memory.
    products = multiply(memory.q, k.transpose((1, 0)))
    if memory.scales is not None:
        products = products * _scales(memory, stage, 0)
    scores = online_softmax.prepare(products, options.scoring)
    scores = jnp.where(inside, scores, -jnp.inf)
    # The running softmax, in powers of 2.
    peak = jnp.maximum(state.peak, scores.max(axis=1))
    fade = jnp.exp2(state.peak - peak)
    weights = jnp.exp2(scores - across(peak, TILE))
    total = state.total * fade + weights.sum(axis=1)
    if memory.scales is not None:  # those of slots that are not seen may be NaN
        weights = jnp.where(inside, weights * _scales(memory, stage, 1), 0.0)
    # Weights go to shared memory, since the second product reads both factors from there.
    memory.weights[...] = weights.astype(memory.weights.dtype)
    plgpu.commit_smem()
    acc = state.acc * across(fade, width) + multiply(memory.weights, v)
    return Softmax(peak, total, acc)


def _store(source: Ref, values: jax.Array, target: Ref, row: Any, group: int) -> None:
    """The first `group` rows of values [QUERIES, D] to target [X, D] from `row` on, through
    `source` in shared memory, since a part of the registers cannot be stored."""
    source[...] = values.astype(source.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(source.at[pl.ds(0, group)], target.at[pl.ds(row, group)])
    plgpu.wait_smem_to_gmem(0)


def _attend(
    batch: BatchRefs,
    shares: Shares,
    q: Ref,  # [T * H + QUERIES, D]
    out: Ref,  # [T * H, D], of the output's dtype
    parts: Parts,
    memory: Scratch,
    options: Options,
) -> None:
    """The multiplying warpgroup's work on the tiles that `ring.fill` brings."""
    group, width = options.group, options.geometry.head_dim

    def attend(piece: Piece) -> None:
        row = piece.row * options.num_heads + piece.head * group
        memory.q[...] = plgpu.load(q.at[pl.ds(row, QUERIES)], optimized=False)
        plgpu.commit_smem()
        flip = jnp.where(batch.direction[piece.row] == RIGHT, options.page - 1, 0)

        def one(i: Any, state: Softmax) -> Softmax:
            # Wait until the copying warpgroup has filled this stage of the ring, and give it back.
            stage = stage_of(memory, piece.before + i)
            plgpu.barrier_wait(memory.ready.at[stage])
            state = _one_tile(state, piece, piece.first + i, memory, stage, flip, options)
            plgpu.barrier_arrive(memory.free.at[stage])
            return state

        state = lax.fori_loop(0, piece.tiles, one, start(QUERIES, width))

        @pl.when(piece.whole)
        def _finish() -> None:
            _store(memory.out, finished(state), out, row, group)

        @pl.when(~piece.whole)
        def _leave_a_part() -> None:
            here = pl.ds(piece.place * QUERIES, QUERIES)
            plgpu.store(parts.peak.at[here], state.peak, optimized=False)
            plgpu.store(parts.total.at[here], state.total, optimized=False)
            _store(memory.acc, state.acc, parts.acc, piece.place * group, group)

    each_piece(batch, shares, options, attend)


def _kernel(*refs: Ref, options: Options) -> None:
    """refs: the batch, the shares, the queries, the pool, the output, the parts, the scratch."""
    batch, _, shares, (q, *more) = unpacked(refs)
    pool, (out, *rest) = take_pool(more, options.geometry)
    parts, memory = Parts(*rest[:3]), Scratch(*rest[3:])
    mine = lax.axis_index(WARPGROUP)

    @pl.when(mine == COPIES)
    def _copy() -> None:
        fill(batch, shares, pool, memory, options)

    @pl.when(mine == MULTIPLIES)
    def _multiply_all() -> None:
        _attend(batch, shares, q, out, parts, memory, options)


def _place(
    batch: BatchRefs, _: tuple[Ref, ...], row: Any, head: Any, member: Any, *, options: Options
) -> tuple[jax.Array, jax.Array]:
    """See `merge.Place`: a member is a head of the group."""
    length, token = decode_row(batch, row, KV, decode_only=True)
    return token * options.num_heads + head * options.group + member, length > 0


def paged_decode(
    q: jax.Array,
    pool: Pool,
    layer: jax.Array | int,
    batch: AttentionBatch,
    shares: Shares,
    *,
    scoring: Scoring,
    interpret: bool = False,
) -> jax.Array:
    """Attention of a batch that has only decodes.

    Args:
        q: [T, H, D].
        pool: [layers, blocks, kv_heads, block_size, D].
        layer: Index into the whole pool; may be traced.
        batch: The step's rows and tokens; T == R.
        shares: From `common.plan` for this batch and window.
        scoring: How products become scores.
        interpret: Run in the interpreter, which checks for races.

    Returns:
        [T, H, D] in q's dtype; zeros for padding and tokens of hidden rows.
    """
    tokens, num_heads, width = q.shape
    options = Options(geometry_of(pool), num_heads, scoring, TILE)
    # A program reads QUERIES rows from a group's first one on.
    wide = read_as(pool.dtype, q.dtype)
    queries = jnp.pad(q.reshape(-1, width).astype(wide), ((0, QUERIES), (0, 0)))
    arrays = (pool.values, pool.scales) if isinstance(pool, ScaledPool) else (pool,)
    fields, programs = batch_arguments(layer, batch), shares.first.shape[0]
    # Two places per program. Statistics are stored including the matrix unit's padding.
    stats = jax.ShapeDtypeStruct((2 * programs * QUERIES,), jnp.float32)
    acc = jax.ShapeDtypeStruct((2 * programs * options.group, width), jnp.float32)
    done, peak, total, acc = plgpu.kernel(
        functools.partial(_kernel, options=options),
        out_type=(jax.ShapeDtypeStruct((tokens * num_heads, width), q.dtype), stats, stats, acc),
        scratch_types=scratch(options, pool.dtype, wide, q.dtype),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        grid=(programs,),
        grid_names=(GRID,),
        num_threads=WARPGROUPS,
        thread_name=WARPGROUP,
        kernel_name="paged_decode",
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else False,
    )(*fields, *shares, queries, *arrays)
    peak, total = (
        one.reshape(-1, QUERIES)[:, : options.group].reshape(-1) for one in (peak, total)
    )
    place = functools.partial(_place, options=options)
    parts = Parts(peak, total, acc)
    done = merge_parts(done, parts, fields, shares, (), place, interpret=interpret)
    return done.reshape(q.shape)
