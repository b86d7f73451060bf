"""Low-rank products that differ by row: as float64 has them, and of nobody else's columns."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.pallas_kernels import add_low_rank, skips_columns
from jaxserve.pallas_kernels.backends import compiling_for

pytestmark = pytest.mark.skipif(not skips_columns(), reason="no kernel here")
OWNER = np.array([2] * 8 + [0] * 8 + [1] * 16 + [4] * 8 + [0] * 8, np.int32)
TOLERANCE = 1e-6


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
@given(data=st.data())
@settings(max_examples=6, deadline=None)
def test_products(dtype: str, data: st.DataObject) -> None:
    rows = data.draw(st.sampled_from([1, 5, 70]))
    depth, outputs = data.draw(st.sampled_from([(32, (40,)), (96, (600,)), (64, (7, 64, 9))]))
    # 3 has no columns, and 7 none any more
    numbers = data.draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 7]), min_size=rows, max_size=rows))
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    a, b = drawn(len(OWNER), len(outputs), depth), [drawn(len(OWNER), out) for out in outputs]
    x, y = drawn(rows, depth).astype(jnp.float32), drawn(rows, sum(outputs)).astype(jnp.float32)
    whose = np.array(numbers, np.int32)
    # What others have does not matter, be it infinite.
    theirs = ~np.isin(OWNER, numbers) | (OWNER == 0)
    a = a.at[theirs].set(np.nan)
    b = [part.at[theirs].set(np.inf) for part in b]
    got = np.asarray(jax.jit(add_low_rank)(y, x, a, b, whose, OWNER))
    want = np.asarray(y, np.float64)
    wide_a, wide_b = np.asarray(a, np.float64), [np.asarray(part, np.float64) for part in b]
    for row, number in enumerate(numbers):
        mine = (number == OWNER) & (number > 0)
        low = wide_a[mine] @ np.asarray(x, np.float64)[row]
        parts = [low[:, i] @ part[mine] for i, part in enumerate(wide_b)]
        want[row] += np.concatenate(parts)
    np.testing.assert_allclose(got, want, atol=TOLERANCE * np.abs(want).max())
    np.testing.assert_array_equal(got[whose == 0], np.asarray(y)[whose == 0])
    alone = jax.jit(add_low_rank)(y[:1], x[:1], a, b, whose[:1], OWNER)
    np.testing.assert_array_equal(alone, got[:1])


def test_what_it_does_not_take() -> None:
    y, x, b = jnp.zeros((2, 8)), jnp.zeros((2, 32)), [jnp.zeros((8, 8), jnp.bfloat16)]
    numbers, owner = jnp.zeros(2, jnp.int32), jnp.zeros(8, jnp.int32)
    a = jnp.zeros((8, 1, 32), jnp.bfloat16)
    assert add_low_rank(y, x, a, b, numbers, owner) is not None
    assert add_low_rank(y, x[:, :8], a[..., :8], b, numbers, owner) is None
    assert add_low_rank(y, x, a.astype(jnp.float16), b, numbers, owner) is None
    assert add_low_rank(y.astype(jnp.bfloat16), x, a, b, numbers, owner) is None
    with compiling_for("xla"):
        assert not skips_columns()
        assert add_low_rank(y, x, a, b, numbers, owner) is None
