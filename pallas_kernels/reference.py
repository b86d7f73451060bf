"""Slow and obvious NumPy references of the kernels, one token at a time, in float64 by default."""

from __future__ import annotations

import jax
import numpy as np
from numpy.typing import DTypeLike

from jaxserve.pallas_kernels.batch import RIGHT, AttentionBatch


def _slot(position: int, direction: int, block_size: int) -> int:
    offset = position % block_size
    return block_size - 1 - offset if direction == RIGHT else offset


def write_kv(
    pool: np.ndarray | jax.Array,
    layer: int,
    k: np.ndarray | jax.Array,
    v: np.ndarray | jax.Array,
    batch: AttentionBatch,
) -> np.ndarray:
    """A copy of the pool with every token's k and v [T, kv_heads, head_dim] in its slot."""
    out = np.array(pool)
    block_size = out.shape[3]
    tables = np.asarray(batch.tables)
    for row in range(int(batch.num_rows)):
        length, context = int(batch.query_lens[row]), int(batch.context_lens[row])
        for i in range(length):
            token, position = int(batch.query_start[row]) + i, context - length + i
            slot = _slot(position, int(batch.direction[row]), block_size)
            for kind, value in enumerate((k, v)):
                block = tables[row, kind, position // block_size]
                out[layer, block, :, slot] = np.asarray(value[token])
    return out


def _one_token(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    soft_cap: float | None,
) -> np.ndarray:
    """q [H, D] over k, v [S, kv_heads, D], all of which it may see -> [H, D]."""
    out = np.empty_like(q)
    group = q.shape[0] // k.shape[1]
    for head in range(q.shape[0]):
        scores = k[:, head // group] @ q[head] * scale
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        weights = np.exp(scores - scores.max())
        out[head] = weights @ v[:, head // group] / weights.sum()
    return out


def paged_attention(
    q: np.ndarray | jax.Array,
    pool: np.ndarray | jax.Array,
    layer: int,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    dtype: DTypeLike = np.float64,
) -> np.ndarray:
    """Attention of q [T, H, D] over the pool -> [T, H, D] in dtype; padding tokens give zeros."""
    queries, blocks = np.asarray(q).astype(dtype), np.asarray(pool[layer]).astype(dtype)
    tables, block_size = np.asarray(batch.tables), blocks.shape[2]
    out = np.zeros(queries.shape, dtype)
    for row in range(int(batch.num_rows)):
        length, context = int(batch.query_lens[row]), int(batch.context_lens[row])
        slots = [_slot(p, int(batch.direction[row]), block_size) for p in range(context)]
        ids = tables[row][:, np.arange(context) // block_size]
        k, v = blocks[ids[0], :, slots], blocks[ids[1], :, slots]
        for i in range(length):
            token, end = int(batch.query_start[row]) + i, context - length + i + 1
            start = 0 if sliding_window is None else max(0, end - sliding_window)
            out[token] = _one_token(queries[token], k[start:end], v[start:end], scale, soft_cap)
    return out
