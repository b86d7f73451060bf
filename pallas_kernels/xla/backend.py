"""The kernels in plain XLA operations, for any device."""

from __future__ import annotations

from typing import Any

import jax

from jaxserve.pallas_kernels.backends import Backend, ScaleOps
from jaxserve.pallas_kernels.xla import attention, hidden, write


def _write_scales(*arguments: Any) -> jax.Array:
    *operands, _ = arguments  # nothing is planned
    return write.write(*operands)


SCALES = ScaleOps(_write_scales, write.move, write.stage_out, write.stage_in)
BACKEND = Backend(
    write=write.write,
    attend=attention.paged_attention,
    absorbed=hidden.absorbed_attention,
    projected=hidden.projected_attention,
    move=write.move,
    stage_out=write.stage_out,
    stage_in=write.stage_in,
    scales=SCALES,
    supports=lambda kind, shape: None,  # any shape
    halves=True,
    decode_group=attention.DECODE_GROUP,
    decode_chunk=attention.DECODE_CONTEXT,
)
