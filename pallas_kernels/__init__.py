"""Attention over the paged block pool: one interface, one backend a file, references beside them.

Knows jax and numpy only. Only this package knows the order of elements inside a block: other code
names a (block, slot) and uses `write`, the attention functions, `move_slots`, `stage_out`,
`stage_in` and `read_tokens`.
"""

from jaxserve.pallas_kernels.attention import (
    absorbed_attention,
    paged_attention,
    plan_absorbed,
    plan_attention,
    plan_write,
    projected_attention,
    write,
)
from jaxserve.pallas_kernels.backends import (
    BACKENDS,
    Backend,
    KernelShape,
    deterministic_backend,
    get_backend,
    resolve_backend,
    select_backend,
    unsupported,
)
from jaxserve.pallas_kernels.batch import HIDDEN, KV, LEFT, RIGHT, AttentionBatch
from jaxserve.pallas_kernels.delta_net import DeltaInput, DeltaNet, StateRows
from jaxserve.pallas_kernels.grouped_matmul import (
    grouped_matmul,
    head_matmul,
    quantized_grouped_matmul,
)
from jaxserve.pallas_kernels.hidden import HiddenProjection, project
from jaxserve.pallas_kernels.low_rank import add_low_rank, skips_columns
from jaxserve.pallas_kernels.move import (
    move_slots,
    stage_in,
    stage_out,
    staged_vectors,
    staging_shape,
)
from jaxserve.pallas_kernels.pool import (
    Pool,
    as_cached,
    block_bytes,
    default_block_size,
    dtype_named,
    format_of,
    make_pool,
    pool_format,
    pool_of,
    read_tokens,
    slot_bytes,
)
from jaxserve.pallas_kernels.quantized_matmul import quantized_matmul
from jaxserve.pallas_kernels.recurrence import recur, recur_text
from jaxserve.pallas_kernels.rowwise.argmax import argmax
from jaxserve.pallas_kernels.rowwise.fixed_batches import in_fixed_batches
from jaxserve.pallas_kernels.rowwise.gates import ACTIVATIONS, gated
from jaxserve.pallas_kernels.rowwise.norm import layer_norm, log_sum_exp, rms_norm
from jaxserve.pallas_kernels.rowwise.rotary import angle_table, angles, rotate
from jaxserve.pallas_kernels.rowwise.weighted import add_weighted
from jaxserve.pallas_kernels.skinny_matmul import by_columns, has_skinny_matmul, skinny_matmul

__all__ = [
    "ACTIVATIONS",
    "BACKENDS",
    "HIDDEN",
    "KV",
    "LEFT",
    "RIGHT",
    "AttentionBatch",
    "Backend",
    "DeltaInput",
    "DeltaNet",
    "HiddenProjection",
    "KernelShape",
    "Pool",
    "StateRows",
    "absorbed_attention",
    "add_low_rank",
    "add_weighted",
    "angle_table",
    "angles",
    "argmax",
    "as_cached",
    "block_bytes",
    "by_columns",
    "default_block_size",
    "deterministic_backend",
    "dtype_named",
    "format_of",
    "gated",
    "get_backend",
    "grouped_matmul",
    "has_skinny_matmul",
    "head_matmul",
    "in_fixed_batches",
    "layer_norm",
    "log_sum_exp",
    "make_pool",
    "move_slots",
    "paged_attention",
    "plan_absorbed",
    "plan_attention",
    "plan_write",
    "pool_format",
    "pool_of",
    "project",
    "projected_attention",
    "quantized_grouped_matmul",
    "quantized_matmul",
    "read_tokens",
    "recur",
    "recur_text",
    "resolve_backend",
    "rms_norm",
    "rotate",
    "select_backend",
    "skinny_matmul",
    "skips_columns",
    "slot_bytes",
    "stage_in",
    "stage_out",
    "staged_vectors",
    "staging_shape",
    "unsupported",
    "write",
]
