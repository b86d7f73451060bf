"""Paged decode attention on Pallas-Triton: one query token a row, split over the context.

FlashAttention's running softmax (Dao et al. 2022, Algorithm 1) over tiles gathered by the block
table; where rows times heads do not fill the GPU, the context is split and the parts merged by
their log-sum-exp (flash-decoding, Dao et al. 2023).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxserve.pallas_kernels import online_softmax, tuned
from jaxserve.pallas_kernels.batch import KV, AttentionBatch
from jaxserve.pallas_kernels.online_softmax import Softmax
from jaxserve.pallas_kernels.triton_common import (
    BatchRefs,
    Geometry,
    Ref,
    as_rows,
    batch_arguments,
    cdiv,
    context_of,
    decode_row,
    geometry_of,
    load_rows,
    power_of_two,
    split_bounds,
    store_rows,
    store_zeros,
    zero_programs,
)
from jaxserve.pallas_kernels.triton_merge import Parts, merge_parts, part_shapes, store_part


class Options(NamedTuple):
    """What a kernel is compiled for, besides shapes."""

    geometry: Geometry
    num_heads: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    splits: int
    tile: int
    decode_only: bool

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.num_heads // self.geometry.kv_heads

    @property
    def padded_group(self) -> int:
        """The same as a matrix unit's tile has it."""
        return max(16, power_of_two(self.group))


def _attend(
    refs: BatchRefs,
    q_ref: Ref,  # [T * H, D]
    pool_ref: Ref,  # [rows, D]
    at: tuple[jax.Array, jax.Array, jax.Array],
    options: Options,
) -> tuple[Softmax, jax.Array, jax.Array, jax.Array]:
    """The share of the program at (split, kv head, row): (softmax of the group's heads, their rows
    in q and the output [G], which of these are heads [G], whether the row is attended at all
    [])."""
    geometry, tile = options.geometry, options.tile
    split, head, row = at
    length, token = decode_row(refs, row, KV, decode_only=options.decode_only)
    lower = jnp.int32(0)
    if options.sliding_window is not None:
        lower = jnp.maximum(length - options.sliding_window, 0)
    member = jnp.arange(options.padded_group, dtype=jnp.int32)
    rows = token * options.num_heads + head * options.group + member
    is_head = member < options.group
    width, padded = geometry.head_dim, geometry.padded_dim
    q = load_rows(q_ref, rows, is_head, width, padded).astype(pool_ref.dtype)
    context = context_of(refs, geometry, row)

    def one_tile(j: jax.Array, state: Softmax) -> Softmax:
        position = j * tile + jnp.arange(tile, dtype=jnp.int32)
        inside = (position >= lower) & (position < length)
        k_rows = context.pool_rows(0, head, position, inside)
        v_rows = context.pool_rows(1, head, position, inside)
        k = load_rows(pool_ref, k_rows, inside, width, padded)
        v = load_rows(pool_ref, v_rows, inside, width, padded)
        products = online_softmax.dot(q, k, transposed=True)
        scores = online_softmax.prepare(products, options.scale, options.soft_cap)
        return online_softmax.step(state, jnp.where(inside[None, :], scores, -jnp.inf), v)

    begin, end = split_bounds(length, lower, split, options.splits, tile)
    state = online_softmax.start(options.padded_group, padded)
    return lax.fori_loop(begin, end, one_tile, state), rows, is_head, length > 0


def _whole_kernel(*refs: Ref, options: Options) -> None:
    """refs: the batch, q [T * H, D], the pool's rows, the output [T * H, D]. Programs behind those
    of the rows write zeros."""
    fields = len(BatchRefs._fields)
    batch, (q_ref, pool_ref, out_ref) = BatchRefs(*refs[:fields]), refs[fields:]
    place = _, head, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    max_rows = batch.context_lens.shape[0]

    @pl.when(row < max_rows)
    def _attend_row() -> None:
        state, rows, is_head, active = _attend(batch, q_ref, pool_ref, place, options)
        # With decode_only the rows are all there is to write; otherwise others write theirs.
        used = is_head & (active | options.decode_only)
        store_rows(out_ref, rows, online_softmax.finish(state), used)

    if not options.decode_only:

        @pl.when(row >= max_rows)
        def _zeros() -> None:
            program = (row - max_rows) * options.geometry.kv_heads + head
            store_zeros(batch, out_ref, program, KV, options.num_heads)


def _split_kernel(*refs: Ref, options: Options) -> None:
    """refs: the batch, q, the pool's rows; then one part's `triton_merge.Parts`."""
    fields = len(BatchRefs._fields)
    q_ref, pool_ref, *part_refs = refs[fields:]
    place = split, head, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    state, _, is_head, _ = _attend(BatchRefs(*refs[:fields]), q_ref, pool_ref, place, options)
    member = jnp.arange(options.padded_group, dtype=jnp.int32)
    at = (row * options.splits + split) * options.num_heads + head * options.group + member
    store_part(Parts(*part_refs), at, state, is_head)


def paged_decode(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    decode_only: bool,
    splits: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention of the KV decodes among q [T, H, D] -> the same shape; zeros for padding and the
    tokens of hidden rows. Those of chunks are left to `paged_prefill`: they may hold anything.

    splits: parts of the context, a power of two; None: as many as fill the GPU.
    """
    tokens, num_heads, head_dim = q.shape
    geometry, rows = geometry_of(pool), batch.max_rows
    launch = tuned.launch("decode", pool.dtype.itemsize, geometry.padded_dim)
    if splits is None:
        tiles = cdiv(batch.table_width * geometry.block_size, launch.tile)
        splits = tuned.context_splits(rows * geometry.kv_heads, tiles)
    options = Options(
        geometry, num_heads, scale, sliding_window, soft_cap, splits, launch.tile, decode_only
    )
    fields = batch_arguments(layer, batch)
    arguments = (*fields, q.reshape(-1, head_dim), as_rows(pool))
    params = plgpu.CompilerParams(num_warps=launch.warps, num_stages=launch.stages)
    out = jax.ShapeDtypeStruct((tokens * num_heads, head_dim), q.dtype)
    if splits > 1:
        parts = pl.pallas_call(
            functools.partial(_split_kernel, options=options),
            out_shape=part_shapes(rows * splits * num_heads, geometry.padded_dim),
            grid=(splits, geometry.kv_heads, rows),
            compiler_params=params,
            interpret=interpret,
            name="paged_decode_split",
        )(*arguments)
        done = merge_parts(Parts(*parts), fields, out, KV, num_heads, decode_only, interpret)
        return done.reshape(q.shape)
    zeros = 0 if decode_only else zero_programs(tokens, num_heads, geometry.kv_heads)
    done = pl.pallas_call(
        functools.partial(_whole_kernel, options=options),
        out_shape=out,
        grid=(1, geometry.kv_heads, rows + zeros),
        compiler_params=params,
        interpret=interpret,
        name="paged_decode",
    )(*arguments)
    return done.reshape(q.shape)
