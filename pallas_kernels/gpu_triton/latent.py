"""Attention over latent vectors on Pallas-Triton: all heads share them, as keys and as values.

A token has half of its vector where others have K, the other half where they have V (`Scoring`):
in each half first what is its value, then what is of its key alone, in a pool of 8 bits a byte of
each number (`pool.store_halves`). The four pieces are read once, for the scores and for the sums
(DeepSeek-V2, section 2.1.2).

A tile is some of a row's tokens with some of their heads, since the sums of all heads may not fit
into registers. Programs take equal shares of the contexts of all tiles, as for prompts
(`prefill`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

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
from jaxserve.pallas_kernels.pool import Pool, halves_wide, read_as, upper_bytes

_MOST_HEADS = 16  # of a tile


class Kind(NamedTuple):
    """Which rows a kernel takes, and how.

    Attributes:
        launch: Name of its sizes in `tuning`.
        decodes, chunks: Which rows.
        uncut: As in `prefill.Kind`.
    """

    launch: str
    decodes: bool
    chunks: bool
    uncut: bool = False


_DECODES, _CHUNKS = Kind("latent", True, False), Kind("latent_prompts", False, True)
_UNCUT = Kind("latent", True, True, uncut=True)


def _kinds(*, decode_only: bool, uncut: bool) -> tuple[Kind, ...]:
    if uncut:
        return (_UNCUT,)
    return (_DECODES._replace(chunks=True),) if decode_only else (_DECODES, _CHUNKS)


class _Piece(NamedTuple):
    """Columns of a half: from `first` on, `width` of them. plane: 0 of K, 1 of V. asked: the first
    of the columns of queries that are multiplied by them."""

    plane: int
    first: int
    width: int
    asked: int

    @property
    def padded(self) -> int:
        """The width padded for Triton."""
        return max(16, common.power_of_two(self.width))


@dataclasses.dataclass(frozen=True)
class Options(common.Options):
    """The options of all kernels, and the size of a query tile.

    Attributes:
        queries: Rows of a query tile, query tokens times heads: a power of two.
        uncut: As in `Kind`.
        paired: Whether what is of keys alone is cut into bytes, see `pool.store_halves`.
    """

    queries: int
    uncut: bool
    paired: bool

    @property
    def group(self) -> int:
        """Heads of a tile."""
        return _heads_of_a_tile(self.num_heads)

    @property
    def members(self) -> int:
        """Rows of a query tile that can be queries."""
        return self.queries // self.group * self.group

    @property
    def values(self) -> tuple[_Piece, _Piece]:
        """The pieces that are values."""
        width = self.scoring.halves
        return _Piece(0, 0, width, 0), _Piece(1, 0, width, width)

    @property
    def rest(self) -> tuple[_Piece, ...]:
        """The pieces that are of keys alone; with `paired` their bytes."""
        first = self.scoring.halves
        width, second = self.geometry.head_dim - first, 0 if self.paired else 1
        pieces = (_Piece(n, first, width, 2 * first + n * second * width) for n in (0, 1))
        return tuple(pieces) if width else ()


def _heads_of_a_tile(num_heads: int) -> int:
    """The largest divisor that is not above `_MOST_HEADS`."""
    return next(n for n in range(min(num_heads, _MOST_HEADS), 0, -1) if num_heads % n == 0)


def _queries(tokens: int, group: int, kind: Kind, launch: tuning.Launch) -> int:
    """Rows of a query tile in a bucket of this many tokens."""
    if kind.uncut:
        return max(launch.queries, 16)
    most = tokens if kind == _CHUNKS else 1
    return max(min(launch.queries, common.power_of_two(most * group)), 16)


def _lengths(batch: AttentionBatch, kind: Kind) -> jax.Array:
    """int32 [R]: the query tokens of the rows of a kind; 0 for others."""
    row = jnp.arange(batch.max_rows, dtype=jnp.int32)
    mine = (row < batch.num_rows) & (batch.kind == KV)
    if not kind.chunks:
        mine &= row < batch.num_decodes
    if not kind.decodes:
        mine &= row >= batch.num_decodes
    return jnp.where(mine, batch.query_lens, 0)


def plan(
    batch: AttentionBatch,
    geometry: common.Geometry,
    itemsize: int,
    num_heads: int,
    *,
    sliding_window: int | None,
    decode_only: bool,
    uncut: bool,
) -> tuple[Work, ...]:
    """Plans `attend`: the work of each of its kernels.

    Args:
        batch: The batch that will attend.
        geometry: The pool's geometry.
        itemsize: Bytes of the pool's elements.
        num_heads: Query heads of one shard.
        sliding_window: Positions that a token sees; None for all.
        decode_only: T == R, and token i is row i's only token.
        uncut: As in `Kind`.
    """
    group, found = _heads_of_a_tile(num_heads), []
    for kind in _kinds(decode_only=decode_only, uncut=uncut):
        launch = tuning.launch(kind.launch, itemsize, geometry.padded_dim)
        tokens = _queries(batch.max_tokens, group, kind, launch) // group
        sizes = Sizes(tokens, launch.tile, batch.table_width * geometry.block_size, sliding_window)
        lengths = _lengths(batch, kind)
        found.append(plan_work(batch, lengths, num_heads // group, sizes, launch, uncut=uncut))
    return tuple(found)


def _load(
    ref: common.Ref,
    rows: jax.Array,
    inside: jax.Array | None,
    first: int,
    piece: _Piece,
) -> jax.Array:
    """The piece of these rows, whose columns begin at `first`: [N, padded], zeros elsewhere."""
    column = lax.broadcasted_iota(jnp.int32, (1, piece.padded), 1)
    mask = None if inside is None else inside[:, None]
    if piece.padded != piece.width:
        mask = column < piece.width if mask is None else mask & (column < piece.width)
    at = ref.at[rows[:, None], first + column]
    return plgpu.load(at) if mask is None else plgpu.load(at, mask=mask, other=0)


def _kernel(*refs: common.Ref, options: Options) -> None:
    """refs: the batch, the tiles, the shares, q [T * H, keys], the pool, the output so far
    (aliased), the output [T * H * 2, halves] and the parts."""
    batch, tiles, shares, (q_ref, *rest) = unpacked(refs, 2)
    pool, (_, out_ref, *parts) = common.take_pool(rest, options.geometry)

    def attend(segment: Segment) -> None:
        into = out_ref, None if options.uncut else Parts(*parts)
        _attend(batch, QueryTiles(*tiles), segment, q_ref, pool, *into, options)

    for_each_segment(shares, attend)


def _attend(
    batch: common.BatchRefs,
    tiles: QueryTiles,
    segment: Segment,
    q_ref: common.Ref,  # [T * H, keys]
    pool: common.PoolRefs,
    out_ref: common.Ref,  # [T * H * 2, halves]
    parts: Parts | None,
    options: Options,
) -> None:
    geometry, size, window = options.geometry, options.tile, options.scoring.sliding_window
    tile = tile_of(
        batch,
        tiles,
        segment.item,
        segment.head,
        queries=options.queries,
        group=options.group,
        num_heads=options.num_heads,
        sliding_window=window,
    )
    dtype = read_as(pool.dtype, q_ref.dtype)

    def queries(piece: _Piece) -> jax.Array:
        return _load(q_ref, tile.rows, tile.used, piece.asked, piece).astype(dtype)

    apart = options.rest[: 1 if options.paired else 2]
    asked = [queries(piece) for piece in (*options.values, *apart)]
    context = common.context_of(batch, geometry, tile.row)

    def walk(j: jax.Array, state: tuple[jax.Array, ...], masked: bool) -> tuple[jax.Array, ...]:
        position = j * size + jnp.arange(size, dtype=jnp.int32)
        inside = (position >= tile.lower) & (position < tile.upper) if masked else None
        rows = [context.pool_rows(plane, 0, position, inside) for plane in (0, 1)]
        factors = [pool.load_scales(of, inside) for of in rows]

        def load(piece: _Piece) -> jax.Array:
            return _load(pool.values, rows[piece.plane], inside, piece.first, piece)

        read = [common.widened(load(piece), dtype) for piece in options.values]
        rest = [load(piece) for piece in options.rest]
        if options.paired and rest:
            rest = [upper_bytes(*rest)]
        keys = [*read, *(x.astype(dtype) for x in rest)]
        products = jnp.zeros((options.queries, size), jnp.float32)
        for q, x, factor in zip(asked, keys, [*factors, None, None], strict=False):
            product = online_softmax.dot(q, x, transposed=True)
            products += online_softmax.scaled(product, factor)
        scores = online_softmax.prepare(products, options.scoring)
        if masked:
            scores = jnp.where(seen_by(tile, position, window), scores, -jnp.inf)
        # Both with the same weights, which the compiler computes once.
        peak, total, *sums = state
        done = [
            online_softmax.step(Softmax(peak, total, acc), scores, x, factor)
            for acc, x, factor in zip(sums, read, factors, strict=True)
        ]
        return done[0].peak, done[0].total, done[0].acc, done[1].acc

    begin_with = online_softmax.start(options.queries, options.values[0].padded)
    state: tuple[jax.Array, ...] = (*begin_with, begin_with.acc)
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
    peak, total, *sums = lax.fori_loop(begin, end, functools.partial(walk, masked=True), state)
    for piece, acc in zip(options.values, sums, strict=True):
        mine = Softmax(peak, total, acc), 2 * tile.rows + piece.plane, tile.used
        before = piece.plane * options.members
        store_segment(out_ref, parts, segment, *mine, 2 * options.members, before=before)


def _place(
    batch: common.BatchRefs,
    tiles: tuple[common.Ref, ...],
    item: jax.Array,
    head: jax.Array,
    member: jax.Array,
    *,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """See `merge.Place`: a member is a query's sum of a piece, those of K's half first."""
    each = jnp.int32(options.members)
    at, used = place_in_tile(
        batch,
        tiles,
        item,
        head,
        lax.rem(member, each),
        group=options.group,
        num_heads=options.num_heads,
    )
    return 2 * at + lax.div(member, each), used


def attend(
    q: jax.Array,
    pool: Pool,
    layer: jax.Array | int,
    batch: AttentionBatch,
    plan: tuple[Work, ...],
    *,
    scoring: Scoring,
    decode_only: bool,
    uncut: bool,
    interpret: bool = False,
) -> jax.Array:
    """See `backends.Backend.attend`, with halves.

    Args:
        q: [T, H, keys], see `pool.key_width`.
        pool: [layers, blocks, 1, block_size, D].
        layer: Index into the whole pool; may be traced.
        batch: The step's rows and tokens.
        plan: From `plan` for this batch and these options.
        scoring: How products become scores, and what are values.
        decode_only: T == R, and token i is row i's only token.
        uncut: As in `Kind`.
        interpret: Run in the interpreter.

    Returns:
        [T, H, 2 * halves] in q's dtype; zeros for tokens of no KV row.
    """
    tokens, num_heads, width = q.shape
    geometry = common.geometry_of(pool)
    out = jnp.zeros((tokens * num_heads * 2, scoring.halves), q.dtype)
    for kind, work in zip(_kinds(decode_only=decode_only, uncut=uncut), plan, strict=True):
        launch = tuning.launch(kind.launch, pool.dtype.itemsize, geometry.padded_dim)
        queries = _queries(tokens, _heads_of_a_tile(num_heads), kind, launch)
        paired = halves_wide(pool.dtype, scoring.halves)
        options = Options(geometry, num_heads, scoring, launch.tile, queries, uncut, paired)
        out = run_shares(
            functools.partial(_kernel, options=options),
            layer,
            batch,
            work.shares,
            (q.reshape(-1, width), *common.pool_arguments(pool), out),
            jax.ShapeDtypeStruct(out.shape, out.dtype),
            launch,
            functools.partial(_place, options=options),
            others=work.tiles,
            members=2 * options.members,
            width=options.values[0].padded,
            in_place=True,
            uncut=uncut,
            interpret=interpret,
            name=f"{kind.launch}_uncut" if uncut else kind.launch,
        )
    return out.reshape(tokens, num_heads, 2 * scoring.halves)
