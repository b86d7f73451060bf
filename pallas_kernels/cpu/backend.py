"""The kernels of CPUs: attention over K and V, writes to the pool, products of few rows and the
argmax, by numba; the rest in plain XLA operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from llvmlite import binding as llvm

from jaxserve.pallas_kernels.backends import KernelShape
from jaxserve.pallas_kernels.cpu import attention, delta, dots, hidden, low_rank, panels
from jaxserve.pallas_kernels.cpu.amx import instructions
from jaxserve.pallas_kernels.cpu.amx import products as amx_products
from jaxserve.pallas_kernels.cpu.rowwise import gates, norms, rotary, weighted
from jaxserve.pallas_kernels.cpu.rowwise.argmax import argmax
from jaxserve.pallas_kernels.cpu.write import put_vectors
from jaxserve.pallas_kernels.xla import backend, write


def _supports(kind: int, shape: KernelShape) -> str | None:
    """Supports pools of all dtypes that `attention` reads."""
    dtype = jnp.dtype(shape.dtype).name
    if dtype not in attention.NUMBERS:
        return f"the pool must be of one of {', '.join(attention.NUMBERS)}, got {dtype}"
    return None


def _products() -> tuple[Any, ...]:
    """The modules with kernels of products with weights [out, in]; the first that takes the weights
    is used."""
    return (amx_products, dots) if instructions.usable() else (dots,)


def _taking(takes: str, *operands: Any, transposed: bool) -> Any:
    """The first module whose function of this name accepts the arguments, or None."""
    kernels = (
        module for module in _products() if getattr(module, takes)(*operands, transposed=transposed)
    )
    return next(kernels, None)


def _skinny_matmul(
    rows: int, weights: jax.Array, *, transposed: bool
) -> Callable[..., jax.Array] | None:
    kernels = (*_products(), panels)
    return next(
        (
            module.skinny_matmul
            for module in kernels
            if module.takes(rows, weights, transposed=transposed)
        ),
        None,
    )


def _quantized_matmul(
    x: jax.ShapeDtypeStruct, q: Any, scale: Any, zero: Any, *, transposed: bool, dtype: Any
) -> Callable[..., jax.Array] | None:
    kernels = _taking("takes_few_bits", x, q, scale, transposed=transposed)
    return kernels and kernels.few_bits_matmul


def _grouped_matmul(weights: Any, *, transposed: bool) -> Callable[..., jax.Array] | None:
    kernels = _taking("takes_groups", weights, transposed=transposed)
    return kernels and kernels.grouped_matmul


def _quantized_grouped_matmul(
    x: jax.Array, q: Any, scale: Any, *, transposed: bool
) -> Callable[..., jax.Array] | None:
    one, own, of_own = (
        jax.ShapeDtypeStruct(shape, given.dtype)
        for shape, given in (((1, x.shape[1]), x), (q.shape[1:], q), (scale.shape[1:], scale))
    )
    kernels = _taking("takes_few_bits", one, own, of_own, transposed=transposed)
    return kernels and kernels.few_bits_grouped_matmul


def _add_low_rank(a: Any) -> Callable[..., jax.Array] | None:
    return low_rank.add_low_rank if low_rank.takes(a) else None


def _by_columns(weights: jax.Array) -> bool:
    """Weights are read up to twice as fast as a single stream of memory; for quantised weights
    there is no other kernel."""
    if weights.dtype in (jnp.int8, jnp.float8_e4m3fn):
        return True
    turned = jax.ShapeDtypeStruct(weights.shape[:-3:-1], weights.dtype)
    return dots.takes(1, turned, transposed=True)


def _norm(x: jax.Array, *weights: jax.Array | None) -> Callable[..., jax.Array] | None:
    return norms.norm if norms.takes(x, *weights) else None


def _rotate(x: jax.Array) -> Callable[..., jax.Array] | None:
    return rotary.rotate if rotary.takes(x) else None


def _gated(gate: jax.Array, up: jax.Array) -> Callable[..., jax.Array] | None:
    return gates.gated if gates.takes(gate, up) else None


def _add_weighted(y: jax.Array) -> Callable[..., jax.Array] | None:
    return weighted.add_weighted if weighted.takes(y) else None


def _built_for() -> str:
    products = " ".join(module.__name__ for module in _products())
    return f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()} {products}"


BACKEND = dataclasses.replace(
    backend.BACKEND,
    write=partial(write.write, put=put_vectors),
    attend=attention.paged_attention,
    projected=hidden.projected_attention,
    move=partial(write.move, put=put_vectors),
    stage_in=partial(write.stage_in, put=put_vectors),
    supports=_supports,
    decode_group=1,
    decode_chunk=1,
    argmax=argmax,
    skinny_matmul=_skinny_matmul,
    by_columns=_by_columns,
    quantized_matmul=_quantized_matmul,
    grouped_matmul=_grouped_matmul,
    quantized_grouped_matmul=_quantized_grouped_matmul,
    add_low_rank=_add_low_rank,
    adds_minimums=True,
    batch_invariant=True,
    both_ways=True,
    halves=True,
    recur=delta.recur,
    norm=_norm,
    log_sum_exp=norms.log_sum_exp,
    angles=rotary.angles,
    rotate=_rotate,
    gated=_gated,
    add_weighted=_add_weighted,
    built_for=_built_for,
)
