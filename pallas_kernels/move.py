"""Slots between blocks, and to and from a staging buffer: for sharing blocks, checkpoints and
defragmentation. One launch for many."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.pallas_kernels import checks
from jaxserve.pallas_kernels.backends import get_backend
from jaxserve.pallas_kernels.sharding import POOL, STAGING, WHOLE, over_heads


def move_slots(
    pool: jax.Array,
    moves: jax.Array,
    count: jax.Array | int,
    *,
    backend: str = "xla",
    mesh: Mesh | None = None,
) -> jax.Array:
    """The pool with what was in (source block, slot) now in (target block, slot) too, in all layers
    and heads; in place where the pool is donated.

    moves: int32 [M, 4], (source block, source slot, target block, target slot) each, of which the
    first count (int32 scalar) are made; the rest may hold anything. No target may be a source or
    twice a target: they are made in any order. ValueError for a wrong shape or dtype.
    """
    checks.check_pool(pool)
    checks.check_places("moves", moves, 4, count)
    kernel, heads = get_backend(backend).move, pool.shape[2]
    run = over_heads(kernel, mesh, (POOL, WHOLE, WHOLE), POOL, pool=heads)
    return run(pool, moves, jnp.asarray(count, jnp.int32))


def stage_out(
    pool: jax.Array,
    slots: jax.Array,
    count: jax.Array | int,
    *,
    backend: str = "xla",
    mesh: Mesh | None = None,
) -> jax.Array:
    """What lies in slots int32 [M, 2], (block, slot) each, in all layers: [M, layers, kv_heads,
    head_dim], contiguous, for a transfer to the host. From `count` on, zeros; those entries of
    slots may hold anything. ValueError for a wrong shape or dtype."""
    checks.check_pool(pool)
    checks.check_places("slots", slots, 2, count)
    kernel, heads = get_backend(backend).stage_out, pool.shape[2]
    run = over_heads(kernel, mesh, (POOL, WHOLE, WHOLE), STAGING, pool=heads)
    return run(pool, slots, jnp.asarray(count, jnp.int32))


def stage_in(
    pool: jax.Array,
    staging: jax.Array,
    slots: jax.Array,
    count: jax.Array | int,
    *,
    backend: str = "xla",
    mesh: Mesh | None = None,
) -> jax.Array:
    """The pool with the first `count` of staging [M, layers, kv_heads, head_dim] in their slots
    int32 [M, 2], which are distinct; in place where the pool is donated. The other entries may hold
    anything. ValueError for a wrong shape or dtype."""
    checks.check_pool(pool)
    checks.check_places("slots", slots, 2, count)
    want = (len(slots), pool.shape[0], pool.shape[2], pool.shape[4])
    if staging.shape != want or staging.dtype != pool.dtype:
        raise ValueError(
            f"staging: want {pool.dtype} [M, layers, kv_heads, head_dim] = {want}, got "
            f"{staging.dtype} {staging.shape}"
        )
    kernel, heads = get_backend(backend).stage_in, pool.shape[2]
    run = over_heads(kernel, mesh, (POOL, STAGING, WHOLE, WHOLE), POOL, pool=heads)
    return run(pool, staging, slots, jnp.asarray(count, jnp.int32))
