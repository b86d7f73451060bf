"""The kernels for TPU (Mosaic), and the same in TPU-interpret mode for tests without one."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxserve.pallas_kernels import (
    tpu_absorbed,
    tpu_common,
    tpu_decode,
    tpu_move,
    tpu_prefill,
    tpu_projected,
    tpu_write,
)
from jaxserve.pallas_kernels.backends import Backend
from jaxserve.pallas_kernels.batch import KV, AttentionBatch
from jaxserve.pallas_kernels.tpu_common import Options


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
    interpret: bool,
) -> jax.Array:
    """See `attention.paged_attention`."""
    options = Options(scale, sliding_window, soft_cap, interpret)
    mine = (batch.kind == KV) & (batch.query_lens > 0)
    if decode_only:
        return tpu_decode.decode(q, pool, layer, batch, mine, options)
    row = jnp.arange(batch.max_rows, dtype=jnp.int32)
    chunks = mine & (row >= batch.num_decodes) & (row < batch.num_rows)
    out = tpu_prefill.prefill(q, pool, layer, batch, chunks, options)
    decodes = mine & (row < batch.num_decodes)
    token = jnp.where(decodes, batch.query_start, batch.max_tokens)
    picked = q.at[token].get(mode="fill", fill_value=0)
    decoded = tpu_decode.decode(picked, pool, layer, batch, decodes, options)
    return out.at[token].set(decoded, mode="drop")


def _backend(interpret: bool) -> Backend:
    def with_mode(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return functools.partial(function, interpret=interpret)

    return Backend(
        write=with_mode(tpu_write.write),
        attend=with_mode(_attend),
        absorbed=with_mode(tpu_absorbed.absorbed),
        projected=with_mode(tpu_projected.projected),
        move=with_mode(tpu_move.move),
        stage_out=with_mode(tpu_move.stage_out),
        stage_in=with_mode(tpu_move.stage_in),
        supports=tpu_common.supports,
    )


BACKEND = _backend(interpret=False)
INTERPRET_BACKEND = _backend(interpret=True)
