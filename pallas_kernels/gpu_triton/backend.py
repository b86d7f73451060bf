"""The Pallas-Triton backend: NVIDIA GPUs of compute capability 8.0 and up."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxserve.pallas_kernels.backends import Backend, KernelShape, Scoring
from jaxserve.pallas_kernels.batch import HIDDEN, AttentionBatch
from jaxserve.pallas_kernels.gpu_triton import absorbed, by_group, grouped, latent, projected, write
from jaxserve.pallas_kernels.gpu_triton import decode as triton_decode
from jaxserve.pallas_kernels.gpu_triton import prefill as triton_prefill
from jaxserve.pallas_kernels.gpu_triton.common import Geometry
from jaxserve.pallas_kernels.gpu_triton.stream_k import Shares
from jaxserve.pallas_kernels.gpu_triton.tiles import Work
from jaxserve.pallas_kernels.pool import POOL_DTYPES
from jaxserve.pallas_kernels.xla.backend import SCALES

MAX_HEAD_DIM = 256
MAX_GROUP = 128  # query heads per kv head: they share a matrix unit's tile


class PagedPlan(NamedTuple):
    """The work of decodes, and of chunks of KV rows if a step has any: one for each of
    `prefill.kinds`."""

    decode: Shares
    chunks: tuple[Work, ...]


def plan_uncut(
    kind: int,
    batch: AttentionBatch,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    num_heads: int,
    *,
    sliding_window: int | None,
    decode_only: bool,
    halves: int = 0,
) -> Work | tuple[Work, ...]:
    """See `backends.Backend.plan`, for `attend_uncut`."""
    if halves:
        given = batch, Geometry.of(shape), jnp.dtype(dtype).itemsize, num_heads
        masks: dict[str, Any] = {"sliding_window": sliding_window, "decode_only": decode_only}
        return latent.plan(*given, **masks, uncut=True)
    args = batch, Geometry.of(shape), jnp.dtype(dtype).itemsize, num_heads, triton_prefill.UNCUT
    return triton_prefill.plan(*args, sliding_window=sliding_window)


def plan(
    kind: int,
    batch: AttentionBatch,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    num_heads: int,
    *,
    sliding_window: int | None,
    decode_only: bool,
    halves: int = 0,
) -> PagedPlan | Work | tuple[Work, ...]:
    """See `backends.Backend.plan`."""
    geometry, itemsize = Geometry.of(shape), jnp.dtype(dtype).itemsize
    masks: dict[str, Any] = {"sliding_window": sliding_window, "decode_only": decode_only}
    if halves:
        return latent.plan(batch, geometry, itemsize, num_heads, **masks, uncut=False)
    if kind == HIDDEN:
        return projected.plan(batch, geometry, itemsize, num_heads, **masks)
    decode = triton_decode.plan(batch, geometry, itemsize, **masks)
    if decode_only:
        return PagedPlan(decode, ())
    arguments = (batch, geometry, itemsize, num_heads)
    chunks = functools.partial(triton_prefill.plan, *arguments, sliding_window=sliding_window)
    return PagedPlan(decode, tuple(map(chunks, triton_prefill.kinds(batch))))


def plan_absorbed(
    batch: AttentionBatch,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    num_heads: int,
    *,
    sliding_window: int | None,
) -> absorbed.Plan:
    """See `backends.Backend.plan_absorbed`."""
    geometry, itemsize = Geometry.of(shape), jnp.dtype(dtype).itemsize
    return absorbed.plan(batch, geometry, itemsize, num_heads, sliding_window=sliding_window)


def attend(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    batch: AttentionBatch,
    plan: Any,
    *,
    scoring: Scoring,
    decode_only: bool,
    sinks: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `backends.Backend.attend`: decodes and chunks, each by a kernel of its own."""
    arguments = (q, pool, layer, batch)
    options: dict[str, Any] = {"scoring": scoring, "interpret": interpret}
    if scoring.halves:
        return latent.attend(*arguments, plan, decode_only=decode_only, uncut=False, **options)
    options["sinks"] = sinks
    out = triton_decode.paged_decode(*arguments, plan.decode, decode_only=decode_only, **options)
    if not decode_only:
        for kind, work in zip(triton_prefill.kinds(batch), plan.chunks, strict=True):
            out = triton_prefill.paged_prefill(out, *arguments, work, kind, **options)
    return out


def attend_uncut(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    batch: AttentionBatch,
    plan: Any,
    *,
    scoring: Scoring,
    decode_only: bool,
    sinks: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `backends.Backend.attend`: decodes and chunks by one kernel, with a fixed order of
    sums."""
    options: dict[str, Any] = {"scoring": scoring, "interpret": interpret}
    if scoring.halves:
        given = q, pool, layer, batch, plan
        return latent.attend(*given, decode_only=decode_only, uncut=True, **options)
    options["sinks"] = sinks
    out, kind = jnp.zeros_like(q), triton_prefill.UNCUT
    return triton_prefill.paged_prefill(out, q, pool, layer, batch, plan, kind, **options)


def supports(kind: int, shape: KernelShape) -> str | None:
    """Why these kernels do not support a cache of this kind and shape (one shard's heads), or
    None."""
    num_heads, head_dim, group = shape.num_heads, shape.head_dim, shape.num_heads // shape.kv_heads
    name = jnp.dtype(shape.dtype).name
    if name not in POOL_DTYPES:
        return f"dtype: must be one of {POOL_DTYPES}, got {name}"
    if shape.halves:
        return _why_no_halves(shape)
    if not 1 <= head_dim <= MAX_HEAD_DIM or head_dim % 8:
        return f"head_dim: must be a multiple of 8 up to {MAX_HEAD_DIM}, got {head_dim}"
    if shape.block_size < 1:
        return f"block_size: must be at least 1, got {shape.block_size}"
    most = absorbed.MAX_HEADS
    if kind == HIDDEN and num_heads > most:
        return f"num_heads: must be at most {most} for hidden caches, got {num_heads}"
    if group > MAX_GROUP:
        return f"num_heads: must be at most {MAX_GROUP} a kv head, got {group}"
    return None


def _why_no_halves(shape: KernelShape) -> str | None:
    """The same of latent vectors."""
    if shape.halves > MAX_HEAD_DIM or shape.halves % 8 or shape.head_dim % 8:
        what = f"multiples of 8 up to {MAX_HEAD_DIM}, and so must head_dim"
        return f"halves: must be {what}, got {shape.halves} and {shape.head_dim}"
    if shape.kv_heads != 1 or shape.sinks:
        return "latent vectors: must be one a token, without sinks"
    return None


def _backend(interpret: bool) -> Backend:
    with_mode = functools.partial(functools.partial, interpret=interpret)
    return Backend(
        write=with_mode(write.write),
        attend=with_mode(attend),
        absorbed=with_mode(absorbed.absorbed),
        projected=with_mode(projected.projected),
        move=with_mode(write.move),
        stage_out=with_mode(write.stage_out),
        stage_in=with_mode(write.stage_in),
        scales=SCALES,
        supports=supports,
        halves=True,
        plan=plan,
        plan_absorbed=plan_absorbed,
        quantized_matmul=with_mode(grouped.choose),
        widened_rows=grouped.LIBRARY_ROWS,
        grouped_matmul=with_mode(by_group.choose),
    )


def _deterministic(interpret: bool) -> Backend:
    attend = functools.partial(attend_uncut, interpret=interpret)
    return dataclasses.replace(_backend(interpret), attend=attend, plan=plan_uncut)


BACKEND = _backend(interpret=False)
INTERPRET_BACKEND = _backend(interpret=True)
DETERMINISTIC_BACKEND = _deterministic(interpret=False)
DETERMINISTIC_INTERPRET_BACKEND = _deterministic(interpret=True)
