"""Products with weights of 8 and 4 bits on CPUs: as float64 has them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.pallas_kernels.cpu import few_bits, pairs


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 13),
    outputs=st.integers(1, 70),
    groups=st.integers(1, 5),
    steps=st.integers(1, 3),
    packed=st.booleans(),
    zeros=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products(rows, outputs, groups, steps, packed, zeros, seed):
    rng = np.random.default_rng(seed)
    inputs, least, most = groups * steps * few_bits.STEP, *((-8, 8) if packed else (-128, 128))
    q = rng.integers(least, most, (outputs, inputs)).astype(np.int8)
    scale = rng.random((outputs, groups)).astype(np.float32)
    zero = rng.integers(-8, 8, (outputs, groups)).astype(np.int8) if zeros else None
    x = rng.normal(size=(rows, inputs)).astype(np.float32)
    weights = q.astype(np.float64).reshape(outputs, groups, -1)
    weights = (weights - (0 if zero is None else zero[..., None])) * scale[..., None]
    want = x @ weights.reshape(outputs, inputs).T
    stored = ((q[:, ::2] & 15) | (q[:, 1::2] << 4)) if packed else q
    operands = [*map(jnp.asarray, (x, stored, scale)), None if zero is None else jnp.asarray(zero)]
    shapes = [
        None if one is None else jax.ShapeDtypeStruct(one.shape, one.dtype) for one in operands
    ]
    assert few_bits.takes(*shapes, transposed=True) and not few_bits.takes(
        *shapes, transposed=False
    )
    got = jax.jit(few_bits.few_bits_matmul)(*operands)
    np.testing.assert_allclose(
        got, want, atol=2e-5 * np.abs(x).max() * np.abs(weights).sum(-1).max()
    )


@pytest.mark.skipif(not pairs.has_vectors(), reason="the other way is the only one here")
def test_other_processors_widen_without_a_table(monkeypatch):
    """Whichever way nibbles become numbers, they are the same."""
    monkeypatch.setattr(pairs, "has_vectors", lambda: False)
    rng = np.random.default_rng(3)
    q = rng.integers(-128, 128, (40, 32)).astype(np.int8)
    x, scale = rng.normal(size=(1, 64)).astype(np.float32), np.ones((40, 1), np.float32)
    numbers = np.stack([(q << 4).astype(np.int8) >> 4, q >> 4], -1).reshape(40, 64)
    dot = few_bits._dot(4, 1)
    found = np.empty(40, np.float32)

    def run(x_at, q_at, scale_at, to):
        for n in range(40):
            dot(x_at, 256, q_at + 32 * n, scale_at + 4 * n, 1, 2, to + 4 * n)

    parted = x.reshape(2, 16, 2).swapaxes(1, 2).copy()
    compiled = few_bits.njit(**few_bits.numba_ffi.OPTIONS)(run)
    compiled(parted.ctypes.data, q.ctypes.data, scale.ctypes.data, found.ctypes.data)
    np.testing.assert_allclose(found, numbers @ x[0], rtol=1e-4, atol=1e-4)


def test_what_is_not_taken():
    def taken(rows, inputs, groups, dtype="int8"):
        shape = jax.ShapeDtypeStruct
        x, q = shape((rows, inputs), jnp.float32), shape((8, inputs), dtype)
        return few_bits.takes(x, q, shape((8, groups), jnp.float32), None, transposed=True)

    assert taken(1, 64, 1) and taken(few_bits.MOST_ROWS, 64, 2)
    assert not taken(few_bits.MOST_ROWS + 1, 64, 1)
    assert not taken(1, 48, 1) and not taken(1, 64, 4)
    assert not taken(1, 64, 1, "float8_e4m3fn")
