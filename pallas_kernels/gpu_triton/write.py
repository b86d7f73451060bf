"""Copies into, out of and within the pool on Pallas-Triton, in place, each in one launch.

A slot of one layer is kv_heads runs of head_dim elements, block_size runs apart. A program copies
a slice of one slot: element e of the slot is element e % head_dim of head e // head_dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxserve.pallas_kernels.batch import HIDDEN, AttentionBatch
from jaxserve.pallas_kernels.gpu_triton import common, tuning


class _Slice:
    """The elements of a slot that one program copies: `at` int32 [N], `inside` bool [N], and their
    head and column in the pool."""

    def __init__(self, index: jax.Array, size: int, geometry: common.Geometry) -> None:
        width = jnp.int32(geometry.head_dim)
        self.at = index * size + jnp.arange(size, dtype=jnp.int32)
        self.inside = self.at < geometry.kv_heads * geometry.head_dim
        self.head, self.column = lax.div(self.at, width), lax.rem(self.at, width)


def _slice_size(geometry: common.Geometry) -> int:
    """Elements of a slot that one program copies."""
    whole = common.power_of_two(geometry.kv_heads * geometry.head_dim)
    return min(whole, tuning.launch("copy", 0, 0).tile)


def _slices(geometry: common.Geometry) -> int:
    return common.cdiv(geometry.kv_heads * geometry.head_dim, _slice_size(geometry))


def _call(kernel: Any, geometry: common.Geometry, **arguments: Any) -> Any:
    kernel = functools.partial(kernel, geometry=geometry, size=_slice_size(geometry))
    params = plgpu.CompilerParams(num_warps=tuning.launch("copy", 0, 0).warps, num_stages=1)
    return pl.pallas_call(kernel, compiler_params=params, **arguments)


def _write_kernel(*refs: common.Ref, geometry: common.Geometry, size: int) -> None:
    """refs: the batch, k and v (and x, if there can be hidden rows) [T, E], the pool's rows in and
    out."""
    fields = len(common.BatchRefs._fields)
    batch = common.BatchRefs(*refs[:fields])
    *values, _, out_ref = refs[fields:]
    part, token = _Slice(pl.program_id(0), size, geometry), pl.program_id(1)
    row = batch.token_row[token]
    used = row < batch.context_lens.shape[0]
    row = jnp.where(used, row, 0)
    position = batch.context_lens[row] - batch.query_lens[row] + token - batch.query_start[row]
    position = jnp.where(used, position, 0)
    hidden = batch.kind[row] == HIDDEN
    context = common.context_of(batch, geometry, row)

    def put(value_ref: common.Ref, plane: int, wanted: jax.Array) -> None:
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
    geometry = common.geometry_of(pool)
    flat = (batch.max_tokens, geometry.kv_heads * geometry.head_dim)
    given = (value.astype(pool.dtype) for value in (k, v, x) if value is not None)
    values = [common.as_bits(value).reshape(flat) for value in given]
    rows = common.as_rows(pool)
    arguments = (*common.batch_arguments(layer, batch), *values, rows)
    done = _call(
        _write_kernel,
        geometry,
        out_shape=jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        grid=(_slices(geometry), batch.max_tokens),
        input_output_aliases={len(arguments) - 1: 0},
        interpret=interpret,
        name="pool_write",
    )(*arguments)
    return _as_pool(done, pool)


def _as_pool(rows: jax.Array, pool: jax.Array, shape: tuple[int, ...] = ()) -> jax.Array:
    """A pool's rows, see `common.as_rows`, as the pool, or with its dtype and another shape."""
    if rows.dtype != pool.dtype:
        rows = lax.bitcast_convert_type(rows, pool.dtype)
    return rows.reshape(shape or pool.shape)


# (places, number of the place, layer, part of the slot) -> place in an array.
Place = Callable[[common.Ref, jax.Array, jax.Array, _Slice, common.Geometry], tuple[jax.Array, ...]]


def _pooled(
    column: int,
    places: common.Ref,
    index: jax.Array,
    layer: jax.Array,
    part: _Slice,
    geometry: common.Geometry,
) -> tuple[jax.Array, ...]:
    """Place in the pool's rows: `places` has its block and slot from this column on."""
    block, slot = places[index, column], places[index, column + 1]
    return geometry.row(layer, block, part.head, slot), part.column


def _staged(
    places: common.Ref, index: jax.Array, layer: jax.Array, part: _Slice, geometry: common.Geometry
) -> tuple[jax.Array, ...]:
    """Place in a staging buffer [M, layers, E]."""
    return index, layer, part.at


_FIRST, _SECOND = functools.partial(_pooled, 0), functools.partial(_pooled, 2)


def _copy_kernel(
    places: common.Ref,  # int32 [M, any]
    count: common.Ref,  # int32 [1]
    *arrays: common.Ref,  # inputs, then the output, perhaps after its alias
    source: Place,
    target: Place,
    zeros: bool,  # for places beyond the count
    geometry: common.Geometry,
    size: int,
) -> None:
    part, layer = _Slice(pl.program_id(0), size, geometry), pl.program_id(1)
    index, out = pl.program_id(2), arrays[-1]
    mask, about = part.inside & (index < count[0]), (places, index, layer, part, geometry)
    value = plgpu.load(arrays[0].at[source(*about)], mask=mask, other=0).astype(out.dtype)
    plgpu.store(out.at[target(*about)], value, mask=part.inside if zeros else mask)


def _copy(
    geometry: common.Geometry,
    places: jax.Array,
    count: jax.Array,
    arrays: tuple[jax.Array, ...],
    source: Place,
    target: Place,
    staged: jax.ShapeDtypeStruct | None = None,
    **options: Any,
) -> jax.Array:
    """Copies to `staged`, or in place to the last of the arrays. Returns what was copied to."""
    last, in_place = arrays[-1], {1 + len(arrays): 0}
    done: jax.Array = _call(
        functools.partial(_copy_kernel, source=source, target=target, zeros=staged is not None),
        geometry,
        out_shape=staged or jax.ShapeDtypeStruct(last.shape, last.dtype),
        grid=(_slices(geometry), geometry.layers, len(places)),
        input_output_aliases={} if staged else in_place,
        **options,
    )(places, jnp.asarray(count, jnp.int32).reshape(1), *arrays)
    return done


def move(
    pool: jax.Array, moves: jax.Array, count: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """Copies slots in all layers, in place.

    Args:
        pool: [layers, blocks, kv_heads, block_size, head_dim].
        moves: int32 [M, 4]: (block, slot) to (block, slot). Sources and targets must be disjoint,
            since programs run in any order.
        count: int32 [], how many of the moves are made.
        interpret: Run in the interpreter.
    """
    options: dict[str, Any] = {"interpret": interpret, "name": "pool_move"}
    given = (common.geometry_of(pool), moves, count, (common.as_rows(pool),))
    return _as_pool(_copy(*given, _FIRST, _SECOND, **options), pool)


def stage_out(
    pool: jax.Array, slots: jax.Array, count: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """Gathers slots of all layers into one buffer.

    Args:
        pool: [layers, blocks, kv_heads, block_size, head_dim].
        slots: int32 [M, 2]: (block, slot).
        count: int32 [], how many of the slots are read.
        interpret: Run in the interpreter.

    Returns:
        [M, layers, kv_heads, head_dim]; zeros from `count` on.
    """
    geometry = common.geometry_of(pool)
    shape = (len(slots), geometry.layers, geometry.kv_heads, geometry.head_dim)
    rows = common.as_rows(pool)
    staged = jax.ShapeDtypeStruct((*shape[:2], shape[2] * shape[3]), rows.dtype)
    options: dict[str, Any] = {"interpret": interpret, "name": "pool_stage_out"}
    done = _copy(geometry, slots, count, (rows,), _FIRST, _staged, staged, **options)
    return _as_pool(done, pool, shape)


def stage_in(
    pool: jax.Array,
    staging: jax.Array,
    slots: jax.Array,
    count: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Scatters a buffer into slots of all layers, in place.

    Args:
        pool: [layers, blocks, kv_heads, block_size, head_dim].
        staging: [M, layers, kv_heads, head_dim].
        slots: int32 [M, 2]: (block, slot).
        count: int32 [], how many entries are written.
        interpret: Run in the interpreter.
    """
    flat = common.as_bits(staging).reshape(*staging.shape[:2], -1)
    options: dict[str, Any] = {"interpret": interpret, "name": "pool_stage_in"}
    given = (common.geometry_of(pool), slots, count, (flat, common.as_rows(pool)))
    return _as_pool(_copy(*given, _staged, _FIRST, **options), pool)
