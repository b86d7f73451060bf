"""Paged attention of ragged prefill chunks on Pallas-Triton (FlashAttention-2, Dao 2023).

A tile is some of a row's query tokens with all query heads of one kv head, so that grouped heads
share loads. Programs take equal shares of the contexts of all tiles, many tiles or a part of one
(`stream_k`), and walk them by the rows' block tables. Context that every query of a tile sees needs
no mask; only its last part, across the diagonal, has one.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.pallas_kernels import online_softmax
from jaxserve.pallas_kernels.backends import Scoring
from jaxserve.pallas_kernels.batch import KV, AttentionBatch
from jaxserve.pallas_kernels.gpu_triton import common, tuning
from jaxserve.pallas_kernels.gpu_triton.merge import Parts, run_shares, store_segment
from jaxserve.pallas_kernels.gpu_triton.stream_k import Segment, for_each_segment, unpacked
from jaxserve.pallas_kernels.gpu_triton.tiles import (
    QueryTiles,
    Sizes,
    Work,
    place_in_tile,
    plan_work,
    seen_by,
    tile_of,
)
from jaxserve.pallas_kernels.online_softmax import Softmax
from jaxserve.pallas_kernels.pool import Pool, read_as


@dataclasses.dataclass(frozen=True)
class Options(common.Options):
    """The options of all kernels, and the size of a query tile.

    Attributes:
        queries: Rows of a query tile, query tokens times heads of a group: a power of two.
        sinks: Whether there are sinks.
        uncut: As in `Kind`.
    """

    queries: int
    sinks: bool
    uncut: bool

    @property
    def members(self) -> int:
        """Rows of a query tile that can be queries."""
        return self.queries // self.group * self.group


class Kind(NamedTuple):
    """Which chunks a kernel takes, and how.

    Attributes:
        launch: Name of its sizes in `tuning`.
        least, most: Tokens of such a chunk.
        tokens: Most tokens of a tile.
        uncut: Decodes are chunks, too, and a program walks the whole context of its queries from
            the first tile on, always by the same code. So a query's sums have a fixed order,
            whatever else is in the batch and wherever its chunk begins.
    """

    launch: str
    least: int
    most: int
    tokens: int
    uncut: bool = False


_MOST = 1 << 30
_DRAFTED = 8  # most tokens of a decode with drafts
ANY = Kind("prefill", 1, _MOST, _MOST)
UNCUT = Kind("few", 1, _MOST, _MOST, uncut=True)
_SMALL = Kind("few", 1, _MOST, _DRAFTED)
_FEW, _MANY = _SMALL._replace(most=_DRAFTED), ANY._replace(least=_DRAFTED + 1)
_FEW_TOKENS = 256  # buckets up to this rarely have long chunks


def kinds(batch: AttentionBatch) -> tuple[Kind, ...]:
    """The kinds of a batch's chunks, each for a kernel of its own. Decodes with drafts have small
    tiles; in a small bucket all chunks have."""
    if not batch.drafts:
        return (ANY,)
    if batch.max_tokens <= min(_FEW_TOKENS, _DRAFTED * batch.max_rows):
        return (_SMALL,)
    return _FEW, _MANY


def chunk_lengths(batch: AttentionBatch, kind: Kind) -> jax.Array:
    """int32 [R]: the query tokens of the chunks of a kind; 0 for other rows."""
    row = jnp.arange(batch.max_rows, dtype=jnp.int32)
    begin = 0 if kind.uncut else batch.num_decodes
    chunk = (row >= begin) & (row < batch.num_rows) & (batch.kind == KV)
    chunk &= (batch.query_lens >= kind.least) & (batch.query_lens <= kind.most)
    return jnp.where(chunk, batch.query_lens, 0)


def _queries(tokens: int, group: int, kind: Kind, launch: tuning.Launch) -> int:
    """Rows of a query tile in a bucket of this many tokens: small buckets and short chunks do not
    fill large tiles."""
    if kind.uncut:
        return max(launch.queries, 16, common.power_of_two(group))
    longest = common.power_of_two(min(tokens, kind.tokens) * group)
    return max(min(launch.queries, longest), 16, common.power_of_two(group))


def plan(
    batch: AttentionBatch,
    geometry: common.Geometry,
    itemsize: int,
    num_heads: int,
    kind: Kind = ANY,
    *,
    sliding_window: int | None,
) -> Work:
    """Plans `paged_prefill`.

    Args:
        batch: The batch that will attend.
        geometry: The pool's geometry.
        itemsize: Bytes of the pool's elements.
        num_heads: Query heads of one shard.
        kind: Which chunks to take.
        sliding_window: Positions that a token sees; None for all.
    """
    launch, group = (
        tuning.launch(kind.launch, itemsize, geometry.padded_dim),
        num_heads // geometry.kv_heads,
    )
    tokens = _queries(batch.max_tokens, group, kind, launch) // group
    sizes = Sizes(tokens, launch.tile, batch.table_width * geometry.block_size, sliding_window)
    lengths = chunk_lengths(batch, kind)
    return plan_work(batch, lengths, geometry.kv_heads, sizes, launch, uncut=kind.uncut)


def _kernel(*refs: common.Ref, options: Options) -> None:
    """refs: the batch, the tiles, the shares, the sinks if there are any, q [T * H, D], the pool,
    the output so far (aliased), the output [T * H, D] and the parts."""
    # Inputs: the batch's columns, the query tiles and shares, optional sinks, q, the pool and the
    # output so far; outputs: the same output, and parts of tiles that several programs share.
    batch, tiles, shares, given = unpacked(refs, 2)
    sinks, (q_ref, *rest) = (given[0], given[1:]) if options.sinks else (None, given)
    pool, (_, out_ref, *parts) = common.take_pool(rest, options.geometry)

    def attend(segment: Segment) -> None:
        into = out_ref, None if options.uncut else Parts(*parts)
        _attend(batch, QueryTiles(*tiles), segment, q_ref, pool, *into, sinks, options)

    for_each_segment(shares, attend)


def _attend(
    batch: common.BatchRefs,
    tiles: QueryTiles,
    segment: Segment,
    q_ref: common.Ref,  # [T * H, D]
    pool: common.PoolRefs,
    out_ref: common.Ref,  # [T * H, D]
    parts: Parts | None,
    sinks: common.Ref | None,
    options: Options,
) -> None:
    geometry, size, window = options.geometry, options.tile, options.scoring.sliding_window
    head, width, padded = segment.head, geometry.head_dim, geometry.padded_dim
    tile = tile_of(
        batch,
        tiles,
        segment.item,
        head,
        queries=options.queries,
        group=options.group,
        num_heads=options.num_heads,
        sliding_window=window,
    )
    # Queries of the tile, [queries, padded_dim]: some tokens times the heads of the group.
    dtype = read_as(pool.dtype, q_ref.dtype)
    q = common.load_rows(q_ref, tile.rows, tile.used, width, padded).astype(dtype)
    context = common.context_of(batch, geometry, tile.row)

    def walk(j: jax.Array, state: Softmax, masked: bool) -> Softmax:
        position = j * size + jnp.arange(size, dtype=jnp.int32)
        inside = (position >= tile.lower) & (position < tile.upper) if masked else None
        # Gather K and V, [size, padded_dim] each, through the row's block table.
        k_rows = context.pool_rows(0, head, position, inside)
        v_rows = context.pool_rows(1, head, position, inside)
        k = pool.load(k_rows, inside, geometry, dtype)
        v = pool.load(v_rows, inside, geometry, dtype)
        # Scores, [queries, size]; across the diagonal each query has its own mask.
        products = online_softmax.dot(q, k, transposed=True)
        products = online_softmax.scaled(products, pool.load_scales(k_rows, inside))
        scores = online_softmax.prepare(products, options.scoring)
        if masked:
            scores = jnp.where(seen_by(tile, position, window), scores, -jnp.inf)
        return online_softmax.step(state, scores, v, pool.load_scales(v_rows, inside))

    state = online_softmax.start(options.queries, padded)
    first = lax.div(tile.lower, jnp.int32(size))
    begin, end = first + segment.begin, first + segment.end
    if options.uncut:
        # The whole context in one loop with one body, so that the order of sums is fixed.
        begin, end = first, common.cdiv(tile.upper, size)
    elif window is None:
        # First the tiles that every query sees, which need no mask.
        unmasked = jnp.minimum(lax.div(tile.whole, jnp.int32(size)), end)
        state = lax.fori_loop(begin, unmasked, functools.partial(walk, masked=False), state)
        begin = jnp.maximum(begin, unmasked)
    state = lax.fori_loop(begin, end, functools.partial(walk, masked=True), state)
    # A whole tile goes to the output, a part of one to `parts`, for `merge`.
    stored = segment, state, tile.rows, tile.used, options.members
    store_segment(out_ref, parts, *stored, sinks)


def paged_prefill(
    out: jax.Array,
    q: jax.Array,
    pool: Pool,
    layer: jax.Array | int,
    batch: AttentionBatch,
    work: Work,
    kind: Kind = ANY,
    *,
    scoring: Scoring,
    sinks: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention of the KV rows [num_decodes, num_rows) of a kind, or of all, filled into an output.

    Args:
        out: [T, H, D], the output so far, in q's dtype.
        q: [T, H, D].
        pool: [layers, blocks, kv_heads, block_size, D].
        layer: Index into the whole pool; may be traced.
        batch: The step's rows and tokens.
        work: From `plan` for this batch and these options.
        kind: Which chunks to take.
        scoring: How products become scores.
        sinks: float32 [H], see `attention.paged_attention`; None for none.
        interpret: Run in the interpreter.
    """
    tokens, num_heads, head_dim = q.shape
    geometry = common.geometry_of(pool)
    launch = tuning.launch(kind.launch, pool.dtype.itemsize, geometry.padded_dim)
    queries = _queries(tokens, num_heads // geometry.kv_heads, kind, launch)
    more = (queries, sinks is not None, kind.uncut)
    options = Options(geometry, num_heads, scoring, launch.tile, *more)
    flat = jax.ShapeDtypeStruct((tokens * num_heads, head_dim), q.dtype)
    done = run_shares(
        functools.partial(_kernel, options=options),
        layer,
        batch,
        work.shares,
        (q.reshape(flat.shape), *common.pool_arguments(pool), out.reshape(flat.shape)),
        flat,
        launch,
        functools.partial(place_in_tile, group=options.group, num_heads=num_heads),
        others=work.tiles,
        members=options.members,
        width=geometry.padded_dim,
        in_place=True,
        sinks=common.sink_arguments(sinks),
        uncut=kind.uncut,
        interpret=interpret,
        name="paged_uncut" if kind.uncut else f"paged_{kind.launch}",
    )
    return done.reshape(q.shape)
