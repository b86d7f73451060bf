"""Every backend's moves of slots and staging against the references, bit for bit."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxserve.pallas_kernels import move_slots, reference, stage_in, stage_out
from jaxserve.pallas_kernels.pool import FLOAT8, ScaledPool
from jaxserve.pallas_kernels.tpu import granules, scales
from tests.pallas_kernels.batches import POISON
from tests.pallas_kernels.cases import BACKENDS, backends_with, compiled
from tests.pallas_kernels.conformance import same

MOST = 14
Size = tuple[int, int, int, int, int]  # of a pool: layers, blocks, kv_heads, block_size, head_dim
SMALL: Size = (3, 5, 2, 8, 64)
WIDE: Size = (2, 4, 2, 16, 128)
SMALL_NUMBERS: Size = (2, 4, 2, 32, 128)
ODD: Size = (2, 4, 3, 12, 40)  # not for TPUs
SLOW = (
    ("triton-interpret", FLOAT8),
    ("tpu-interpret", FLOAT8),
    ("tpu-interpret", "float32"),
    ("tpu-interpret", "int8"),
)
POOLS = [
    pytest.param(
        backend,
        size,
        dtype,
        id=f"{backend}-{dtype}",
        # Interpreting takes long; float8 moves as int8 does, on TPUs float32 as bfloat16, and
        # int8 by test_moves_in_pieces.
        marks=[pytest.mark.slow] if (backend, dtype) in SLOW else [],
    )
    for backend in backends_with("move")
    for size, dtype in (
        (SMALL, "float32"),
        (WIDE, "bfloat16"),
        (ODD, "float16"),
        (SMALL_NUMBERS, "int8"),
        (SMALL_NUMBERS, FLOAT8),
    )
    if (backend, size) != ("tpu-interpret", ODD)
]


def drawn_pool(size: Size, dtype: str, rng: np.random.Generator) -> np.ndarray | ScaledPool:
    """Values of all kinds: a move is a copy of bits."""
    if dtype == "int8":
        values = rng.integers(-128, 128, size).astype(np.int8)
        scales = drawn_pool(size[:4], "float32", rng)
        assert isinstance(scales, np.ndarray)
        return ScaledPool(values, np.abs(scales))
    pool = rng.standard_normal(size, dtype=np.float32)
    for odd in (*POISON, -0.0):
        pool[rng.random(size) < 0.05] = odd
    with np.errstate(invalid="ignore"):
        return pool.astype(jnp.dtype(dtype))


def drawn_slots(size: Size, rng: np.random.Generator) -> np.ndarray:
    """Twice MOST distinct (block, slot), int32 [2 * MOST, 2], with runs of neighbours among
    them."""
    flat = rng.permutation(size[1] * size[3])[: 2 * MOST]
    flat[: MOST // 2].sort()
    return np.stack(np.divmod(flat, size[3]), axis=1).astype(np.int32)


def joined(pool: np.ndarray | jax.Array | ScaledPool) -> np.ndarray:
    """The pool with the bytes of scales behind each vector, if it has any: as it is staged."""
    if not isinstance(pool, ScaledPool):
        return np.asarray(pool)
    scales = np.asarray(pool.scales)[..., None].view(np.int8)
    return np.concatenate([np.asarray(pool.values), scales], axis=-1)


def check_moves(backend: str, pool: np.ndarray | ScaledPool, moves: np.ndarray, count: int) -> None:
    """Also out to a staging buffer and in from it; what lies there from `count` on must not get
    into the pool."""
    sources, targets, used = moves[:, :2], moves[:, 2:], jnp.int32(count)
    given, whole = functools.partial(jax.tree.map, jnp.array, pool), joined(pool)
    got = compiled(move_slots, backend, donate=True)(given(), moves, used)
    same(joined(got), reference.move(whole, moves, count))
    staged = compiled(stage_out, backend)(pool, sources, used)
    same(staged, reference.stage_out(whole, sources, count))
    staging = np.array(staged)
    staging[count:] = 77 if staging.dtype == np.int8 else np.nan
    put = compiled(stage_in, backend, donate=True)
    got = put(given(), staging, targets, used)
    same(joined(got), reference.stage_in(whole, staging, targets, count))


@pytest.mark.parametrize(("backend", "size", "dtype"), POOLS)
def test_moves_and_staging(backend: str, size: Size, dtype: str) -> None:
    """Entries from `count` on may hold anything, what is outside of the pool too."""

    @settings(max_examples=max(1, BACKENDS[backend] - 1))
    @example(count=0, junk=10**6, seed=0)
    @example(count=1, junk=-1, seed=1)  # on TPUs one of two cores has no granule
    @given(
        count=st.integers(0, MOST), junk=st.sampled_from([-1, 0, 10**6]), seed=st.integers(0, 2**16)
    )
    def run(count: int, junk: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        moves = drawn_slots(size, rng).reshape(2, MOST, 2).transpose(1, 0, 2).reshape(MOST, 4)
        moves = np.where(np.arange(MOST)[:, None] < count, moves, np.int32(junk))
        check_moves(backend, drawn_pool(size, dtype, rng), moves, count)

    run()


def test_moves_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """On TPUs, as there is scalar memory for granules and memory for blocks of scales."""
    size = (2, 5, 1, 32, 128)  # that no other test has compiled
    monkeypatch.setattr(granules, "SMEM_LIMIT", 8 * 4 * (4 + size[3]))
    monkeypatch.setattr(scales, "MOST_BYTES", 2 * size[0] * 8 * 128 * 4)
    rng = np.random.default_rng(0)
    moves = drawn_slots(size, rng).reshape(2, MOST, 2).transpose(1, 0, 2).reshape(MOST, 4)
    check_moves("tpu-interpret", drawn_pool(size, "int8", rng), moves, MOST - 1)


@pytest.mark.parametrize(("backend", "size", "dtype"), POOLS)
def test_a_whole_block_moves(backend: str, size: Size, dtype: str) -> None:
    """In order, and of a second block some slots mirrored."""
    index, slots = np.arange(MOST), size[3]
    slot, block = index % 8, np.where(index < 8, 0, 1)
    mirrored = np.where(block == 1, slots - 1 - slot, slot)
    moves = np.stack([block, slot, block + 2, mirrored], axis=1).astype(np.int32)
    check_moves(backend, drawn_pool(size, dtype, np.random.default_rng(0)), moves, MOST)
