"""Drawing pools and batches whose every unused slot is poisoned, for the kernel tests.

All in NumPy until the end, so that only the kernels are compiled.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax.typing import DTypeLike

from jaxserve.pallas_kernels import HIDDEN, KV, LEFT, RIGHT, AttentionBatch, HiddenProjection
from jaxserve.pallas_kernels.pool import ScaledPool
from jaxserve.pallas_kernels.reference import as_cached

POISON = np.array([np.nan, np.inf, -np.inf], np.float32)


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

    @property
    def decode_only(self) -> bool:
        """Whether steps of this shape have a token a row."""
        return self.tokens == self.rows


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
    batch = AttentionBatch(
        tables=ids.reshape(shape.rows, 2, shape.width).astype(np.int32),
        context_lens=field[0],
        query_start=field[1],
        query_lens=field[2],
        direction=field[3],
        kind=field[4],
        token_row=token_row,
        num_decodes=np.int32(num_decodes),
        num_rows=np.int32(len(rows)),
    )
    on_device: AttentionBatch = jax.tree.map(jnp.asarray, batch)
    return on_device


def with_tables(batch: AttentionBatch, tables: np.ndarray) -> AttentionBatch:
    """The batch with these tables [R, 2, W]."""
    return dataclasses.replace(batch, tables=jnp.asarray(tables))


def tokens_of(batch: AttentionBatch, kind: int, *, decodes: bool = False) -> np.ndarray:
    """bool [T]: the tokens of rows of this kind, or of those of them that are decodes."""
    rows = int(batch.num_decodes if decodes else batch.num_rows)
    counted = (np.asarray(batch.kind) == kind) & (np.arange(batch.max_rows) < rows)
    return np.append(counted, False)[np.asarray(batch.token_row)]


def slots(batch: AttentionBatch, row: int, start: int, end: int, block_size: int) -> np.ndarray:
    """(block of K, block of V, slot) of the row's positions [start, end): [3, end - start]."""
    position = np.arange(start, end)
    offset = position % block_size
    if int(np.asarray(batch.direction)[row]) == RIGHT:
        offset = block_size - 1 - offset
    table = np.asarray(batch.tables)[row][:, position // block_size]
    return np.stack([table[0], table[1], offset])


def make_pool(
    shape: Shape,
    batch: AttentionBatch,
    rng: np.random.Generator,
    dtype: DTypeLike,
    window: int | None = None,
) -> np.ndarray:
    """Random values where rows have cached tokens (this step's included) that their first query
    can see, NaN and infinities everywhere else. Hidden rows have nothing in tables[:, 1]."""
    size = (shape.layers, shape.blocks, shape.kv_heads, shape.block_size, shape.head_dim)
    pool = np.resize(rng.permutation(np.repeat(POISON, 331)), size)
    host: AttentionBatch = jax.tree.map(np.asarray, batch)
    for row in range(int(host.num_rows)):
        context, length = int(host.context_lens[row]), int(host.query_lens[row])
        start = 0 if window is None else max(0, context - length + 1 - window)
        k, v, slot = slots(host, row, start, context, shape.block_size)
        for block in (k,) if int(host.kind[row]) == HIDDEN else (k, v):
            new = rng.standard_normal((len(slot), shape.layers, shape.kv_heads, shape.head_dim))
            pool[:, block, :, slot] = new
    return pool.astype(dtype)


def in_bytes(
    drawn: np.ndarray, batch: AttentionBatch, dtype: DTypeLike, halves: int
) -> np.ndarray | ScaledPool:
    """A pool of 8 bits of one of float32: each vector's first `halves` as it has them, and of two
    numbers in place of each other one the upper byte, in blocks of V the lower one; see
    `pool.store_halves`."""
    stored = as_cached(drawn[..., :halves], dtype)
    bits = np.repeat(drawn[..., halves:].astype(jnp.bfloat16).view(np.uint16), 2, axis=-1)
    k, v = (np.isin(np.arange(drawn.shape[1]), np.asarray(batch.tables)[:, n]) for n in (0, 1))
    lower = (v & ~k)[:, None, None, None]
    bits = np.where(lower, bits & 255, bits >> 8).astype(np.uint8)
    values = stored.values if isinstance(stored, ScaledPool) else stored
    values = np.concatenate([values, bits.view(values.dtype)], axis=-1)
    return ScaledPool(values, stored.scales) if isinstance(stored, ScaledPool) else values


def vectors(
    shape: Shape,
    heads: int,
    rng: np.random.Generator,
    dtype: DTypeLike,
    used: np.ndarray | None = None,
) -> np.ndarray:
    """[tokens, heads, head_dim]; NaN for the tokens that are not used, bool [T], if given."""
    drawn = rng.standard_normal((shape.tokens, heads, shape.head_dim), dtype=np.float32)
    if used is not None:
        drawn[~used] = np.nan
    return drawn.astype(dtype)


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

    def drawn(*size: int, scale: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(size, dtype=np.float32) * scale).astype(dtype)

    frequency = 100.0 ** -(np.arange(shape.head_dim // 2) / (shape.head_dim // 2))
    phase = np.arange(shape.longest)[:, None] * frequency
    table = np.stack([np.cos(phase), np.sin(phase)]).astype(np.float32)
    projection = HiddenProjection(
        wk=drawn(width, width, scale=width**-0.5),
        wv=drawn(width, width, scale=width**-0.5),
        bk=drawn(width) if bias else None,
        bv=drawn(width) if bias else None,
        k_norm=drawn(shape.head_dim).astype(np.float32) if norm else None,
        rotation=table if rotary else None,
    )
    on_device: HiddenProjection = jax.tree.map(jnp.asarray, projection)
    return on_device


def lengths(shape: Shape) -> st.SearchStrategy[int]:
    """Context lengths: 1, the longest, at and around the edges of blocks, and any other."""
    size = shape.block_size
    edges = {k * size + d for k in range(shape.width + 1) for d in (-1, 0, 1)}
    near = st.sampled_from(sorted(n for n in edges if 1 <= n <= shape.longest))
    return near | st.integers(1, shape.longest)


@st.composite
def steps(draw: st.DrawFn, shape: Shape, kind: int = KV) -> tuple[AttentionBatch, int]:
    """(batch, seed): decodes first, then chunks, with and without cached context; rows and tokens
    may be left over. Only decodes if there are no more tokens than rows, else the rows' tokens lie
    in any order. Rows are all of this kind or of both."""
    kinds = st.sampled_from(draw(st.sampled_from([(kind,), (KV, HIDDEN)])))
    decodes = draw(st.integers(0, shape.rows))
    rows = [(draw(lengths(shape)), 1) for _ in range(decodes)]
    placing, left = None, shape.tokens - decodes
    if not shape.decode_only:
        for _ in range(draw(st.integers(0, shape.rows - decodes))):
            context = draw(lengths(shape))
            rows.append((context, min(context, left, draw(lengths(shape)))))
            left -= rows[-1][1]
        placing = draw(st.permutations(range(len(rows))))
    directions = [draw(st.sampled_from([LEFT, RIGHT])) for _ in rows]
    drawn = [draw(kinds) for _ in rows]
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    return make_batch(shape, rows, directions, decodes, rng, placing, drawn), seed
