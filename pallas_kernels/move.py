"""Slots between blocks, and to and from a staging buffer: for sharing blocks, checkpoints and
defragmentation. One launch for many."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxserve.pallas_kernels import checks
from jaxserve.pallas_kernels.backends import get_backend
from jaxserve.pallas_kernels.pool import Pool, SamePool, ScaledPool, staged_width, widen
from jaxserve.pallas_kernels.sharding import POOL, STAGING, WHOLE, over_heads


def move_slots(
    pool: SamePool,
    moves: jax.Array,
    count: jax.Array | int,
    *,
    backend: str = "xla",
    mesh: Mesh | None = None,
) -> SamePool:
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
    by, heads = get_backend(backend), pool.shape[2]

    def moved(pool: Pool, moves: jax.Array, count: jax.Array) -> Pool:
        if not isinstance(pool, ScaledPool):
            return by.move(pool, moves, count)
        scales = by.scales.move(pool.scales, moves, count)
        return ScaledPool(by.move(pool.values, moves, count), scales)

    run = over_heads(moved, mesh, (POOL, WHOLE, WHOLE), POOL, pool=heads)
    done: SamePool = run(pool, moves, jnp.asarray(count, jnp.int32))
    return done


def stage_out(
    pool: Pool,
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
        [M, layers, kv_heads, head_dim]; zeros from `count` on. For an int8 pool the last axis has
        `SCALE_BYTES` more, for the vector's scale.

    Raises:
        ValueError: A wrong shape or dtype.
    """
    checks.check_pool(pool)
    checks.check_places("slots", slots, 2, count)
    by, heads = get_backend(backend), pool.shape[2]

    def staged(pool: Pool, slots: jax.Array, count: jax.Array) -> jax.Array:
        if not isinstance(pool, ScaledPool):
            return by.stage_out(pool, slots, count)
        scales = by.scales.stage_out(pool.scales, slots, count)
        scales = lax.bitcast_convert_type(scales, jnp.int8)
        return jnp.concatenate([by.stage_out(pool.values, slots, count), scales], axis=-1)

    run = over_heads(staged, mesh, (POOL, WHOLE, WHOLE), STAGING, pool=heads)
    done: jax.Array = run(pool, slots, jnp.asarray(count, jnp.int32))
    return done


def stage_in(
    pool: SamePool,
    staging: jax.Array,
    slots: jax.Array,
    count: jax.Array | int,
    *,
    backend: str = "xla",
    mesh: Mesh | None = None,
) -> SamePool:
    """Scatters a buffer from `stage_out` back into slots of all layers.

    Args:
        pool: [layers, blocks, kv_heads, block_size, head_dim]; updated in place where it is
            donated.
        staging: As from `stage_out`, in the pool's dtype.
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
    want = staging_shape(pool, len(slots))
    if staging.shape != want or staging.dtype != pool.dtype:
        raise ValueError(
            f"staging: want {pool.dtype} [M, layers, kv_heads, width] = {want}, got "
            f"{staging.dtype} {staging.shape}"
        )
    by, heads = get_backend(backend), pool.shape[2]

    def put(pool: Pool, staging: jax.Array, slots: jax.Array, count: jax.Array) -> Pool:
        if not isinstance(pool, ScaledPool):
            return by.stage_in(pool, staging, slots, count)
        values, scales = _parted(staging, pool.shape[4])
        return ScaledPool(
            by.stage_in(pool.values, values, slots, count),
            by.scales.stage_in(pool.scales, scales, slots, count),
        )

    run = over_heads(put, mesh, (POOL, STAGING, WHOLE, WHOLE), POOL, pool=heads)
    done: SamePool = run(pool, staging, slots, jnp.asarray(count, jnp.int32))
    return done


def staging_shape(pool: Pool, slots: int) -> tuple[int, ...]:
    """The shape of a buffer for this many slots, see `stage_out`."""
    layers, _, heads, _, dim = pool.shape
    return slots, layers, heads, staged_width(dim, pool.dtype)


def staged_vectors(pool: Pool, staging: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The result of `stage_out` as numbers to compute with: [M, layers, kv_heads, head_dim]."""
    if not isinstance(pool, ScaledPool):
        return widen(staging, None, dtype)
    return widen(*_parted(staging, pool.shape[4]), dtype)


def _parted(staging: jax.Array, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """The values and scales of a staging buffer of int8."""
    scales = lax.bitcast_convert_type(staging[..., head_dim:], jnp.float32)
    return staging[..., :head_dim], scales
