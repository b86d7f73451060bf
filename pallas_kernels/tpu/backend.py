"""The kernels for TPU (Mosaic), and the same in TPU-interpret mode for tests without a TPU."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxserve.pallas_kernels.backends import Backend, KernelShape, ScaleOps, Scoring
from jaxserve.pallas_kernels.batch import HIDDEN, KV, AttentionBatch
from jaxserve.pallas_kernels.tpu import (
    absorbed,
    common,
    decode,
    grouped,
    halves,
    move,
    prefill,
    projected,
    scales,
    write,
)
from jaxserve.pallas_kernels.tpu.common import Options
from jaxserve.pallas_kernels.tpu.decode import Decodes
from jaxserve.pallas_kernels.tpu.tiles import Tiles


class PagedPlan(NamedTuple):
    """The work of a step's KV rows.

    Attributes:
        decodes: The work of decodes; None if these are treated as chunks.
        token: int32 [R], the token of each row that decodes; past the end of the token axis for
            other rows.
        chunks: The work of prefill chunks; None for decode_only.
    """

    decodes: Decodes | None
    token: jax.Array
    chunks: Tiles | None


def _plan(
    kind: int,
    batch: AttentionBatch,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    num_heads: int,
    *,
    sliding_window: int | None,
    decode_only: bool,
    interpret: bool,
    deterministic: bool = False,
    halves: int = 0,
) -> PagedPlan | Tiles:
    """See `backends.Backend.plan`; nothing depends on halves. deterministic: decodes are treated as
    chunks, so that a query's sums have a fixed order wherever its chunk begins."""
    if kind == HIDDEN:
        masks: dict[str, Any] = {"sliding_window": sliding_window, "decode_only": decode_only}
        return projected.plan(batch, shape, dtype, interpret=interpret, **masks)
    row = jnp.arange(batch.max_rows, dtype=jnp.int32)
    live = (batch.kind == KV) & (batch.query_lens > 0)
    chunks, nobody = None, jnp.full_like(row, batch.max_tokens)
    if deterministic:
        given = (live & (row < batch.num_rows), batch, shape, dtype, num_heads)
        return PagedPlan(None, nobody, prefill.plan(*given, sliding_window, interpret))
    if not decode_only:
        ragged = live & (row >= batch.num_decodes) & (row < batch.num_rows)
        chunks = prefill.plan(ragged, batch, shape, dtype, num_heads, sliding_window, interpret)
        live &= row < batch.num_decodes
    decodes = decode.plan(live, batch, shape, dtype, sliding_window, interpret)
    return PagedPlan(decodes, jnp.where(live, batch.query_start, nobody), chunks)


def _attend(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    batch: AttentionBatch,
    plan: PagedPlan,
    *,
    scoring: Scoring,
    decode_only: bool,
    sinks: jax.Array | None = None,
    interpret: bool,
) -> jax.Array:
    """See `attention.paged_attention`."""
    options = Options.from_scoring(scoring, interpret)
    width = batch.table_width
    if plan.chunks is None:
        assert plan.decodes is not None
        return decode.decode(q, pool, layer, width, plan.decodes, options, sinks)
    out = prefill.prefill(q, pool, layer, width, plan.chunks, options, sinks)
    if plan.decodes is None:
        return out
    picked = q.at[plan.token].get(mode="fill", fill_value=0)
    decoded = decode.decode(picked, pool, layer, width, plan.decodes, options, sinks)
    return out.at[plan.token].set(decoded, mode="drop")


def _supports(kind: int, shape: KernelShape) -> str | None:
    why_not = common.supports(kind, shape)
    return halves.supports(shape) if why_not is None and shape.halves else why_not


def _backend(interpret: bool) -> Backend:
    with_mode = functools.partial(functools.partial, interpret=interpret)
    return Backend(
        write=with_mode(write.write),
        attend=with_mode(_attend),
        absorbed=with_mode(absorbed.absorbed),
        projected=with_mode(projected.projected),
        move=with_mode(move.move),
        stage_out=with_mode(move.stage_out),
        stage_in=with_mode(move.stage_in),
        supports=_supports,
        halves=True,
        plan=with_mode(_plan),
        plan_absorbed=with_mode(absorbed.plan),
        plan_write=write.plan,
        quantized_matmul=with_mode(grouped.choose),
        scales=ScaleOps(
            write=with_mode(scales.write),
            move=with_mode(scales.move),
            stage_out=scales.stage_out,
            stage_in=with_mode(scales.stage_in),
        ),
    )


def _deterministic(interpret: bool) -> Backend:
    plan = functools.partial(_plan, interpret=interpret, deterministic=True)
    return dataclasses.replace(_backend(interpret), plan=plan)


BACKEND = _backend(interpret=False)
INTERPRET_BACKEND = _backend(interpret=True)
DETERMINISTIC_BACKEND = _deterministic(interpret=False)
DETERMINISTIC_INTERPRET_BACKEND = _deterministic(interpret=True)
