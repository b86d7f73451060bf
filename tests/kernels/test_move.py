"""Moves of slots against the reference, exactly, and what they must leave alone."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.pallas_kernels import move_slots, reference, stage_in, stage_out

BLOCKS, SLOTS, MOST = 6, 8, 10
SHAPE = (2, BLOCKS, 3, SLOTS, 16)

move = jax.jit(move_slots, donate_argnums=0)
put = jax.jit(stage_in, donate_argnums=0)
take = jax.jit(stage_out)


@st.composite
def places(draw: st.DrawFn, columns: int) -> tuple[np.ndarray, int]:
    """(int32 [MOST, columns], count): that many (block, slot), or pairs of them, all different;
    the rest is junk, outside of the pool too."""
    count = draw(st.integers(0, MOST))
    many = count * columns // 2
    flat = draw(
        st.lists(st.integers(0, BLOCKS * SLOTS - 1), min_size=many, max_size=many, unique=True)
    )
    rows = np.array([(i // SLOTS, i % SLOTS) for i in flat], np.int32).reshape(count, columns)
    junk = draw(st.sampled_from([-1, 0, 10**6]))
    return np.concatenate([rows, np.full((MOST - count, columns), junk, np.int32)]), count


def drawn_pool(seed: int, dtype: jnp.dtype | type) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(SHAPE)).astype(dtype)


def equal(got: jax.Array, want: np.ndarray) -> None:
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(np.asarray(got).astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@given(drawn=places(4), seed=st.integers(0, 99))
def test_move(dtype: jnp.dtype, drawn: tuple[np.ndarray, int], seed: int) -> None:
    moves, count = drawn
    want = reference.move(drawn_pool(seed, dtype), moves, count)
    equal(move(drawn_pool(seed, dtype), jnp.asarray(moves), jnp.int32(count)), want)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@given(drawn=places(2), seed=st.integers(0, 99))
def test_staging(dtype: jnp.dtype, drawn: tuple[np.ndarray, int], seed: int) -> None:
    slots, count = drawn
    pool = drawn_pool(seed, dtype)
    staged = take(pool, jnp.asarray(slots), jnp.int32(count))
    equal(staged, reference.stage_out(pool, slots, count))
    other = drawn_pool(seed + 100, dtype)
    # What lies behind the staged vectors must not get into the pool.
    staged = staged.at[count:].set(jnp.nan)
    want = reference.stage_in(other, staged, slots, count)
    equal(put(other, staged, jnp.asarray(slots), jnp.int32(count)), want)


def test_moves_are_in_place() -> None:
    """A copy of the pool would show as temporary memory of its size."""
    pool = jax.ShapeDtypeStruct((3, 4000, 2, 8, 16), jnp.float32)
    moves = jax.ShapeDtypeStruct((16, 4), jnp.int32)
    call = jax.jit(functools.partial(move_slots), donate_argnums=0)
    memory = call.lower(pool, moves, 3).compile().memory_analysis()
    size = pool.size * 4
    assert memory is not None
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size // 4
