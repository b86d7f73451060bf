"""Common parts of the Pallas-TPU kernels: options, work items, the shape of a chunk of context.

A kernel's grid is (groups of heads, items). An item is one row's tokens, or a tile of them, with
the chunks of context that they see. Items that see none are left out beforehand, so that the grid,
whose length is only known at run time, has no idle ones.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from jaxserve.pallas_kernels.backends import KernelShape, Scoring
from jaxserve.pallas_kernels.batch import RIGHT, AttentionBatch
from jaxserve.pallas_kernels.tpu.tuning import Sizes

LANES = 128
# Heads are cut out of 16-bit weights, whose tiles have this many rows; not mostly padding.
PACKED, LEAST_HEAD_DIM = 16, 64
# SMEM for items and rows of tables; the smallest chip has 1 MiB, of which the compiler needs some.
SMEM_LIMIT = 900 << 10
ANY = pl.BlockSpec(memory_space=pl.ANY)
HBM = pl.BlockSpec(memory_space=pltpu.HBM)

# Fields of an item: its row, position of its first query, number of queries, first chunk and end of
# the chunks that it sees, the row's direction, and the place of its queries (in units of the
# kernel's own).
ROW, FIRST, COUNT, BEGIN, END, SIDE, AT = range(7)


@dataclasses.dataclass(frozen=True)
class Options(Scoring):
    """How products become scores, and whether to run in the interpreter."""

    interpret: bool = False

    @classmethod
    def from_scoring(cls, scoring: Scoring, interpret: bool) -> Options:
        """Options with this scoring."""
        return cls(**vars(scoring), interpret=interpret)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Static shape of a chunk of context in VMEM: [heads, blocks * block_size, head_dim].

    Attributes:
        heads: Pool heads of one program.
        blocks: Blocks of a chunk.
        block_size: Tokens of a block.
        head_dim: Elements of a head.
        width: W, entries of a table row.
    """

    heads: int
    blocks: int
    block_size: int
    head_dim: int
    width: int

    @property
    def tokens(self) -> int:
        """Tokens of context of a chunk."""
        return self.blocks * self.block_size

    @property
    def shape(self) -> tuple[int, int, int]:
        """[heads, tokens, head_dim], the shape of half a buffer in VMEM."""
        return self.heads, self.tokens, self.head_dim

    def positions(self, j: jax.Array, side: jax.Array, axis: int) -> jax.Array:
        """Positions of chunk j's slots, int32 [1, tokens] (axis 1) or [tokens, 1] (axis 0); a row
        of direction RIGHT has its blocks mirrored."""
        shape = (1, self.tokens) if axis else (self.tokens, 1)
        slot = lax.broadcasted_iota(jnp.int32, shape, axis)
        if self.block_size & (self.block_size - 1):
            offset = slot % self.block_size
        else:
            offset = slot & (self.block_size - 1)
        mirrored = slot + self.block_size - 1 - 2 * offset
        return j * self.tokens + jnp.where(side == RIGHT, mirrored, slot)


def granule_of(dtype: DTypeLike) -> int:
    """Rows of a layout tile in a pool of this dtype: transfers begin and end at multiples of it."""
    return 32 if jnp.dtype(dtype).itemsize == 1 else 8


def padded(head_dim: int) -> int:
    """Elements that a head of head_dim takes in HBM and VMEM: whole tiles."""
    return -(-head_dim // LANES) * LANES


def make_chunk(
    shape: tuple[int, ...], dtype: DTypeLike, heads: int, width: int, sizes: Sizes
) -> Chunk:
    """Chooses the chunk: as many blocks as the sizes allow, at least one.

    Args:
        shape: The pool's.
        dtype: The pool's.
        heads: Pool heads of one program.
        width: W, entries of a table row.
        sizes: Of the chip.
    """
    _, _, _, block_size, head_dim = shape
    token_bytes = heads * padded(head_dim) * jnp.dtype(dtype).itemsize
    tokens = min(sizes.chunk_bytes // token_bytes, sizes.chunk_tokens)
    if tokens > LANES:
        tokens -= tokens % LANES
    blocks = max(1, min(tokens // block_size, width))
    return Chunk(heads, blocks, block_size, head_dim, width)


def most_a_program(number: int, most: int, cores: int, multiple: int = 1) -> int:
    """Chooses how many heads, or layers, a program takes.

    The largest divisor of their number up to `most` whose programs divide over the cores, or the
    largest one up to `most` if none does.

    Args:
        number: Heads or layers in all.
        most: Most heads or layers of a program, if there is such a divisor.
        cores: TensorCores of the chip.
        multiple: The result is a multiple of this, or all of them.
    """
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    allowed = [n for n in divisors if n % multiple == 0] or [number]
    fitting = [n for n in allowed if n <= most] or allowed[:1]
    spread = [n for n in fitting if (number // n) % cores == 0]
    return max(spread or fitting)


def make_items(
    rows: jax.Array,
    first: jax.Array,
    count: jax.Array,
    at: jax.Array,
    batch: AttentionBatch,
    chunk: Chunk,
    sliding_window: int | None,
) -> jax.Array:
    """Makes N items.

    Args:
        rows: int32 [N], row of the batch.
        first: int32 [N], position of the first query.
        count: int32 [N], number of queries.
        at: int32 [N], place of the queries, in the kernel's own units.
        batch: The batch that will attend.
        chunk: Shape of a chunk.
        sliding_window: Positions that a token sees; None for all.

    Returns:
        int32 [7, N], the fields in the order of ROW to AT.
    """
    low = jnp.zeros_like(first)
    if sliding_window is not None:
        low = jnp.maximum(first - sliding_window + 1, 0)
    end = -(-(first + count) // chunk.tokens)
    side = batch.direction[rows]
    fields = (rows, first, count, low // chunk.tokens, end, side, at)
    return jnp.stack([field.astype(jnp.int32) for field in fields])


def live_first(live: jax.Array) -> tuple[jax.Array, jax.Array]:
    """bool [N] -> the indices of the true entries in order, then of the false ones; and the number
    of true ones."""
    return jnp.argsort(~live, stable=True).astype(jnp.int32), live.sum(dtype=jnp.int32)


class Work(NamedTuple):
    """The work of a kernel, the same in all layers.

    Attributes:
        items: int32 [7, N].
        tables: int32 [R, 1, 2 * W], a shape with little padding by tiles.
        number: int32 [], how many of the items are used.
    """

    items: jax.Array
    tables: jax.Array
    number: jax.Array

    def scalars(self, layer: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        """The scalar-prefetch operands (items, layer). Raises ValueError if the items and two rows
        of the tables exceed scalar memory."""
        rows, _, width = self.tables.shape
        size = 4 * (self.items.size + 2 * width)
        if size > SMEM_LIMIT:
            raise ValueError(
                f"batch.tables: two rows of {[rows, 2, width // 2]} and the items take {size} "
                f"bytes of a TPU's scalar memory, more than {SMEM_LIMIT}: use a larger block_size"
            )
        return self.items, jnp.asarray(layer, jnp.int32).reshape(1)


def make_work(items: jax.Array, number: jax.Array, batch: AttentionBatch) -> Work:
    """The work of the first `number` items [7, N], with the batch's tables."""
    return Work(items, batch.tables.reshape(batch.max_rows, 1, -1), number)


def decode_items(
    live: jax.Array, batch: AttentionBatch, chunk: Chunk, sliding_window: int | None
) -> tuple[jax.Array, jax.Array]:
    """Makes an item for each decode, whose token is at its context's end.

    Args:
        live: bool [R], rows to make items for.
        batch: The batch that will attend.
        chunk: Shape of a chunk.
        sliding_window: Positions that a token sees; None for all.

    Returns:
        (int32 [7, R], int32 [] number of items).
    """
    rows, number = live_first(live)
    first = batch.context_lens[rows] - 1
    items = make_items(rows, first, jnp.ones_like(rows), rows, batch, chunk, sliding_window)
    return items, number


def bounds(items: Any, i: jax.Array, sliding_window: int | None) -> tuple[jax.Array, jax.Array]:
    """Positions [low, high) that any of item i's queries sees."""
    high = items[FIRST, i] + items[COUNT, i]
    if sliding_window is None:
        return jnp.zeros_like(high), high
    return jnp.maximum(items[FIRST, i] - sliding_window + 1, 0), high


def compiler(sizes: Sizes, parallel: int, sequential: int = 1) -> pltpu.CompilerParams:
    """Compiler parameters: `parallel` grid axes that cores may share, then `sequential` ones that
    they may not.

    Chips do not check a transfer's bounds: that takes more bundles than the rest of a block's
    transfer. The interpreter checks all of them, and so do the tests.
    """
    semantics = (pltpu.PARALLEL,) * parallel + (pltpu.ARBITRARY,) * sequential
    return pltpu.CompilerParams(
        dimension_semantics=semantics, vmem_limit_bytes=sizes.vmem, disable_bounds_checks=True
    )


def interpreted(interpret: bool) -> Any:
    """pallas_call's `interpret`: the TPU interpreter, which emulates DMA and semaphores."""
    return pltpu.InterpretParams(out_of_bounds_reads="raise") if interpret else False


def supports(kind: int, shape: KernelShape) -> str | None:
    """Why the kernels do not support this shape (of one shard), or None."""
    head_dim, block_size = shape.head_dim, shape.block_size
    name = jnp.dtype(shape.dtype).name
    if name == "float16":
        return "dtype float16: TPUs compute in float32 and bfloat16"
    if head_dim < LEAST_HEAD_DIM or head_dim % PACKED:
        return f"head_dim {head_dim}: must be a multiple of {PACKED} from {LEAST_HEAD_DIM} up"
    slots = granule_of(shape.dtype)
    if block_size % slots:
        return f"block_size {block_size}: must be a multiple of {slots} for {name}"
    if shape.num_heads % shape.kv_heads:
        return f"num_heads {shape.num_heads}: must be a multiple of kv_heads {shape.kv_heads}"
    return None
