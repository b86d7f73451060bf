"""The kernels in plain XLA operations, for any device."""

from __future__ import annotations

from jax.typing import DTypeLike

from jaxserve.pallas_kernels.backends import Backend
from jaxserve.pallas_kernels.xla import attention, hidden, write


def _supports(
    kind: int,
    *,
    num_heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: DTypeLike,
) -> str | None:
    """Every shape there can be."""
    return None


BACKEND = Backend(
    write=write.write,
    attend=attention.paged_attention,
    absorbed=hidden.absorbed_attention,
    projected=hidden.projected_attention,
    move=write.move,
    stage_out=write.stage_out,
    stage_in=write.stage_in,
    supports=_supports,
    decode_group=attention.DECODE_GROUP,
    decode_chunk=attention.DECODE_CONTEXT,
)
