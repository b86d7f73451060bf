"""On CPUs a row's bits are the same in any company: alone, among many, first or last."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models import layers
from jaxserve.models.quantized import Quantized
from jaxserve.pallas_kernels import (
    add_weighted,
    angles,
    gated,
    in_fixed_batches,
    layer_norm,
    log_sum_exp,
    rms_norm,
    rotate,
)
from jaxserve.pallas_kernels.cpu.rowwise import norms
from jaxserve.pallas_kernels.rowwise import norm

WIDTH = 160
COMPANY = (1, 2, 7, 33, 150)  # rows of a call
MOST = max(COMPANY)
Rows = Callable[..., Any]


def _numbers(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def _bits(result: Any) -> list[np.ndarray]:
    return [np.asarray(one).view(np.uint32) for one in jax.tree.leaves(result)]


def alike(function: Rows, *rows: jax.Array) -> None:
    """Each row of the function's result has the bits that it has among all."""
    run = jax.jit(function)
    among = _bits(run(*rows))
    for count in COMPANY:
        for first in {0, MOST - count}:
            got = _bits(run(*(one[first : first + count] for one in rows)))
            for here, there in zip(got, among, strict=True):
                np.testing.assert_array_equal(here, there[first : first + count])


def test_norms() -> None:
    scale, bias = _numbers(WIDTH, seed=1), _numbers(WIDTH, seed=2)
    for width in (WIDTH, 77):
        x = 3 * _numbers(MOST, width) + 1
        alike(lambda x, w=width: rms_norm(x, scale[:w], 1e-5), x)
        alike(lambda x, w=width: layer_norm(x, scale[:w], bias[:w], 1e-5), x)
    heads = _numbers(MOST, 5, 32)
    alike(lambda x: rms_norm(x, scale[:32], 1e-6, 1.0), heads)
    alike(lambda x: rms_norm(x, scale.reshape(5, 32), 1e-6, 0.0, 2), heads)


def test_sums_of_exponentials() -> None:
    alike(log_sum_exp, 20 * _numbers(MOST, 1001))


def test_rotary_positions() -> None:
    positions = jnp.arange(MOST, dtype=jnp.int32) * 97
    frequencies = np.geomspace(1, 1e-4, 24, dtype=np.float32)
    alike(lambda at: angles(at, frequencies, 1.1), positions)
    cos, sin = angles(positions, frequencies, 1.1)
    alike(rotate, _numbers(MOST, 3, 56), cos, sin)


@pytest.mark.parametrize(
    ("activation", "clamped"), [("silu", (2.0, 1.7)), ("gelu_pytorch_tanh", None)]
)
def test_gates(activation: str, clamped: tuple[float, float] | None) -> None:
    alike(lambda g, u: gated(g, u, activation, clamped), 4 * _numbers(MOST, 75), _numbers(MOST, 75))


@pytest.mark.parametrize("width", [64, 77])
def test_weighted_sums(width: int) -> None:
    base, y, weights = (_numbers(MOST, n, seed=n) for n in (width, width + 1, 3))
    y, places = y[:, :width], jnp.asarray(np.random.default_rng(4).integers(0, MOST, (MOST, 3)))
    alike(lambda b, w, p: add_weighted(b, y, w, p.astype(jnp.int32)), base, weights, places)
    alike(lambda b, y, w: add_weighted(b, y, w), base, y, weights[:, :1])
    expected = np.zeros((MOST, width), np.float32)
    for k in range(3):  # rounded twice, in this order
        expected += np.asarray(weights)[:, k, None] * np.asarray(y)[np.asarray(places)[:, k]]
    found = add_weighted(None, y, weights, places.astype(jnp.int32))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.promise(45)
@pytest.mark.parametrize(
    ("shape", "transposed", "dtype"),
    [
        ((96, WIDTH), True, jnp.float32),
        ((96, WIDTH), True, jnp.bfloat16),
        ((96, WIDTH), False, jnp.float32),
        ((96, WIDTH), False, jnp.bfloat16),
        ((48, 44), True, jnp.bfloat16),
        ((48, 44), False, jnp.float32),
        ((3, 32), True, jnp.float32),
    ],
)
def test_products(shape: tuple[int, int], transposed: bool, dtype: Any) -> None:
    """Of shapes that kernels take, and of others."""
    weights = _numbers(*(shape if transposed else shape[::-1]), seed=1, dtype=dtype)
    alike(lambda x: layers.matmul(x, weights, transposed=transposed), _numbers(MOST, shape[1]))


@pytest.mark.parametrize(
    ("bits", "groups", "beside", "inputs"),
    [
        (8, 1, None, None),
        pytest.param(8, 2, None, "bfloat16", marks=pytest.mark.slow),
        pytest.param(4, 4, "zero", None, marks=pytest.mark.slow),
        (4, 4, "minimum", "bfloat16"),
        pytest.param(8, 4, "minimum", None, marks=pytest.mark.slow),
        (8, 5, None, "bfloat16"),
    ],
)
def test_products_of_few_bits(
    bits: int, groups: int, beside: str | None, inputs: str | None
) -> None:
    rng, width = np.random.default_rng(3), 128 if groups != 5 else 160
    q = rng.integers(-128, 128, (64, width * bits // 8)).astype(np.int8)
    more: dict[str, Any] = {}
    if beside == "zero":
        more["zero"] = jnp.asarray(rng.integers(-8, 8, (64, groups)), jnp.int8)
    elif beside == "minimum":
        more["minimum"] = _numbers(64, groups, seed=4)
    weights = Quantized(
        jnp.asarray(q), _numbers(64, groups, seed=5), bits=bits, inputs=inputs, **more
    )
    alike(lambda x: layers.matmul(x, weights, transposed=True), _numbers(MOST, width))


def test_float8_products() -> None:
    """By XLA, a fixed number of rows at a time."""
    q = _numbers(64, 44, seed=1).astype(jnp.float8_e4m3fn)
    weights = Quantized(q, jnp.ones((64, 1), jnp.float32))
    alike(lambda x: layers.matmul(x, weights, transposed=True), _numbers(MOST, 44))


def test_other_operations() -> None:
    """XLA's, a fixed number of rows at a time: as many results as rows."""

    def choose(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.top_k(jax.nn.softmax(x, axis=-1), 3)

    alike(lambda x: in_fixed_batches(choose, x), _numbers(MOST, 12))
    assert in_fixed_batches(choose, _numbers(3, 12))[0].shape == (3, 3)


def test_a_change_of_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm that takes another way with few rows, as XLA's does."""

    def otherwise(x: jax.Array, *weights: Any) -> Any:
        return norms.norm if len(x) > 4 else None

    changed = dataclasses.replace(norm.platform_backend(), norm=otherwise)
    monkeypatch.setattr(norm, "platform_backend", lambda: changed)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        alike(lambda x: rms_norm(x, jnp.ones(WIDTH), 1e-5), _numbers(MOST, WIDTH))
