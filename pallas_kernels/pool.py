"""The block pool: one array for every layer's K, V (or hidden) blocks, or two arrays for int8."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Format, Layout
from jax.typing import DTypeLike

from jaxserve.pallas_kernels.batch import LEFT, RIGHT

FLOAT8 = "float8_e4m3fn"
WIDE_DTYPES = ("float32", "bfloat16", "float16")
POOL_DTYPES = (*WIDE_DTYPES, FLOAT8, "int8")
_NAMED = {"fp8": FLOAT8}  # dtypes with another name in configurations
# Bytes of the scale of an int8 vector, a float32.
SCALE_BYTES = 4
MOST_NARROW = 1 << 31  # see `exceeds_index_range`
# Default tokens of a block. A TPU's program starts the transfer of each block and waits for it, one
# after another: with small blocks it would do little else.
BLOCK_SIZE = 16
TPU_BLOCK_SIZE = 64
# A TPU stores the last two axes, slots and head_dim, in whole tiles of this size.
TPU_TILE = (8, 128)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaledPool:
    """A pool of int8. A vector is its values times its scale. A scale per block would change with
    each new token, for both owners of a block.

    Attributes:
        values: int8 [layers, blocks, kv_heads, block_size, head_dim].
        scales: float32 [layers, blocks, kv_heads, block_size].
    """

    values: Any
    scales: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the values."""
        shape: tuple[int, ...] = self.values.shape
        return shape

    @property
    def ndim(self) -> int:
        """Axes of the values."""
        return len(self.shape)

    @property
    def dtype(self) -> jnp.dtype:
        """int8."""
        return jnp.dtype(self.values.dtype)

    @property
    def sharding(self) -> Any:
        """That of the values."""
        return self.values.sharding

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return int(self.values.nbytes + self.scales.nbytes)


Pool: TypeAlias = jax.Array | ScaledPool
SamePool = TypeVar("SamePool", bound=Pool)


def dtype_named(name: str) -> jnp.dtype:
    """The dtype of a pool by its name in a configuration: one of POOL_DTYPES, or fp8."""
    return jnp.dtype(_NAMED.get(name, name))


def quantize_vectors(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rounds vectors to int8, each by the scale of its largest element.

    Args:
        x: [..., D]. A value that is not finite makes its vector NaN.

    Returns:
        int8 [..., D] and the scales, float32 [...].
    """
    wide = x.astype(jnp.float32)
    # Not a division, which XLA makes a product of, but not for a single vector outside of jit.
    scale = jnp.max(jnp.abs(wide), axis=-1) * (1 / 127)
    inverse = jnp.where(scale > 0, 1 / scale, 0)
    q = jnp.clip(jnp.round(wide * inverse[..., None]), -127, 127)
    return q.astype(jnp.int8), jnp.where(jnp.isfinite(scale), scale, jnp.nan)


def saturating_cast(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """x in the dtype of a pool that is not int8. In float8, values that are too large, including
    infinity, become the largest number, 448: a plain conversion would make them NaN."""
    if jnp.dtype(dtype).name == FLOAT8:
        most = float(jnp.finfo(dtype).max)
        x = jnp.clip(x, -most, most)
    return x.astype(dtype)


def widen(values: jax.Array, scales: jax.Array | None, dtype: DTypeLike) -> jax.Array:
    """Cached vectors as numbers to compute with.

    Args:
        values: [..., D], in the pool's dtype.
        scales: float32 [...]; None if the pool has none.
        dtype: Dtype of the result.
    """
    if scales is None:
        return values.astype(dtype)
    return (values.astype(jnp.float32) * scales[..., None]).astype(dtype)


def as_stored(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array | None]:
    """Vectors as a pool of this dtype holds them, and their scales; None if it has none."""
    if jnp.dtype(dtype) == jnp.int8:
        return quantize_vectors(x)
    return saturating_cast(x, dtype), None


def halves_wide(dtype: DTypeLike, halves: int) -> bool:
    """Whether a pool of this dtype has `halves` (see `backends.Scoring`) of fewer bits than the
    rest of a vector: of 8, and the rest of 16."""
    return bool(halves) and jnp.dtype(dtype).itemsize == 1


def cached_width(head_dim: int, dtype: DTypeLike, halves: int) -> int:
    """Elements that a pool of this dtype has for a vector of head_dim, see `store_halves`."""
    return head_dim + (head_dim - halves if halves_wide(dtype, halves) else 0)


def key_width(width: int, dtype: DTypeLike, halves: int) -> int:
    """Elements of the keys whose halves a pool has `width` elements for."""
    return halves + width if halves_wide(dtype, halves) else 2 * width


def store_halves(
    k: jax.Array, v: jax.Array, dtype: DTypeLike, halves: int
) -> tuple[tuple[jax.Array, jax.Array | None], tuple[jax.Array, jax.Array | None]]:
    """Halves of keys as a pool of 8 bits holds them: what are values in 8 bits, each half with its
    own scale, and the rest of both in bfloat16, the upper bytes in K and the lower ones in V. So
    both halves of a number are in the same column, and no byte of it is a number by itself.

    Args:
        k, v: [..., D].
        dtype: The pool's.
        halves: See `backends.Scoring`.

    Returns:
        K and V, each as `as_stored`, [..., cached_width] in the pool's dtype.
    """
    rest = jnp.concatenate([k[..., halves:], v[..., halves:]], axis=-1).astype(jnp.bfloat16)
    bits = lax.bitcast_convert_type(rest, jnp.uint16)

    def stored(x: jax.Array, part: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        values, scales = as_stored(x[..., :halves], dtype)
        part = lax.bitcast_convert_type(part.astype(jnp.uint8), dtype)
        return jnp.concatenate([values, part], axis=-1), scales

    return stored(k, bits >> 8), stored(v, bits & 255)


def join_halves(
    k: tuple[jax.Array, jax.Array | None],
    v: tuple[jax.Array, jax.Array | None],
    dtype: DTypeLike,
    halves: int,
) -> jax.Array:
    """The keys whose halves these are, as numbers to compute with: what are values of K and of V,
    then the rest of both, [..., key_width].

    Args:
        k, v: Values and scales, as in `widen`.
        dtype: Dtype of the result.
        halves: See `backends.Scoring`.
    """
    parts = [widen(values[..., :halves], scales, dtype) for values, scales in (k, v)]
    rest = [values[..., halves:] for values, _ in (k, v)]
    if halves_wide(k[0].dtype, halves):
        rest = [upper_bytes(*rest).astype(dtype)]
    return jnp.concatenate([*parts, *(part.astype(dtype) for part in rest)], axis=-1)


def upper_bytes(high: jax.Array, low: jax.Array) -> jax.Array:
    """The float32 whose upper bytes these are, of any dtypes of 8 bits; its others are 0."""
    high, low = (lax.bitcast_convert_type(x, jnp.uint8).astype(jnp.uint32) for x in (high, low))
    return lax.bitcast_convert_type((high << 8 | low) << 16, jnp.float32)


def as_cached(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Vectors after a round trip through a pool of this dtype.

    Args:
        x: [..., D].
        dtype: The pool's.

    Returns:
        float32 [..., D].
    """
    return widen(*as_stored(x, dtype), jnp.float32)


def read_as(cached: DTypeLike, queries: DTypeLike) -> jnp.dtype:
    """The dtype that attention computes with: the pool's, or the queries' if that has 8 bits."""
    return jnp.dtype(queries if jnp.dtype(cached).itemsize == 1 else cached)


def make_pool(
    num_layers: int,
    num_blocks: int,
    kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: DTypeLike,
    sharding: jax.sharding.Sharding | None = None,
) -> Pool:
    """Makes a zeroed pool [num_layers, num_blocks, kv_heads, block_size, head_dim].

    A block holds K or V of up to block_size tokens, in all layers (Apt-Serve section 4.3). The
    memory layout is `pool_format`: jitted functions that return the pool need it as
    `out_shardings`.

    Args:
        num_layers: Layers of the model.
        num_blocks: Blocks that K and V (or hidden vectors) share.
        kv_heads: KV heads, over all shards.
        block_size: Tokens of a block.
        head_dim: Elements of a head.
        dtype: One of POOL_DTYPES.
        sharding: Where to make it, never as a whole on one of several devices; None for the first
            device.

    Raises:
        ValueError: A size below 1, or another dtype.
    """
    shape = (num_layers, num_blocks, kv_heads, block_size, head_dim)
    names = ("num_layers", "num_blocks", "kv_heads", "block_size", "head_dim")
    for name, size in zip(names, shape, strict=True):
        if size < 1:
            raise ValueError(f"{name}: must be at least 1, got {size}")
    if jnp.dtype(dtype).name not in POOL_DTYPES:
        raise ValueError(f"dtype: must be one of {POOL_DTYPES}, got {jnp.dtype(dtype).name}")
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.jit(
        lambda: jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), pool_of(shape, dtype)),
        out_shardings=format_of(dtype, sharding),
    )()


def pool_of(
    shape: tuple[int, ...], dtype: DTypeLike, placed: Any = None
) -> jax.ShapeDtypeStruct | ScaledPool:
    """The shapes and dtypes of a pool. placed: its format, or None."""
    if jnp.dtype(dtype) != jnp.int8:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=placed)
    placed = placed or ScaledPool(None, None)
    return ScaledPool(
        jax.ShapeDtypeStruct(shape, jnp.int8, sharding=placed.values),
        jax.ShapeDtypeStruct(shape[:4], jnp.float32, sharding=placed.scales),
    )


def format_of(dtype: DTypeLike, sharding: jax.sharding.Sharding) -> Any:
    """The format of a pool of this dtype and sharding, a tree with the pool's structure: axes in
    order in memory, as the kernels need. Stated explicitly because, if head_dim is not a multiple
    of 128, a TPU's compiler would put the blocks last, and copy the whole pool into order and back
    around every step.
    """
    values = Format(Layout(major_to_minor=tuple(range(5))), sharding)
    if jnp.dtype(dtype) != jnp.int8:
        return values
    if isinstance(sharding, jax.sharding.NamedSharding):
        sharding = jax.sharding.NamedSharding(
            sharding.mesh, jax.sharding.PartitionSpec(*sharding.spec[:4])
        )
    return ScaledPool(values, Format(Layout(major_to_minor=tuple(range(4))), sharding))


def pool_format(pool: Pool) -> Any:
    """The format of this pool, see `format_of`."""
    return format_of(pool.dtype, pool.sharding)


def default_block_size(platform: str) -> int:
    """Tokens of a block if none is configured, on devices of this platform."""
    return TPU_BLOCK_SIZE if platform == "tpu" else BLOCK_SIZE


def block_bytes(
    num_layers: int,
    kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: DTypeLike,
    platform: str = "cpu",
) -> int:
    """Bytes of one block (K or V, not both) over all layers.

    Args:
        num_layers: Layers of the model.
        kv_heads: KV heads of the pool, or of one shard of it.
        block_size: Tokens of a block.
        head_dim: Elements of a head.
        dtype: Of the pool.
        platform: "tpu" pads slots and head_dim to whole tiles.
    """
    scales = SCALE_BYTES * kv_heads * block_size if jnp.dtype(dtype) == jnp.int8 else 0
    if platform == "tpu":
        slots, lanes = TPU_TILE
        if scales:
            scales = SCALE_BYTES * _up(kv_heads, slots) * _up(block_size, lanes)
        block_size, head_dim = _up(block_size, slots), _up(head_dim, lanes)
    values = kv_heads * block_size * head_dim * jnp.dtype(dtype).itemsize
    return num_layers * (values + scales)


def exceeds_index_range(size: int, dtype: DTypeLike) -> bool:
    """Whether Pallas-Triton miscounts the numbers of a pool (of a shard): those of 8 bits, between
    2 and 4 GiB."""
    return jnp.dtype(dtype).itemsize == 1 and MOST_NARROW < size <= 2 * MOST_NARROW


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def slot_bytes(num_layers: int, kv_heads: int, head_dim: int, dtype: DTypeLike) -> int:
    """Bytes of one token's K (or V, or hidden vector) in all layers, staged or in host memory.

    Args:
        num_layers: Layers of the model.
        kv_heads: KV heads of the pool, or of one shard of it.
        head_dim: Elements of a head.
        dtype: Of the pool.
    """
    return num_layers * kv_heads * staged_width(head_dim, dtype) * jnp.dtype(dtype).itemsize


def staged_width(head_dim: int, dtype: DTypeLike) -> int:
    """Elements of a head in a staging buffer, see `move.stage_out`."""
    return head_dim + (SCALE_BYTES if jnp.dtype(dtype) == jnp.int8 else 0)


def read_tokens(
    pool: Pool, layer: int, table_row: np.ndarray, length: int, direction: int
) -> np.ndarray:
    """Copies one request's cached vectors to the host, in token order. For tests and pictures.

    Args:
        pool: [layers, blocks, kv_heads, block_size, head_dim].
        layer: Index of the layer.
        table_row: Block ids of one kind, tables[row, 0] or tables[row, 1].
        length: Tokens to read.
        direction: LEFT or RIGHT, how the request fills its blocks.

    Returns:
        [length, kv_heads, head_dim], for an int8 pool in float32.

    Raises:
        ValueError: A length, direction or block id out of range.
    """
    _, blocks, kv_heads, block_size, head_dim = pool.shape
    used = -(-length // block_size)
    if direction not in (LEFT, RIGHT):
        raise ValueError(f"direction: must be LEFT ({LEFT}) or RIGHT ({RIGHT}), got {direction}")
    if not 0 <= length <= len(table_row) * block_size:
        raise ValueError(
            f"length: must be in [0, {len(table_row) * block_size}] for a table of "
            f"{len(table_row)} blocks, got {length}"
        )
    ids = np.asarray(table_row)[:used]
    if used and not (ids.min() >= 0 and ids.max() < blocks):
        raise ValueError(f"table_row: block ids must be in [0, {blocks}), got {ids.tolist()}")
    if isinstance(pool, ScaledPool):
        vectors = np.asarray(widen(pool.values[layer, ids], pool.scales[layer, ids], jnp.float32))
    else:
        vectors = np.asarray(pool[layer, ids])
    if direction == RIGHT:
        vectors = vectors[:, :, ::-1]
    tokens = vectors.transpose(0, 2, 1, 3).reshape(used * block_size, kv_heads, head_dim)
    return tokens[:length]
