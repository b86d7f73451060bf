"""Common parts of the Pallas-Triton kernels: the batch as refs, the pool as rows, ragged
contexts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike

from jaxserve.pallas_kernels.backends import Scoring
from jaxserve.pallas_kernels.batch import RIGHT, AttentionBatch
from jaxserve.pallas_kernels.online_softmax import LOG2_E, Scales
from jaxserve.pallas_kernels.pool import FLOAT8, MOST_NARROW, Pool, ScaledPool, exceeds_index_range

FLOAT8_SCALE = 256.0  # factor missing in the results of `widened` for float8
ZERO_ROWS = 64  # rows of an output that one program zeroes
Ref = Any  # pallas has no public type for the refs that kernels get


class BatchRefs(NamedTuple):
    """A layer's index and a batch's fields as int32 refs, in the order of `batch_arguments`.

    Attributes:
        layer: [1].
        tables: [R, 2, W].
        context_lens, query_start, query_lens, direction, kind: [R].
        token_row: [T].
        num_decodes, num_rows: [1].
    """

    layer: Ref
    tables: Ref
    context_lens: Ref
    query_start: Ref
    query_lens: Ref
    direction: Ref
    kind: Ref
    token_row: Ref
    num_decodes: Ref
    num_rows: Ref


def batch_arguments(layer: jax.Array | int, batch: AttentionBatch) -> tuple[jax.Array, ...]:
    """The arrays that a kernel sees as `BatchRefs`."""
    return BatchRefs(
        jnp.asarray(layer, jnp.int32).reshape(1),
        batch.tables,
        batch.context_lens,
        batch.query_start,
        batch.query_lens,
        batch.direction,
        batch.kind,
        batch.token_row,
        batch.num_decodes.reshape(1),
        batch.num_rows.reshape(1),
    )


class Geometry(NamedTuple):
    """The static shape of a pool, seen as rows [layers * blocks * kv_heads * block_size, head_dim].

    Row numbers fit int32 where byte offsets do not; the view costs nothing.

    Attributes:
        layers: Layers of the model.
        blocks: Blocks of the pool.
        kv_heads: KV heads of one shard.
        block_size: Tokens of a block.
        head_dim: Elements of a head.
        scaled: Whether its vectors have scales.
    """

    layers: int
    blocks: int
    kv_heads: int
    block_size: int
    head_dim: int
    scaled: bool = False

    @classmethod
    def of(cls, shape: tuple[int, ...], *, scaled: bool = False) -> Geometry:
        """The geometry of a pool [layers, blocks, kv_heads, block_size, head_dim]."""
        layers, blocks, kv_heads, block_size, head_dim = shape
        return cls(layers, blocks, kv_heads, block_size, head_dim, scaled)

    @property
    def padded_dim(self) -> int:
        """head_dim padded for Triton to a power of two, at least 16."""
        return max(16, power_of_two(self.head_dim))

    def row(
        self, layer: jax.Array, block: jax.Array, head: jax.Array | int, slot: jax.Array
    ) -> jax.Array:
        """The row of the pool that holds one head of a slot.

        Args:
            layer: Index of the layer, int32.
            block: Block id, int32.
            head: KV head.
            slot: Slot of the block, int32.

        Returns:
            int32, of the arguments' broadcast shape.
        """
        head_row = (layer * self.blocks + block) * self.kv_heads + head
        return head_row * self.block_size + slot


@dataclasses.dataclass(frozen=True)
class Options:
    """The options that a kernel is compiled for, besides array shapes.

    Attributes:
        geometry: The pool's geometry.
        num_heads: Query heads of one shard.
        scoring: How products become scores.
        tile: Tokens of context per iteration.
    """

    geometry: Geometry
    num_heads: int
    scoring: Scoring
    tile: int

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.num_heads // self.geometry.kv_heads

    def lower(self, length: jax.Array) -> jax.Array:
        """The first position that the newest of `length` tokens sees."""
        window = self.scoring.sliding_window
        return jnp.int32(0) if window is None else jnp.maximum(length - window, 0)


def context_tiles(length: jax.Array, tile: int, window: int | None) -> jax.Array:
    """The number of tiles, of `tile` tokens each, that the newest of `length` tokens sees anything
    of."""
    tiles = cdiv(length, tile)
    return tiles if window is None else tiles - jnp.maximum(length - window, 0) // tile


def geometry_of(pool: Pool) -> Geometry:
    """The static shape of a pool [layers, blocks, kv_heads, block_size, head_dim]."""
    return Geometry.of(pool.shape, scaled=isinstance(pool, ScaledPool))


class PoolRefs(NamedTuple):
    """A pool as a kernel sees it.

    Attributes:
        values: [rows, head_dim]; float8 as uint8, which GPUs before sm_89 support, too.
        scales: float32 [rows], or None.
    """

    values: Ref
    scales: Ref | None

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the values."""
        return jnp.dtype(self.values.dtype)

    def load(
        self, rows: jax.Array, inside: jax.Array | None, geometry: Geometry, dtype: DTypeLike
    ) -> jax.Array:
        """The values of vectors, see `widened`.

        Args:
            rows: int32 [N].
            inside: bool [N], rows to load; the others are zeros. None for all.
            geometry: The pool's geometry.
            dtype: A wide dtype.

        Returns:
            [N, padded head_dim].
        """
        width, padded = geometry.head_dim, geometry.padded_dim
        return widened(load_rows(self.values, rows, inside, width, padded), dtype)

    def load_scales(self, rows: jax.Array, inside: jax.Array | None) -> Scales:
        """The scales of rows, float32 [N], zeros where not `inside`; or one scale for all; None for
        1."""
        if self.scales is None:
            return FLOAT8_SCALE if self.values.dtype == jnp.uint8 else None
        at = self.scales.at[rows]
        return plgpu.load(at) if inside is None else plgpu.load(at, mask=inside, other=0)


def pool_arguments(pool: Pool) -> tuple[jax.Array, ...]:
    """The arrays that a kernel sees as `PoolRefs`: views of the same memory."""
    if isinstance(pool, ScaledPool):
        return as_rows(pool.values), pool.scales.reshape(-1)
    return (as_rows(pool),)


def sink_arguments(sinks: jax.Array | None) -> tuple[jax.Array, ...]:
    """Sinks [num_heads] as kernels take them, float32 in units of log 2; empty for none."""
    return () if sinks is None else (sinks * LOG2_E,)


def take_pool(refs: Sequence[Ref], geometry: Geometry) -> tuple[PoolRefs, list[Ref]]:
    """The pool, which comes first of the refs, and the rest of them."""
    count = 2 if geometry.scaled else 1
    return PoolRefs(refs[0], refs[1] if geometry.scaled else None), list(refs[count:])


def as_rows(values: jax.Array) -> jax.Array:
    """A pool's values as [rows, head_dim]: a view of the same memory. Raises ValueError if Pallas
    would miscount them: it counts the numbers of an array of up to 4 GiB with signed 32-bit
    integers."""
    if exceeds_index_range(values.size, values.dtype):
        raise ValueError(
            f"pool: has {values.size} numbers of 8 bits; these kernels reach {MOST_NARROW}, or "
            f"more than {2 * MOST_NARROW}"
        )
    return as_bits(values).reshape(-1, values.shape[-1])


def as_bits(values: jax.Array) -> jax.Array:
    """float8 as uint8; other dtypes as they are."""
    return lax.bitcast_convert_type(values, jnp.uint8) if values.dtype.name == FLOAT8 else values


def widened(values: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Numbers of a pool, float8 as uint8, in a wide dtype. Results for float8 lack a factor of
    `FLOAT8_SCALE`: the 8 bits are read as the upper half of a float16, whose exponent has one more
    bit. The factor is applied to scores, since there are fewer of them than numbers."""
    if values.dtype != jnp.uint8:
        return values.astype(dtype)
    bits = (values.astype(jnp.int8).astype(jnp.int16) << 7) & jnp.int16(~(1 << 14))
    found = lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)
    nan = jnp.abs(found) == 1.875  # 127
    return jnp.where(nan, jnp.float32(jnp.nan), found).astype(dtype)


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below number."""
    return 1 << (number - 1).bit_length()


def cdiv(a: Any, b: int) -> Any:
    """a / b rounded up, for a >= 0, traced or not (no sign fix-ups in the kernel)."""
    return (a + b - 1) // b if isinstance(a, int) else lax.div(a + (b - 1), jnp.int32(b))


class Context(NamedTuple):
    """Finds one row's cached tokens in the pool.

    Attributes:
        refs: The batch's refs.
        geometry: The pool's geometry.
        row: int32 [], row of the batch.
        direction: int32 [], the direction in which the row fills its blocks.
        layer: int32 [], index into the whole pool.
    """

    refs: BatchRefs
    geometry: Geometry
    row: jax.Array
    direction: jax.Array
    layer: jax.Array

    def pool_rows(
        self, plane: int, head: jax.Array | int, position: jax.Array, inside: jax.Array | None
    ) -> jax.Array:
        """The rows of the pool that hold some positions.

        Args:
            plane: 0 for K or hidden vectors, 1 for V: the index in tables[:, plane].
            head: KV head; for a single position it may be int32 [N].
            position: int32 [N], or int32 [] with many heads.
            inside: bool, which positions are valid; None for all.

        Returns:
            int32 [N]; any row where not `inside`.
        """
        size = jnp.int32(self.geometry.block_size)
        entry, offset = lax.div(position, size), lax.rem(position, size)
        slot = jnp.where(self.direction == RIGHT, size - 1 - offset, offset)
        at = self.refs.tables.at[self.row, jnp.int32(plane), entry]
        block = plgpu.load(at) if inside is None else plgpu.load(at, mask=inside, other=0)
        return self.geometry.row(self.layer, block, head, slot)


def context_of(refs: BatchRefs, geometry: Geometry, row: jax.Array) -> Context:
    """The context of a row, int32 [], in the batch's layer."""
    return Context(refs, geometry, row, refs.direction[row], refs.layer[0])


def load_rows(
    ref: Ref, rows: jax.Array, inside: jax.Array | None, width: int, padded: int
) -> jax.Array:
    """Loads rows of a matrix, padded with zeros.

    Args:
        ref: [X, width].
        rows: int32 [N].
        inside: bool [N], rows to load, the others being zeros; None for all.
        width: Columns of ref.
        padded: Columns of the result, a power of two.

    Returns:
        [N, padded].
    """
    column = lax.broadcasted_iota(jnp.int32, (1, padded), 1)
    mask = None if inside is None else inside[:, None]
    if padded != width:
        mask = column < width if mask is None else mask & (column < width)
    at = ref.at[rows[:, None], column]
    return plgpu.load(at) if mask is None else plgpu.load(at, mask=mask, other=0)


def decode_row(
    refs: BatchRefs, row: jax.Array, kind: int, *, decode_only: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The context length and token index of a decode row.

    Args:
        refs: The batch's refs.
        row: int32 [], row of the batch.
        kind: KV or HIDDEN.
        decode_only: Every row with a token is a decode, and token i is row i's, padding included.

    Returns:
        (cached tokens, index of the row's token), int32 []. 0 cached tokens for a row that is not a
        decode of this kind.
    """
    active = (refs.kind[row] == kind) & (refs.query_lens[row] > 0)
    if decode_only:
        return jnp.where(active, refs.context_lens[row], 0), row
    active &= row < refs.num_decodes[0]
    return jnp.where(active, refs.context_lens[row], 0), refs.query_start[row]


def store_rows(ref: Ref, rows: jax.Array, values: jax.Array, inside: jax.Array) -> None:
    """Stores rows of a matrix.

    Args:
        ref: [X, width].
        rows: int32 [N], where to.
        values: [N, padded], converted to ref's dtype; columns past width are dropped.
        inside: bool [N], rows to store.
    """
    width, padded = ref.shape[1], values.shape[1]
    column = lax.broadcasted_iota(jnp.int32, (1, padded), 1)
    mask = inside[:, None] if padded == width else inside[:, None] & (column < width)
    mask = jnp.broadcast_to(mask, values.shape)
    plgpu.store(ref.at[rows[:, None], column], values.astype(ref.dtype), mask=mask)


def zero_programs(tokens: int, num_heads: int) -> int:
    """Number of programs that `store_zeros` needs for an output [tokens * num_heads, D]."""
    return cdiv(tokens * num_heads, ZERO_ROWS)


def store_zeros(
    batch: BatchRefs,
    ref: Ref,
    program: jax.Array,
    kind: int,
    num_heads: int,
    *,
    decodes: bool = False,
) -> None:
    """Writes one program's part of the zeros for tokens that belong to no row of a kind.

    Those are padding tokens and tokens of rows of the other kind.

    Args:
        batch: The batch's refs.
        ref: The output, [T * num_heads, D].
        program: int32 [], number among the `zero_programs`.
        kind: KV or HIDDEN.
        num_heads: Rows of the output for each token.
        decodes: Whether only decode rows are of this kind.
    """
    at = program * ZERO_ROWS + jnp.arange(ZERO_ROWS, dtype=jnp.int32)
    token = lax.div(at, jnp.int32(num_heads))
    inside = token < batch.token_row.shape[0]
    row = plgpu.load(batch.token_row.at[token], mask=inside, other=0)
    real = inside & (row < batch.num_rows[0])
    nobodys = inside & (plgpu.load(batch.kind.at[row], mask=real, other=-1) != kind)
    if decodes:
        nobodys |= inside & (row >= batch.num_decodes[0])
    padded = max(16, power_of_two(ref.shape[1]))
    store_rows(ref, at, jnp.zeros((ZERO_ROWS, padded), ref.dtype), nobodys)
