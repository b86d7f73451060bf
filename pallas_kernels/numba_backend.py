"""The kernels of CPUs: attention over K and V by numba, the rest in plain XLA operations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxserve.pallas_kernels import numba_attention, xla_backend
from jaxserve.pallas_kernels.backends import Backend
from jaxserve.pallas_kernels.batch import AttentionBatch


def _attend(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    decode_only: bool,
) -> jax.Array:
    """See `attention.paged_attention`: q [T, H, D] -> the same."""
    call = jax.ffi.ffi_call(
        numba_attention.target(q.shape[2]), jax.ShapeDtypeStruct(q.shape, jnp.float32)
    )
    ints = jnp.stack([jnp.asarray(layer, jnp.int32), jnp.int32(sliding_window or 0)])
    out = call(
        q.astype(jnp.float32),
        pool,
        batch.tables,
        batch.context_lens,
        batch.query_start,
        batch.query_lens,
        batch.direction,
        batch.kind,
        batch.token_row,
        ints,
        jnp.array([scale, soft_cap or 0], jnp.float32),
    )
    return out.astype(q.dtype)


def _supports(
    kind: int,
    *,
    num_heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: DTypeLike,
) -> str | None:
    """Pools of float32."""
    if jnp.dtype(dtype) != jnp.float32:
        return f"the pool must be of float32, got {jnp.dtype(dtype).name}"
    return None


BACKEND = Backend(
    write=xla_backend.BACKEND.write,
    attend=_attend,
    absorbed=xla_backend.BACKEND.absorbed,
    projected=xla_backend.BACKEND.projected,
    move=xla_backend.BACKEND.move,
    stage_out=xla_backend.BACKEND.stage_out,
    stage_in=xla_backend.BACKEND.stage_in,
    supports=_supports,
)
