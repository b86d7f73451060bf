"""Static validation: shapes, dtypes and options, at trace time. Costs nothing at run time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.pallas_kernels.batch import AttentionBatch
from jaxserve.pallas_kernels.pool import Pool, ScaledPool

HEAD_AXIS = "tensor"


def check_pool(pool: Pool) -> None:
    """Raises ValueError unless this can be a pool."""
    if pool.ndim != 5:
        raise ValueError(
            f"pool: want [layers, blocks, kv_heads, block_size, head_dim], got {pool.shape}"
        )
    if isinstance(pool, ScaledPool):
        want = pool.shape[:4]
        if pool.scales.shape != want or pool.scales.dtype != jnp.float32:
            raise ValueError(
                f"pool.scales: want float32 {list(want)}, got {pool.scales.dtype} "
                f"{list(pool.scales.shape)}"
            )
    elif not jnp.issubdtype(pool.dtype, jnp.floating):
        raise ValueError(f"pool: want a floating dtype, or int8 with scales, got {pool.dtype}")


def check_layer(pool: Pool, layer: jax.Array | int) -> None:
    """Raises ValueError unless this can be a layer of the pool."""
    if jnp.shape(layer) != () or not jnp.issubdtype(jnp.result_type(layer), jnp.integer):
        raise ValueError(f"layer: want an integer scalar, got shape {jnp.shape(layer)}")
    if isinstance(layer, int) and not 0 <= layer < pool.shape[0]:
        raise ValueError(f"layer: must be in [0, {pool.shape[0]}), got {layer}")


def check_step(pool: Pool, layer: jax.Array | int, batch: AttentionBatch) -> None:
    """The checks of all functions of a step. Raises ValueError for a wrong shape or dtype."""
    batch.validate()
    check_pool(pool)
    check_layer(pool, layer)


def check_tokens(name: str, value: jax.Array, want: tuple[int, int, int], axes: str) -> None:
    """Checks the shape of a per-token array.

    Args:
        name: The argument's name, for the error.
        value: The array.
        want: The shape that it must have.
        axes: Names of the axes, for the error.

    Raises:
        ValueError: Another shape.
    """
    if value.shape != want:
        raise ValueError(f"{name}: want [{axes}] = {want}, got {value.shape}")


def check_queries(q: jax.Array, batch: AttentionBatch, width: int, name: str = "q") -> None:
    """Checks that queries are [tokens, any number of heads, width].

    Args:
        q: The queries.
        batch: The step's batch.
        width: Elements of a head.
        name: The argument's name, for the error.

    Raises:
        ValueError: Another shape.
    """
    if q.ndim != 3 or q.shape[0] != batch.max_tokens or q.shape[2] != width:
        raise ValueError(
            f"{name}: want [tokens, num_heads, width] = ({batch.max_tokens}, *, {width}), "
            f"got {q.shape}"
        )


def check_decode_only(batch: AttentionBatch, decode_only: bool) -> None:
    """Raises ValueError if decode_only is set and the batch has not as many tokens as rows."""
    if decode_only and batch.max_tokens != batch.max_rows:
        raise ValueError(
            f"decode_only: needs as many tokens as rows, got {batch.max_tokens} and "
            f"{batch.max_rows}"
        )


def check_options(sliding_window: int | None, soft_cap: float | None) -> None:
    """Raises ValueError for an invalid window or cap."""
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window: must be at least 1, got {sliding_window}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap: must be positive, got {soft_cap}")


def check_shards(mesh: Mesh, **heads: int) -> None:
    """Raises ValueError unless each of these numbers of heads divides over the mesh."""
    if HEAD_AXIS not in mesh.shape:
        raise ValueError(f"mesh: needs an axis {HEAD_AXIS!r}, has {tuple(mesh.axis_names)}")
    for name, count in heads.items():
        if count % mesh.shape[HEAD_AXIS]:
            raise ValueError(
                f"{name}: {count} heads do not divide over {mesh.shape[HEAD_AXIS]} shards"
            )


def check_places(name: str, places: jax.Array, columns: int, count: jax.Array | int) -> None:
    """Checks a list of slots or moves.

    Args:
        name: The argument's name, for the error.
        places: Must be int32 [M, columns].
        columns: Numbers of one entry.
        count: Must be an integer scalar.

    Raises:
        ValueError: Another shape or dtype.
    """
    if places.ndim != 2 or places.shape[1] != columns or places.dtype != jnp.int32:
        raise ValueError(
            f"{name}: want int32 [M, {columns}], got {places.dtype} {list(places.shape)}"
        )
    if jnp.shape(count) != () or not jnp.issubdtype(jnp.result_type(count), jnp.integer):
        raise ValueError(f"count: want an integer scalar, got shape {jnp.shape(count)}")
