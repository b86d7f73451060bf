"""Attention over the paged block pool: one interface, one backend a file, references beside them.

Knows jax and numpy only. The order of elements inside a block is this package's own business:
everyone else speaks of (block, slot) and goes through `write_kv`, `paged_attention` and
`read_tokens`.
"""

from jaxserve.pallas_kernels.attention import (
    BACKENDS,
    Backend,
    paged_attention,
    resolve_backend,
    write_kv,
)
from jaxserve.pallas_kernels.batch import HIDDEN, KV, LEFT, RIGHT, AttentionBatch
from jaxserve.pallas_kernels.pool import block_bytes, make_pool, read_tokens

__all__ = [
    "BACKENDS",
    "HIDDEN",
    "KV",
    "LEFT",
    "RIGHT",
    "AttentionBatch",
    "Backend",
    "block_bytes",
    "make_pool",
    "paged_attention",
    "read_tokens",
    "resolve_backend",
    "write_kv",
]
