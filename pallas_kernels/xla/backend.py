"""The kernels in plain XLA operations, for any device."""

from __future__ import annotations

from jaxserve.pallas_kernels.backends import Backend
from jaxserve.pallas_kernels.xla import attention, hidden, write

BACKEND = Backend(
    write=write.write,
    attend=attention.paged_attention,
    absorbed=hidden.absorbed_attention,
    projected=hidden.projected_attention,
    move=write.move,
    stage_out=write.stage_out,
    stage_in=write.stage_in,
    supports=lambda kind, shape: None,  # every shape there can be
    decode_group=attention.DECODE_GROUP,
    decode_chunk=attention.DECODE_CONTEXT,
)
