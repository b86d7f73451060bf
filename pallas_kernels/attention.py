"""The interface to a step's kernels: checks shapes, dispatches to a backend, shards by head."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxserve.pallas_kernels import checks
from jaxserve.pallas_kernels.backends import Backend, get_backend
from jaxserve.pallas_kernels.batch import AttentionBatch
from jaxserve.pallas_kernels.checks import HEAD_AXIS
from jaxserve.pallas_kernels.hidden import HiddenProjection

__all__ = [
    "Backend",
    "absorbed_attention",
    "paged_attention",
    "projected_attention",
    "write",
]

BY_HEAD = P(None, HEAD_AXIS)  # [tokens, heads, ...]
POOL = P(None, None, HEAD_AXIS)


def write(
    pool: jax.Array,
    layer: jax.Array | int,
    k: jax.Array,
    v: jax.Array,
    batch: AttentionBatch,
    *,
    x: jax.Array | None = None,
    backend: str = "xla",
    mesh: Mesh | None = None,
) -> jax.Array:
    """Write the step's tokens into their slots of one layer: k and v of KV rows, x of hidden ones;
    [T, kv_heads, head_dim] each, a hidden vector being cut into kv_heads parts in order.

    In place where the pool is donated (or a loop's carry). layer: index into the whole pool, may
    be traced. x: None says that no row of the batch is hidden. Values are converted to the pool's
    dtype; padding tokens are dropped. With a mesh, kv heads are sharded over its axis "tensor".
    ValueError for a wrong shape or dtype.
    """
    checks.check_step(pool, layer, batch)
    want = (batch.max_tokens, pool.shape[2], pool.shape[4])
    given = {"k": k, "v": v} if x is None else {"k": k, "v": v, "x": x}
    for name, value in given.items():
        checks.check_tokens(name, value, want, "tokens, kv_heads, head_dim")
    chosen = get_backend(backend).write
    if mesh is None:
        return chosen(pool, layer, k, v, x, batch)
    checks.check_shards(mesh, k=want[1])
    sharded = jax.shard_map(
        chosen,
        mesh=mesh,
        in_specs=(POOL, P(), BY_HEAD, BY_HEAD, None if x is None else BY_HEAD, P()),
        out_specs=POOL,
        check_vma=False,
    )
    return sharded(pool, jnp.asarray(layer, jnp.int32), k, v, x, batch)


def paged_attention(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    decode_only: bool,
    backend: str = "xla",
    mesh: Mesh | None = None,
) -> jax.Array:
    """Causal attention of the step's tokens of KV rows over their rows' cached context, themselves
    included (write first): q [T, num_heads, head_dim] -> the same shape and dtype.

    Query head h reads kv head h // (num_heads // kv_heads). Scores are q . k * scale, then
    soft_cap * tanh(score / soft_cap) if given. sliding_window: a token sees the last so many
    positions, its own included. decode_only: T == R and token i is row i's only token. Padding
    tokens and those of hidden rows give zeros. Sums are in float32. With a mesh, heads are sharded
    over its axis "tensor". ValueError for a wrong shape, dtype or option.
    """
    checks.check_step(pool, layer, batch)
    checks.check_options(sliding_window, soft_cap)
    checks.check_queries(q, batch, pool.shape[4])
    checks.check_decode_only(batch, decode_only)
    if q.shape[1] % pool.shape[2]:
        raise ValueError(f"q: {q.shape[1]} heads are not a multiple of the pool's {pool.shape[2]}")
    attend = functools.partial(
        get_backend(backend).attend,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        decode_only=decode_only,
    )
    if mesh is None:
        return attend(q, pool, layer, batch)
    checks.check_shards(mesh, q=q.shape[1], pool=pool.shape[2])
    sharded = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(BY_HEAD, POOL, P(), P()),
        out_specs=BY_HEAD,
        check_vma=False,
    )
    return sharded(q, pool, jnp.asarray(layer, jnp.int32), batch)


def absorbed_attention(
    qx: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    backend: str = "xla",
    mesh: Mesh | None = None,
) -> jax.Array:
    """Attention of hidden decodes over their raw cached vectors, all heads over the same ones:
    qx [T, num_heads, E] -> sum_i a_i x_i, [T, num_heads, E] in qx's dtype; E = kv_heads * head_dim.

    For models whose keys are not rotated: with qx_h = Wk_h^T q_h the scores are those of q_h . k_i
    but for a constant, and Wv_h applied to the result gives sum_i a_i v_i (design: the fold of Wk
    into the query and of Wv out of the sum). Rows that count: hidden, and below num_decodes; the
    row's token is query_start[row]. Zeros for all other tokens. scale, sliding_window, soft_cap: as
    in `paged_attention`; a cap wants the constant, so it is right only without a key bias. With a
    mesh, the hidden axis E is sharded over its axis "tensor" and the scores are summed over it.
    ValueError for a wrong shape, dtype or option.
    """
    checks.check_step(pool, layer, batch)
    checks.check_options(sliding_window, soft_cap)
    checks.check_queries(qx, batch, pool.shape[2] * pool.shape[4], "qx")
    absorbed = functools.partial(
        get_backend(backend).absorbed,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        axis_name=None if mesh is None else HEAD_AXIS,
    )
    if mesh is None:
        return absorbed(qx, pool, layer, batch)
    checks.check_shards(mesh, pool=pool.shape[2])
    by_width = P(None, None, HEAD_AXIS)
    sharded = jax.shard_map(
        absorbed,
        mesh=mesh,
        in_specs=(by_width, POOL, P(), P()),
        out_specs=by_width,
        check_vma=False,
    )
    return sharded(qx, pool, jnp.asarray(layer, jnp.int32), batch)


def projected_attention(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    batch: AttentionBatch,
    projection: HiddenProjection,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    decode_only: bool,
    backend: str = "xla",
    mesh: Mesh | None = None,
) -> jax.Array:
    """Causal attention of hidden rows' tokens, decodes and chunks, over the K and V that their
    cached vectors project to (Apt-Serve section 4.2): q [T, num_heads, head_dim] -> the same.

    num_heads equals the pool's kv_heads. Nothing is written back. Zeros for padding tokens and
    those of KV rows. Other arguments: as in `paged_attention`. With a mesh, heads (of q and of the
    projection's columns) are sharded over its axis "tensor", and the blocks that the batch names
    are gathered whole on every shard. ValueError for a wrong shape, dtype or option.
    """
    checks.check_step(pool, layer, batch)
    checks.check_options(sliding_window, soft_cap)
    checks.check_queries(q, batch, pool.shape[4])
    checks.check_decode_only(batch, decode_only)
    heads, head_dim = pool.shape[2], pool.shape[4]
    if q.shape[1] != heads:
        raise ValueError(f"q: {q.shape[1]} heads, but hidden blocks of {heads} want as many")
    projection.validate(heads * head_dim, heads, head_dim)
    projected = functools.partial(
        get_backend(backend).projected,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        decode_only=decode_only,
    )
    if mesh is None:
        return projected(q, pool, layer, batch, projection)
    checks.check_shards(mesh, q=q.shape[1], pool=heads)

    def one_shard(
        q: jax.Array,
        pool: jax.Array,
        layer: jax.Array,
        batch: AttentionBatch,
        projection: HiddenProjection,
    ) -> jax.Array:
        whole, tables = _whole_blocks(pool, layer, batch)
        batch = dataclasses.replace(batch, tables=tables)
        return projected(q, whole, jnp.int32(0), batch, projection)

    sharded = jax.shard_map(
        one_shard,
        mesh=mesh,
        in_specs=(BY_HEAD, POOL, P(), P(), _projection_specs(projection)),
        out_specs=BY_HEAD,
        check_vma=False,
    )
    return sharded(q, pool, jnp.asarray(layer, jnp.int32), batch, projection)


def _projection_specs(projection: HiddenProjection) -> HiddenProjection:
    """The projection's columns cut by head, as a tree of specs."""
    columns, bias = P(None, HEAD_AXIS), P(HEAD_AXIS)
    specs = {"wk": columns, "wv": columns, "bk": bias, "bv": bias, "k_norm": P(), "rotation": P()}
    given: dict[str, Any] = {
        name: spec for name, spec in specs.items() if getattr(projection, name) is not None
    }
    return dataclasses.replace(projection, **given)


def _whole_blocks(
    pool: jax.Array, layer: jax.Array, batch: AttentionBatch
) -> tuple[jax.Array, jax.Array]:
    """The layer's hidden blocks with the parts of all shards, as a pool of one layer, and the
    tables into it: only the blocks that the tables can name, where those are fewer than the pool's.
    A projected head needs all of x, and x is half of what all heads' K and V would be to send."""
    blocks, entries = pool.shape[1], batch.max_rows * batch.table_width
    mine = jax.lax.dynamic_index_in_dim(pool, layer, keepdims=False)
    tables = batch.tables
    if entries < blocks:
        mine = mine[tables[:, 0].reshape(-1)]
        ids = jnp.arange(entries, dtype=jnp.int32).reshape(batch.max_rows, 1, batch.table_width)
        tables = jnp.broadcast_to(ids, tables.shape)
    return jax.lax.all_gather(mine, HEAD_AXIS, axis=1, tiled=True)[None], tables
