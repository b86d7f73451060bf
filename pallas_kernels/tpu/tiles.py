"""Ragged chunks of queries as tiles: head-major with aligned rows, and the way back. Queries come
as [T, H, D], with rows anywhere on the token axis. A kernel needs a tile of one row's queries head
by head, and a layout tile of the TPU holds 16 queries. So rows are laid out one after another at
multiples of 16 (XLA gathers them once), and a tile starts at any such multiple.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.batch import AttentionBatch
from jaxserve.pallas_kernels.tpu import common

ALIGNED = 16


class Layout(NamedTuple):
    """The places of a batch's queries in aligned order. A unit is 16 places.

    Attributes:
        place: int32 [T], each token's place; past the end for tokens without one.
        source: int32 [units * 16], the token at each place, T for none. Includes room for a tile's
            overhang.
    """

    place: jax.Array
    source: jax.Array

    def gather(self, q: jax.Array, kv_heads: int) -> jax.Array:
        """[T, H, D] -> [kv_heads, group, units, 16, D]."""
        _, num_heads, head_dim = q.shape
        aligned = q.at[self.source].get(mode="fill", fill_value=0).transpose(1, 0, 2)
        return aligned.reshape(kv_heads, num_heads // kv_heads, -1, ALIGNED, head_dim)

    def scatter(self, out: jax.Array) -> jax.Array:
        """[kv_heads, group, units, 16, D] -> [T, H, D], zeros for tokens without a place."""
        kv_heads, group, units, aligned, head_dim = out.shape
        flat = out.reshape(kv_heads * group, units * aligned, head_dim).transpose(1, 0, 2)
        return flat.at[self.place].get(mode="fill", fill_value=0)


class Tiles(NamedTuple):
    """A batch's queries as tiles: their layout and a kernel's work."""

    layout: Layout
    work: common.Work


def make_tiles(
    batch: AttentionBatch,
    live: jax.Array,
    tile: int,
    chunk: common.Chunk,
    sliding_window: int | None,
) -> Tiles:
    """Cuts rows into tiles.

    Args:
        batch: The batch that will attend.
        live: bool [R], rows to cut.
        tile: Queries of a tile, a multiple of 16.
        chunk: Shape of a chunk of context.
        sliding_window: Positions that a token sees; None for all.
    """
    layout, start = _lay_out(batch, live, tile)
    items, number = _tile_items(batch, live, start, tile, chunk, sliding_window)
    return Tiles(layout, common.make_work(items, number, batch))


def _lay_out(batch: AttentionBatch, live: jax.Array, tile: int) -> tuple[Layout, jax.Array]:
    """The layout, and each row's first unit, int32 [R]."""
    lens = jnp.where(live, batch.query_lens, 0)
    units = -(-lens // ALIGNED)
    start = jnp.cumsum(units) - units
    row = jnp.minimum(batch.token_row, batch.max_rows - 1)
    mine = (batch.token_row < batch.max_rows) & live[row]
    index = jnp.arange(batch.max_tokens, dtype=jnp.int32) - batch.query_start[row]
    most = batch.max_tokens // ALIGNED + min(batch.max_rows, batch.max_tokens) + tile // ALIGNED
    place = jnp.where(mine, start[row] * ALIGNED + index, most * ALIGNED)
    source = jnp.full(most * ALIGNED, batch.max_tokens, jnp.int32)
    source = source.at[place].set(jnp.arange(batch.max_tokens, dtype=jnp.int32), mode="drop")
    return Layout(place, source), start


def _tile_items(
    batch: AttentionBatch,
    live: jax.Array,
    start: jax.Array,
    tile: int,
    chunk: common.Chunk,
    sliding_window: int | None,
) -> tuple[jax.Array, jax.Array]:
    """Items of all tiles, row by row: (int32 [7, N], number). AT is the tile's first unit."""
    lens = jnp.where(live, batch.query_lens, 0)
    tiles = -(-lens // tile)
    ends = jnp.cumsum(tiles)
    most = batch.max_tokens // tile + min(batch.max_rows, batch.max_tokens)
    item = jnp.arange(most, dtype=jnp.int32)
    row = jnp.searchsorted(ends, item, side="right").astype(jnp.int32)
    row = jnp.minimum(row, batch.max_rows - 1)
    done = (item - (ends - tiles)[row]) * tile
    first = batch.context_lens[row] - batch.query_lens[row] + done
    count = jnp.clip(lens[row] - done, 0, tile)
    at = start[row] + done // ALIGNED
    items = common.make_items(row, first, count, at, batch, chunk, sliding_window)
    return items, ends[-1].astype(jnp.int32)


def query_spec(heads: int, group: int, tile: int, head_dim: int) -> pl.BlockSpec:
    """The block of an item's queries, [heads, group, tile / 16, 16, head_dim].

    Args:
        heads: KV heads of a program.
        group: Query heads of a KV head.
        tile: Queries of a tile.
        head_dim: Elements of a head.
    """
    shape = (heads, group, tile // ALIGNED, ALIGNED, head_dim)
    return pl.BlockSpec(
        tuple(pl.Element(size) for size in shape),
        lambda h, i, items, *_: (h * heads, 0, items[common.AT, i], 0, 0),
    )


def seen_by(
    items: Any, i: jax.Array, at: jax.Array, group: int, tile: int, window: int | None
) -> jax.Array:
    """Which positions the queries of an item see. Rows of the tile past the item's count see none.

    Args:
        items: SMEM int32 [7, N].
        i: int32 [], the item.
        at: int32 [1, S], positions.
        group: Query heads of a KV head.
        tile: Queries of a tile, a power of two.
        window: Sliding window, or None.

    Returns:
        bool [group * tile, S].
    """
    query = lax.broadcasted_iota(jnp.int32, (group * tile, 1), 0) & (tile - 1)
    position = jnp.where(query < items[common.COUNT, i], items[common.FIRST, i] + query, -1)
    seen = at <= position
    return seen if window is None else seen & (at > position - window)


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Sends a tile's results from VMEM to their units, 16 queries a transfer.

    Nothing is sent beyond the tile's count: the next places belong to another row.

    Attributes:
        items: SMEM int32 [7, N].
        done: VMEM [heads, group, tile, head_dim].
        out: HBM [kv_heads, group, units, 16, head_dim].
        sent: DMA semaphore.
        pending: SMEM int32 [1], transfers under way.
        heads: KV heads of a program.
    """

    items: Any
    done: Any
    out: Any
    sent: Any
    pending: Any
    heads: int

    def put(self, h: jax.Array, i: jax.Array, values: jax.Array) -> None:
        """Sends the results of item i for head group h, once the item before is sent. Waits after
        the last item."""

        @pl.when(i == 0)
        def _() -> None:
            self.pending[0] = 0

        self._wait()
        self.done[...] = values.astype(self.done.dtype).reshape(self.done.shape)
        units = (self.items[common.COUNT, i] + ALIGNED - 1) // ALIGNED
        self.pending[0] = units

        @pl.loop(0, units)
        def _(u: jax.Array) -> None:
            self._copy(h, self.items[common.AT, i] + u, u).start()

        @pl.when(i + 1 == pl.num_programs(1))
        def _() -> None:
            self._wait()

    def _wait(self) -> None:
        @pl.loop(0, self.pending[0])
        def _(u: jax.Array) -> None:
            self._copy(0, 0, 0).wait()

        self.pending[0] = 0

    def _copy(self, h: jax.Array | int, unit: jax.Array | int, u: jax.Array | int) -> Any:
        queries = pl.ds(pl.multiple_of(jnp.int32(u) * ALIGNED, ALIGNED), ALIGNED)
        target = self.out.at[pl.ds(h * self.heads, self.heads), :, unit]
        return pltpu.make_async_copy(self.done.at[:, :, queries], target, self.sent)
