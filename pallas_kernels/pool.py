"""The block pool: one array for every layer's K, V (or hidden) blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.typing import DTypeLike

from jaxserve.pallas_kernels.batch import LEFT, RIGHT

POOL_DTYPES = ("float32", "bfloat16", "float16")
# Tokens of a block unless told otherwise. A TPU's program starts the transfer of each block, and
# waits for it, one after another: over small ones it would do little else.
BLOCK_SIZE = 16
TPU_BLOCK_SIZE = 64
# A TPU keeps the last two axes, slots and head_dim, in whole tiles of so many.
TPU_TILE = (8, 128)


def make_pool(
    num_layers: int,
    num_blocks: int,
    kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: DTypeLike,
    sharding: jax.sharding.Sharding | None = None,
) -> jax.Array:
    """Makes a zeroed pool [num_layers, num_blocks, kv_heads, block_size, head_dim].

    A block holds K or V of up to block_size tokens, in all layers (Apt-Serve section 4.3). The
    memory layout is `row_major`: jitted functions that return the pool need
    `out_shardings=row_major(pool.sharding)` for it.

    Args:
        num_layers: Layers of the model.
        num_blocks: Blocks that K and V (or hidden vectors) share.
        kv_heads: KV heads, over all shards.
        block_size: Tokens of a block.
        head_dim: Elements of a head.
        dtype: One of POOL_DTYPES.
        sharding: Where to make it, never whole on one of several devices; None for the first
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
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=row_major(sharding))()


def row_major(sharding: jax.sharding.Sharding) -> Format:
    """The format of a pool with this sharding: its axes in memory in order, as the kernels want
    them.

    Stated explicitly because where head_dim is no multiple of 128 a TPU's compiler would rather put
    the blocks last, and then copy the whole pool into order and back around every step.
    """
    return Format(Layout(major_to_minor=tuple(range(5))), sharding)


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
    if platform == "tpu":
        slots, lanes = TPU_TILE
        block_size, head_dim = -(-block_size // slots) * slots, -(-head_dim // lanes) * lanes
    return num_layers * kv_heads * block_size * head_dim * jnp.dtype(dtype).itemsize


def read_tokens(
    pool: jax.Array, layer: int, table_row: np.ndarray, length: int, direction: int
) -> np.ndarray:
    """Copies one request's cached vectors to the host, in token order. For tests and pictures.

    Args:
        pool: [layers, blocks, kv_heads, block_size, head_dim].
        layer: Index of the layer.
        table_row: Block ids of one kind, tables[row, 0] or tables[row, 1].
        length: Tokens to read.
        direction: LEFT or RIGHT, how the request fills its blocks.

    Returns:
        [length, kv_heads, head_dim].

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
    found = np.asarray(pool[layer, ids])
    if direction == RIGHT:
        found = found[:, :, ::-1]
    tokens = found.transpose(0, 2, 1, 3).reshape(used * block_size, kv_heads, head_dim)
    return tokens[:length]
