"""Kernels over a device mesh: tensor parallelism by head (Megatron-LM, Shoeybi et al. 2019, section
3). The one place that knows how what a kernel takes and gives is cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxserve.pallas_kernels.batch import AttentionBatch
from jaxserve.pallas_kernels.checks import HEAD_AXIS, check_shards
from jaxserve.pallas_kernels.hidden import HiddenProjection

WHOLE = P()  # the same on all shards
BY_HEAD = P(None, HEAD_AXIS)  # [tokens, heads, ...]
BY_WIDTH = P(None, None, HEAD_AXIS)  # [tokens, heads, E], each head cut along E
POOL = P(None, None, HEAD_AXIS)  # [layers, blocks, kv_heads, ...]
STAGING = P(None, None, HEAD_AXIS)  # [slots, layers, kv_heads, ...]


def over_heads(
    kernel: Callable[..., jax.Array],
    mesh: Mesh | None,
    takes: tuple[Any, ...],
    gives: P,
    **heads: int,
) -> Callable[..., jax.Array]:
    """The kernel, run by each shard of the mesh on its own heads; without a mesh the kernel itself.

    takes, gives: how its positional arguments and its result are cut, as partition specs. heads:
    how many there are of each, by the name an error shall give them. ValueError unless the mesh has
    the axis "tensor" and all of them divide over it.
    """
    if mesh is None:
        return kernel
    check_shards(mesh, **heads)
    sharded: Callable[..., jax.Array] = jax.shard_map(
        kernel, mesh=mesh, in_specs=takes, out_specs=gives, check_vma=False
    )
    return sharded


def projection_specs(projection: HiddenProjection) -> HiddenProjection:
    """The projection's columns cut by head, as a tree of partition specs."""
    columns, bias = P(None, HEAD_AXIS), P(HEAD_AXIS)
    specs = {"wk": columns, "wv": columns, "bk": bias, "bv": bias, "k_norm": P(), "rotation": P()}
    given: dict[str, Any] = {
        name: spec for name, spec in specs.items() if getattr(projection, name) is not None
    }
    return dataclasses.replace(projection, **given)


def gather_blocks(
    pool: jax.Array, layer: jax.Array, batch: AttentionBatch
) -> tuple[jax.Array, AttentionBatch]:
    """Inside a shard: a layer's hidden blocks with the parts of all shards, as a pool of one layer
    [1, N, kv_heads, block_size, head_dim], and the batch with tables into it.

    N: the blocks that the tables can name, where those are fewer than the pool's. A projected head
    needs all of x, and x is half of what all heads' K and V would be to send.
    """
    blocks, entries = pool.shape[1], batch.max_rows * batch.table_width
    mine = jax.lax.dynamic_index_in_dim(pool, layer, keepdims=False)
    tables = batch.tables
    if entries < blocks:
        mine = mine[tables[:, 0].reshape(-1)]
        ids = jnp.arange(entries, dtype=jnp.int32).reshape(batch.max_rows, 1, batch.table_width)
        tables = jnp.broadcast_to(ids, tables.shape)
    whole = jax.lax.all_gather(mine, HEAD_AXIS, axis=1, tiled=True)[None]
    return whole, dataclasses.replace(batch, tables=tables)
