"""Attention over parts of a context, put together by their log-sum-exp (flash-decoding, Dao et al.
2023), on Pallas-Triton."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxserve.pallas_kernels.online_softmax import NOTHING_SEEN, Softmax
from jaxserve.pallas_kernels.triton_common import (
    BatchRefs,
    Ref,
    decode_row,
    load_rows,
    store_rows,
    store_zeros,
    zero_programs,
)


class Parts(NamedTuple):
    """Softmax states of each row, part and head, at (row * parts + part) * heads + head: float32
    arrays, or refs of them. acc is written only where total is above 0."""

    peak: Ref  # [R * S * H]
    total: Ref  # [R * S * H]
    acc: Ref  # [R * S * H, padded head_dim]


def part_shapes(count: int, width: int) -> Parts:
    """What a kernel that stores `count` states of outputs `width` wide returns."""
    stats = jax.ShapeDtypeStruct((count,), jnp.float32)
    return Parts(stats, stats, jax.ShapeDtypeStruct((count, width), jnp.float32))


def store_part(parts: Parts, at: jax.Array, state: Softmax, used: jax.Array) -> None:
    """State [M] into places `at` int32 [M], where `used` (bool [M])."""
    plgpu.store(parts.peak.at[at], state.peak, mask=used)
    plgpu.store(parts.total.at[at], state.total, mask=used)
    store_rows(parts.acc, at, state.acc, used & (state.total > 0))


def _kernel(
    *refs: Ref, kind: int, num_heads: int, splits: int, head_dim: int, decode_only: bool
) -> None:
    """One head of one row. refs: the batch, its `Parts`, the output [T * H, D]. Programs behind
    those of the rows write zeros."""
    fields = len(BatchRefs._fields)
    batch, out_ref = BatchRefs(*refs[:fields]), refs[-1]
    parts = Parts(*refs[fields : fields + 3])
    head, row = pl.program_id(0), pl.program_id(1)
    max_rows = batch.context_lens.shape[0]
    merge = functools.partial(
        _merge, batch, parts, out_ref, head, row, kind, num_heads, splits, head_dim, decode_only
    )
    pl.when(row < max_rows)(merge)
    if not decode_only:

        @pl.when(row >= max_rows)
        def _zeros() -> None:
            store_zeros(batch, out_ref, (row - max_rows) * num_heads + head, kind, num_heads)


def _merge(
    batch: BatchRefs,
    parts: Parts,
    out_ref: Ref,
    head: jax.Array,
    row: jax.Array,
    kind: int,
    num_heads: int,
    splits: int,
    head_dim: int,
    decode_only: bool,
) -> None:
    length, token = decode_row(batch, row, kind, decode_only=decode_only)
    at = (row * splits + jnp.arange(splits, dtype=jnp.int32)) * num_heads + head
    # Rows that are not attended may have no parts stored.
    active = jnp.broadcast_to(length > 0, at.shape)
    peak = plgpu.load(parts.peak.at[at], mask=active, other=NOTHING_SEEN)
    total = plgpu.load(parts.total.at[at], mask=active, other=0)
    padded = parts.acc.shape[1]
    acc = load_rows(parts.acc, at, total > 0, padded, padded)
    weight = jnp.exp2(peak - peak.max(axis=0))
    whole = (weight * total).sum(axis=0)
    out = (acc * weight[:, None]).sum(axis=0) / jnp.where(whole == 0, 1.0, whole)
    column = jnp.arange(padded, dtype=jnp.int32)
    mask = (column < head_dim) & ((length > 0) | decode_only)
    place = out_ref.at[token * num_heads + head, column]
    plgpu.store(place, out.astype(out_ref.dtype), mask=mask)


def merge_parts(
    parts: Parts,
    fields: tuple[jax.Array, ...],
    out: jax.ShapeDtypeStruct,
    kind: int,
    num_heads: int,
    decode_only: bool,
    interpret: bool,
) -> jax.Array:
    """The outputs [T * H, D] of the decodes of a kind; zeros for padding and the tokens of rows of
    the other kind, anything for those of chunks of this one. fields: what `batch_arguments`
    gives."""
    batch = BatchRefs(*fields)
    rows, tokens = batch.context_lens.shape[0], batch.token_row.shape[0]
    splits = parts.total.shape[0] // (rows * num_heads)
    zeros = 0 if decode_only else zero_programs(tokens, num_heads, num_heads)
    kernel = functools.partial(
        _kernel,
        kind=kind,
        num_heads=num_heads,
        splits=splits,
        head_dim=out.shape[1],
        decode_only=decode_only,
    )
    done: jax.Array = pl.pallas_call(
        kernel,
        out_shape=out,
        grid=(num_heads, rows + zeros),
        compiler_params=plgpu.CompilerParams(num_warps=2, num_stages=1),
        interpret=interpret,
        name="merge_parts",
    )(*fields, *parts)
    return done
