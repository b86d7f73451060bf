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
    """Copies cached tokens from slot to slot, in all layers and heads.

    Args:
        pool: [layers, blocks, kv_heads, block_size, head_dim]; updated in place where it is
            donated.
        moves: int32 [M, 4]: (source block, source slot, target block, target slot). Made in any
            order, so no target may be a source or appear twice.
        count: int32 scalar, how many of the moves are made. The rest may hold anything.
        backend: As for `get_backend`.
        mesh: Shards kv heads over its axis "tensor"; None for one device.

    Returns:
        The pool.

    Raises:
        ValueError: A wrong shape or dtype.
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
    """Gathers cached tokens of all layers into one contiguous buffer, for a transfer to the host.

    Args:
        pool: [layers, blocks, kv_heads, block_size, head_dim].
        slots: int32 [M, 2]: (block, slot).
        count: int32 scalar, how many of the slots are read. The rest may hold anything.
        backend: As for `get_backend`.
        mesh: Shards kv heads over its axis "tensor"; None for one device.

    Returns:
        [M, layers, kv_heads, head_dim]; zeros from `count` on.

    Raises:
        ValueError: A wrong shape or dtype.
    """
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
    """Scatters a buffer as `stage_out` fills it back into slots of all layers.

    Args:
        pool: [layers, blocks, kv_heads, block_size, head_dim]; updated in place where it is
            donated.
        staging: [M, layers, kv_heads, head_dim] in the pool's dtype.
        slots: int32 [M, 2]: (block, slot), all distinct.
        count: int32 scalar, how many entries are written. The rest may hold anything.
        backend: As for `get_backend`.
        mesh: Shards kv heads over its axis "tensor"; None for one device.

    Returns:
        The pool.

    Raises:
        ValueError: A wrong shape or dtype.
    """
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
