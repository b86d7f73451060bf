"""Drawing pools and batches whose every unused slot is poisoned, for the kernel tests."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxserve.pallas_kernels import RIGHT, AttentionBatch


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static part of a test: one compilation each."""

    num_heads: int
    kv_heads: int
    head_dim: int = 16
    block_size: int = 8
    rows: int = 5
    width: int = 6
    tokens: int = 5  # equal to rows: decode_only
    layers: int = 2

    @property
    def longest(self) -> int:
        """The most context that a row's table has room for."""
        return self.width * self.block_size

    @property
    def blocks(self) -> int:
        """Enough for every table entry to be a block of its own, and a few of nobody's."""
        return 2 * self.rows * self.width + 3


def make_batch(
    shape: Shape,
    rows: list[tuple[int, int]],
    directions: list[int],
    num_decodes: int,
    rng: np.random.Generator,
    placing: list[int] | None = None,
) -> AttentionBatch:
    """rows: (context_len, query_len) each; tables are a random permutation of the blocks. placing:
    the order of the rows' tokens on the token axis, if not that of the rows."""
    ids = rng.permutation(shape.blocks)[: 2 * shape.rows * shape.width]
    field = np.zeros((4, shape.rows), np.int32)
    token_row = np.full(shape.tokens, shape.rows, np.int32)
    token = 0
    for row in placing or range(len(rows)):
        context, length = rows[row]
        field[:, row] = context, token, length, directions[row]
        token_row[token : token + length] = row
        token += length
    return AttentionBatch(
        tables=jnp.asarray(ids.reshape(shape.rows, 2, shape.width), jnp.int32),
        context_lens=jnp.asarray(field[0]),
        query_start=jnp.asarray(field[1]),
        query_lens=jnp.asarray(field[2]),
        direction=jnp.asarray(field[3]),
        token_row=jnp.asarray(token_row),
        num_decodes=jnp.asarray(num_decodes, jnp.int32),
        num_rows=jnp.asarray(len(rows), jnp.int32),
    )


def slots(batch: AttentionBatch, row: int, start: int, end: int, block_size: int) -> np.ndarray:
    """(block of K, block of V, slot) of the row's positions [start, end): [3, end - start]."""
    position = np.arange(start, end)
    offset = position % block_size
    if int(batch.direction[row]) == RIGHT:
        offset = block_size - 1 - offset
    table = np.asarray(batch.tables[row])[:, position // block_size]
    return np.stack([table[0], table[1], offset])


def make_pool(
    shape: Shape,
    batch: AttentionBatch,
    rng: np.random.Generator,
    dtype: DTypeLike,
    window: int | None = None,
) -> jnp.ndarray:
    """Random values where rows have cached tokens (this step's included) that their first query
    can see, NaN and infinities everywhere else."""
    size = (shape.layers, shape.blocks, shape.kv_heads, shape.block_size, shape.head_dim)
    pool = rng.choice(np.array([np.nan, np.inf, -np.inf], np.float32), size)
    for row in range(int(batch.num_rows)):
        context, length = int(batch.context_lens[row]), int(batch.query_lens[row])
        start = 0 if window is None else max(0, context - length + 1 - window)
        k, v, slot = slots(batch, row, start, context, shape.block_size)
        for block in (k, v):
            new = rng.standard_normal((len(slot), shape.layers, shape.kv_heads, shape.head_dim))
            pool[:, block, :, slot] = new
    return jnp.asarray(pool).astype(dtype)


def vectors(shape: Shape, heads: int, rng: np.random.Generator, dtype: DTypeLike) -> jnp.ndarray:
    """[tokens, heads, head_dim], the padding tokens' ones too."""
    drawn = rng.standard_normal((shape.tokens, heads, shape.head_dim), dtype=np.float32)
    return jnp.asarray(drawn).astype(dtype)
