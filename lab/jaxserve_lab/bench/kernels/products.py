"""Products with quantised weights: checks them on this device, and times them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.layers import Linear, linear
from jaxserve.models.quantized import (
    BLOCKS,
    Quantization,
    Quantized,
    dequantize,
    parse_quantization,
    quantized_dot,
)
from jaxserve.models.registry import get_family
from jaxserve.pallas_kernels.gpu_triton import grouped
from jaxserve.weights import load_params
from jaxserve.weights.quantize import quantize
from jaxserve_lab.bench.kernels import kernel_inputs as inputs
from jaxserve_lab.bench.kernels.device_timing import Loop, Timing, measure
from jaxserve_lab.bench.kernels.kernel_cases import KernelCase
from jaxserve_lab.bench.kernels.kernel_checks import LIMITS, Check, at_once, relative_error
from jaxserve_lab.bench.kernels.kernels import Ceilings, Measured, measured

# As in `model.quantization`, or GGML's name of blocks that stay as stored.
FORMATS = ("int8", "int8:group=128", "int4", "int4:group=32,zero", "fp8", "Q8_0", "Q4_1")
ROWS = (1, 16, 64, 128, 512)  # decodes, and a prompt
# How products with stored weights can be computed; the engine chooses by their rows.
CONTENDERS: dict[str, Callable[..., jax.Array]] = {
    "kernel": grouped.by_kernel,
    "library": grouped.by_library,
}
SHAPE = (1024, 512)  # inputs and outputs of the checks
LAYERS = 4  # their weights take turns, so that none is in a cache


def quantization(name: str) -> Quantization:
    """How a model's weights are stored in one of `FORMATS`."""
    kept = BLOCKS.get(name)
    return parse_quantization(name) if kept is None else Quantization(kept)


def check_products(
    formats: Sequence[str] = FORMATS,
    dtypes: Sequence[str] = ("bfloat16", "float16"),
    rows: Sequence[int] = ROWS,
) -> Iterator[Check]:
    """Checks products of every format, dtype and number of rows against float64 products of the
    dequantised weights."""
    weights = {name: _weights(name) for name in formats}

    def one(case: tuple[str, str, int]) -> list[Check]:
        name, dtype, count = case
        x = inputs.host_vectors((count, SHAPE[0]), jnp.dtype(dtype), 1)
        run = jax.jit(functools.partial(quantized_dot, transposed=False, dtype=dtype))
        wide = np.asarray(dequantize(weights[name], jnp.float32)).astype(np.float64)
        error = relative_error(run(x, weights[name]), np.asarray(x).astype(np.float64) @ wide)
        return [Check(f"product, {name}", f"{count} rows", dtype, error, LIMITS[dtype])]

    cases = [(name, dtype, count) for name in formats for dtype in dtypes for count in rows]
    return at_once(one, cases)


def check_contenders(
    contenders: Sequence[str],
    formats: Sequence[str] = FORMATS,
    dtype: str = "bfloat16",
    count: int = ROWS[-1],
) -> Iterator[Check]:
    """Checks products as `check_products`, by each contender that takes a format.

    Args:
        contenders: Of `CONTENDERS`.
        formats: Formats of the weights.
        dtype: Dtype of x.
        count: Rows of x.
    """

    def one(case: tuple[str, str]) -> list[Check]:
        name, contender = case
        weights = _weights(name)
        if not _takes(contender, weights):
            return []
        x = inputs.host_vectors((count, SHAPE[0]), jnp.dtype(dtype), 1)
        run = jax.jit(functools.partial(CONTENDERS[contender], dtype=dtype))
        got = run(x, weights.q, weights.scale, weights.zero)
        wide = np.asarray(dequantize(weights, jnp.float32)).astype(np.float64)
        error = relative_error(got, np.asarray(x).astype(np.float64) @ wide)
        what = f"product by {contender}, {name}"
        return [Check(what, f"{count} rows", dtype, error, LIMITS[dtype])]

    return at_once(one, [(name, contender) for name in formats for contender in contenders])


def _takes(contender: str, weights: Quantized) -> bool:
    """Whether a contender takes such weights: none adds minimums, and the kernel is for groups."""
    groups = weights.scale.shape[0] > 1 or weights.zero is not None
    return weights.minimum is None and (groups or contender != "kernel")


def _weights(name: str) -> Quantized:
    """Random weights; if there are minimums, they are large enough to matter."""
    scheme = quantization(name).scheme
    wide = inputs.host_vectors(SHAPE, jnp.dtype("float32"), 2) * SHAPE[0] ** -0.5
    small = jax.jit(functools.partial(quantize, scheme=scheme))(wide)
    if not scheme.minimum:
        return small
    least = inputs.host_vectors(small.scale.shape, jnp.dtype("float32"), 3) * SHAPE[0] ** -0.5
    return dataclasses.replace(small, minimum=least)


def time_products(
    model: str,
    formats: Sequence[str],
    rows: Sequence[int],
    dtype: str,
    ceilings: Ceilings,
    tell: Callable[[Measured], None],
    contenders: Sequence[str] = ("",),
) -> None:
    """Times a feed-forward layer's products up and down, its largest, one after the other.

    Args:
        model: A preset, or "tiny".
        formats: Formats of the weights, in addition to `dtype` itself, which comes first.
        rows: Rows of x, one number per measurement.
        dtype: Dtype of x and of unquantised weights.
        ceilings: The device's best rates.
        tell: Called with each measurement.
        contenders: Of `CONTENDERS`, by whom to compute them, without `dtype` itself; "" for what
            the engine chooses.
    """
    config = dataclasses.replace(inputs.model_config(model), num_layers=LAYERS)
    family = get_family(config.family)
    for name in (dtype, *formats) if "" in contenders else formats:
        stored = None if name == dtype else quantization(name)
        shape = dataclasses.replace(config, quantization=stored)
        params = load_params(
            None, family, shape, dtype=jnp.dtype(dtype), load_format="random"
        ).layers
        layers = [_up_and_down(layer) for layer in params]
        for count, contender in itertools.product(rows, contenders):
            if contender and not all(_takes(contender, one.kernel) for one in layers[0]):
                continue
            case = _case(layers, count, config.d_model, config.d_ff, dtype, contender)
            timing = measure(case.make(None))
            host = timing.host_seconds / LAYERS
            timing = Timing(timing.seconds / LAYERS, timing.clock, host)
            tell(measured(model, case, name, "", timing, ceilings))


def _up_and_down(layer: Any) -> tuple[Linear, Linear]:
    """The projections up and down, the last ones of every family's layer."""
    parts = jax.tree.leaves(layer, is_leaf=lambda node: isinstance(node, Linear))
    up, down = [part for part in parts if isinstance(part, Linear)][-2:]
    return up, down


def _case(
    layers: list[tuple[Linear, Linear]],
    rows: int,
    width: int,
    wider: int,
    dtype: str,
    contender: str,
) -> KernelCase:
    def product(x: jax.Array, part: Linear) -> jax.Array:
        if not contender:
            return linear(x, part, None)
        w = part.kernel
        return CONTENDERS[contender](x, w.q, w.scale, w.zero, dtype=x.dtype)

    def step(i: jax.Array, x: jax.Array, layers: list[tuple[Linear, Linear]]) -> jax.Array:
        # Otherwise weights could be dequantised once, before the loop.
        x, layers = jax.lax.optimization_barrier((x, layers))
        for up, down in layers:
            x = product(product(x, up), down)
        wide = x.astype(jnp.float32)  # otherwise it would grow from call to call
        return (wide * jax.lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True))).astype(dtype)

    def make(_: Any) -> Loop:
        return Loop(step, inputs.vectors((rows, width), jnp.dtype(dtype), 1), layers)

    weights = sum(part.nbytes for part in jax.tree.leaves(layers[0]))
    moved = weights + 2 * rows * (width + wider) * jnp.dtype(dtype).itemsize
    shape = f"{rows} x {width} x {wider}"
    name = f"up and down by {contender}" if contender else "up and down"
    return KernelCase(name, shape, moved, 4 * rows * width * wider, make)
