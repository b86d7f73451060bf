"""The Pallas-Triton backend: NVIDIA GPUs of compute capability 8.0 and up."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxserve.pallas_kernels.backends import Backend
from jaxserve.pallas_kernels.batch import HIDDEN, AttentionBatch
from jaxserve.pallas_kernels.gpu_triton import absorbed, projected, write
from jaxserve.pallas_kernels.gpu_triton import decode as triton_decode
from jaxserve.pallas_kernels.gpu_triton import prefill as triton_prefill
from jaxserve.pallas_kernels.gpu_triton.common import Geometry
from jaxserve.pallas_kernels.gpu_triton.stream_k import Shares
from jaxserve.pallas_kernels.gpu_triton.tiles import Work
from jaxserve.pallas_kernels.pool import POOL_DTYPES

MAX_HEAD_DIM = 256
MAX_GROUP = 128  # query heads that share a kv head: they are one tile of a matrix unit


class PagedPlan(NamedTuple):
    """What decodes and, in a step that has any, chunks of KV rows want of programs."""

    decode: Shares
    prefill: Work | None


def plan(
    kind: int,
    batch: AttentionBatch,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    num_heads: int,
    *,
    sliding_window: int | None,
    decode_only: bool,
) -> PagedPlan | Work:
    """See `backends.Backend.plan`."""
    geometry, itemsize = Geometry(*shape), jnp.dtype(dtype).itemsize
    window = sliding_window
    if kind == HIDDEN:
        return projected.plan(
            batch, geometry, itemsize, num_heads, sliding_window=window, decode_only=decode_only
        )
    decode = triton_decode.plan(
        batch, geometry, itemsize, sliding_window=window, decode_only=decode_only
    )
    if decode_only:
        return PagedPlan(decode, None)
    prefill = triton_prefill.plan(batch, geometry, itemsize, num_heads, sliding_window=window)
    return PagedPlan(decode, prefill)


def plan_absorbed(
    batch: AttentionBatch,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    num_heads: int,
    *,
    sliding_window: int | None,
) -> absorbed.Plan:
    """See `backends.Backend.plan_absorbed`."""
    geometry, itemsize = Geometry(*shape), jnp.dtype(dtype).itemsize
    return absorbed.plan(batch, geometry, itemsize, num_heads, sliding_window=sliding_window)


def attend(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    batch: AttentionBatch,
    plan: PagedPlan,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    decode_only: bool,
    interpret: bool = False,
) -> jax.Array:
    """See `backends.Backend.attend`: decodes and chunks, each by a kernel of its own."""
    out = triton_decode.paged_decode(
        q,
        pool,
        layer,
        batch,
        plan.decode,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        decode_only=decode_only,
        interpret=interpret,
    )
    if plan.prefill is None:
        return out
    return triton_prefill.paged_prefill(
        out,
        q,
        pool,
        layer,
        batch,
        plan.prefill,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        interpret=interpret,
    )


def supports(
    kind: int,
    *,
    num_heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: DTypeLike,
) -> str | None:
    """None, or why a cache of this kind and shape (one shard's heads) is not for these kernels."""
    name = jnp.dtype(dtype).name
    if name not in POOL_DTYPES:
        return f"dtype: must be one of {POOL_DTYPES}, got {name}"
    if not 1 <= head_dim <= MAX_HEAD_DIM or head_dim % 8:
        return f"head_dim: must be a multiple of 8 up to {MAX_HEAD_DIM}, got {head_dim}"
    if block_size < 1:
        return f"block_size: must be at least 1, got {block_size}"
    most = absorbed.MAX_HEADS
    if kind == HIDDEN and num_heads > most:
        return f"num_heads: must be at most {most} for hidden caches, got {num_heads}"
    if num_heads // kv_heads > MAX_GROUP:
        return f"num_heads: must be at most {MAX_GROUP} a kv head, got {num_heads // kv_heads}"
    return None


def _backend(interpret: bool) -> Backend:
    return Backend(
        write=functools.partial(write.write, interpret=interpret),
        attend=functools.partial(attend, interpret=interpret),
        absorbed=functools.partial(absorbed.absorbed, interpret=interpret),
        projected=functools.partial(projected.projected, interpret=interpret),
        move=functools.partial(write.move, interpret=interpret),
        stage_out=functools.partial(write.stage_out, interpret=interpret),
        stage_in=functools.partial(write.stage_in, interpret=interpret),
        supports=supports,
        plan=plan,
        plan_absorbed=plan_absorbed,
    )


BACKEND = _backend(interpret=False)
INTERPRET_BACKEND = _backend(interpret=True)
