"""Slow and obvious NumPy references of the kernels, one token at a time, in float64 by default.

They take the arguments of a backend's functions (see `backends.Backend`), with all heads, and
arrays of any float dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from jaxserve.pallas_kernels.batch import HIDDEN, KV, RIGHT, AttentionBatch
from jaxserve.pallas_kernels.delta_net import DeltaInput
from jaxserve.pallas_kernels.hidden import HiddenProjection
from jaxserve.pallas_kernels.pool import ScaledPool, halves_wide

Array = np.ndarray | jax.Array


def as_cached(values: np.ndarray, cached: DTypeLike) -> np.ndarray | ScaledPool:
    """Float32 vectors [..., D] after a round trip through a pool of another dtype. Values that are
    not finite stay so; for int8 vectors, in their scales."""
    if jnp.dtype(cached) != jnp.int8:
        with np.errstate(invalid="ignore"):
            return values.astype(jnp.dtype(cached))
    with np.errstate(invalid="ignore", divide="ignore"):
        scales = np.abs(values).max(axis=-1) / np.float32(127)
        rounded = np.nan_to_num(np.round(values / scales[..., None]), posinf=77, neginf=-77)
    return ScaledPool(rounded.astype(np.int8), np.where(np.isfinite(scales), scales, np.nan))


def as_numbers(pool: Array | ScaledPool, halves: int = 0) -> np.ndarray:
    """The cached values in float64; the bytes of `pool.store_halves`, with `halves`, as 0 to
    255."""
    values = np.asarray(pool.values if isinstance(pool, ScaledPool) else pool)
    numbers = values.astype(np.float64)
    if isinstance(pool, ScaledPool):
        numbers *= np.asarray(pool.scales)[..., None]
    if halves_wide(values.dtype, halves):
        numbers[..., halves:] = values.view(np.uint8)[..., halves:]
    return numbers


def _on_host(batch: AttentionBatch) -> AttentionBatch:
    """The batch in NumPy arrays: device arrays are slow to read element by element."""
    host: AttentionBatch = jax.tree.map(np.asarray, batch)
    return host


def _slot(position: int, direction: int, block_size: int) -> int:
    offset = position % block_size
    return block_size - 1 - offset if direction == RIGHT else offset


def write(
    pool: Array, layer: int, k: Array, v: Array, x: Array | None, batch: AttentionBatch
) -> np.ndarray:
    """A copy of the pool with a step's tokens in their slots of one layer.

    Args:
        pool: [layers, blocks, kv_heads, block_size, head_dim].
        layer: Index of the layer.
        k, v: [T, kv_heads, head_dim], written for KV rows.
        x: [T, kv_heads, head_dim], written for hidden rows; None without any.
        batch: The step's rows and tokens.
    """
    out, batch = np.array(pool), _on_host(batch)
    block_size = out.shape[3]
    planes = [None if value is None else np.asarray(value) for value in (k, v, x)]
    for row in range(int(batch.num_rows)):
        length, context = int(batch.query_lens[row]), int(batch.context_lens[row])
        values = planes[2:] if int(batch.kind[row]) == HIDDEN else planes[:2]
        for i in range(length):
            token, position = int(batch.query_start[row]) + i, context - length + i
            slot = _slot(position, int(batch.direction[row]), block_size)
            for plane, value in enumerate(values):
                assert value is not None, f"row {row} is hidden, but there is no x"
                block = batch.tables[row, plane, position // block_size]
                out[layer, block, :, slot] = value[token]
    return out


def _one_token(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    soft_cap: float | None,
    sinks: np.ndarray | None,
) -> np.ndarray:
    """q [H, D] over k, v [S, kv_heads, D], all of which it may see -> [H, D]."""
    out = np.empty_like(q)
    group = q.shape[0] // k.shape[1]
    for head in range(q.shape[0]):
        scores = k[:, head // group] @ q[head] * scale
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        if sinks is not None:
            scores = np.append(scores, sinks[head])
        weights = np.exp(scores - scores.max())
        out[head] = weights[: len(v)] @ v[:, head // group] / weights.sum()
    return out


def _seen(batch: AttentionBatch, row: int, window: int | None) -> Iterator[tuple[int, int, int]]:
    """(token, start, end) for each of the row's tokens in this step, which sees positions [start,
    end)."""
    length, context = int(batch.query_lens[row]), int(batch.context_lens[row])
    for i in range(length):
        end = context - length + i + 1
        yield int(batch.query_start[row]) + i, 0 if window is None else max(0, end - window), end


def _cached(blocks: np.ndarray, batch: AttentionBatch, row: int, plane: int) -> np.ndarray:
    """The row's vectors of one plane, in token order: [context, kv_heads, D]."""
    context, block_size = int(batch.context_lens[row]), blocks.shape[2]
    slots = [_slot(p, int(batch.direction[row]), block_size) for p in range(context)]
    ids = batch.tables[row, plane, np.arange(context) // block_size]
    return blocks[ids, :, slots]


def _attend(
    q: Array,
    pool: Array,
    layer: int,
    batch: AttentionBatch,
    kind: int,
    end: jax.Array,
    read: Callable[[Callable[[int], np.ndarray]], tuple[np.ndarray, np.ndarray]],
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Array | None = None,
    dtype: DTypeLike = np.float64,
) -> np.ndarray:
    """Attention of q [T, H, D] over the rows of a kind before `end` -> [T, H, D] in dtype, zeros
    for other tokens. read: K and V [S, any, D] from a row's cached vectors in each plane."""
    queries, blocks = np.asarray(q).astype(dtype), np.asarray(pool)[layer].astype(dtype)
    out, batch = np.zeros(queries.shape, dtype), _on_host(batch)
    extra = None if sinks is None else np.asarray(sinks).astype(dtype)
    for row in range(int(end)):
        if int(batch.kind[row]) == kind:
            k, v = read(partial(_cached, blocks, batch, row))
            for token, start, stop in _seen(batch, row, sliding_window):
                seen = k[start:stop], v[start:stop]
                out[token] = _one_token(queries[token], *seen, scale, soft_cap, extra)
    return out


def paged_attention(
    q: Array, pool: Array, layer: int, batch: AttentionBatch, **options: Any
) -> np.ndarray:
    """Attention of KV rows over the pool.

    Args:
        q: [T, H, D], or [T, H, keys] with halves: their width says whether the pool has bytes.
        pool: [layers, blocks, kv_heads, block_size, head_dim], of `as_numbers`.
        layer: Index of the layer.
        batch: The step's rows and tokens.
        **options: scale, sliding_window, soft_cap, sinks, halves, and the dtype to compute in.

    Returns:
        [T, H, D], or [T, H, 2 * halves]; zeros for padding tokens and those of hidden rows.
    """
    halves = options.pop("halves", 0)

    def read(cached: Callable[[int], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        both = cached(0), cached(1)
        if not halves:
            return both
        rest = [x[..., halves:] for x in both]
        if q.shape[2] < 2 * pool.shape[4]:
            bits = (256 * rest[0] + rest[1]).astype(np.uint16)
            rest = [bits.view(jnp.bfloat16).astype(both[0].dtype)]
        return (np.concatenate([*(x[..., :halves] for x in both), *rest], axis=-1),) * 2

    out = _attend(q, pool, layer, batch, KV, batch.num_rows, read, **options)
    return out[..., : 2 * halves] if halves else out


def absorbed_attention(
    qx: Array, pool: Array, layer: int, batch: AttentionBatch, **options: Any
) -> np.ndarray:
    """Attention of hidden decodes over raw hidden vectors, one x for all heads.

    Args:
        qx: [T, H, E].
        pool: [layers, blocks, kv_heads, block_size, head_dim].
        layer: Index of the layer.
        batch: The step's rows and tokens.
        **options: As for `paged_attention`.

    Returns:
        [T, H, E]; zeros for all other tokens.
    """

    def read(cached: Callable[[int], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        x = cached(0)
        return (x.reshape(len(x), 1, -1),) * 2

    return _attend(qx, pool, layer, batch, HIDDEN, batch.num_decodes, read, **options)


def projected_attention(
    q: Array,
    pool: Array,
    layer: int,
    batch: AttentionBatch,
    projection: HiddenProjection,
    **options: Any,
) -> np.ndarray:
    """Attention of hidden rows over the K and V that their cached vectors project to.

    Args:
        q: [T, H, D].
        pool: [layers, blocks, kv_heads, block_size, head_dim].
        layer: Index of the layer.
        batch: The step's rows and tokens.
        projection: The layer's map from hidden vectors to K and V.
        **options: As for `paged_attention`.

    Returns:
        [T, H, D]; zeros for padding tokens and those of KV rows.
    """

    def read(cached: Callable[[int], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        x = cached(0)
        return project(x.reshape(len(x), -1), projection, q.shape[2])

    return _attend(q, pool, layer, batch, HIDDEN, batch.num_rows, read, **options)


def project(
    x: np.ndarray, projection: HiddenProjection, head_dim: int
) -> tuple[np.ndarray, np.ndarray]:
    """K and V [S, heads, head_dim] of hidden vectors x [S, E] at positions 0 to S - 1."""
    # If a window hides the first positions, their values do not matter.
    with np.errstate(invalid="ignore"):
        return _project(x, projection, head_dim)


def _project(
    x: np.ndarray, projection: HiddenProjection, head_dim: int
) -> tuple[np.ndarray, np.ndarray]:
    def heads(weights: jax.Array, bias: jax.Array | None) -> np.ndarray:
        y = x @ np.asarray(weights).astype(x.dtype)
        y = y if bias is None else y + np.asarray(bias).astype(x.dtype)
        return y.reshape(len(x), -1, head_dim)

    k, v = heads(projection.wk, projection.bk), heads(projection.wv, projection.bv)
    if projection.k_norm is not None:
        mean_square = (k * k).mean(axis=-1, keepdims=True)
        k = k / np.sqrt(mean_square + projection.norm_eps) * np.asarray(projection.k_norm)
    if projection.rotation is not None:
        cos, sin = np.asarray(projection.rotation).astype(x.dtype)[:, : len(x), None]
        first, second = np.split(k, 2, axis=-1)
        k = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return k, v


def move(pool: Array, moves: Array, count: int) -> np.ndarray:
    """A copy of the pool with the first `count` of moves [M, 4] made, in all layers: (block, slot)
    to (block, slot)."""
    out, old = np.array(pool), np.asarray(pool)
    for source, from_slot, target, to_slot in np.asarray(moves)[:count]:
        out[:, target, :, to_slot] = old[:, source, :, from_slot]
    return out


def stage_out(pool: Array, slots: Array, count: int) -> np.ndarray:
    """The vectors of the first `count` of slots [M, 2], (block, slot) each, in all layers: [M,
    layers, kv_heads, head_dim], the rest zeros."""
    old = np.asarray(pool)
    out = np.zeros((len(slots), old.shape[0], old.shape[2], old.shape[4]), old.dtype)
    for i, (block, slot) in enumerate(np.asarray(slots)[:count]):
        out[i] = old[:, block, :, slot]
    return out


def stage_in(pool: Array, staging: Array, slots: Array, count: int) -> np.ndarray:
    """A copy of the pool with staged vectors in their slots, in all layers.

    Args:
        pool: [layers, blocks, kv_heads, block_size, head_dim].
        staging: [M, layers, kv_heads, head_dim].
        slots: [M, 2]: (block, slot).
        count: How many entries are written.
    """
    out = np.array(pool)
    for value, (block, slot) in zip(np.asarray(staging)[:count], np.asarray(slots), strict=False):
        out[:, block, :, slot] = value
    return out


def recur(inputs: DeltaInput) -> np.ndarray:
    """What `recurrence.recur` reads of a text from its beginning: [T, value_heads, value_dim]."""
    net, per = inputs.net, inputs.net.per_key
    given = (inputs.mixed, inputs.gates, inputs.conv, inputs.rate, inputs.shift)
    mixed, gates, conv, rate, shift = (np.asarray(part).astype(np.float64) for part in given)
    out = np.zeros((len(mixed), net.key_heads, per, net.value_dim))
    state = np.zeros((net.key_heads, per, net.key_dim, net.value_dim))
    for t in range(len(mixed)):
        for h in range(net.key_heads):
            x = np.zeros(net.channels)
            for tap in range(min(net.taps, t + 1)):
                x += mixed[t - tap, h] * conv[h, :, net.taps - 1 - tap]
            q, k, v = np.split(x / (1 + np.exp(-x)), (net.key_dim, 2 * net.key_dim))
            q, k = (vector / np.sqrt((vector**2).sum() + 1e-6) for vector in (q, k))
            for j in range(per):
                forget = np.log1p(np.exp(gates[t, h, per + j] + shift[h, j]))
                state[h, j] *= np.exp(-np.exp(rate[h, j]) * forget)
                change = v[j * net.value_dim :][: net.value_dim] - k @ state[h, j]
                state[h, j] += np.outer(k, change / (1 + np.exp(-gates[t, h, j])))
                out[t, h, j] = q @ state[h, j] / np.sqrt(net.key_dim)
    return out.reshape(len(out), -1, net.value_dim)
