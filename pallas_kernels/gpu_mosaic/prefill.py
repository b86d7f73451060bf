"""Paged attention of prefill chunks on Mosaic GPU (FlashAttention-3, Shah et al. 2024), for sm_90.

Three warpgroups: one copies tiles of K and V into shared memory (TMA), two multiply them (wgmma)
with 64 query tokens of one head each. The two take turns by a barrier: while one has the tensor
cores the other computes its softmax (section 3.1). Context that all of a warpgroup's queries see
needs no mask, then the diagonal has one, and what only the other warpgroup sees is given back
unread. Programs take equal shares of all contexts, and parts of a query tile are merged by their
log-sum-exp, as in the Triton kernels.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from jaxserve.pallas_kernels import online_softmax
from jaxserve.pallas_kernels.backends import Scoring
from jaxserve.pallas_kernels.batch import RIGHT, AttentionBatch
from jaxserve.pallas_kernels.gpu_mosaic.common import (
    GRID,
    WARPGROUP,
    Options,
    across,
    finished,
    multiply,
    operand,
    plgpu,
    start,
)
from jaxserve.pallas_kernels.gpu_triton import tuning
from jaxserve.pallas_kernels.gpu_triton.common import (
    BatchRefs,
    Geometry,
    Ref,
    batch_arguments,
    geometry_of,
)
from jaxserve.pallas_kernels.gpu_triton.merge import Parts, merge_parts, part_shapes
from jaxserve.pallas_kernels.gpu_triton.prefill import Kind, chunk_lengths
from jaxserve.pallas_kernels.gpu_triton.stream_k import Segment, Shares, for_each_segment, unpacked
from jaxserve.pallas_kernels.gpu_triton.tiles import (
    QueryTiles,
    Sizes,
    Work,
    place_in_tile,
    plan_work,
)
from jaxserve.pallas_kernels.online_softmax import Softmax
from jaxserve.pallas_kernels.pool import Pool

ROWS = 64  # query tokens of a warpgroup
MULTIPLIERS = 2  # warpgroups that multiply; the next one copies
QUERIES = MULTIPLIERS * ROWS  # query tokens of a tile, all of one head
TILE = 128  # tokens of context per iteration
STAGES = {64: 4, 128: 2}  # of the ring, by head_dim: what fits into shared memory
# Registers of a thread: 2 * 232 + 40 are what a multiprocessor has for three warpgroups.
MULTIPLIER_REGISTERS, COPIER_REGISTERS = 232, 40
_WGMMA = plgpu.Layout.WGMMA if hasattr(plgpu, "Layout") else None


class Scratch(NamedTuple):
    """Refs in shared memory, and the barriers that synchronize the warpgroups.

    Attributes:
        q: [MULTIPLIERS, ROWS, D], queries in the pool's dtype.
        k, v: [stages, TILE, D], the rings of tiles in the pool's dtype.
        staged: [MULTIPLIERS, ROWS, D], queries and outputs on their way, row by row: in the matrix
            unit's layout, a copy could only begin at every eighth token.
        weights: [MULTIPLIERS, ROWS, TILE], softmax weights: only for the interpreter.
        q_ready: Barriers, one for each multiplier: its queries have arrived.
        k_ready, v_ready: Barriers, one a stage: its tile has arrived.
        k_free, v_free: Barriers, one a stage: both multipliers have read its tile.
        turns: Barrier of the multipliers: the tensor cores change hands.
        cleared: Barrier of the multipliers: both have cleared their half of a tile.
    """

    q: Ref
    k: Ref
    v: Ref
    staged: Ref
    weights: Ref
    q_ready: Ref
    k_ready: Ref
    v_ready: Ref
    k_free: Ref
    v_free: Ref
    turns: Ref
    cleared: Ref


def _scratch(options: Options, dtype: DTypeLike, *, interpret: bool) -> Scratch:
    """The scratch types of a kernel over a pool of this dtype, for `plgpu.kernel`."""
    width = options.geometry.head_dim
    stages, copies = STAGES[width], TILE // options.page
    rows = MULTIPLIERS, ROWS
    ready = plgpu.Barrier(num_arrivals=copies, num_barriers=stages)
    free = plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=stages)
    turn = plgpu.Barrier(num_arrivals=MULTIPLIERS)
    return Scratch(
        q=operand(dtype, *rows, width),
        k=operand(dtype, stages, TILE, width),
        v=operand(dtype, stages, TILE, width),
        staged=plgpu.SMEM((*rows, width), dtype),
        weights=operand(dtype, *rows, TILE) if interpret else plgpu.SMEM((ROWS,), dtype),
        q_ready=plgpu.Barrier(num_barriers=MULTIPLIERS),
        k_ready=ready,
        v_ready=ready,
        k_free=free,
        v_free=free,
        turns=turn,
        cleared=turn,
    )


class _Queries(NamedTuple):
    """A multiplier's part of a query tile. All are int32 scalars.

    Attributes:
        number: Of the multiplier.
        token: Index of its first query on the flat token axis.
        used: How many queries it has, up to ROWS.
        position: Position of its first query.
        length: Cached tokens of the row.
        flip: Bits of a token's place that are inverted in a block filled from the right.
    """

    number: Any
    token: Any
    used: Any
    position: Any
    length: Any
    flip: Any


def _queries(
    batch: BatchRefs, tiles: QueryTiles, item: Any, number: Any, options: Options
) -> _Queries:
    row, first = tiles.row[item], tiles.first[item] + number * ROWS
    length, own = batch.context_lens[row], batch.query_lens[row]
    return _Queries(
        number,
        batch.query_start[row] + first,
        jnp.clip(own - first, 0, ROWS),
        length - own + first,
        length,
        jnp.where(batch.direction[row] == RIGHT, options.page - 1, 0),
    )


def _positions(tile: Any, flip: Any, shape: tuple[int, int], axis: int) -> jax.Array:
    """The positions of a tile's tokens, along `axis`."""
    place = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=_WGMMA)
    return tile * TILE + (place ^ flip)


def _take_turns(memory: Scratch) -> None:
    plgpu.barrier_arrive(memory.turns)
    plgpu.barrier_wait(memory.turns)


def _clear_tail(memory: Scratch, mine: _Queries, tile: Any, stage: Any, options: Options) -> None:
    """Clears slots of V past the end of the context, which may hold NaN: 0 * NaN is NaN. Each
    multiplier clears one half of the tile. Whole blocks past the end are zeros already."""
    cut = lax.rem(mine.length, jnp.int32(options.page)) != 0

    @pl.when(cut & (tile == lax.div(mine.length - 1, jnp.int32(TILE))))
    def _clear() -> None:
        for column in range(0, memory.v.shape[2], ROWS):  # few registers at once
            half = memory.v.at[stage, pl.ds(mine.number * ROWS, ROWS), pl.ds(column, ROWS)]
            place = plgpu.broadcasted_iota(jnp.int32, half.shape, 0, layout=_WGMMA)
            position = tile * TILE + ((place + mine.number * ROWS) ^ mine.flip)
            half[...] = jnp.where(position < mine.length, half[...], jnp.zeros((), half.dtype))
        plgpu.commit_smem()
        plgpu.barrier_arrive(memory.cleared)
        plgpu.barrier_wait(memory.cleared)


def _add_values(
    acc: jax.Array, weights: jax.Array, v: Ref, memory: Scratch, number: Any, *, interpret: bool
) -> jax.Array:
    """acc + weights @ v. The weights stay in registers, and the sum in the accumulator; the
    interpreter of jax 0.12 knows neither, and takes weights from shared memory."""
    if interpret:
        memory.weights[number] = weights
        plgpu.commit_smem()
        return acc + multiply(memory.weights.at[number], v)

    def run(into: Ref) -> None:
        plgpu.wgmma(into, weights, v)

    done: jax.Array = pl.run_state(run)(plgpu.ACC.init(acc))
    return done


def _one_tile(
    tile: Any,
    state: Softmax,
    *,
    memory: Scratch,
    mine: _Queries,
    stage: Any,
    options: Options,
    masked: bool,
    interpret: bool,
) -> Softmax:
    """`online_softmax.step` of a tile of the context that is in the ring at this stage."""
    shape = ROWS, TILE
    plgpu.barrier_wait(memory.k_ready.at[stage])

    def score(into: Ref) -> jax.Array:
        plgpu.wgmma(into, memory.q.at[mine.number], memory.k.at[stage].transpose((1, 0)))
        _take_turns(memory)  # the product is issued: the other's may follow
        found: jax.Array = into[...]
        return found

    products = pl.run_scoped(score, plgpu.ACC(shape, jnp.float32))
    plgpu.barrier_arrive(memory.k_free.at[stage])
    scores = online_softmax.prepare(products, options.scoring)
    if masked:
        query = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_WGMMA) + mine.position
        flip, here = lax.optimization_barrier((mine.flip, tile))
        seen = _positions(here, flip, shape, 1) <= query
        scores = jnp.where(seen, scores, -jnp.inf)
    peak = jnp.maximum(state.peak, scores.max(axis=1))
    fade = jnp.exp2(state.peak - peak)
    weights = jnp.exp2(scores - across(peak, TILE))
    total = state.total * fade + weights.sum(axis=1)
    acc = state.acc * across(fade, state.acc.shape[1])
    narrow = weights.astype(memory.v.dtype)
    # All of this is done before the tensor cores are asked for.
    peak, total, acc, narrow = lax.optimization_barrier((peak, total, acc, narrow))
    plgpu.barrier_arrive(memory.turns)
    plgpu.barrier_wait(memory.v_ready.at[stage])
    if masked:
        _clear_tail(memory, mine, tile, stage, options)
    plgpu.barrier_wait(memory.turns)
    v = memory.v.at[stage]
    acc = _add_values(acc, narrow, v, memory, mine.number, interpret=interpret)
    plgpu.barrier_arrive(memory.v_free.at[stage])
    return Softmax(peak, total, acc)


def _skip(memory: Scratch, mine: _Queries, tile: Any, stage: Any, options: Options) -> None:
    """The turn of a multiplier whose queries see nothing of a tile."""
    plgpu.barrier_wait(memory.k_ready.at[stage])
    plgpu.barrier_arrive(memory.k_free.at[stage])
    _take_turns(memory)
    plgpu.barrier_arrive(memory.turns)
    plgpu.barrier_wait(memory.v_ready.at[stage])
    _clear_tail(memory, mine, tile, stage, options)
    plgpu.barrier_wait(memory.turns)
    plgpu.barrier_arrive(memory.v_free.at[stage])


def _stage(memory: Scratch, number: Any) -> Any:
    """The ring's stage for this tile, numbered through the whole program."""
    return lax.rem(number, jnp.int32(memory.k.shape[0]))


def _attend(
    batch: BatchRefs,
    tiles: QueryTiles,
    shares: Shares,
    q: Ref,  # [T, H, D], of the pool's dtype
    out: Ref,  # [T, H, D], of the pool's dtype
    parts: Parts,
    memory: Scratch,
    options: Options,
    *,
    interpret: bool,
) -> None:
    """A multiplying warpgroup's work on the tiles that `_fill` brings."""
    number = lax.axis_index(WARPGROUP)
    width, size = options.geometry.head_dim, jnp.int32(TILE)

    def attend(piece: Segment) -> None:
        mine = _queries(batch, tiles, piece.item, number, options)
        # Rows that are not this tile's queries hold others, or zeros past the end: no row's result
        # depends on another.
        source, staged = q.at[pl.ds(mine.token, ROWS), piece.head], memory.staged.at[number]
        plgpu.copy_gmem_to_smem(source, staged, memory.q_ready.at[number])
        plgpu.barrier_wait(memory.q_ready.at[number])
        memory.q[number] = plgpu.layout_cast(staged[...], _WGMMA)
        plgpu.commit_smem()
        begin, end = piece.begin, piece.end
        has_any = jnp.where(mine.used > 0, jnp.int32(1), 0)
        whole = lax.div(mine.position + 1, size) * has_any  # tiles that all queries see
        some = lax.div(mine.position + mine.used + TILE - 1, size) * has_any

        def walk(tile: Any, state: Softmax, *, masked: bool) -> Softmax:
            stage = _stage(memory, piece.before + tile - begin)
            options_of = {"memory": memory, "mine": mine, "stage": stage, "options": options}
            return _one_tile(tile, state, **options_of, masked=masked, interpret=interpret)

        def skip(tile: Any, _: None) -> None:
            _skip(memory, mine, tile, _stage(memory, piece.before + tile - begin), options)

        first, second = jnp.clip(whole, begin, end), jnp.clip(some, begin, end)
        state = start(ROWS, width)
        state = lax.fori_loop(begin, first, functools.partial(walk, masked=False), state)
        state = lax.fori_loop(first, second, functools.partial(walk, masked=True), state)
        lax.fori_loop(second, end, skip, None)

        @pl.when(piece.whole)
        def _finish() -> None:
            staged[...] = finished(state).astype(staged.dtype)
            plgpu.commit_smem()
            _store(staged, out, mine, piece.head)

        @pl.when(~piece.whole)
        def _leave_a_part() -> None:
            here = pl.ds(piece.place * QUERIES + number * ROWS, ROWS)
            for ref, values in zip(parts, state, strict=True):
                plgpu.store(ref.at[here], values, optimized=False)

    # The first turn is multiplier 0's.
    pl.when(number == 1)(lambda: _take_turns(memory))
    for_each_segment(shares, attend, lax.axis_index(GRID))
    pl.when(number == 0)(lambda: _take_turns(memory))


def _store(staged: Ref, out: Ref, mine: _Queries, head: Any) -> None:
    """The used rows of an output [ROWS, D] in shared memory to their tokens: a copy has a fixed
    number of rows, so a part of them takes a copy for each bit of their number."""
    rows = ROWS
    while rows:

        @pl.when((mine.used & rows) != 0)
        def _copy(rows: int = rows) -> None:
            before = mine.used & ~(2 * rows - 1)  # by the larger bits
            target = out.at[pl.ds(mine.token + before, rows), head]
            plgpu.copy_smem_to_gmem(staged.at[pl.ds(before, rows)], target)

        rows //= 2
    plgpu.wait_smem_to_gmem(0)


def _fill(
    batch: BatchRefs,
    tiles: QueryTiles,
    shares: Shares,
    pool: Ref,
    memory: Scratch,
    options: Options,
) -> None:
    """The copying warpgroup's work: brings all tiles of the program into the rings."""
    stages, heads_of = memory.k.shape[0], jnp.int32(options.group)

    def bring(piece: Segment) -> None:
        row, head = tiles.row[piece.item], lax.div(piece.head, heads_of)

        def one(tile: Any, _: None) -> None:
            number = piece.before + tile - piece.begin
            stage = _stage(memory, number)
            rings = (
                (memory.k, memory.k_ready, memory.k_free),
                (memory.v, memory.v_ready, memory.v_free),
            )
            for plane, (ring, ready, free) in enumerate(rings):
                # Read before the wait, so that they have arrived when it ends.
                pages = _pages(batch, row, plane, tile, options)

                @pl.when(number >= stages)
                def _tile_is_read(free: Ref = free) -> None:
                    plgpu.barrier_wait(free.at[stage])

                for page, (block, slot) in enumerate(pages):
                    here = pl.ds(pl.multiple_of(slot, options.page), options.page)
                    target = ring.at[stage, pl.ds(page * options.page, options.page)]
                    source = pool.at[batch.layer[0], block, head, here]
                    plgpu.copy_gmem_to_smem(source, target, ready.at[stage])

        lax.fori_loop(piece.begin, piece.end, one, None)

    for_each_segment(shares, bring, lax.axis_index(GRID))


def _pages(
    batch: BatchRefs, row: Any, plane: int, tile: Any, options: Options
) -> list[tuple[Any, Any]]:
    """(block, first slot) of all pages of a tile of K (plane 0) or V (1) of a row's context. Pages
    past its end are in a block past the pool's, for which the copy engine writes zeros."""
    geometry, page = options.geometry, options.page
    size, length = jnp.int32(geometry.block_size), batch.context_lens[row]
    last = jnp.maximum(lax.div(length - 1, size), 0)
    found = []
    for i in range(TILE // page):
        position = tile * TILE + i * page
        slot = lax.rem(position, size)
        slot = jnp.where(batch.direction[row] == RIGHT, size - page - slot, slot)
        block = batch.tables[row, plane, jnp.minimum(lax.div(position, size), last)]
        found.append((jnp.where(position < length, block, geometry.blocks), slot))
    return found


def _kernel(*refs: Ref, options: Options, interpret: bool) -> None:
    """refs: the batch, the tiles, the shares, the queries, the pool, the output, the parts, the
    scratch."""
    batch, tiles, shares, (q, pool, out, *rest) = unpacked(refs, 2)
    parts, memory = Parts(*rest[:3]), Scratch(*rest[3:])
    work = batch, QueryTiles(*tiles), shares
    mine = lax.axis_index(WARPGROUP)

    @pl.when(mine < MULTIPLIERS)
    def _multiply_all() -> None:
        plgpu.set_max_registers(MULTIPLIER_REGISTERS, action="increase")
        _attend(*work, q, out, parts, memory, options, interpret=interpret)

    @pl.when(mine == MULTIPLIERS)
    def _copy() -> None:
        plgpu.set_max_registers(COPIER_REGISTERS, action="decrease")
        _fill(*work, pool, memory, options)


def plan(batch: AttentionBatch, geometry: Geometry, num_heads: int, kind: Kind) -> Work:
    """Plans `paged_prefill`: an item is a query tile, for each query head.

    Args:
        batch: The batch that will attend.
        geometry: The pool's geometry.
        num_heads: Query heads of one shard.
        kind: Which chunks to take.
    """
    sizes = Sizes(QUERIES, TILE, batch.table_width * geometry.block_size, None)
    lengths = chunk_lengths(batch, kind)
    return plan_work(batch, lengths, num_heads, sizes, tuning.Launch(TILE))


def paged_prefill(
    q: jax.Array,
    pool: Pool,
    layer: jax.Array | int,
    batch: AttentionBatch,
    work: Work,
    *,
    scoring: Scoring,
    interpret: bool = False,
) -> jax.Array:
    """Attention of the chunks of a plan.

    Args:
        q: [T, H, D].
        pool: [layers, blocks, kv_heads, block_size, D], of 16 bits.
        layer: Index into the whole pool; may be traced.
        batch: The step's rows and tokens.
        work: From `plan` for this batch.
        scoring: How products become scores, without a window.
        interpret: Run in the interpreter, which checks for races.

    Returns:
        [T, H, D] in q's dtype, rounded to the pool's. Tokens that are in no such chunk may hold
        anything.
    """
    tokens, num_heads, width = q.shape
    options = Options(geometry_of(pool), num_heads, scoring, TILE)
    fields, programs = batch_arguments(layer, batch), work.shares.first.shape[0]
    whole = jax.ShapeDtypeStruct(q.shape, pool.dtype)
    done, *parts = plgpu.kernel(
        functools.partial(_kernel, options=options, interpret=interpret),
        out_type=(whole, *part_shapes(programs, QUERIES, width)),
        scratch_types=_scratch(options, pool.dtype, interpret=interpret),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        grid=(programs,),
        grid_names=(GRID,),
        num_threads=MULTIPLIERS + 1,
        thread_name=WARPGROUP,
        kernel_name="paged_prefill",
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else False,
    )(*fields, *work.tiles, *work.shares, q.astype(pool.dtype), pool)
    flat = done.reshape(tokens * num_heads, width)
    place = functools.partial(place_in_tile, group=1, num_heads=num_heads)
    given = (fields, work.shares, work.tiles)
    flat = merge_parts(flat, Parts(*parts), *given, place, interpret=interpret)
    return flat.reshape(q.shape).astype(q.dtype)
