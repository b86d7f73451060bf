"""The one interface to paged attention: checks shapes, picks a backend, shards by head.

Backends are modules' functions in a registry; the engine names one (`"auto"` picks by platform).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxserve.pallas_kernels import xla_attention
from jaxserve.pallas_kernels.batch import HIDDEN, KV, AttentionBatch

HEAD_AXIS = "tensor"


@dataclasses.dataclass(frozen=True)
class Backend:
    """write(pool, layer, k, v, batch) -> pool; attend(q, pool, layer, batch, *, scale,
    sliding_window, soft_cap, decode_only) -> [T, H, D]. Both see one shard's heads."""

    write: Callable[..., jax.Array]
    attend: Callable[..., jax.Array]


BACKENDS: dict[str, Backend] = {
    "xla": Backend(write=xla_attention.write_kv, attend=xla_attention.paged_attention),
}


def resolve_backend(name: str) -> str:
    """The backend that a configured name means; "auto" is "xla", the only one there is on every
    platform. ValueError for an unknown name."""
    if name == "auto":
        return "xla"
    if name not in BACKENDS:
        raise ValueError(f"backend: must be auto or one of {sorted(BACKENDS)}, got {name!r}")
    return name


def _check_pool(pool: jax.Array, layer: jax.Array | int, batch: AttentionBatch) -> None:
    batch.validate()
    if pool.ndim != 5:
        raise ValueError(
            f"pool: want [layers, blocks, kv_heads, block_size, head_dim], got {pool.shape}"
        )
    if not jnp.issubdtype(pool.dtype, jnp.floating):
        raise ValueError(f"pool: want a floating dtype, got {pool.dtype}")
    if jnp.shape(layer) != () or not jnp.issubdtype(jnp.result_type(layer), jnp.integer):
        raise ValueError(f"layer: want an integer scalar, got shape {jnp.shape(layer)}")
    if isinstance(layer, int) and not 0 <= layer < pool.shape[0]:
        raise ValueError(f"layer: must be in [0, {pool.shape[0]}), got {layer}")


def _check_shards(mesh: Mesh, **heads: int) -> None:
    if HEAD_AXIS not in mesh.shape:
        raise ValueError(f"mesh: needs an axis {HEAD_AXIS!r}, has {tuple(mesh.axis_names)}")
    for name, count in heads.items():
        if count % mesh.shape[HEAD_AXIS]:
            raise ValueError(
                f"{name}: {count} heads do not divide over {mesh.shape[HEAD_AXIS]} shards"
            )


def write_kv(
    pool: jax.Array,
    layer: jax.Array | int,
    k: jax.Array,
    v: jax.Array,
    batch: AttentionBatch,
    *,
    backend: str = "xla",
    mesh: Mesh | None = None,
) -> jax.Array:
    """Write the step's k and v [T, kv_heads, head_dim] into their slots of one layer.

    In place where the pool is donated (or a loop's carry). layer: index into the whole pool, may
    be traced. Values are converted to the pool's dtype; padding tokens are dropped. With a mesh,
    kv heads are sharded over its axis "tensor". ValueError for a wrong shape or dtype.
    """
    _check_pool(pool, layer, batch)
    want = (batch.max_tokens, pool.shape[2], pool.shape[4])
    for name, value in (("k", k), ("v", v)):
        if value.shape != want:
            raise ValueError(
                f"{name}: want [tokens, kv_heads, head_dim] = {want}, got {value.shape}"
            )
    write = BACKENDS[resolve_backend(backend)].write
    if mesh is None:
        return write(pool, layer, k, v, batch)
    _check_shards(mesh, k=want[1])
    by_head, pool_spec = P(None, HEAD_AXIS), P(None, None, HEAD_AXIS)
    sharded = jax.shard_map(
        write,
        mesh=mesh,
        in_specs=(pool_spec, P(), by_head, by_head, P()),
        out_specs=pool_spec,
        check_vma=False,
    )
    return sharded(pool, jnp.asarray(layer, jnp.int32), k, v, batch)


def _check_attention(
    q: jax.Array,
    pool: jax.Array,
    batch: AttentionBatch,
    sliding_window: int | None,
    soft_cap: float | None,
    kind: int,
    decode_only: bool,
) -> None:
    if kind == HIDDEN:
        raise NotImplementedError("kind: hidden blocks cannot be read yet, only KV ones")
    if kind != KV:
        raise ValueError(f"kind: must be KV ({KV}) or HIDDEN ({HIDDEN}), got {kind}")
    kv_heads, head_dim = pool.shape[2], pool.shape[4]
    if q.ndim != 3 or q.shape[0] != batch.max_tokens or q.shape[2] != head_dim:
        raise ValueError(
            f"q: want [tokens, num_heads, head_dim] = ({batch.max_tokens}, *, {head_dim}), "
            f"got {q.shape}"
        )
    if q.shape[1] % kv_heads:
        raise ValueError(f"q: {q.shape[1]} heads are not a multiple of the pool's {kv_heads}")
    if decode_only and batch.max_tokens != batch.max_rows:
        raise ValueError(
            f"decode_only: needs as many tokens as rows, got {batch.max_tokens} and "
            f"{batch.max_rows}"
        )
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window: must be at least 1, got {sliding_window}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap: must be positive, got {soft_cap}")


def paged_attention(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    kind: int = KV,
    decode_only: bool,
    backend: str = "xla",
    mesh: Mesh | None = None,
) -> jax.Array:
    """Causal attention of the step's tokens over their rows' cached context, themselves included
    (write first): q [T, num_heads, head_dim] -> the same shape and dtype.

    Query head h reads kv head h // (num_heads // kv_heads). Scores are q . k * scale, then
    soft_cap * tanh(score / soft_cap) if given. sliding_window: a token sees the last so many
    positions, its own included. decode_only: T == R and token i is row i's only token. Padding
    tokens give zeros. Sums are in float32. With a mesh, heads are sharded over its axis "tensor".
    ValueError for a wrong shape, dtype or option.
    """
    _check_pool(pool, layer, batch)
    _check_attention(q, pool, batch, sliding_window, soft_cap, kind, decode_only)
    chosen = BACKENDS[resolve_backend(backend)].attend
    attend = functools.partial(
        chosen,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        decode_only=decode_only,
    )
    if mesh is None:
        return attend(q, pool, layer, batch)
    _check_shards(mesh, q=q.shape[1], pool=pool.shape[2])
    by_head = P(None, HEAD_AXIS)
    sharded = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(by_head, P(None, None, HEAD_AXIS), P(), P()),
        out_specs=by_head,
        check_vma=False,
    )
    return sharded(q, pool, jnp.asarray(layer, jnp.int32), batch)
