"""Kernels of products with quantised weights, interpreted, against what these stand for."""

from __future__ import annotations

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.quantized import Scheme, dequantize
from jaxserve.pallas_kernels.backends import platform_backend
from jaxserve.pallas_kernels.gpu_triton import grouped as gpu
from jaxserve.pallas_kernels.tpu import grouped as tpu
from jaxserve.weights.quantize import quantize

module = sys.modules["jaxserve.pallas_kernels.quantized_matmul"]  # its name is the function's
KERNELS = {"gpu": gpu, "tpu": tpu}


@pytest.mark.parametrize("where", KERNELS)
@pytest.mark.parametrize(
    ("scheme", "inputs", "rows"),
    [
        (Scheme("int4", 32, True, "bfloat16"), 512, 5),
        pytest.param(Scheme("int4", 128, False, "float16"), 512, 20, marks=pytest.mark.slow),
        (Scheme("int4", 0, True), 256, 1),
        (Scheme("int8", 64, False, "bfloat16"), 1024, 17),
        pytest.param(Scheme("int4", 256), 512, 3, marks=pytest.mark.slow),
    ],
    ids=lambda one: f"{one.kind}-{one.group}" if isinstance(one, Scheme) else str(one),
)
def test_against_wide_weights(where, scheme, inputs, rows):
    check(where, scheme, inputs, rows)


@pytest.mark.slow
def test_inputs_that_few_turns_divide():
    """33 groups: a turn of GPUs' kernel takes one."""
    check("gpu", Scheme("int4", 32), 1056, 2)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_halves_become_floats_by_their_bits(dtype):
    numbers = np.arange(-128, 128, dtype=np.int8)
    low, high = gpu._halves(jnp.asarray(numbers), dtype)
    assert low.dtype == high.dtype == dtype
    np.testing.assert_array_equal(low.astype(jnp.float32), (numbers << 4) >> 4)
    np.testing.assert_array_equal(high.astype(jnp.float32), numbers >> 4)


def check(where, scheme, inputs, rows):
    weights = jax.random.normal(jax.random.key(0), (inputs, 128))
    small = quantize(weights, scheme)
    x = jax.random.normal(jax.random.key(1), (rows, inputs))
    given = (x, small.q, small.scale, small.zero)
    kernel = KERNELS[where].choose(*given, transposed=False, interpret=True)
    assert kernel is not None
    want = x @ dequantize(small, jnp.float32)
    np.testing.assert_allclose(kernel(*given), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("scheme", [Scheme("int4", 32, True), Scheme("int8", 64), Scheme("int8")])
def test_the_library_multiplies_what_the_weights_stand_for(scheme, dtype):
    """As exactly as x's dtype has the weights."""
    weights = jax.random.normal(jax.random.key(0), (256, 128))
    small = quantize(weights, scheme)
    x = jax.random.normal(jax.random.key(1), (9, 256)).astype(dtype)
    y = gpu.by_library(x, small.q, small.scale, small.zero, dtype=jnp.float32)
    want = x.astype(jnp.float32) @ dequantize(small, jnp.float32)
    limit = 1e-6 if dtype == jnp.float32 else 4e-3
    assert jnp.linalg.norm(y - want) <= limit * jnp.linalg.norm(want)


@pytest.mark.parametrize(
    ("rows", "by"), [(gpu.LIBRARY_ROWS - 1, gpu.by_kernel), (gpu.LIBRARY_ROWS, gpu.by_library)]
)
def test_many_rows_are_for_the_library(rows, by):
    small = shapes_of((512, 128), Scheme("int4", 32))
    x = jax.ShapeDtypeStruct((rows, 512), jnp.bfloat16)
    assert gpu.choose(x, small.q, small.scale, small.zero, transposed=False).func is by


@pytest.mark.parametrize(
    ("count", "inputs", "outputs", "group", "want"),
    [
        (1, 4096, 14336, 32, (16, 128, 128, 8)),
        (64, 14336, 4096, 128, (64, 64, 128, 8)),
        (2048, 4096, 14336, 32, (128, 64, 128, 1)),
        (20, 1056, 96, 32, (32, 32, 32, 1)),
        (1, 1024, 128, 64, (16, 128, 128, 2)),
    ],
)
def test_few_programs_share_the_inputs(count, inputs, outputs, group, want):
    assert gpu.sizes_for(count, inputs, outputs, group)[:4] == want


def test_scales_of_float16_are_read_by_their_bits_on_tpus():
    """All that are finite."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    scales = bits.view(np.float16)
    finite = np.isfinite(scales)
    found = tpu._wide(jnp.asarray(bits[finite].view(np.int16)))
    np.testing.assert_array_equal(found, scales[finite].astype(np.float32))


@pytest.mark.parametrize("where", [*KERNELS, "cpu"])
def test_minimums_are_added_to_what_a_kernel_makes(where, monkeypatch):
    """In float32, as they may be as large as it is."""
    if where != "cpu":
        choose = functools.partial(KERNELS[where].choose, interpret=True)
        own = {"quantized_matmul": choose, "adds_minimums": False}
        backend = dataclasses.replace(platform_backend(), **own)
        monkeypatch.setattr(module, "platform_backend", lambda: backend)
    small = quantize(jax.random.normal(jax.random.key(0), (256, 128)), Scheme("int4", 32))
    least = jax.random.normal(jax.random.key(1), small.scale.shape) * 100
    small = dataclasses.replace(small, minimum=least)
    x = jax.random.normal(jax.random.key(2), (5, 256)).astype(jnp.bfloat16).astype(jnp.float32)
    want = x @ dequantize(small, jnp.float32)
    if where == "cpu":
        small = jax.tree.map(jnp.transpose, small)
    given = (small.q, small.scale, small.zero, small.minimum)
    turned = where == "cpu"
    for dtype, ends in ((jnp.float32, 1e-4), (jnp.bfloat16, 5e-3)):
        y = module.quantized_matmul(
            x.astype(dtype), *given, transposed=turned, dtype=dtype, axes=(None, None), mesh=None
        )
        assert y is not None and y.dtype == dtype
        np.testing.assert_allclose(y.astype(jnp.float32), want, rtol=ends, atol=20 * ends)


def shapes_of(shape, scheme, **options):
    return jax.eval_shape(lambda: quantize(jnp.ones(shape), scheme, **options))


@pytest.mark.parametrize("where", KERNELS)
def test_what_is_left_to_xla(where):
    x, choose = jnp.zeros((4, 512)), KERNELS[where].choose
    single = shapes_of((512, 128), Scheme("int8"))
    table = shapes_of((128, 512), Scheme("int4", 32), transposed=True)
    odd = shapes_of((512, 8), Scheme("int4", 32))
    for weights, transposed in ((single, False), (table, True), (odd, False)):
        given = (x, weights.q, weights.scale, weights.zero)
        assert choose(*given, transposed=transposed) is None
