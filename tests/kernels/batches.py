"""Drawing pools and batches whose every unused slot is poisoned, for the kernel tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax.typing import DTypeLike

from jaxserve.pallas_kernels import HIDDEN, KV, LEFT, RIGHT, AttentionBatch, HiddenProjection


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
    kinds: list[int] | None = None,
) -> AttentionBatch:
    """rows: (context_len, query_len) each; tables are a random permutation of the blocks. placing:
    the order of the rows' tokens on the token axis, if not that of the rows. kinds: KV or HIDDEN
    for each row; all KV without it."""
    ids = rng.permutation(shape.blocks)[: 2 * shape.rows * shape.width]
    field = np.zeros((5, shape.rows), np.int32)
    field[4, : len(rows)] = kinds or 0
    token_row = np.full(shape.tokens, shape.rows, np.int32)
    token = 0
    for row in placing or range(len(rows)):
        context, length = rows[row]
        field[:4, row] = context, token, length, directions[row]
        token_row[token : token + length] = row
        token += length
    return AttentionBatch(
        tables=jnp.asarray(ids.reshape(shape.rows, 2, shape.width), jnp.int32),
        context_lens=jnp.asarray(field[0]),
        query_start=jnp.asarray(field[1]),
        query_lens=jnp.asarray(field[2]),
        direction=jnp.asarray(field[3]),
        kind=jnp.asarray(field[4]),
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
    can see, NaN and infinities everywhere else. Hidden rows have nothing in tables[:, 1]."""
    size = (shape.layers, shape.blocks, shape.kv_heads, shape.block_size, shape.head_dim)
    pool = rng.choice(np.array([np.nan, np.inf, -np.inf], np.float32), size)
    for row in range(int(batch.num_rows)):
        context, length = int(batch.context_lens[row]), int(batch.query_lens[row])
        start = 0 if window is None else max(0, context - length + 1 - window)
        k, v, slot = slots(batch, row, start, context, shape.block_size)
        for block in (k,) if int(batch.kind[row]) == HIDDEN else (k, v):
            new = rng.standard_normal((len(slot), shape.layers, shape.kv_heads, shape.head_dim))
            pool[:, block, :, slot] = new
    return jnp.asarray(pool).astype(dtype)


def vectors(shape: Shape, heads: int, rng: np.random.Generator, dtype: DTypeLike) -> jnp.ndarray:
    """[tokens, heads, head_dim], the padding tokens' ones too."""
    drawn = rng.standard_normal((shape.tokens, heads, shape.head_dim), dtype=np.float32)
    return jnp.asarray(drawn).astype(dtype)


def make_projection(
    shape: Shape,
    rng: np.random.Generator,
    dtype: DTypeLike,
    *,
    bias: bool = False,
    norm: bool = False,
    rotary: bool = False,
) -> HiddenProjection:
    """Random weights of the scale that keeps K and V near 1; a real rotary table (base 100)."""
    width = shape.kv_heads * shape.head_dim

    def drawn(*size: int) -> jnp.ndarray:
        return jnp.asarray(rng.standard_normal(size, dtype=np.float32)).astype(dtype)

    frequency = 100.0 ** -(np.arange(shape.head_dim // 2) / (shape.head_dim // 2))
    phase = np.arange(shape.longest)[:, None] * frequency
    table = jnp.asarray(np.stack([np.cos(phase), np.sin(phase)]), jnp.float32)
    scale = jnp.asarray(width**-0.5, dtype)
    return HiddenProjection(
        wk=drawn(width, width) * scale,
        wv=drawn(width, width) * scale,
        bk=drawn(width) if bias else None,
        bv=drawn(width) if bias else None,
        k_norm=drawn(shape.head_dim).astype(jnp.float32) if norm else None,
        rotation=table if rotary else None,
    )


def lengths(shape: Shape) -> st.SearchStrategy[int]:
    """Context lengths, at and around block edges more often."""
    edges = {
        edge + d
        for edge in (0, shape.block_size, 2 * shape.block_size, shape.longest)
        for d in (-1, 0, 1)
    }
    near = sorted(edge for edge in edges if 1 <= edge <= shape.longest)
    return st.sampled_from(near) | st.integers(1, shape.longest)


@st.composite
def decode_batches(
    draw: st.DrawFn, shape: Shape, kinds: Sequence[int] = (KV,)
) -> tuple[AttentionBatch, int]:
    """(batch of decodes, seed), some rows unused; each row of one of these kinds."""
    contexts = draw(st.lists(lengths(shape), min_size=0, max_size=shape.rows))
    directions = [draw(st.sampled_from([LEFT, RIGHT])) for _ in contexts]
    seed = draw(st.integers(0, 2**16))
    rows = [(context, 1) for context in contexts]
    drawn = [draw(st.sampled_from(kinds)) for _ in rows]
    rng = np.random.default_rng(seed)
    return make_batch(shape, rows, directions, len(rows), rng, kinds=drawn), seed


@st.composite
def mixed_batches(
    draw: st.DrawFn, shape: Shape, kinds: Sequence[int] = (KV,)
) -> tuple[AttentionBatch, int]:
    """(batch, seed): decodes first, then chunks with and without cached context, some rows and
    tokens unused; each row of one of these kinds. Only decodes if there are no more tokens."""
    if shape.tokens == shape.rows:
        return draw(decode_batches(shape, kinds))
    decodes = draw(st.integers(0, shape.rows))
    rows = [(draw(lengths(shape)), 1) for _ in range(decodes)]
    left = shape.tokens - decodes
    for _ in range(draw(st.integers(0, shape.rows - decodes))):
        context = draw(lengths(shape))
        length = min(context, left, draw(lengths(shape)))
        rows.append((context, length))
        left -= length
    directions = [draw(st.sampled_from([LEFT, RIGHT])) for _ in rows]
    seed = draw(st.integers(0, 2**16))
    drawn = [draw(st.sampled_from(kinds)) for _ in rows]
    rng = np.random.default_rng(seed)
    return make_batch(shape, rows, directions, decodes, rng, kinds=drawn), seed
