"""Latent vectors in pools of 8 bits: what is kept of them, and how far attention may be off."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels import (
    make_pool,
    move_slots,
    paged_attention,
    stage_in,
    stage_out,
    write,
)
from jaxserve.pallas_kernels.pool import FLOAT8, Pool, ScaledPool, cached_width
from tests.pallas_kernels.batches import Shape, make_batch, slots, vectors
from tests.pallas_kernels.cases import compiled

HALVES, REST = 40, 20
SHAPE = Shape(3, 1, HALVES + REST, block_size=32, rows=3, width=2, tokens=48)
ROWS, LAYER = [(9, 1), (57, 30), (17, 17)], 1
BATCH = make_batch(SHAPE, ROWS, [0, 1, 0], 1, np.random.default_rng(5))
USED = np.asarray(BATCH.token_row) < len(ROWS)
DTYPES = ("int8", FLOAT8)
put = functools.partial(write, halves=HALVES)
BACKENDS = ("xla", "numba", "triton-interpret", "tpu-interpret")
EACH = [
    pytest.param(backend, dtype, marks=[pytest.mark.slow] * slow)
    for dtype in DTYPES
    for backend in BACKENDS
    # What takes long to compile; the other dtype of the backend does the same.
    for slow in [dtype == FLOAT8 and backend in ("numba", "tpu-interpret")]
]


def drawn(seed: int) -> np.ndarray:
    """float32 [T, 1, D]: in the rest of a vector all bytes there are, above and below."""
    found = vectors(SHAPE, 1, np.random.default_rng(seed), np.float32)
    place = np.arange(SHAPE.tokens * REST)
    bits = (place % 256 << 8 | (place * 7 + seed) % 256).astype(np.uint16)
    found[..., HALVES:] = bits.view(jnp.bfloat16).astype(np.float32).reshape(-1, 1, REST)
    return found


def empty(dtype: str) -> Pool:
    width = cached_width(SHAPE.head_dim, dtype, HALVES)
    return make_pool(SHAPE.layers, SHAPE.blocks, 1, SHAPE.block_size, width, dtype)


def stored(pool: Pool) -> np.ndarray:
    """The bytes [layers, blocks, 1, block_size, D]."""
    values = pool.values if isinstance(pool, ScaledPool) else pool
    return np.asarray(values).view(np.uint8)


def bits_of(x: np.ndarray) -> np.ndarray:
    """Of bfloat16; all NaN alike."""
    found = x.astype(jnp.bfloat16)
    return np.where(np.isnan(found.astype(np.float32)), 0x7FC0, found.view(np.uint16))


def places() -> np.ndarray:
    """(block of K, block of V, slot) of the used tokens: [3, N]."""
    many = enumerate(ROWS)
    found = [slots(BATCH, row, end - count, end, SHAPE.block_size) for row, (end, count) in many]
    return np.concatenate(found, axis=1)


@pytest.mark.parametrize(("backend", "dtype"), EACH)
def test_the_rest_of_a_vector_has_16_bits(backend: str, dtype: str) -> None:
    """Wherever it is moved; and so has what is said to be of 8 bits no more than its error."""
    k, v = drawn(1), drawn(2)
    pool = compiled(put, backend, donate=True)(empty(dtype), LAYER, k, v, BATCH)
    of_k, of_v, slot = places()
    free = [n for n in range(SHAPE.blocks) if n not in np.asarray(BATCH.tables)]

    def check(pool: Pool, of_k: np.ndarray, of_v: np.ndarray, slot: np.ndarray) -> None:
        found = stored(pool)[LAYER, :, 0, :, HALVES:].astype(np.uint16)
        rest = np.concatenate([k[USED, 0, HALVES:], v[USED, 0, HALVES:]], axis=-1)
        bits = found[of_k, slot] << 8 | found[of_v, slot]
        np.testing.assert_array_equal(bits_of(bits.view(jnp.bfloat16)), bits_of(rest))
        for blocks, x in ((of_k, k), (of_v, v)):
            wide = x[USED, 0, :HALVES]
            if isinstance(pool, ScaledPool):
                scales = np.asarray(pool.scales)[LAYER, blocks, 0, slot][:, None]
                got = np.asarray(pool.values)[LAYER, blocks, 0, slot, :HALVES] * scales
                assert scales[:, 0] == pytest.approx(np.abs(wide).max(axis=-1) / 127, rel=1e-6)
            else:
                got = np.asarray(pool)[LAYER, blocks, 0, slot, :HALVES].astype(np.float32)
            assert np.all(np.abs(got - wide) <= errors(wide, dtype) * 1.001)

    check(pool, of_k, of_v, slot)
    # To blocks of nobody, and through a staging buffer to where all of it is again.
    source = np.stack([of_k, slot], axis=1)[:20], np.stack([of_v, slot], axis=1)[:20]
    target = [np.stack([np.full(20, free[n]), np.arange(20)], axis=1) for n in (0, 1)]
    moves = np.concatenate(
        [np.concatenate(pair, axis=1) for pair in zip(source, target, strict=True)]
    )
    pool = compiled(move_slots, backend, donate=True)(pool, moves.astype(np.int32), 40)
    blocks = [
        np.concatenate([each[:, 0], of[20:]]) for each, of in zip(target, (of_k, of_v), strict=True)
    ]
    slot = np.concatenate([np.arange(20), slot[20:]])
    check(pool, *blocks, slot)
    staging = compiled(stage_out, backend)(pool, moves[:, 2:].astype(np.int32), 40)
    cleared = jax.tree.map(jnp.zeros_like, pool)
    where = moves[:, :2].astype(np.int32)
    back = compiled(stage_in, backend, donate=True)(cleared, staging, where, 40)
    np.testing.assert_array_equal(
        stored(back)[:, where[:, 0], 0, where[:, 1]], stored(pool)[:, moves[:, 2], 0, moves[:, 3]]
    )


def errors(wide: np.ndarray, dtype: str) -> np.ndarray:
    """The most that numbers [..., n] of one vector are off by: half a step of its scale, or half
    the last of float8's 4 digits, of the smallest numbers an absolute one."""
    if dtype == "int8":
        step = np.abs(wide).max(axis=-1, keepdims=True) / 127
        return np.broadcast_to(step / 2, wide.shape)
    return np.maximum(np.abs(wide) * 2**-4, 2**-10)


@pytest.mark.parametrize(("backend", "dtype"), [e for e in EACH if e.values[0] in BACKENDS[:2]])
def test_attention_is_off_by_what_vectors_are(backend: str, dtype: str) -> None:
    """Of scores off by at most d, weights are within factors exp(-2d) and exp(2d); so a sum of
    values is off by (exp(2d) - 1) sum w |v|, and by what these are. A score is off by what each
    number of the key is (2**-8 of the wide ones), times that of the query."""
    rng, (length, scale) = np.random.default_rng(3), (57, 0.02)
    shape = dataclasses.replace(SHAPE, tokens=length, rows=1)
    batch = make_batch(shape, [(length, length)], [0], 0, rng)
    k, v = (rng.standard_normal((length, 1, SHAPE.head_dim), dtype=np.float32) for _ in range(2))
    q = rng.standard_normal((length, 3, 2 * SHAPE.head_dim), dtype=np.float32)
    options = {"scale": scale, "halves": HALVES, "decode_only": False, "backend": backend}

    pool = compiled(put, backend, donate=True)(empty(dtype), LAYER, k, v, batch)
    got = np.asarray(paged_attention(jnp.asarray(q), pool, LAYER, batch, **options))

    values = np.concatenate([k[:, 0, :HALVES], v[:, 0, :HALVES]], axis=-1).astype(np.float64)
    rest = np.concatenate([k[:, 0, HALVES:], v[:, 0, HALVES:]], axis=-1)
    keys = np.concatenate([values, rest], axis=-1)
    of_values = np.concatenate([errors(x[:, 0, :HALVES], dtype) for x in (k, v)], axis=-1)
    off = np.concatenate([of_values, np.abs(rest) * 2**-8], axis=-1)
    for token in range(length):
        seen = slice(token + 1)
        weights = np.exp(q[token] @ keys[seen].T * scale)
        weights /= weights.sum(axis=-1, keepdims=True)
        most = (np.abs(q[token]) @ off[seen].T * scale).max(axis=-1, keepdims=True)
        allowed = np.expm1(2 * most) * (weights @ np.abs(values[seen])) + of_values[seen].max(
            axis=0
        )
        assert np.all(np.abs(got[token] - weights @ values[seen]) <= allowed + 1e-5)
        assert most.max() < (0.05 if dtype == "int8" else 0.15)
