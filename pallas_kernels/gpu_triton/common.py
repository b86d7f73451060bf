"""What the Pallas-Triton kernels share: the batch as refs, the pool as rows, ragged contexts."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from jaxserve.pallas_kernels.backends import Scoring
from jaxserve.pallas_kernels.batch import RIGHT, AttentionBatch

ZERO_ROWS = 64  # of an output, that one program fills with zeros
Ref = Any  # pallas has no public type for the refs that kernels get


class BatchRefs(NamedTuple):
    """One layer's index and a batch's fields as int32 refs, in the order of `batch_arguments`."""

    layer: Ref  # [1]
    tables: Ref  # [R, 2, W]
    context_lens: Ref  # [R]
    query_start: Ref  # [R]
    query_lens: Ref  # [R]
    direction: Ref  # [R]
    kind: Ref  # [R]
    token_row: Ref  # [T]
    num_decodes: Ref  # [1]
    num_rows: Ref  # [1]


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
    """

    layers: int
    blocks: int
    kv_heads: int
    block_size: int
    head_dim: int

    @property
    def padded_dim(self) -> int:
        """head_dim as Triton wants it: a power of two, at least 16."""
        return max(16, power_of_two(self.head_dim))

    def row(
        self, layer: jax.Array, block: jax.Array, head: jax.Array | int, slot: jax.Array
    ) -> jax.Array:
        """The row of one slot's head, int32; arguments broadcast."""
        head_row = (layer * self.blocks + block) * self.kv_heads + head
        return head_row * self.block_size + slot


@dataclasses.dataclass(frozen=True)
class Options:
    """What a kernel is compiled for, besides shapes. tile: tokens of context an iteration."""

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
    """Tiles of so many tokens that the newest of `length` tokens sees something in."""
    tiles = cdiv(length, tile)
    return tiles if window is None else tiles - jnp.maximum(length - window, 0) // tile


def geometry_of(pool: jax.Array) -> Geometry:
    """The static shape of a pool [layers, blocks, kv_heads, block_size, head_dim]."""
    return Geometry(*pool.shape)


def as_rows(pool: jax.Array) -> jax.Array:
    """The pool as [rows, head_dim]: a view of the same memory."""
    return pool.reshape(-1, pool.shape[-1])


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below number."""
    return 1 << (number - 1).bit_length()


def cdiv(a: Any, b: int) -> Any:
    """a / b rounded up, for a >= 0, traced or not (no sign fix-ups in the kernel)."""
    return (a + b - 1) // b if isinstance(a, int) else lax.div(a + (b - 1), jnp.int32(b))


class Context(NamedTuple):
    """One row's cached tokens: where position p lies."""

    refs: BatchRefs
    geometry: Geometry
    row: jax.Array  # int32 []
    direction: jax.Array  # int32 []
    layer: jax.Array  # int32 []

    def pool_rows(
        self, plane: int, head: jax.Array | int, position: jax.Array, inside: jax.Array | None
    ) -> jax.Array:
        """Pool rows int32 [N] of positions [N] (or one head's or many heads' of one position) in
        tables[:, plane]; where not `inside` (None: all are), any."""
        size = jnp.int32(self.geometry.block_size)
        entry, offset = lax.div(position, size), lax.rem(position, size)
        slot = jnp.where(self.direction == RIGHT, size - 1 - offset, offset)
        at = self.refs.tables.at[self.row, jnp.int32(plane), entry]
        block = plgpu.load(at) if inside is None else plgpu.load(at, mask=inside, other=0)
        return self.geometry.row(self.layer, block, head, slot)


def context_of(refs: BatchRefs, geometry: Geometry, row: jax.Array) -> Context:
    """Where the cached tokens of a row, int32 [], lie in the batch's layer."""
    return Context(refs, geometry, row, refs.direction[row], refs.layer[0])


def load_rows(
    ref: Ref, rows: jax.Array, inside: jax.Array | None, width: int, padded: int
) -> jax.Array:
    """ref [X, width] at rows [N] -> [N, padded]; zeros where not `inside` (bool [N]; None: all are)
    and past width."""
    column = lax.broadcasted_iota(jnp.int32, (1, padded), 1)
    mask = None if inside is None else inside[:, None]
    if padded != width:
        mask = column < width if mask is None else mask & (column < width)
    at = ref.at[rows[:, None], column]
    return plgpu.load(at) if mask is None else plgpu.load(at, mask=mask, other=0)


def decode_row(
    refs: BatchRefs, row: jax.Array, kind: int, *, decode_only: bool = False
) -> tuple[jax.Array, jax.Array]:
    """(cached tokens, token of this step) of a decode row, int32 []; 0 cached tokens for rows that
    are not decodes of this kind. decode_only: every row with a token is a decode, and token i is
    row i's, padding included."""
    active = (refs.kind[row] == kind) & (refs.query_lens[row] > 0)
    if decode_only:
        return jnp.where(active, refs.context_lens[row], 0), row
    active &= row < refs.num_decodes[0]
    return jnp.where(active, refs.context_lens[row], 0), refs.query_start[row]


def store_rows(ref: Ref, rows: jax.Array, values: jax.Array, inside: jax.Array) -> None:
    """values [N, padded] into ref [X, width] at rows [N], where `inside` (bool [N])."""
    width, padded = ref.shape[1], values.shape[1]
    column = lax.broadcasted_iota(jnp.int32, (1, padded), 1)
    mask = inside[:, None] if padded == width else inside[:, None] & (column < width)
    mask = jnp.broadcast_to(mask, values.shape)
    plgpu.store(ref.at[rows[:, None], column], values.astype(ref.dtype), mask=mask)


def zero_programs(tokens: int, num_heads: int) -> int:
    """How many programs `store_zeros` needs for an output [tokens * num_heads, D]."""
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
    """Program `program` of those that write zeros into ref [T * num_heads, D] for tokens that are
    of no row of this kind: those of rows of the other kind, and padding. decodes: only decode rows
    are of this kind."""
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
