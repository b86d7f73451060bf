"""The Mosaic GPU backend: decodes and prompts on Hopper's own units, all else by the Triton
kernels."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxserve.pallas_kernels.backends import Backend, KernelShape
from jaxserve.pallas_kernels.batch import KV, AttentionBatch
from jaxserve.pallas_kernels.gpu_mosaic.common import QUERIES as GROUP
from jaxserve.pallas_kernels.gpu_mosaic.common import TILE, missing
from jaxserve.pallas_kernels.gpu_mosaic.common import plan as plan_decode
from jaxserve.pallas_kernels.gpu_mosaic.decode import paged_decode
from jaxserve.pallas_kernels.gpu_mosaic.prefill import QUERIES, paged_prefill
from jaxserve.pallas_kernels.gpu_mosaic.prefill import plan as plan_prefill
from jaxserve.pallas_kernels.gpu_triton import backend, prefill
from jaxserve.pallas_kernels.gpu_triton import decode as triton_decode
from jaxserve.pallas_kernels.gpu_triton.common import Geometry
from jaxserve.pallas_kernels.pool import FLOAT8, Pool

# Those of the matrix unit's operands, and those that decodes convert to them.
DTYPES = ("bfloat16", "float16", FLOAT8, "int8")
HEAD_DIMS = (64, 128)
_NO_SINKS = "its kernels know no attention sinks"
# XLA would put the kernels, with slices of their arguments, where command buffers end.
XLA_OPTIONS = (("xla_gpu_enable_dynamic_slice_fusion", False),)
SMALL_BLOCKS = (8, 16, 32)  # larger blocks consist of whole tiles


class Ours(NamedTuple):
    """What the kernels here are used for; Triton's for the rest.

    Attributes:
        decodes: Steps of decodes alone.
        prompts: Chunks of prompts.
    """

    decodes: bool = True
    prompts: bool = True


def _takes(
    kind: prefill.Kind, batch: AttentionBatch, dtype: DTypeLike, window: int | None, ours: Ours
) -> bool:
    """Whether chunks of a kind are for the kernel here: those of a few tokens, and steps of few,
    would fill little of its tiles, a window cuts off the start of the context, too, and numbers of
    8 bits would be converted again for each tile of queries."""
    large = kind.most > QUERIES and batch.max_tokens >= QUERIES
    return ours.prompts and large and window is None and jnp.dtype(dtype).itemsize == 2


def plan(
    kind: int,
    batch: AttentionBatch,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    num_heads: int,
    *,
    sliding_window: int | None,
    decode_only: bool,
    ours: Ours,
) -> Any:
    """See `backends.Backend.plan`."""
    geometry = Geometry.of(shape)
    if kind == KV and decode_only and ours.decodes:
        return plan_decode(batch, geometry, sliding_window=sliding_window)
    found = backend.plan(
        kind,
        batch,
        shape,
        dtype,
        num_heads,
        sliding_window=sliding_window,
        decode_only=decode_only,
    )
    if decode_only or not isinstance(found, backend.PagedPlan):
        return found
    kinds = zip(prefill.kinds(batch), found.chunks, strict=True)
    chunks = tuple(
        plan_prefill(batch, geometry, num_heads, kind)
        if _takes(kind, batch, dtype, sliding_window, ours)
        else theirs
        for kind, theirs in kinds
    )
    return found._replace(chunks=chunks)


def attend(
    q: jax.Array,
    pool: Pool,
    layer: jax.Array | int,
    batch: AttentionBatch,
    plan: Any,
    *,
    decode_only: bool,
    ours: Ours,
    sinks: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    """See `backends.Backend.attend`."""
    if sinks is not None:
        raise ValueError(f"sinks: {_NO_SINKS}")
    given = q, pool, layer, batch
    if decode_only and ours.decodes:
        return paged_decode(*given, plan, **options)
    if decode_only:
        return triton_decode.paged_decode(*given, plan.decode, decode_only=True, **options)
    kinds = list(zip(prefill.kinds(batch), plan.chunks, strict=True))
    window, out = options["scoring"].sliding_window, None
    for kind, work in kinds:
        if _takes(kind, batch, pool.dtype, window, ours):
            out = paged_prefill(*given, work, **options)
    out = triton_decode.paged_decode(*given, plan.decode, decode_only=False, out=out, **options)
    for kind, work in kinds:
        if not _takes(kind, batch, pool.dtype, window, ours):
            out = prefill.paged_prefill(out, *given, work, kind, **options)
    return out


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
    if group > GROUP:
        return f"num_heads: must be at most {GROUP} a kv head, got {group}"
    return missing()


def _backend(of_the_rest: Backend, ours: Ours, *, interpret: bool) -> Backend:
    return dataclasses.replace(
        of_the_rest,
        attend=functools.partial(attend, ours=ours, interpret=interpret),
        supports=supports,
        halves=False,
        plan=functools.partial(plan, ours=ours),
        xla_options=XLA_OPTIONS,
    )


BACKEND = _backend(backend.BACKEND, Ours(), interpret=False)
DECODES_BACKEND = _backend(backend.BACKEND, Ours(prompts=False), interpret=False)
PROMPTS_BACKEND = _backend(backend.BACKEND, Ours(decodes=False), interpret=False)
INTERPRET_BACKEND = _backend(backend.INTERPRET_BACKEND, Ours(), interpret=True)
