"""Products with weights [out, in] on CPUs, of floats and of 8 and 4 bits: as float64 has them, and
a row's the same whatever rows are beside it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from jaxserve.pallas_kernels.cpu import dot_tiles, dots, pairs

TALL = 6  # rows of the largest tile
# Bits, inputs of a group, zero points: with one to four groups in a vector of weights.
STORED = [(8, 32, False), (8, 64, True), (4, 32, False), (4, 32, True), (4, 256, False)]


_skinny_matmul = functools.partial(dots.skinny_matmul, transposed=True)


def _shape(one: Any) -> Any:
    return None if one is None else jax.ShapeDtypeStruct(one.shape, one.dtype)


def _few_bits(rng: Any, bits: int, outputs: int, inputs: int, groups: int, zeros: bool) -> Any:
    """The weights as they are stored, and in float64."""
    most = 1 << (bits - 1)
    q = rng.integers(-most, most, (outputs, inputs)).astype(np.int8)
    scale = rng.random((outputs, groups)).astype(np.float32)
    zero = rng.integers(-8, 8, (outputs, groups)).astype(np.int8) if zeros else None
    weights = q.astype(np.float64).reshape(outputs, groups, -1)
    weights = (weights - (0 if zero is None else zero[..., None])) * scale[..., None]
    stored = ((q[:, ::2] & 15) | (q[:, 1::2] << 4)) if bits == 4 else q
    parts = [None if one is None else jnp.asarray(one) for one in (stored, scale, zero)]
    return parts, weights.reshape(outputs, inputs)


def _check(product: Any, x: Any, given: Any, want: Any, most: float) -> None:
    got = np.asarray(jax.jit(product)(x, *given))
    np.testing.assert_allclose(got, want, atol=1e-6 * most)
    for row in (0, len(x) - 1):
        alone = jax.jit(product)(x[row : row + 1], *given)
        np.testing.assert_array_equal(got[row], alone[0])


@settings(max_examples=6, deadline=None)
@given(
    rows=st.integers(1, 2 * TALL + 3),
    outputs=st.integers(dots.OUTPUTS, 70),
    stored=st.sampled_from(STORED),
    groups=st.integers(2, 5),
    seed=st.integers(0, 99),
)
def test_few_bits(rows, outputs, stored, groups, seed):
    """With whole vectors of weights and with parts of one at the end."""
    bits, group, zeros = stored
    rng = np.random.default_rng(seed)
    inputs = group * groups
    given, weights = _few_bits(rng, bits, outputs, inputs, groups, zeros)
    x = jnp.asarray(rng.normal(size=(rows, inputs)), jnp.bfloat16)
    operands = map(_shape, (x, *given[:2]))
    assert dots.takes_few_bits(*operands, transposed=True)
    exact = np.asarray(x, np.float64)
    most = np.abs(exact).max() * np.abs(weights).sum(-1).max()
    _check(dots.few_bits_matmul, x, given, exact @ weights.T, most)


@pytest.mark.parametrize(
    ("rows", "stored"), [(1, STORED[0]), (2, STORED[3]), (7, STORED[1]), (7, STORED[4])]
)
def test_few_bits_of_float32(rows, stored):
    """A row is two of bfloat16 then: 16 bits and a little more of each number are kept."""
    (bits, group, zeros), rng = stored, np.random.default_rng(rows)
    given, weights = _few_bits(rng, bits, 40, 3 * group, 3, zeros)
    x = jnp.asarray(rng.normal(size=(rows, 3 * group)), jnp.float32)
    exact = np.asarray(x, np.float64)
    got = np.asarray(jax.jit(dots.few_bits_matmul)(x, *given))
    off = np.abs(got - exact @ weights.T) / (np.abs(exact) @ np.abs(weights).T)
    assert off.max() < 2.0**-16


@pytest.mark.parametrize(
    ("bits", "zeros", "inputs"), [(8, False, 96), (8, True, 224), (4, False, 224)]
)
def test_one_scale_an_output(bits, zeros, inputs):
    """Of inputs that fill no whole vectors; of several shares, the last of which overlaps."""
    rng = np.random.default_rng(inputs)
    given, weights = _few_bits(rng, bits, 2055, inputs, 1, zeros)
    x = jnp.asarray(rng.normal(size=(7, inputs)), jnp.bfloat16)
    most = float(jnp.abs(x).max()) * np.abs(weights).sum(-1).max()
    _check(dots.few_bits_matmul, x, given, np.asarray(x, np.float64) @ weights.T, most)


@pytest.mark.parametrize("groups", [1, 3])
def test_float8(groups):
    """Every number of it, those below 2^-6 too."""
    rng = np.random.default_rng(groups)
    numbers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    numbers = numbers[np.isfinite(numbers.astype(np.float32))]
    q = rng.permuted(np.resize(numbers, (40, 192)), axis=1)
    scale = rng.random((40, groups)).astype(np.float32)
    weights = q.astype(np.float64) * np.repeat(scale, 192 // groups, axis=1)
    x = jnp.asarray(rng.normal(size=(15, 192)), jnp.bfloat16)
    most = float(jnp.abs(x).max()) * np.abs(weights).sum(-1).max()
    given = [jnp.asarray(q), jnp.asarray(scale), None]
    _check(dots.few_bits_matmul, x, given, np.asarray(x, np.float64) @ weights.T, most)


@settings(max_examples=10, deadline=None)
@given(
    rows=st.integers(1, 2 * TALL + 3),
    outputs=st.integers(dots.OUTPUTS, 70),
    vectors=st.integers(1, 9),
    wide=st.booleans(),
    seed=st.integers(0, 99),
)
def test_floats(rows, outputs, vectors, wide, seed):
    rng, dtype = np.random.default_rng(seed), jnp.float32 if wide else jnp.bfloat16
    inputs = vectors * (16 if wide else 32)
    x = jnp.asarray(rng.normal(size=(rows, inputs)), dtype)
    weights = jnp.asarray(rng.normal(size=(outputs, inputs)), dtype)
    left, right = np.asarray(x, np.float64), np.asarray(weights, np.float64)
    most = np.abs(left).max() * np.abs(right).sum(-1).max()
    _check(_skinny_matmul, x, [weights], left @ right.T, most)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4"])
def test_more_rows_than_fit_the_cache(dtype):
    """They are multiplied a part at a time, each with all outputs: every row as it is alone."""
    inputs, few = 8192, dtype == "int4"
    rows = 2 * dots.PART // (inputs * (4 if dtype == "float32" else 2)) + 5
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(rows, inputs)), "bfloat16" if few else dtype)
    given = _few_bits(rng, 4, 9, inputs, inputs // 32, True)[0]
    given = given if few else [jnp.asarray(rng.normal(size=(9, inputs)), dtype)]
    product = jax.jit(dots.few_bits_matmul if few else _skinny_matmul)
    alone = [product(x[r : r + 1], *given)[0] for r in range(rows)]
    np.testing.assert_array_equal(product(x, *given), jnp.stack(alone))


@pytest.mark.parametrize("known", ["neither", "pairs", "fast pairs"])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_other_processors(bits, known, monkeypatch):
    """With products of pairs, fast or not, or without: the same numbers, which floats hold. A row
    has them alone, with weights as they are stored, and among others, with weights laid out."""
    if not pairs.has_pairs() and known != "neither":
        pytest.skip("this processor has no products of pairs")
    monkeypatch.setattr(pairs, "has_pairs", lambda: known != "neither")
    monkeypatch.setattr(pairs, "has_fast_pairs", lambda: known == "fast pairs")
    rng = np.random.default_rng(3)
    inputs, steps, rows = 2 * 64 * 8 // bits, 2, 3
    if bits == 16:
        weights = rng.integers(-8, 8, (4, inputs)).astype(np.float64)
        stored = np.asarray(jnp.asarray(weights, jnp.bfloat16)).view(np.uint16)
    else:
        given, weights = _few_bits(rng, bits, 4, inputs, 1, False)
        stored = np.asarray(given[0])
        weights = np.rint(weights / np.asarray(given[1], np.float64))
    x = jnp.asarray(rng.integers(-4, 4, (rows, inputs)), jnp.bfloat16)
    given_rows = np.asarray(x).view(np.uint16)
    size = inputs * (2 if known == "fast pairs" else 4)  # bytes of a row that is laid out
    stored_row, few = inputs * bits // 8, bits < 16
    as_stored, laid_out = dot_tiles.INTEGERS, dot_tiles.WIDE

    def run(x_at, q_at, scale_at, room, wide, to):
        for r in range(rows):
            dot_tiles.part(bits, 0, x_at + r * 2 * inputs, steps, 0, room + r * size)
        for n in range(4):
            dot_tiles.widen(bits, 0, q_at + n * stored_row, steps, 0, wide + n * size)
        dot_tiles.tile(
            bits, 3, 4, 0, 0, laid_out, room, size, wide, size, steps, 0, scale_at, 0, 1,
            steps, q_at, 0, to, 16,
        )  # fmt: skip
        dot_tiles.tile(
            bits, 1, 1, 0, 0, as_stored, room if few else x_at, 0, q_at, 0, steps, 0,
            scale_at, 0, 1, steps, q_at, 0, to + 48, 4,
        )  # fmt: skip

    room, wide = (np.empty(count * size + 64, np.uint8) for count in (rows, 4))
    places = [-(-one.ctypes.data // 64) * 64 for one in (room, wide)]
    found, scale = np.empty(13, np.float32), np.ones(4, np.float32)
    compiled = njit(error_model="numpy")(run)
    at = [one.ctypes.data for one in (given_rows, stored, scale)]
    compiled(*at, *places, found.ctypes.data)
    expected = np.asarray(x, np.float64) @ weights.T
    np.testing.assert_array_equal(found[:12].reshape(rows, 4), expected)
    assert found[12] == expected[0, 0]


def test_what_is_not_taken():
    def taken(rows, inputs, groups, dtype="int8", outputs=8, transposed=True, of="bfloat16"):
        shape = jax.ShapeDtypeStruct
        x, q = shape((rows, inputs), of), shape((outputs, inputs), dtype)
        scale = shape((outputs, groups), jnp.float32)
        return dots.takes_few_bits(x, q, scale, transposed=transposed)

    assert taken(1, 64, 1)
    assert taken(4096, 64, 2)
    assert taken(4096, 64, 2, of="float32")
    assert not taken(1, 64, 1, transposed=False)
    assert not taken(1, 64, 1, outputs=3)
    assert not taken(1, 48, 1)
    assert not taken(1, 64, 4)
    assert not taken(1, 192, 2)  # groups that do not end where vectors do
    assert taken(1, 64, 1, "float8_e4m3fn")
    assert not taken(1, 64, 1, "uint8")

    def floats(rows, dtype, shape=(8, 64), transposed=True):
        return dots.takes(rows, jax.ShapeDtypeStruct(shape, dtype), transposed=transposed)

    for dtype in (jnp.float32, jnp.bfloat16):
        assert floats(1, dtype) and floats(4096, dtype)
        assert not floats(1, dtype, transposed=False)
        assert not floats(1, dtype, (3, 64))
        assert not floats(1, dtype, (8, 56))
    assert floats(1, jnp.float32, (8, 48))
    assert not floats(1, jnp.bfloat16, (8, 48))
    assert not floats(1, jnp.float16)
