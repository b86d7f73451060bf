"""Copies into, out of and inside the pool on Pallas-Triton, in place, one launch each.

A slot of one layer is kv_heads runs of head_dim elements, block_size runs apart. A program copies
a slice of one slot: element e of the slot is element e % head_dim of head e // head_dim.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxserve.pallas_kernels.batch import HIDDEN, AttentionBatch
from jaxserve.pallas_kernels.gpu_triton import tuning
from jaxserve.pallas_kernels.gpu_triton.common import (
    BatchRefs,
    Geometry,
    Ref,
    as_rows,
    batch_arguments,
    cdiv,
    context_of,
    geometry_of,
    power_of_two,
)


class _Slice:
    """The elements of a slot that one program copies: `at` int32 [N], `inside` bool [N], and their
    head and column in the pool."""

    def __init__(self, index: jax.Array, size: int, geometry: Geometry) -> None:
        width = jnp.int32(geometry.head_dim)
        self.at = index * size + jnp.arange(size, dtype=jnp.int32)
        self.inside = self.at < geometry.kv_heads * geometry.head_dim
        self.head, self.column = lax.div(self.at, width), lax.rem(self.at, width)


def _slice_size(geometry: Geometry) -> int:
    """Elements of a slot that one program copies."""
    whole = power_of_two(geometry.kv_heads * geometry.head_dim)
    return min(whole, tuning.launch("copy", 0, 0).tile)


def _slices(geometry: Geometry) -> int:
    return cdiv(geometry.kv_heads * geometry.head_dim, _slice_size(geometry))


def _call(kernel: Any, geometry: Geometry, **arguments: Any) -> Any:
    kernel = functools.partial(kernel, geometry=geometry, size=_slice_size(geometry))
    params = plgpu.CompilerParams(num_warps=tuning.launch("copy", 0, 0).warps, num_stages=1)
    return pl.pallas_call(kernel, compiler_params=params, **arguments)


def _write_kernel(*refs: Ref, geometry: Geometry, size: int) -> None:
    """refs: the batch, k and v (and x, where hidden rows can be) [T, E], the pool's rows in and
    out."""
    fields = len(BatchRefs._fields)
    batch = BatchRefs(*refs[:fields])
    *values, _, out_ref = refs[fields:]
    part, token = _Slice(pl.program_id(0), size, geometry), pl.program_id(1)
    row = batch.token_row[token]
    used = row < batch.context_lens.shape[0]
    row = jnp.where(used, row, 0)
    position = batch.context_lens[row] - batch.query_lens[row] + token - batch.query_start[row]
    position = jnp.where(used, position, 0)
    hidden = batch.kind[row] == HIDDEN
    context = context_of(batch, geometry, row)

    def put(value_ref: Ref, plane: int, wanted: jax.Array) -> None:
        mask = part.inside & wanted
        value = plgpu.load(value_ref.at[token, part.at], mask=mask, other=0)
        rows = context.pool_rows(plane, part.head, position, None)
        plgpu.store(out_ref.at[rows, part.column], value.astype(out_ref.dtype), mask=mask)

    kv = used & ~hidden
    for plane, value_ref in enumerate(values[:2]):
        put(value_ref, plane, kv)
    if len(values) == 3:
        put(values[2], 0, used & hidden)


def write(
    pool: jax.Array,
    layer: jax.Array | int,
    k: jax.Array,
    v: jax.Array,
    x: jax.Array | None,
    batch: AttentionBatch,
    *,
    interpret: bool = False,
) -> jax.Array:
    """See `backends.Backend.write`: k, v and x [T, kv_heads, head_dim] into their slots."""
    geometry = geometry_of(pool)
    flat = (batch.max_tokens, geometry.kv_heads * geometry.head_dim)
    values = [value.reshape(flat) for value in (k, v, x) if value is not None]
    rows = as_rows(pool)
    arguments = (*batch_arguments(layer, batch), *values, rows)
    done = _call(
        _write_kernel,
        geometry,
        out_shape=jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        grid=(_slices(geometry), batch.max_tokens),
        input_output_aliases={len(arguments) - 1: 0},
        interpret=interpret,
        name="pool_write",
    )(*arguments)
    return done.reshape(pool.shape)


def _pool_rows(
    geometry: Geometry, part: _Slice, layer: jax.Array, block: jax.Array, slot: jax.Array
) -> jax.Array:
    return geometry.row(layer, block, part.head, slot)


def _move_kernel(
    moves_ref: Ref,  # [M, 4]: block and slot from, block and slot to
    count_ref: Ref,  # [1]
    _: Ref,  # the pool's rows, aliased to the output
    out_ref: Ref,  # [rows, D]
    *,
    geometry: Geometry,
    size: int,
) -> None:
    part, layer, index = (
        _Slice(pl.program_id(0), size, geometry),
        pl.program_id(1),
        pl.program_id(2),
    )
    mask = part.inside & (index < count_ref[0])
    source = _pool_rows(geometry, part, layer, moves_ref[index, 0], moves_ref[index, 1])
    target = _pool_rows(geometry, part, layer, moves_ref[index, 2], moves_ref[index, 3])
    value = plgpu.load(out_ref.at[source, part.column], mask=mask, other=0)
    plgpu.store(out_ref.at[target, part.column], value, mask=mask)


def move(
    pool: jax.Array, moves: jax.Array, count: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """The first `count` of moves int32 [M, 4] (block, slot to block, slot), all layers, in place.
    Sources and targets must be disjoint: programs run in any order."""
    geometry, rows = geometry_of(pool), as_rows(pool)
    done = _call(
        _move_kernel,
        geometry,
        out_shape=jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        grid=(_slices(geometry), geometry.layers, moves.shape[0]),
        input_output_aliases={2: 0},
        interpret=interpret,
        name="pool_move",
    )(moves, jnp.asarray(count, jnp.int32).reshape(1), rows)
    return done.reshape(pool.shape)


def _stage_out_kernel(
    slots_ref: Ref,  # [M, 2]: block and slot
    count_ref: Ref,  # [1]
    pool_ref: Ref,  # [rows, D]
    out_ref: Ref,  # [M, layers, E]
    *,
    geometry: Geometry,
    size: int,
) -> None:
    part, layer, index = (
        _Slice(pl.program_id(0), size, geometry),
        pl.program_id(1),
        pl.program_id(2),
    )
    source = _pool_rows(geometry, part, layer, slots_ref[index, 0], slots_ref[index, 1])
    mask = part.inside & (index < count_ref[0])
    value = plgpu.load(pool_ref.at[source, part.column], mask=mask, other=0)
    plgpu.store(out_ref.at[index, layer, part.at], value, mask=part.inside)


def stage_out(
    pool: jax.Array, slots: jax.Array, count: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """The first `count` of slots int32 [M, 2] (block, slot) of all layers -> [M, layers, kv_heads,
    head_dim]; the rest zeros."""
    geometry = geometry_of(pool)
    moves, width = slots.shape[0], geometry.kv_heads * geometry.head_dim
    staged = _call(
        _stage_out_kernel,
        geometry,
        out_shape=jax.ShapeDtypeStruct((moves, geometry.layers, width), pool.dtype),
        grid=(_slices(geometry), geometry.layers, moves),
        interpret=interpret,
        name="pool_stage_out",
    )(slots, jnp.asarray(count, jnp.int32).reshape(1), as_rows(pool))
    return staged.reshape(moves, geometry.layers, geometry.kv_heads, geometry.head_dim)


def _stage_in_kernel(
    slots_ref: Ref,  # [M, 2]: block and slot
    count_ref: Ref,  # [1]
    staging_ref: Ref,  # [M, layers, E]
    _: Ref,  # the pool's rows, aliased to the output
    out_ref: Ref,  # [rows, D]
    *,
    geometry: Geometry,
    size: int,
) -> None:
    part, layer, index = (
        _Slice(pl.program_id(0), size, geometry),
        pl.program_id(1),
        pl.program_id(2),
    )
    target = _pool_rows(geometry, part, layer, slots_ref[index, 0], slots_ref[index, 1])
    mask = part.inside & (index < count_ref[0])
    value = plgpu.load(staging_ref.at[index, layer, part.at], mask=mask, other=0)
    plgpu.store(out_ref.at[target, part.column], value.astype(out_ref.dtype), mask=mask)


def stage_in(
    pool: jax.Array,
    staging: jax.Array,
    slots: jax.Array,
    count: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """The first `count` of staging [M, layers, kv_heads, head_dim] into their slots int32 [M, 2]
    (block, slot) of all layers, in place."""
    geometry, rows = geometry_of(pool), as_rows(pool)
    moves, width = slots.shape[0], geometry.kv_heads * geometry.head_dim
    done = _call(
        _stage_in_kernel,
        geometry,
        out_shape=jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        grid=(_slices(geometry), geometry.layers, moves),
        input_output_aliases={3: 0},
        interpret=interpret,
        name="pool_stage_in",
    )(
        slots,
        jnp.asarray(count, jnp.int32).reshape(1),
        staging.reshape(moves, geometry.layers, width),
        rows,
    )
    return done.reshape(pool.shape)
