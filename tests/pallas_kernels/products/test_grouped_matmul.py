"""Products of rows with the weights of their group: as float64 has them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.models.quantized import dequantize, parse_quantization, quantized_grouped_dot
from jaxserve.pallas_kernels import grouped_matmul, head_matmul, quantized_grouped_matmul
from jaxserve.pallas_kernels.cpu import dots
from jaxserve.pallas_kernels.gpu_triton import by_group
from jaxserve.weights.quantize import quantize

TOLERANCE = 1e-6


def _expected(x, weights, sizes):
    """One product a group; zeros behind the last."""
    x, weights = np.asarray(x, np.float64), np.asarray(weights, np.float64)
    out, first = np.zeros((len(x), weights.shape[2])), 0
    for size, own in zip(sizes, weights, strict=True):
        out[first : first + size] = x[first : first + size] @ own
        first += size
    return out


def _compared(x, weights, sizes, *, transposed):
    product = jax.jit(lambda *given: grouped_matmul(*given, transposed=transposed))
    stored = jnp.swapaxes(weights, 1, 2) if transposed else weights
    want = _expected(x.astype(weights.dtype), weights, sizes)
    most = np.abs(x).max() * np.abs(np.asarray(weights, np.float64)).sum(1).max()
    got = product(x, stored, jnp.asarray(sizes, jnp.int32))
    assert got.dtype == x.dtype
    np.testing.assert_allclose(got, want, atol=TOLERANCE * most)
    return product, stored, got


@settings(max_examples=8, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    behind=st.integers(0, 3),
    outputs=st.sampled_from([4, 24, 70]),
    wide=st.booleans(),
    transposed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_each_group_has_its_own_weights(sizes, behind, outputs, wide, transposed, seed):
    """With groups without rows, and rows of no group."""
    rng, dtype = np.random.default_rng(seed), jnp.float32 if wide else jnp.bfloat16
    rows = max(1, sum(sizes) + behind)
    x = jnp.asarray(rng.normal(size=(rows, 64)), jnp.float32)
    weights = jnp.asarray(rng.normal(size=(len(sizes), 64, outputs)), dtype)
    _compared(x, weights, sizes, transposed=transposed)


@pytest.mark.parametrize("transposed", [False, True])
def test_inputs_of_any_width(transposed):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(7, 9)), jnp.float32)
    weights = jnp.asarray(rng.normal(size=(3, 9, 5)), jnp.float32)
    _compared(x, weights, [4, 0, 2], transposed=transposed)


def test_result_of_another_dtype():
    x, weights = jnp.ones((2, 8), jnp.bfloat16), jnp.ones((1, 8, 4), jnp.bfloat16)
    got = grouped_matmul(x, weights, jnp.array([1]), dtype=jnp.float32)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, [[8] * 4, [0] * 4])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("outputs", [40, 2055])
def test_a_row_is_the_same_whatever_rows_are_beside_it(dtype, outputs):
    """By the kernel of CPUs, in several shares, the last of which overlaps; with more rows of no
    group than a share has."""
    rng, sizes = np.random.default_rng(outputs), [1, 0, 13, 2]
    x = jnp.asarray(rng.normal(size=(sum(sizes) + 2 * dots.TAIL + 3, 96)), jnp.float32)
    weights = jnp.asarray(rng.normal(size=(len(sizes), 96, outputs)), dtype)
    assert dots.takes_groups(jnp.swapaxes(weights, 1, 2), transposed=True)
    product, stored, got = _compared(x, weights, sizes, transposed=True)
    group_of = np.repeat(np.arange(len(sizes)), sizes)
    for row, group in enumerate(group_of):
        alone = product(
            x[row : row + 1], stored, (jnp.arange(len(sizes)) == group).astype(jnp.int32)
        )
        np.testing.assert_array_equal(got[row], alone[0])


@pytest.mark.parametrize(
    ("how", "dtype"), [("int8", jnp.float32), ("int4:group=32,zero", jnp.bfloat16)]
)
def test_few_bits(how, dtype):
    """As what they stand for has it, and a row the same whatever rows are beside it."""
    rng, sizes = np.random.default_rng(0), [3, 0, 1, 9]
    scheme = parse_quantization(how).scheme
    weights = jnp.asarray(rng.normal(size=(len(sizes), 128, 40)), jnp.float32)
    small = jax.vmap(lambda one: quantize(one, scheme))(weights)
    x = jnp.asarray(rng.normal(size=(sum(sizes) + 2, 128)), dtype)
    stored = jax.tree.map(lambda part: jnp.swapaxes(part, 1, 2), small)
    parts = (stored.q, stored.scale, stored.zero)
    assert quantized_grouped_matmul(x, *parts, jnp.asarray(sizes), transposed=True) is not None
    product = jax.jit(
        lambda x, sizes: quantized_grouped_dot(x, stored, sizes, transposed=True, dtype=jnp.float32)
    )
    got = np.asarray(product(x, jnp.asarray(sizes, jnp.int32)))
    want = _expected(x, dequantize(small, jnp.float32), sizes)
    np.testing.assert_allclose(got, want, atol=2e-4)
    for row, group in enumerate(np.repeat(np.arange(len(sizes)), sizes)):
        one = (jnp.arange(len(sizes)) == group).astype(jnp.int32)
        np.testing.assert_array_equal(got[row], product(x[row : row + 1], one)[0])


@pytest.mark.parametrize(
    "sizes", [[1, 0, 40, 0, 2], [0, 0, 0], [16, 32], [0, 5]], ids=lambda sizes: str(sizes)
)
def test_kernel_of_gpus(sizes):
    """Interpreted: with groups of several tiles and of none, and rows of no group."""
    rng = np.random.default_rng(0)
    count = sum(sizes) + 3
    x = jnp.asarray(rng.normal(size=(count, 128)), jnp.bfloat16)
    weights = jnp.asarray(rng.normal(size=(len(sizes), 128, 48)), jnp.bfloat16)
    kernel = by_group.choose(weights, transposed=False, interpret=True)
    got = kernel(x, weights, jnp.asarray(sizes, jnp.int32))
    want = _expected(x, weights, sizes)
    np.testing.assert_allclose(got, want, atol=1e-5 * max(1, np.abs(want).max()))


@settings(max_examples=4, deadline=None)  # each shape is compiled
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    behind=st.integers(0, 20),
    rows=st.sampled_from([16, 32]),
)
def test_tiles_have_each_row_once(sizes, behind, rows):
    tiles = by_group.tiles_of(jnp.asarray(sizes, jnp.int32), rows, max(1, sum(sizes) + behind))
    found = [
        (group, row)
        for group, start, stop in zip(*(np.asarray(one).tolist() for one in tiles), strict=True)
        for row in range(start, stop)
    ]
    assert found == list(enumerate_rows(sizes))
    assert all(stop - start <= rows for start, stop in zip(tiles.start, tiles.stop, strict=True))


def enumerate_rows(sizes):
    """(group, row) of all rows that have a group."""
    return ((int(group), row) for row, group in enumerate(np.repeat(np.arange(len(sizes)), sizes)))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (6, 5)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_head_has_its_own_weights(dtype, inputs, outputs, transposed):
    """Of sizes with a kernel and without; a token has the same bits alone and beside others."""
    rng = np.random.default_rng(inputs)
    x = jnp.asarray(rng.normal(size=(11, 3, inputs)), jnp.float32)
    weights = jnp.asarray(rng.normal(size=(3, inputs, outputs)), dtype)
    stored = jnp.swapaxes(weights, 1, 2) if transposed else weights
    product = jax.jit(lambda *given: head_matmul(*given, transposed=transposed))
    got = product(x, stored)
    rounded = (np.asarray(a).astype(np.float64) for a in (x.astype(dtype), weights))
    np.testing.assert_allclose(got, np.einsum("thi,hio->tho", *rounded), atol=1e-4)
    for first, end in ((0, 1), (3, 11)):
        np.testing.assert_array_equal(product(x[first:end], stored), got[first:end])
