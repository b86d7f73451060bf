"""Paged attention of KV rows on CPUs, compiled by numba: decodes and prompt chunks, on all cores.

A share is a row's tile of queries, for some of its heads.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numba import carray, njit

from jaxserve.pallas_kernels.backends import Scoring
from jaxserve.pallas_kernels.batch import KV, AttentionBatch
from jaxserve.pallas_kernels.cpu import queries, scores, vectors
from jaxserve.pallas_kernels.cpu.numba_ffi import (
    INLINE,
    OPTIONS,
    allocate,
    compiled_once,
    data,
    dims,
    free,
    int32s,
    register,
    words,
)
from jaxserve.pallas_kernels.cpu.queries import FEW, NO_SINK, attend, room
from jaxserve.pallas_kernels.pool import FLOAT8, Pool, ScaledPool, cached_width

TILE = 64  # queries, heads of a group times tokens, that are multiplied at once
ALONE = 1 << 17  # numbers of context below which other threads do not help
ENOUGH = 8  # if a call has fewer shares, heads are cut too
SHARES = 64  # most shares, about
_HEAD, _UNIT = 2, 5  # words, see `_plan`

# Operands and the result, see `target`.
_Q, _POOL, _TABLES, _LENS, _START, _MANY, _SIDE, _KIND, _TOKEN_ROW, _INTS, _FLOATS = range(11)
_SCALES = _OUT = 11  # the pool's scales, if any; the result is last

# numba's types of a pool's numbers, see `vectors.widened`.
NUMBERS: dict[str, Any] = {
    "float32": np.float32,
    "bfloat16": np.uint16,
    FLOAT8: np.uint8,
    "int8": np.int8,
}


def paged_attention(
    q: jax.Array,
    pool: Pool,
    layer: jax.Array | int,
    batch: AttentionBatch,
    *,
    scoring: Scoring,
    decode_only: bool,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """See `attention.paged_attention`: q [T, H, D] -> the same, or [T, H, 2 * halves], on one CPU
    device."""
    if scoring.halves and pool.shape[2] != 1:
        raise ValueError(f"halves: want one KV head a device, got {pool.shape[2]}")
    call = jax.ffi.ffi_call(
        target(q.shape[2], pool.dtype.name, halves=scoring.halves),
        jax.ShapeDtypeStruct((*q.shape[:2], 2 * scoring.halves or q.shape[2]), jnp.float32),
    )
    masks = scoring.sliding_window or 0, scoring.both_ways
    ints = jnp.stack([jnp.asarray(layer, jnp.int32), *map(jnp.int32, masks)])
    values, scales = (pool.values, (pool.scales,)) if isinstance(pool, ScaledPool) else (pool, ())
    floats = jnp.array([scoring.scale, scoring.soft_cap or 0], jnp.float32)
    if sinks is None:
        sinks = jnp.full(q.shape[1], NO_SINK, jnp.float32)
    out = call(
        q.astype(jnp.float32),
        values,
        batch.tables,
        batch.context_lens,
        batch.query_start,
        batch.query_lens,
        batch.direction,
        batch.kind,
        batch.token_row,
        ints,
        jnp.concatenate([floats, sinks]),
        *scales,
    )
    return out.astype(q.dtype)


@compiled_once
def target(head_dim: int, dtype: str, *, halves: int) -> str:
    """The name of the kernel for queries of this width, which is compiled at the first call.
    halves: see `Scoring`; if not 0, K and V are halves of keys of this width.

    Operands: q [T, H, D], float32; pool [L, B, K, S, D], of a dtype in `NUMBERS`; from
    `AttentionBatch`: tables, context_lens, query_start, query_lens, direction, kind, token_row;
    int32 [3]: layer, sliding_window (0: none), whether tokens see later ones; float32 [2 + H]:
    scale, soft_cap (0: none), sinks (`NO_SINK`: none); for an int8 pool its scales, float32 [L, B,
    K, S]. Result: [T, H, D], or [T, H, 2 * halves].
    """
    name, number = f"jaxserve_paged_attention_{dtype}_{head_dim}", NUMBERS[dtype]
    cached_dim = head_dim
    if halves:
        name, cached_dim = f"{name}_{halves}", cached_width(head_dim // 2, dtype, halves)
    last, scaled = _OUT + (dtype == "int8"), dtype == "int8"

    @njit(**OPTIONS)
    def plan(given: Any) -> Any:
        return _plan(given, given[last], halves)

    @njit(**INLINE)
    def share(given: Any, address: int, i: int) -> None:
        layers, blocks, kv_heads, size, _ = dims(given[_POOL], 5)
        shape = layers, blocks, kv_heads, size, cached_dim
        pool = carray(data(given[_POOL]), shape, number)
        if scaled:
            scales = carray(data(given[_SCALES]), shape[:4], np.float32)
            _share(given, pool, scales, given[last], address, i, head_dim, halves)
        else:
            _share(given, pool, None, given[last], address, i, head_dim, halves)

    files = (__file__, queries.__file__, scores.__file__, vectors.__file__)
    return register(name, plan, share, *files)


@njit(**OPTIONS)
def _plan(given: Any, result: Any, halves: int) -> Any:
    """Zeroes tokens that belong to no KV row, and cuts the others into shares: (row, first query
    token, tokens, first kv head, heads), those with most work first. With halves, where all query
    heads share one KV head, parts of `FEW` query heads take the place of kv heads."""
    tokens, heads, head_dim = dims(given[_Q], 3)
    kv_heads = dims(given[_POOL], 5)[2]
    lens, many, kind = int32s(given[_LENS]), int32s(given[_MANY]), int32s(given[_KIND])
    token_row, rows = int32s(given[_TOKEN_ROW]), len(kind)
    width = 2 * halves if halves else head_dim
    out = carray(data(result), (tokens, heads * width), np.float32)
    for token in range(tokens):
        row = token_row[token]
        if row < 0 or row >= rows or kind[row] != KV:
            out[token] = np.float32(0)
    tile = max(1, TILE // (heads // kv_heads))
    tiles, work = 0, 0
    for row in range(rows):
        if kind[row] == KV and many[row] > 0:
            tiles += (many[row] + tile - 1) // tile
            work += lens[row] * kv_heads * head_dim * ((many[row] + FEW) // FEW)
    parts = (heads + FEW - 1) // FEW if halves else kv_heads
    cuts = 1  # cuts of the heads
    if work >= ALONE:
        while cuts < parts and tiles * cuts < ENOUGH:
            cuts += 1
    per = (parts + cuts - 1) // cuts
    cuts = (parts + per - 1) // per
    address = allocate(_HEAD + tiles * cuts * _UNIT)
    head = words(address, _HEAD)
    units = words(address + 8 * _HEAD, tiles * cuts * _UNIT).reshape((tiles * cuts, _UNIT))
    at = 0
    for row in range(rows):
        if kind[row] != KV or many[row] <= 0:
            continue
        for i in range((many[row] + tile - 1) // tile - 1, -1, -1):
            for cut in range(cuts):
                units[at, 0], units[at, 1] = row, i * tile
                units[at, 2] = min(tile, many[row] - i * tile)
                units[at, 3] = cut * per
                units[at, 4] = min(per, parts - cut * per)
                at += 1
    # A few shares at a time if there are many, all of them if other threads would come too late.
    head[0], head[1] = at, max(1, at // SHARES) if work >= ALONE else max(1, at)
    return (at + head[1] - 1) // head[1], address


@njit(**INLINE)
def _share(
    given: Any, pool: Any, scales: Any, result: Any, address: int, i: int, head_dim: int,
    halves: int,
) -> None:  # fmt: skip
    tokens, heads, _ = dims(given[_Q], 3)
    kv_heads = pool.shape[2]
    rows, _, table_width = dims(given[_TABLES], 3)
    q = carray(data(given[_Q]), (tokens, heads, head_dim), np.float32)
    tables = carray(data(given[_TABLES]), (rows, 2, table_width), np.int32)
    lens, start, many = int32s(given[_LENS]), int32s(given[_START]), int32s(given[_MANY])
    sides, ints = int32s(given[_SIDE]), int32s(given[_INTS])
    floats = carray(data(given[_FLOATS]), (2 + heads,), np.float32)
    width = 2 * halves if halves else head_dim
    out = carray(data(result), (tokens, heads, width), np.float32)
    layer, window = pool[ints[0]], ints[1]
    ahead = 0
    if ints[2] != 0:
        for row in range(rows):
            ahead = max(ahead, lens[row], 1)
    layer_scales = None if scales is None else scales[ints[0]]
    scale, cap, sinks = floats[0], floats[1], floats[2:]
    group = heads // kv_heads
    head_words = words(address, _HEAD)
    number, per = head_words[0], head_words[1]
    units = words(address + 8 * _HEAD, number * _UNIT).reshape((number, _UNIT))
    most = 1
    for unit in range(i * per, min((i + 1) * per, number)):
        most = max(most, units[unit, 2])
    memory = room(most * group, head_dim)
    for unit in range(i * per, min((i + 1) * per, number)):
        row, first, count, head, count_heads = units[unit]
        position = lens[row] - many[row] + first
        # With halves, the query heads of the share read the one KV head together.
        begin, end, each = head, head + count_heads, group
        if halves:
            begin, end, each = 0, 1, min(count_heads * FEW, heads - head * FEW)
        for h in range(begin, end):
            of = head * FEW if halves else h * group
            attend(
                out, q, layer, layer_scales, tables[row], h, of, each, sides[row],
                start[row] + first, count, position, lens[row], ahead, scale, window, cap, sinks,
                head_dim, halves, memory,
            )  # fmt: skip
    free(memory)
