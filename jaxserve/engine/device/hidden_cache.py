"""Hidden caches on the device (Apt-Serve section 4.3): attention over them, and their projection to
K and V in place."""

from __future__ import annotations

import dataclasses
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.engine.device.batch_layout import Layout, attention_batch, positions
from jaxserve.engine.device.step_model import StepModel, compiler_options
from jaxserve.models.attention import kv_projection
from jaxserve.models.base import AttentionInput, KVProjection, KVWeights, LayerIndex, Params
from jaxserve.models.forward import over_layers
from jaxserve.pallas_kernels import (
    HIDDEN,
    KV,
    RIGHT,
    AttentionBatch,
    HiddenProjection,
    Pool,
    absorbed_attention,
    plan_absorbed,
    plan_attention,
    plan_write,
    project,
    projected_attention,
    stage_out,
    staged_vectors,
    write,
)
from jaxserve.sched.cache.cache_kinds import ABSORBED

FEW_HEADS = 16  # up to this many heads, one matmul per head beats a batched one with its copies


class HiddenRows(NamedTuple):
    """What all layers share about a step's rows with hidden caches.

    Attributes:
        decodes: the first rows of the step as a batch of their own, including all decodes with
        hidden caches.
        token: int32 [n], the index of each of these rows on the step's token axis. Beyond its end
        for rows that are not hidden decodes.
        chunks: the batch with all decodes marked as KV, so that only chunks are read as hidden;
        None in a decode step.
        plans: kernel plans for decodes and for chunks.
    """

    decodes: AttentionBatch
    token: jax.Array
    chunks: AttentionBatch | None
    plans: tuple[Any, Any]


def hidden_rows(pool: Pool, batch: AttentionBatch, model: StepModel, layout: Layout) -> HiddenRows:
    """Splits a batch with hidden rows into decodes and chunks, and plans their attention.

    Args:
        pool: the pool.
        batch: the step's batch.
        model: gives the kernels and how hidden caches are read.
        layout: the batch's layout.
    """
    options: dict[str, Any] = {
        "sliding_window": model.config.sliding_window,
        "backend": model.backend,
        "mesh": model.mesh,
    }
    heads = model.config.num_heads
    is_decode = jnp.arange(batch.max_rows, dtype=jnp.int32) < batch.num_decodes
    token = jnp.where(is_decode & (batch.kind == HIDDEN), batch.query_start, batch.max_tokens)
    decodes, chunks, plans = batch.decodes(layout.hidden), None, [None, None]
    if model.hidden_read == ABSORBED:
        plans[0] = plan_absorbed(pool, decodes, heads, **options)
    else:
        plans[0] = plan_attention(pool, decodes, heads, kind=HIDDEN, decode_only=True, **options)
    if not layout.decode_only:
        chunks = dataclasses.replace(batch, kind=jnp.where(is_decode, KV, batch.kind))
        plans[1] = plan_attention(pool, chunks, heads, kind=HIDDEN, decode_only=False, **options)
    return HiddenRows(decodes, token[: layout.hidden], chunks, (plans[0], plans[1]))


def attend_hidden(
    out: jax.Array,
    inputs: AttentionInput,
    pool: Pool,
    layer: LayerIndex,
    rows: HiddenRows,
    how: KVProjection,
    model: StepModel,
) -> jax.Array:
    """Adds the attention of rows with hidden caches.

    Absorbed reading (Wk folded into the query, Wv applied to the sum) is for decodes. A chunk has
    so many queries that projecting its context once is less work than folding each of them.

    Args:
        out: [T, num_heads, head_dim], attention of the other rows, zeros for the tokens of hidden
            rows.
        inputs: inputs of the layer; q, k and v must not be fused.
        pool: the pool.
        layer: index of the layer.
        rows: the step's hidden rows.
        how: rotation and norm of the projection. The weights come from `inputs`.
        model: gives the kernels and how hidden caches are read.

    Returns:
        `out` with the hidden rows filled in.
    """
    weights = inputs.weights
    assert weights is not None, "the model's q, k and v are fused"
    projection = _projection(weights, how)
    options: dict[str, Any] = {
        "scale": model.config.attn_scale,
        "sliding_window": model.config.sliding_window,
        "backend": model.backend,
        "mesh": model.mesh,
    }

    q = inputs.q.at[rows.token].get(mode="fill", fill_value=0)
    given = q, pool, layer, rows.decodes
    of_decodes, of_chunks = rows.plans
    if model.hidden_read == ABSORBED:
        done = _absorbed(*given, weights, {"plan": of_decodes, **options})
    else:
        done = projected_attention(*given, projection, decode_only=True, plan=of_decodes, **options)
    out = out.at[rows.token].set(done, mode="drop")
    if rows.chunks is None:
        return out
    return out + projected_attention(
        inputs.q,
        pool,
        layer,
        rows.chunks,
        projection,
        decode_only=False,
        plan=of_chunks,
        **options,
    )


def _absorbed(
    q: jax.Array,
    pool: Pool,
    layer: LayerIndex,
    batch: AttentionBatch,
    weights: KVWeights,
    options: dict[str, Any],
) -> jax.Array:
    """q [R, num_heads, head_dim] of a batch of decodes -> the same shape; zeros for other rows."""
    heads, head_dim = q.shape[1:]
    mixed = absorbed_attention(_fold(q, weights.wk), pool, layer, batch, **options)
    out = _unfold(mixed, weights.wv)
    if weights.bv is not None:
        # The weights of a row's softmax sum to one; rows that are not hidden have none.
        bias = weights.bv.reshape(1, heads, head_dim).astype(out.dtype)
        out = jnp.where((batch.kind != KV)[:, None, None], out + bias, out)
    return out


def _fold(q: jax.Array, wk: jax.Array) -> jax.Array:
    """q [R, H, D], wk [E, H * D] -> Wk_h q_h, [R, H, E]."""
    rows, heads, head_dim = q.shape
    if rows == 1 and heads <= FEW_HEADS:
        parts = [q[:, h] @ _head(wk, h, head_dim).T for h in range(heads)]
        return jnp.stack(parts, axis=1)
    return jnp.einsum("rhd,ehd->rhe", q, wk.reshape(-1, heads, head_dim))


def _unfold(mixed: jax.Array, wv: jax.Array) -> jax.Array:
    """mixed [R, H, E], wv [E, H * D] -> Wv_h^T mixed_h, [R, H, D]."""
    heads = mixed.shape[1]
    head_dim = wv.shape[1] // heads
    if heads <= FEW_HEADS:
        parts = [mixed[:, h] @ _head(wv, h, head_dim) for h in range(heads)]
        return jnp.stack(parts, axis=1)
    return jnp.einsum("rhe,ehd->rhd", mixed, wv.reshape(-1, heads, head_dim))


def _head(weights: jax.Array, head: int, head_dim: int) -> jax.Array:
    return weights[:, head * head_dim : (head + 1) * head_dim]


def _projection(weights: KVWeights, how: KVProjection) -> HiddenProjection:
    """Projection of one layer. weights: those of the layer."""
    norm = None if weights.k_norm is None else weights.k_norm.astype(jnp.float32)
    return HiddenProjection(
        weights.wk, weights.wv, weights.bk, weights.bv, norm, how.rotation, how.norm_eps
    )


@lru_cache(maxsize=8)
def make_project_to_kv(model: StepModel, pool_format: Any) -> Any:
    """A jitted function (params, pool, packed batch, *, layout) -> pool, with the pool donated. It
    turns the cached hidden vectors of the batch's tokens into K and V; K overwrites the vectors.
    pool_format: see `pallas_kernels.pool_format`."""
    return jax.jit(
        partial(_project_to_kv, model),
        donate_argnames=("pool",),
        static_argnames=("layout",),
        out_shardings=pool_format,
        compiler_options=compiler_options(pool_format),
    )


def _project_to_kv(
    model: StepModel, params: Params, pool: Pool, packed: jax.Array, *, layout: Layout
) -> Pool:
    fields = layout.unpack(packed)
    batch, where = attention_batch(fields), positions(fields)
    how = kv_projection(params, model.config, model.max_len)
    count = jnp.sum(batch.query_lens, dtype=jnp.int32)
    options: dict[str, Any] = {"backend": model.backend, "mesh": model.mesh}
    puts = plan_write(pool, batch, hidden=False, backend=model.backend)
    # The vectors of all layers are read before any is overwritten.
    staged = stage_out(pool, _slots(batch, where, pool.shape[3]), count, **options)
    wide = pool.dtype if pool.dtype.itemsize > 1 else jnp.dtype(jnp.float32)
    cached = staged_vectors(pool, staged, wide)
    heads = model.config.num_kv_heads

    def one_layer(pool: Pool, weights: KVWeights, index: LayerIndex) -> Pool:
        x = cached[:, index].reshape(len(cached), -1)
        made = project(x, where, _projection(weights, how), heads)
        k, v = (a.transpose(1, 0, 2) for a in made)
        return write(pool, index, k, v, batch, plan=puts, **options)

    return over_layers(one_layer, pool, how.weights)


def _slots(batch: AttentionBatch, where: jax.Array, block_size: int) -> jax.Array:
    """int32 [T, 2]: (block, slot) of each token's hidden vector."""
    row = jnp.minimum(batch.token_row, batch.max_rows - 1)
    offset = where % block_size
    slot = jnp.where(batch.direction[row] == RIGHT, block_size - 1 - offset, offset)
    return jnp.stack([batch.tables[row, 0, where // block_size], slot], axis=1)
