"""Streams a row's context through VMEM: double-buffered DMA over its block table (Mosaic).

Tables stay in HBM, whatever their size; the rows of two items, the one at work and the next, are in
scalar memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from jaxserve.pallas_kernels.pool import Pool, ScaledPool
from jaxserve.pallas_kernels.tpu.common import ANY, BEGIN, END, ROW, SIDE, Chunk, bounds


class Buffer(NamedTuple):
    """Room for two chunks, as refs or as scratch shapes.

    Attributes:
        values: VMEM [2, heads, tokens, head_dim].
        scales: VMEM float32 [2, blocks, kv_heads, block_size], of all the pool's heads; None if it
            has none.
    """

    values: Any
    scales: Any

    def vectors(self, at: tuple[Any, ...], dtype: DTypeLike) -> jax.Array:
        """The values there, in a wide dtype."""
        found: jax.Array = self.values[at]
        return found.astype(jnp.float32).astype(dtype) if found.dtype.itemsize == 1 else found

    def scales_of(self, half: jax.Array, heads: Any) -> jax.Array | None:
        """The scales of some of the pool's heads, float32 [n, 1, tokens]; None for 1."""
        if self.scales is None:
            return None
        parts = [self.scales[half, b, heads] for b in range(self.scales.shape[1])]
        return jnp.concatenate(parts, axis=1)[:, None, :]


def buffer_of(chunk: Chunk, pool: Pool) -> Buffer:
    """The scratch shapes of a buffer for chunks of this pool."""
    scales = None
    if isinstance(pool, ScaledPool):
        shape = (2, chunk.blocks, pool.shape[2], chunk.block_size)
        scales = pltpu.VMEM(shape, jnp.float32)
    return Buffer(pltpu.VMEM((2, *chunk.shape), pool.dtype), scales)


def pool_spec(pool: Pool) -> Any:
    """The pool as an operand: it stays in HBM."""
    return jax.tree.map(lambda _: ANY, pool)


class Signals(NamedTuple):
    """The scratch of a kernel's stream.

    Attributes:
        arrived: DMA semaphores [2], one for each half of the buffers.
        turn: SMEM int32 [1], the half in use.
        rows: SMEM int32 [2, 1, 2 * W], table rows of the current and the next item: item
            i's is at i & 1.
        brought: DMA semaphore, of a table row.
    """

    arrived: Any
    turn: Any
    rows: Any
    brought: Any


def signals(chunk: Chunk) -> Signals:
    """The scratch shapes of `Signals`."""
    return Signals(
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SMEM((1,), jnp.int32),
        pltpu.SMEM((2, 1, 2 * chunk.width), jnp.int32),
        pltpu.SemaphoreType.DMA,
    )


@dataclasses.dataclass(frozen=True)
class Stream:
    """Brings the chunks that items see into VMEM, one ahead of the one in use.

    At an item's last chunk, that is the next item's first chunk, so that a program only waits idly
    for its very first chunk.

    Attributes:
        chunk: Shape of a chunk.
        sliding_window: Positions that a token sees; None for all.
        prefetched: The items, SMEM int32 [7, N], and layer, SMEM int32 [1].
        tables: HBM int32 [R, 1, 2 * W].
        pool: HBM [layers, blocks, kv_heads, block_size, head_dim], or a ScaledPool of refs.
        buffers: One for K and one for V, or one for hidden vectors.
        signals: The kernel's scratch.
        head: First pool head of this program.
        first, end: The items of this program, one after another.
        beside: (i, j, half) -> further copies for chunk j of item i, which signal arrived[half].
    """

    chunk: Chunk
    sliding_window: int | None
    prefetched: tuple[Any, Any]
    tables: Any
    pool: Any
    buffers: tuple[Buffer, ...]
    signals: Signals
    head: jax.Array | int
    first: jax.Array | int
    end: jax.Array | int
    beside: Callable[..., list[Any]] = lambda i, j, half: []

    def walk(self, i: jax.Array, use: Callable[[jax.Array, jax.Array], None]) -> None:
        """Runs use(j, half) for each chunk j of item i, whose vectors are in that half of the
        buffers. Slots outside of the item's `bounds` hold stale data."""
        items, turn = self.prefetched[0], self.signals.turn
        begin, end = items[BEGIN, i], items[END, i]

        # The program's first item: nothing is in flight yet, so its table row is waited for.
        @pl.when(i == self.first)
        def _() -> None:
            turn[0] = 0
            self._row(i).start()
            self._row(i).wait()
            self._start(i, begin, 0)

        # The next item's table row comes while this item's chunks are used.
        @pl.when(i + 1 < self.end)
        def _() -> None:
            self._row(i + 1).start()

        @pl.loop(begin, end)
        def _(j: jax.Array) -> None:
            # In flight: chunk j, to `half`. Next comes this item's chunk j + 1, or, after its last
            # one, the next item's first.
            half = turn[0]
            last = j + 1 == end
            following = jnp.minimum(i + 1, self.end - 1)
            next_item = jnp.where(last, following, i)
            next_chunk = jnp.where(last, items[BEGIN, following], j + 1)

            @pl.when(last & (i + 1 < self.end))
            def _() -> None:
                self._row(i + 1).wait()

            @pl.when(jnp.logical_not(last & (i + 1 == self.end)))
            def _() -> None:
                self._start(next_item, next_chunk, 1 - half)

            # Chunk j has arrived; the next one fills the other half meanwhile.
            self._wait(i, j, half)
            use(j, half)
            turn[0] = 1 - half

    def _row(self, i: jax.Array) -> Any:
        """The copy of the table row that item i reads."""
        rows, brought = self.signals.rows, self.signals.brought
        source = self.tables.at[self.prefetched[0][ROW, i]]
        return pltpu.make_async_copy(source, rows.at[i & 1], brought)

    def _start(self, i: jax.Array, j: jax.Array, half: jax.Array | int) -> None:
        """Starts the copies of chunk j of item i: of each block that the item sees a part of."""
        chunk, layer, rows = self.chunk, self.prefetched[1], self.signals.rows
        heads, start = pl.ds(self.head, chunk.heads), j * chunk.blocks
        for copy in self.beside(i, j, half):
            copy.start()

        @pl.loop(*self._blocks(i, j))
        def _(b: jax.Array) -> None:
            for plane, buffer in enumerate(self.buffers):
                block = rows[i & 1, 0, plane * chunk.width + start + b]
                for copy in self._copies(layer[0], block, heads, buffer, half, b):
                    copy.start()

    def _wait(self, i: jax.Array, j: jax.Array, half: jax.Array | int) -> None:
        """Waits for chunk j of item i. A wait knows its copy by size and semaphore; any block will
        do."""
        for copy in self.beside(i, j, half):
            copy.wait()

        @pl.loop(*self._blocks(i, j))
        def _(b: jax.Array) -> None:
            heads = pl.ds(0, self.chunk.heads)
            for buffer in self.buffers:
                for copy in self._copies(0, 0, heads, buffer, half, b):
                    copy.wait()

    def _blocks(self, i: jax.Array, j: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[first, end) of chunk j's blocks that item i sees a part of."""
        size, start = self.chunk.block_size, j * self.chunk.blocks
        low, high = bounds(self.prefetched[0], i, self.sliding_window)
        first = jnp.maximum(low // size - start, 0)
        return first, jnp.minimum((high + size - 1) // size - start, self.chunk.blocks)

    def _copies(
        self,
        layer: jax.Array | int,
        block: jax.Array | int,
        heads: Any,
        buffer: Buffer,
        half: jax.Array | int,
        b: jax.Array,
    ) -> list[Any]:
        size, arrived = self.chunk.block_size, self.signals.arrived.at[half]
        slots = pl.ds(pl.multiple_of(b * size, size), size)
        target = buffer.values.at[half, :, slots]
        if buffer.scales is None:
            return [pltpu.make_async_copy(self.pool.at[layer, block, heads], target, arrived)]
        values, scales = self.pool.values.at[layer, block, heads], self.pool.scales
        of_scales = scales.at[layer, block], buffer.scales.at[half, b]
        return [
            pltpu.make_async_copy(values, target, arrived),
            pltpu.make_async_copy(*of_scales, arrived),
        ]


def clean_ends(
    chunk: Chunk,
    items: Any,
    i: jax.Array,
    j: jax.Array,
    buffer: Buffer,
    half: jax.Array,
    window: int | None,
) -> None:
    """Zeroes slots outside of an item's bounds, if a chunk has any: a weight of 0 times NaN is NaN.
    If there are scales, those have to be zeroed instead, see `own_scales`.

    Args:
        chunk: Shape of a chunk.
        items: SMEM int32 [7, N].
        i: int32 [], the item.
        j: int32 [], its chunk.
        buffer: The buffer.
        half: int32 [], the half of the buffer with the chunk.
        window: Sliding window, or None.
    """
    if buffer.scales is not None:
        return
    low, high = bounds(items, i, window)

    @pl.when((j * chunk.tokens < low) | ((j + 1) * chunk.tokens > high))
    def _() -> None:
        at = chunk.positions(j, items[SIDE, i], 0)
        own = (at >= low) & (at < high)
        found = stored = buffer.values[half]
        if stored.dtype.itemsize == 1:  # as bits: they may be those of other numbers
            found = lax.bitcast_convert_type(stored, jnp.int8).astype(jnp.int32)
        cleaned = jnp.where(own[None], found, jnp.zeros((), found.dtype))
        if stored.dtype.itemsize == 1:
            cleaned = lax.bitcast_convert_type(cleaned.astype(jnp.int8), stored.dtype)
        buffer.values[half] = cleaned


def own_scales(scales: jax.Array | None, own: jax.Array) -> jax.Array | None:
    """Scales [n, 1, tokens] with zeros where not own, bool, broadcasts; None if there are none."""
    return None if scales is None else jnp.where(own, scales, 0.0)
