"""Kernels of products with quantised weights, interpreted, against what these stand for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.quantized import Scheme, dequantize
from jaxserve.pallas_kernels.gpu_triton import grouped as gpu
from jaxserve.pallas_kernels.tpu import grouped as tpu
from jaxserve.weights.quantize import quantize

KERNELS = {"gpu": gpu, "tpu": tpu}


@pytest.mark.parametrize("where", KERNELS)
@pytest.mark.parametrize(
    ("scheme", "inputs", "rows"),
    [
        (Scheme("int4", 32, True, "bfloat16"), 512, 5),
        (Scheme("int4", 128, False, "float16"), 512, 20),
        (Scheme("int4", 0, True), 256, 1),
        (Scheme("int8", 64, False, "bfloat16"), 1024, 17),
        (Scheme("int4", 256), 512, 3),
    ],
    ids=lambda one: f"{one.kind}-{one.group}" if isinstance(one, Scheme) else str(one),
)
def test_against_wide_weights(where, scheme, inputs, rows):
    weights = jax.random.normal(jax.random.key(0), (inputs, 128))
    small = quantize(weights, scheme)
    x = jax.random.normal(jax.random.key(1), (rows, inputs))
    given = (x, small.q, small.scale, small.zero)
    kernel = KERNELS[where].choose(*given, transposed=False, interpret=True)
    assert kernel is not None
    want = x @ dequantize(small, jnp.float32)
    np.testing.assert_allclose(kernel(*given), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("where", KERNELS)
def test_what_is_left_to_xla(where):
    x, choose = jnp.zeros((4, 512)), KERNELS[where].choose
    single = quantize(jnp.ones((512, 128)), Scheme("int8"))
    table = quantize(jnp.ones((128, 512)), Scheme("int4", 32), transposed=True)
    odd = quantize(jnp.ones((512, 8)), Scheme("int4", 32))
    for weights, transposed in ((single, False), (table, True), (odd, False)):
        given = (x, weights.q, weights.scale, weights.zero)
        assert choose(*given, transposed=transposed) is None
