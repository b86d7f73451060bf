"""Kernels over a device mesh: tensor parallelism by head (Megatron-LM, Shoeybi et al. 2019, section
3). The only module that knows how a kernel's arguments and results are cut."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxserve.pallas_kernels.batch import HIDDEN, AttentionBatch
from jaxserve.pallas_kernels.checks import HEAD_AXIS, check_shards
from jaxserve.pallas_kernels.hidden import HiddenProjection
from jaxserve.pallas_kernels.pool import Pool

WHOLE = P()  # the same on all shards
BY_HEAD = P(None, HEAD_AXIS)  # [tokens, heads, ...]
OF_HEADS = P(HEAD_AXIS)  # [heads]
BY_WIDTH = P(None, None, HEAD_AXIS)  # [tokens, heads, E], each head cut along E
POOL = P(None, None, HEAD_AXIS)  # [layers, blocks, kv_heads, ...]
STAGING = P(None, None, HEAD_AXIS)  # [slots, layers, kv_heads, ...]


def over_heads(
    kernel: Callable[..., Any],
    mesh: Mesh | None,
    takes: tuple[Any, ...],
    gives: P,
    **heads: int,
) -> Callable[..., Any]:
    """Wraps a kernel so that each shard of a mesh runs it on its own heads.

    Args:
        kernel: Takes and returns one shard's arrays.
        mesh: None to get the kernel itself.
        takes: Partition specs of the positional arguments.
        gives: Partition spec of the result.
        **heads: Numbers of heads that must divide over the mesh, by their names in errors.

    Raises:
        ValueError: The mesh has no axis "tensor", or some heads do not divide over it.
    """
    if mesh is None:
        return kernel
    check_shards(mesh, **heads)
    sharded: Callable[..., Any] = jax.shard_map(
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


def sum_as_far(
    scores: jax.Array, axis: int, piece: int, length: jax.Array, axis_name: str
) -> jax.Array:
    """Inside a shard, sums scores over the shards up to some length, piece by piece and in place.

    Only pieces of a loop's carry are copied; a choice between sums of several lengths would copy
    all scores in each.

    Args:
        scores: This shard's scores.
        axis: The axis that is cut into pieces.
        piece: Length of a piece; divides the axis.
        length: int32 [], length to sum. Scores after the last summed piece stay the shard's own.
        axis_name: The mesh axis to sum over.
    """

    def one_piece(i: jax.Array, scores: jax.Array) -> jax.Array:
        part = jax.lax.dynamic_slice_in_dim(scores, i * piece, piece, axis)
        summed = jax.lax.psum(part, axis_name)
        return jax.lax.dynamic_update_slice_in_dim(scores, summed, i * piece, axis)

    return jax.lax.fori_loop(0, (length + piece - 1) // piece, one_piece, scores)


def row_by_row(
    kernel: Callable[..., jax.Array],
    q: jax.Array,
    pool: Pool,
    layer: jax.Array,
    batch: AttentionBatch,
    projection: HiddenProjection,
    *,
    decode_only: bool,
) -> jax.Array:
    """Inside a shard, projected attention of the shard's heads, one hidden row after another.

    A projected head needs all of x, but a shard has only a part. So one row's blocks of one layer
    are gathered at a time, as a pool [1, W, kv_heads, block_size, head_dim]. At most one context is
    gathered at once, and sending x takes half of what all heads' K and V would.

    Args:
        kernel: Takes the other arguments except decode_only.
        q: [T, H, D], the shard's heads.
        pool: The shard's part of the pool.
        layer: Index into the whole pool.
        batch: The step's rows and tokens.
        projection: The columns of the shard's heads.
        decode_only: As in `attention.paged_attention`.

    Returns:
        [T, H, D]; zeros for tokens of rows that are not hidden.
    """
    index = jnp.arange(batch.max_rows, dtype=jnp.int32)
    hidden = (batch.kind == HIDDEN) & (batch.query_lens > 0) & (index < batch.num_rows)
    order = jnp.argsort(~hidden, stable=True)

    def gather(blocks: jax.Array, part: jax.Array) -> jax.Array:
        return jax.lax.all_gather(part[layer, blocks], HEAD_AXIS, axis=1, tiled=True)[None]

    def one_row(i: jax.Array, out: jax.Array) -> jax.Array:
        row = order[i]
        whole = jax.tree.map(functools.partial(gather, batch.tables[row, 0]), pool)
        if decode_only:
            token = batch.query_start[row]
            query = jax.lax.dynamic_slice_in_dim(q, token, 1)
            done = kernel(query, whole, jnp.int32(0), _alone(batch, row, None), projection)
            return jax.lax.dynamic_update_slice_in_dim(out, done, token, axis=0)
        alone = _alone(batch, row, jnp.where(batch.token_row == row, 0, 1))
        return out + kernel(q, whole, jnp.int32(0), alone, projection)

    number = jnp.sum(hidden)
    # Made from q: otherwise XLA makes the zeros of all layers when the step begins, and keeps them.
    zeros = jnp.where(number < 0, q, 0)
    return jax.lax.fori_loop(0, number, one_row, zeros)


def _alone(batch: AttentionBatch, row: jax.Array, token_row: jax.Array | None) -> AttentionBatch:
    """One row as a batch, its tables naming gathered blocks in order. token_row: int32 [T] for all
    tokens of the batch, with other rows' tokens as padding; None for the row's single token."""
    zero = jnp.zeros(1, jnp.int32)
    table = jnp.arange(batch.table_width, dtype=jnp.int32)
    return AttentionBatch(
        tables=jnp.broadcast_to(table, (1, 2, batch.table_width)),
        context_lens=batch.context_lens[row][None],
        query_start=zero if token_row is None else batch.query_start[row][None],
        query_lens=batch.query_lens[row][None],
        direction=batch.direction[row][None],
        kind=jnp.full(1, HIDDEN, jnp.int32),
        token_row=zero if token_row is None else token_row,
        num_decodes=jnp.int32(token_row is None),
        num_rows=jnp.int32(1),
    )
