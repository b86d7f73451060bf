"""A row's context through VMEM: double-buffered DMA over its block table (Mosaic)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.tpu_common import BEGIN, END, ROW, Chunk, bounds


@dataclasses.dataclass(frozen=True)
class Stream:
    """Brings the chunks that items see into VMEM, one ahead of the one in use; at an item's last
    chunk that is the next item's first, so that only a program's very first is waited for idly.

    prefetched: the items, SMEM int32 [7, N], tables, SMEM int32 [R * 2 * W], layer, SMEM int32 [1].
    pool: HBM [layers, blocks, kv_heads, block_size, head_dim].
    buffers: VMEM [2, heads, tokens, head_dim] for K and V, or one of them for hidden vectors.
    signals: arrived, DMA semaphores [2], and turn, SMEM int32 [1], the half of the buffers in use.
    head: first head of this program. count: items in the grid.
    """

    chunk: Chunk
    sliding_window: int | None
    prefetched: tuple[Any, Any, Any]
    pool: Any
    buffers: tuple[Any, ...]
    signals: tuple[Any, Any]
    head: jax.Array | int
    count: jax.Array | int
    # What else a chunk brings: beside(i, j, half) -> copies that signal arrived[half].
    beside: Callable[..., list[Any]] = lambda i, j, half: []

    def walk(self, i: jax.Array, use: Callable[[jax.Array, jax.Array], None]) -> None:
        """use(j, half) for each chunk j of item i, its vectors in that half of the buffers. Slots
        outside of the item's `bounds` hold whatever was there."""
        items, turn = self.prefetched[0], self.signals[1]
        begin, end = items[BEGIN, i], items[END, i]

        @pl.when(i == 0)
        def _() -> None:
            turn[0] = 0
            self._each(i, begin, 0, lambda copy: copy.start())

        @pl.loop(begin, end)
        def _(j: jax.Array) -> None:
            half = turn[0]
            last = j + 1 == end
            following = jnp.minimum(i + 1, self.count - 1)
            next_item = jnp.where(last, following, i)
            next_chunk = jnp.where(last, items[BEGIN, following], j + 1)

            @pl.when(jnp.logical_not(last & (i + 1 == self.count)))
            def _() -> None:
                self._each(next_item, next_chunk, 1 - half, lambda copy: copy.start())

            self._each(i, j, half, lambda copy: copy.wait())
            use(j, half)
            turn[0] = 1 - half

    def _each(
        self, i: jax.Array, j: jax.Array, half: jax.Array | int, act: Callable[[Any], None]
    ) -> None:
        """act on the copy of each block of chunk j that item i sees something in."""
        chunk, (items, tables, layer), arrived = self.chunk, self.prefetched, self.signals[0]
        low, high = bounds(items, i, self.sliding_window)
        size, start = chunk.block_size, j * chunk.blocks
        first = jnp.maximum(low // size - start, 0)
        end = jnp.minimum((high + size - 1) // size - start, chunk.blocks)
        heads = pl.ds(self.head, chunk.heads)
        row = items[ROW, i] * 2 * chunk.width + start
        for copy in self.beside(i, j, half):
            act(copy)

        @pl.loop(first, end)
        def _(b: jax.Array) -> None:
            slots = pl.ds(pl.multiple_of(b * size, size), size)
            for plane, buffer in enumerate(self.buffers):
                block = tables[row + plane * chunk.width + b]
                source = self.pool.at[layer[0], block, heads]
                act(pltpu.make_async_copy(source, buffer.at[half, :, slots], arrived.at[half]))


def clean(buffer: Any, half: jax.Array, own: jax.Array) -> None:
    """Zero the slots of buffer [2, heads, tokens, head_dim] that are not own, bool [tokens, 1]:
    a weight of 0 times NaN is NaN."""
    buffer[half] = jnp.where(own[None], buffer[half], jnp.zeros((), buffer.dtype))
