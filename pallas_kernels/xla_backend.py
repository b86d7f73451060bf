"""The kernels in plain XLA operations, for any device."""

from __future__ import annotations

from jax.typing import DTypeLike

from jaxserve.pallas_kernels import xla_attention, xla_hidden, xla_write
from jaxserve.pallas_kernels.backends import Backend


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
    write=xla_write.write,
    attend=xla_attention.paged_attention,
    absorbed=xla_hidden.absorbed_attention,
    projected=xla_hidden.projected_attention,
    move=xla_write.move,
    stage_out=xla_write.stage_out,
    stage_in=xla_write.stage_in,
    supports=_supports,
    decode_group=xla_attention.DECODE_GROUP,
    decode_chunk=xla_attention.DECODE_CONTEXT,
)
