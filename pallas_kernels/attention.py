"""The interface to a step's kernels: checks shapes, dispatches to a backend, shards by head."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.pallas_kernels import checks
from jaxserve.pallas_kernels.backends import Backend, Scoring, get_backend
from jaxserve.pallas_kernels.batch import HIDDEN, KV, AttentionBatch
from jaxserve.pallas_kernels.checks import HEAD_AXIS
from jaxserve.pallas_kernels.hidden import HiddenProjection
from jaxserve.pallas_kernels.pool import (
    Pool,
    SamePool,
    ScaledPool,
    as_stored,
    halves_wide,
    key_width,
    store_halves,
)
from jaxserve.pallas_kernels.sharding import (
    BY_HEAD,
    BY_WIDTH,
    OF_HEADS,
    POOL,
    WHOLE,
    over_heads,
    projection_specs,
    row_by_row,
)


def write(
    pool: SamePool,
    layer: jax.Array | int,
    k: jax.Array,
    v: jax.Array,
    batch: AttentionBatch,
    *,
    x: jax.Array | None = None,
    halves: int = 0,
    plan: Any = None,
    backend: str = "xla",
    mesh: Mesh | None = None,
) -> SamePool:
    """Writes the K, V or hidden vectors of a step's tokens into their slots of one layer.

    Rows fill their blocks from either end (BROS section 5.1). A hidden row has one vector per token
    (Apt-Serve section 4.2). Works in place if the pool is donated, or is a loop's carry. Values are
    converted to the pool's dtype, as `as_stored` and `store_halves` do; padding tokens are dropped.

    Args:
        pool: [layers, blocks, kv_heads, block_size, head_dim].
        layer: Index into the whole pool; may be traced.
        k, v: [T, kv_heads, head_dim], written for KV rows; with `halves` of such a head_dim that
            the pool's is its `pool.cached_width`.
        x: [T, kv_heads, head_dim], written for hidden rows: each hidden vector cut into kv_heads
            parts, in order. None if the batch has no hidden row.
        halves: As in `paged_attention`.
        batch: The step's rows and tokens.
        plan: From `plan_write`; None to make it here.
        backend: As for `get_backend`.
        mesh: Shards kv heads over its axis "tensor"; None for one device.

    Returns:
        The pool.

    Raises:
        ValueError: A wrong shape, dtype or option.
    """
    checks.check_step(pool, layer, batch)
    width = key_width(pool.shape[4], pool.dtype, halves) // 2 if halves else pool.shape[4]
    want = (batch.max_tokens, pool.shape[2], width)
    vectors = {"k": k, "v": v} if x is None else {"k": k, "v": v, "x": x}
    for name, value in vectors.items():
        checks.check_tokens(name, value, want, "tokens, kv_heads, head_dim")
    if plan is None:
        plan = plan_write(pool, batch, hidden=x is not None, backend=backend)
    takes = (POOL, WHOLE, BY_HEAD, BY_HEAD, None if x is None else BY_HEAD, WHOLE, WHOLE)
    put = partial(_write, get_backend(backend), halves)
    run = over_heads(put, mesh, takes, POOL, k=want[1])
    written: SamePool = run(pool, jnp.asarray(layer, jnp.int32), k, v, x, batch, plan)
    return written


def _write(
    by: Backend,
    halves: int,
    pool: Pool,
    layer: jax.Array,
    k: jax.Array,
    v: jax.Array,
    x: jax.Array | None,
    batch: AttentionBatch,
    plan: Any,
) -> Pool:
    """One shard's `write`."""
    dtype, nothing = pool.dtype, (None, None)
    of_x = nothing if x is None else as_stored(x, dtype)
    if halves_wide(dtype, halves):
        stored = (*store_halves(k, v, dtype, halves), of_x)
    else:
        stored = (as_stored(k, dtype), as_stored(v, dtype), of_x)
    values, scales = zip(*stored, strict=True)
    if not isinstance(pool, ScaledPool):
        return _planned(by.write, pool, layer, *values, batch, plan)
    return ScaledPool(
        _planned(by.write, pool.values, layer, *values, batch, plan),
        by.scales.write(pool.scales, layer, *scales, batch, plan),
    )


def plan_write(pool: Pool, batch: AttentionBatch, *, hidden: bool, backend: str = "xla") -> Any:
    """Plans `write` for all layers of a step: the slot of each token.

    Args:
        pool: The pool that will be written to.
        batch: The batch that will be written.
        hidden: Whether `write` will be given x.
        backend: As for `get_backend`.

    Returns:
        A tree of arrays for `write` with the same batch, on any mesh. None if the backend plans
        nothing.

    Raises:
        ValueError: A wrong shape, dtype or option.
    """
    planned = get_backend(backend).plan_write
    if planned is None:
        return None
    checks.check_pool(pool)
    batch.validate()
    return planned(batch, pool.shape, pool.dtype, hidden=hidden)


def plan_attention(
    pool: Pool,
    batch: AttentionBatch,
    num_heads: int,
    *,
    kind: int = KV,
    sliding_window: int | None = None,
    halves: int = 0,
    decode_only: bool,
    backend: str = "xla",
    mesh: Mesh | None = None,
) -> Any:
    """Plans the attention of all layers of a step: how its work is split.

    Args:
        pool: The pool that will be read.
        batch: The batch that will attend.
        num_heads: Query heads, over all shards.
        kind: KV to plan for `paged_attention`, HIDDEN for `projected_attention`.
        sliding_window: As in `paged_attention`.
        halves: As in `paged_attention`.
        decode_only: As in `paged_attention`.
        backend: As for `get_backend`.
        mesh: The mesh that attention will run on.

    Returns:
        A tree of arrays for attention with the same batch and options. None if the backend plans
        nothing, and for HIDDEN on a mesh.

    Raises:
        ValueError: A wrong shape, dtype or option.
    """
    planned = get_backend(backend).plan
    if planned is None or (kind == HIDDEN and mesh is not None):
        return None
    checks.check_pool(pool)
    batch.validate()
    checks.check_options(sliding_window, None)
    checks.check_decode_only(batch, decode_only)
    shards = 1 if mesh is None else mesh.shape[HEAD_AXIS]
    return planned(
        kind,
        batch,
        _of_a_shard(pool, shards),
        pool.dtype,
        num_heads // shards,
        sliding_window=sliding_window,
        decode_only=decode_only,
        **({"halves": halves} if halves else {}),
    )


def plan_absorbed(
    pool: Pool,
    batch: AttentionBatch,
    num_heads: int,
    *,
    sliding_window: int | None = None,
    backend: str = "xla",
    mesh: Mesh | None = None,
) -> Any:
    """Plans `absorbed_attention` for all layers of a step.

    Args:
        pool: The pool that will be read.
        batch: The batch that will attend.
        num_heads: Query heads. Every shard has all of them, and a slice of each vector.
        sliding_window: As in `paged_attention`.
        backend: As for `get_backend`.
        mesh: The mesh that attention will run on.

    Returns:
        A tree of arrays for `absorbed_attention` with the same batch and options. None if the
        backend plans nothing.

    Raises:
        ValueError: A wrong shape, dtype or option.
    """
    planned = get_backend(backend).plan_absorbed
    if planned is None:
        return None
    checks.check_pool(pool)
    batch.validate()
    checks.check_options(sliding_window, None)
    shape = _of_a_shard(pool, 1 if mesh is None else mesh.shape[HEAD_AXIS])
    return planned(batch, shape, pool.dtype, num_heads, sliding_window=sliding_window)


def _of_a_shard(pool: Pool, shards: int) -> tuple[int, ...]:
    """The shape of a shard's part of the pool."""
    layers, blocks, kv_heads, *rest = pool.shape
    return (layers, blocks, kv_heads // shards, *rest)


def paged_attention(
    q: jax.Array,
    pool: Pool,
    layer: jax.Array | int,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    both_ways: bool = False,
    halves: int = 0,
    decode_only: bool,
    plan: Any = None,
    backend: str = "xla",
    mesh: Mesh | None = None,
) -> jax.Array:
    """Attention of the step's KV rows over their cached context.

    PagedAttention (Kwon et al. 2023, section 4.1) with the running softmax of FlashAttention (Dao
    et al. 2022, section 3.1). Tokens attend to themselves too, so `write` them first. Query head h
    reads kv head h // (num_heads // kv_heads). Sums are in float32.

    Args:
        q: [T, num_heads, head_dim], or [T, num_heads, pool.key_width] with `halves`.
        pool: [layers, blocks, kv_heads, block_size, head_dim].
        layer: Index into the whole pool; may be traced.
        batch: The step's rows and tokens.
        scale: Scores are q . k * scale.
        sliding_window: Positions that a token sees, the last ones up to its own; None for all.
        soft_cap: Scores become soft_cap * tanh(score / soft_cap); None for no cap.
        sinks: [num_heads], one more score without a value in each head's softmax (like the learned
            sinks of Xiao et al. 2023, section 3.3); None for none.
        both_ways: Tokens see all of the context, or a window on both sides; else attention is
            causal. Only if `Backend.both_ways`.
        halves: A token's value are the first so many elements of its K, and of its V; its key are
            these and the rest of both (absorbed latent attention, DeepSeek-V2, section 2.1.2). Only
            if `Backend.halves`. 0: K is the key, and V the value.
        decode_only: T == R, and token i is row i's only token.
        plan: From `plan_attention`; None to make it here.
        backend: As for `get_backend`.
        mesh: Shards heads over its axis "tensor"; None for one device.

    Returns:
        [T, num_heads, head_dim], or [T, num_heads, 2 * halves], in q's dtype; zeros for padding
        tokens and those of hidden rows.

    Raises:
        ValueError: A wrong shape, dtype or option.
    """
    checks.check_step(pool, layer, batch)
    checks.check_options(sliding_window, soft_cap)
    width = key_width(pool.shape[4], pool.dtype, halves) if halves else pool.shape[4]
    checks.check_queries(q, batch, width)
    checks.check_decode_only(batch, decode_only)
    if q.shape[1] % pool.shape[2]:
        raise ValueError(f"q: {q.shape[1]} heads are not a multiple of the pool's {pool.shape[2]}")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"sinks: want [num_heads] = {q.shape[1:2]}, got {sinks.shape}")
    if not 0 <= halves <= pool.shape[4]:
        raise ValueError(f"halves: must be at most head_dim = {pool.shape[4]}, got {halves}")
    if halves and not get_backend(backend).halves:
        raise ValueError(f"halves: {backend} has no such attention")
    if plan is None:
        masks: dict[str, Any] = {"sliding_window": sliding_window, "decode_only": decode_only}
        masks["halves"] = halves
        plan = plan_attention(pool, batch, q.shape[1], backend=backend, mesh=mesh, **masks)
    if both_ways and not get_backend(backend).both_ways:
        raise ValueError(f"both_ways: {backend} has no such attention")
    scoring = Scoring(scale, sliding_window, soft_cap, both_ways, halves)
    attend = partial(get_backend(backend).attend, scoring=scoring, decode_only=decode_only)

    def shard(sinks: jax.Array | None, *arguments: Any) -> jax.Array:
        return _planned(partial(attend, sinks=sinks), *arguments)

    heads = {"q": q.shape[1], "pool": pool.shape[2]}
    takes = (None if sinks is None else OF_HEADS, BY_HEAD, POOL, WHOLE, WHOLE, WHOLE)
    run = over_heads(shard, mesh, takes, BY_HEAD, **heads)
    wide = None if sinks is None else sinks.astype(jnp.float32)
    done: jax.Array = run(wide, q, pool, jnp.asarray(layer, jnp.int32), batch, plan)
    return done


def absorbed_attention(
    qx: jax.Array,
    pool: Pool,
    layer: jax.Array | int,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    plan: Any = None,
    backend: str = "xla",
    mesh: Mesh | None = None,
) -> jax.Array:
    """Attention of hidden decodes over their raw cached vectors, which all heads share.

    For models whose keys are not rotated: with qx_h = Wk_h^T q_h the scores are those of q_h . k_i
    up to a constant, and Wv_h applied to the result gives sum_i a_i v_i (as DeepSeek-V2, section
    2.1.2, absorbs its up-projections). E = kv_heads * head_dim.

    Args:
        qx: [T, num_heads, E]. The token of a row is query_start[row].
        pool: [layers, blocks, kv_heads, block_size, head_dim].
        layer: Index into the whole pool; may be traced.
        batch: The step's rows and tokens. Only hidden rows below num_decodes are computed.
        scale: As in `paged_attention`.
        sliding_window: As in `paged_attention`.
        soft_cap: As in `paged_attention`. Right only without a key bias, since it needs the
            constant.
        plan: From `plan_absorbed`; None to make it here.
        backend: As for `get_backend`.
        mesh: Shards E over its axis "tensor" and sums the scores over it; None for one device.

    Returns:
        sum_i a_i x_i, [T, num_heads, E] in qx's dtype; zeros for all other tokens.

    Raises:
        ValueError: A wrong shape, dtype or option.
    """
    checks.check_step(pool, layer, batch)
    checks.check_options(sliding_window, soft_cap)
    checks.check_queries(qx, batch, pool.shape[2] * pool.shape[4], "qx")
    if plan is None:
        more: dict[str, Any] = {"backend": backend, "mesh": mesh}
        plan = plan_absorbed(pool, batch, qx.shape[1], sliding_window=sliding_window, **more)
    axis_name = None if mesh is None else HEAD_AXIS
    scoring = Scoring(scale, sliding_window, soft_cap)
    absorbed = partial(get_backend(backend).absorbed, scoring=scoring, axis_name=axis_name)
    takes = (BY_WIDTH, POOL, WHOLE, WHOLE, WHOLE)
    run = over_heads(partial(_planned, absorbed), mesh, takes, BY_WIDTH, pool=pool.shape[2])
    return run(qx, pool, jnp.asarray(layer, jnp.int32), batch, plan)


def projected_attention(
    q: jax.Array,
    pool: Pool,
    layer: jax.Array | int,
    batch: AttentionBatch,
    projection: HiddenProjection,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    decode_only: bool,
    plan: Any = None,
    backend: str = "xla",
    mesh: Mesh | None = None,
) -> jax.Array:
    """Causal attention of hidden rows over the K and V that their cached vectors project to.

    Takes decodes and chunks (Apt-Serve section 4.2). Nothing is written back. On a mesh, rows are
    processed one after another, and the whole blocks of a row are gathered on every shard.

    Args:
        q: [T, num_heads, head_dim], num_heads equal to the pool's kv_heads.
        pool: [layers, blocks, kv_heads, block_size, head_dim].
        layer: Index into the whole pool; may be traced.
        batch: The step's rows and tokens.
        projection: The layer's map from hidden vectors to K and V.
        scale: As in `paged_attention`.
        sliding_window: As in `paged_attention`.
        soft_cap: As in `paged_attention`.
        decode_only: As in `paged_attention`.
        plan: From `plan_attention` with kind HIDDEN; None to make it here. Not used on a mesh.
        backend: As for `get_backend`.
        mesh: Shards the heads of q and of the projection's columns over its axis "tensor"; None for
            one device.

    Returns:
        Shape and dtype of q; zeros for padding tokens and those of KV rows.

    Raises:
        ValueError: A wrong shape, dtype or option.
    """
    checks.check_step(pool, layer, batch)
    checks.check_options(sliding_window, soft_cap)
    checks.check_queries(q, batch, pool.shape[4])
    checks.check_decode_only(batch, decode_only)
    heads, head_dim = pool.shape[2], pool.shape[4]
    if q.shape[1] != heads:
        raise ValueError(f"q: {q.shape[1]} heads, but hidden blocks of {heads} want as many")
    projection.validate(heads * head_dim, heads, head_dim)
    masks: dict[str, Any] = {"sliding_window": sliding_window, "decode_only": decode_only}
    scoring = Scoring(scale, sliding_window, soft_cap)
    kernel = partial(get_backend(backend).projected, scoring=scoring, decode_only=decode_only)

    def projected(
        q: jax.Array,
        pool: Pool,
        layer: jax.Array,
        batch: AttentionBatch,
        projection: HiddenProjection,
        plan: Any = None,
    ) -> jax.Array:
        if plan is None:
            plan = plan_attention(pool, batch, q.shape[1], kind=HIDDEN, backend=backend, **masks)
        return _planned(kernel, q, pool, layer, batch, projection, plan)

    number = jnp.asarray(layer, jnp.int32)
    if mesh is None:
        return projected(q, pool, number, batch, projection, plan)
    takes = (BY_HEAD, POOL, WHOLE, WHOLE, projection_specs(projection))
    by_row = partial(row_by_row, projected, decode_only=decode_only)
    run = over_heads(by_row, mesh, takes, BY_HEAD, q=heads, pool=heads)
    return run(q, pool, number, batch, projection)


def _planned(kernel: Callable[..., jax.Array], *arguments: Any) -> jax.Array:
    """Runs a kernel. The last argument is its plan; it is left out if None, since the backend then
    plans nothing."""
    *arrays, plan = arguments
    return kernel(*arrays, *(() if plan is None else (plan,)))
