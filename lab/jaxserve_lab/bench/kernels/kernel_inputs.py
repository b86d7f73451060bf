"""Batches and pools for measuring and checking kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxserve
from jaxserve import pallas_kernels
from jaxserve.models.base import ModelConfig
from jaxserve.pallas_kernels import reference
from jaxserve.pallas_kernels.pool import (
    Pool,
    ScaledPool,
    make_pool,
    quantize_vectors,
    read_as,
    saturating_cast,
    slot_bytes,
)
from jaxserve.sched.cache.cache_kinds import why_no_hidden_caches
from jaxserve.weights import load_config, load_preset

TINY = "tiny"
TINY_FOLDER = Path(jaxserve.__file__).parent / "assets" / "tiny-stories"


@dataclass(frozen=True)
class Heads:
    """The part of a model that its attention sees.

    Attributes:
        num_heads: Query heads.
        kv_heads: Heads of K and V.
        head_dim: Elements of a head.
        rotary: Whether keys are rotated by position.
    """

    num_heads: int
    kv_heads: int
    head_dim: int
    rotary: bool = False

    @property
    def width(self) -> int:
        """Elements of K, or of a hidden vector, of one token."""
        return self.kv_heads * self.head_dim

    def shape(self, block_size: int, dtype: str) -> pallas_kernels.KernelShape:
        """The shape of such a model and its pool for kernels."""
        return pallas_kernels.KernelShape(
            self.num_heads, self.kv_heads, self.head_dim, block_size, jnp.dtype(dtype)
        )

    def vector_bytes(self, dtype: str) -> int:
        """Bytes of K, or of a hidden vector, of one token in a pool of this dtype."""
        return slot_bytes(1, self.kv_heads, self.head_dim, jnp.dtype(dtype))

    @property
    def offers_hidden(self) -> bool:
        """Whether a model with these heads can have hidden caches."""
        shape = self.width, self.num_heads, self.kv_heads, self.head_dim
        return why_no_hidden_caches(*shape) is None


@dataclass(frozen=True)
class Row:
    """One request of a step.

    Attributes:
        context: Cached tokens, the step's own included.
        query: Tokens of the step.
        kind: Kind of its cache, KV or HIDDEN.
        direction: The end from which it fills its blocks, LEFT or RIGHT.
    """

    context: int
    query: int = 1
    kind: int = pallas_kernels.KV
    direction: int = pallas_kernels.LEFT


def model_config(name: str) -> ModelConfig:
    """The configuration of a preset, or of "tiny", the model in the box. Raises ValueError with the
    known names."""
    if name == TINY:
        return load_config(TINY_FOLDER)[1]
    return load_preset(name)[1]


def model_heads(name: str) -> Heads:
    """The attention of a model that `model_config` knows."""
    config = model_config(name)
    rotary = config.rope is not None
    return Heads(config.num_heads, config.num_kv_heads, config.head_dim, rotary)


def make_batch(
    rows: Sequence[Row],
    block_size: int,
    blocks: int,
    rng: np.random.Generator,
    *,
    drafts: bool = False,
) -> pallas_kernels.AttentionBatch:
    """A batch without padding, whose rows have their own blocks in random order.

    Args:
        rows: Rows, decodes first.
        block_size: Tokens of a block.
        blocks: Blocks of the pool.
        rng: Draws the order of the blocks.
        drafts: As in `AttentionBatch`.

    Raises:
        ValueError: There are too few blocks.
    """
    width = max(-(-row.context // block_size) for row in rows)
    count = len(rows)
    if 2 * count * width > blocks:
        raise ValueError(f"blocks: {count} rows need {2 * count * width}, got {blocks}")
    tables = rng.permutation(blocks)[: 2 * count * width].reshape(count, 2, width)
    query = np.array([row.query for row in rows])

    def ints(values: object) -> jax.Array:
        return jnp.asarray(values, jnp.int32)

    return pallas_kernels.AttentionBatch(
        tables=ints(tables),
        context_lens=ints([row.context for row in rows]),
        query_start=ints(np.cumsum(query) - query),
        query_lens=ints(query),
        direction=ints([row.direction for row in rows]),
        kind=ints([row.kind for row in rows]),
        token_row=ints(np.repeat(np.arange(count), query)),
        num_decodes=ints(_leading_decodes(rows)),
        num_rows=ints(count),
        drafts=drafts,
    )


def _leading_decodes(rows: Sequence[Row]) -> int:
    return next((i for i, row in enumerate(rows) if row.query != 1), len(rows))


def activations(dtype: str) -> jnp.dtype:
    """The dtype of queries and new vectors for a pool of this dtype: bfloat16 for 8 bits."""
    return read_as(dtype, "bfloat16")


def random_pool(heads: Heads, layers: int, blocks: int, block_size: int, dtype: jnp.dtype) -> Pool:
    """A pool of standard normal values, made on the device one layer at a time, since a large pool
    would not fit twice.

    Args:
        heads: Heads of the model.
        layers: Layers of the pool.
        blocks: Blocks of the pool.
        block_size: Tokens of a block.
        dtype: Dtype of the pool.

    Returns:
        [layers, blocks, kv_heads, block_size, head_dim].
    """
    shape = (blocks, heads.kv_heads, block_size, heads.head_dim)

    def fill(layer: jax.Array, pool: Pool) -> Pool:
        values = jax.random.normal(jax.random.key(layer), shape, activations(dtype.name))
        new = (
            saturating_cast(values, dtype)
            if dtype != jnp.int8
            else ScaledPool(*quantize_vectors(values))
        )
        return jax.tree.map(
            lambda all, one: jax.lax.dynamic_update_index_in_dim(all, one, layer, 0), pool, new
        )

    empty = make_pool(layers, blocks, heads.kv_heads, block_size, heads.head_dim, dtype)
    return jax.jit(lambda pool: jax.lax.fori_loop(0, layers, fill, pool), donate_argnums=0)(empty)


def poisoned_pool(
    heads: Heads,
    layers: int,
    blocks: int,
    block_size: int,
    dtype: jnp.dtype,
    batch: pallas_kernels.AttentionBatch,
    rng: np.random.Generator,
) -> Pool:
    """A pool with random values in the slots of the batch's rows, and NaN in all others; with int8
    their scales are NaN.

    Args:
        heads, layers, blocks, block_size, dtype: As for `random_pool`.
        batch: The batch whose slots get values.
        rng: Draws the values.

    Returns:
        [layers, blocks, kv_heads, block_size, head_dim].
    """
    pool = np.full((layers, blocks, heads.kv_heads, block_size, heads.head_dim), np.nan, np.float32)
    tables = np.asarray(batch.tables)
    for row, context in enumerate(np.asarray(batch.context_lens)):
        position = np.arange(context)
        slot = position % block_size
        if int(batch.direction[row]) == pallas_kernels.RIGHT:
            slot = block_size - 1 - slot
        planes = (0,) if int(batch.kind[row]) == pallas_kernels.HIDDEN else (0, 1)
        for plane in planes:
            block = tables[row, plane, position // block_size]
            size = (context, layers, heads.kv_heads, heads.head_dim)
            pool[:, block, :, slot] = rng.standard_normal(size, dtype=np.float32)
    cached: Pool = jax.tree.map(jnp.asarray, reference.as_cached(pool, dtype))
    return cached


def vectors(shape: Sequence[int], dtype: jnp.dtype, seed: int) -> jax.Array:
    """Standard normal values of that shape, made on the device; the same for the same seed."""
    return jax.random.normal(jax.random.key(seed), tuple(shape), dtype)


def host_vectors(shape: Sequence[int], dtype: jnp.dtype, seed: int) -> jax.Array:
    """Like `vectors`, but made on the host without compiling, for small arrays."""
    drawn = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return jnp.asarray(drawn.astype(dtype))


Draw = Callable[[Sequence[int], jnp.dtype, int], jax.Array]


def make_projection(
    heads: Heads, longest: int, dtype: jnp.dtype, vectors: Draw = vectors
) -> pallas_kernels.HiddenProjection:
    """Weights that keep K and V near 1, with a bias, or with a rotation by position (RoPE, Su et
    al. 2021, section 3.2) if the model has one.

    Args:
        heads: Heads of the model.
        longest: Tokens of the longest context for the rotation.
        dtype: Dtype of weights and bias.
        vectors: Draws them.
    """
    width = heads.width
    scale = jnp.asarray(width**-0.5, dtype)
    frequency = 10000.0 ** -(np.arange(heads.head_dim // 2) / (heads.head_dim // 2))
    phase = np.arange(longest)[:, None] * frequency
    bias = None if heads.rotary else vectors((width,), dtype, 13)
    return pallas_kernels.HiddenProjection(
        wk=vectors((width, width), dtype, 11) * scale,
        wv=vectors((width, width), dtype, 12) * scale,
        bk=bias,
        bv=bias,
        rotation=jnp.asarray(np.stack([np.cos(phase), np.sin(phase)]), jnp.float32)
        if heads.rotary
        else None,
    )
