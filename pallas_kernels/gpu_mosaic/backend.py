"""The Mosaic GPU backend: decodes on Hopper's own units, all else by the Triton kernels."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.pallas_kernels.backends import Backend, KernelShape
from jaxserve.pallas_kernels.batch import KV, AttentionBatch
from jaxserve.pallas_kernels.gpu_mosaic.common import QUERIES, TILE, missing
from jaxserve.pallas_kernels.gpu_mosaic.common import plan as plan_decode
from jaxserve.pallas_kernels.gpu_mosaic.decode import paged_decode
from jaxserve.pallas_kernels.gpu_triton import backend
from jaxserve.pallas_kernels.gpu_triton.common import Geometry

DTYPES = ("bfloat16", "float16")  # of the matrix unit's operands
HEAD_DIMS = (64, 128)
_NO_SINKS = "its kernels know no attention sinks"
SMALL_BLOCKS = (8, 16, 32)  # larger blocks consist of whole tiles


def plan(
    kind: int, batch: AttentionBatch, shape: tuple[int, ...], *more: Any, **options: Any
) -> Any:
    """See `backends.Backend.plan`."""
    if kind == KV and options["decode_only"]:
        return plan_decode(batch, Geometry.of(shape), sliding_window=options["sliding_window"])
    return backend.plan(kind, batch, shape, *more, **options)


def attend(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    batch: AttentionBatch,
    plan: Any,
    *,
    decode_only: bool,
    sinks: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    """See `backends.Backend.attend`."""
    if sinks is not None:
        raise ValueError(f"sinks: {_NO_SINKS}")
    if decode_only:
        return paged_decode(q, pool, layer, batch, plan, **options)
    return backend.attend(q, pool, layer, batch, plan, decode_only=False, **options)


def supports(kind: int, shape: KernelShape) -> str | None:
    """Why the kernels do not support a cache of this kind and shape (one shard's heads), or
    None."""
    reason = backend.supports(kind, shape)
    if reason is not None or kind != KV:
        return reason
    head_dim, group = shape.head_dim, shape.num_heads // shape.kv_heads
    block_size = shape.block_size
    name = jnp.dtype(shape.dtype).name
    if name not in DTYPES:
        return f"dtype: must be one of {DTYPES}, got {name}"
    if head_dim not in HEAD_DIMS:
        return f"head_dim: must be one of {HEAD_DIMS}, got {head_dim}"
    if shape.sinks:
        return _NO_SINKS
    if block_size not in SMALL_BLOCKS and block_size % TILE:
        return (
            f"block_size: must be one of {SMALL_BLOCKS} or a multiple of {TILE}, got {block_size}"
        )
    if group > QUERIES:
        return f"num_heads: must be at most {QUERIES} a kv head, got {group}"
    return missing()


def _backend(of_the_rest: Backend, *, interpret: bool) -> Backend:
    return dataclasses.replace(
        of_the_rest,
        attend=functools.partial(attend, interpret=interpret),
        supports=supports,
        plan=plan,
    )


BACKEND = _backend(backend.BACKEND, interpret=False)
INTERPRET_BACKEND = _backend(backend.INTERPRET_BACKEND, interpret=True)
