"""The kernels of CPUs: attention over K and V, and what writes the pool, by numba; the rest in
plain XLA operations."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxserve.pallas_kernels.backends import Backend
from jaxserve.pallas_kernels.batch import AttentionBatch
from jaxserve.pallas_kernels.cpu import attention
from jaxserve.pallas_kernels.cpu.write import put_vectors
from jaxserve.pallas_kernels.xla import backend, write


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
        attention.target(q.shape[2], bfloat16=pool.dtype == jnp.bfloat16),
        jax.ShapeDtypeStruct(q.shape, jnp.float32),
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
    """Pools of float32 and bfloat16."""
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        return f"the pool must be of float32 or bfloat16, got {jnp.dtype(dtype).name}"
    return None


BACKEND = Backend(
    write=partial(write.write, put=put_vectors),
    attend=_attend,
    absorbed=backend.BACKEND.absorbed,
    projected=backend.BACKEND.projected,
    move=partial(write.move, put=put_vectors),
    stage_out=backend.BACKEND.stage_out,
    stage_in=partial(write.stage_in, put=put_vectors),
    supports=_supports,
)
