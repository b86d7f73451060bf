"""Attention over parts of a context, put together by their log-sum-exp (flash-decoding, Dao et al.
2023), on Pallas-Triton."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxserve.pallas_kernels import online_softmax
from jaxserve.pallas_kernels.batch import AttentionBatch
from jaxserve.pallas_kernels.gpu_triton import common, tuning
from jaxserve.pallas_kernels.gpu_triton.stream_k import Segment, Shares, bounds, unpacked
from jaxserve.pallas_kernels.online_softmax import Softmax

TOGETHER = 16  # parts that are merged at once

# (batch, other arguments of the kernel, item, head, member) -> the member's row in the output,
# int32 [], and whether there is one, bool [].
Place = Callable[
    [common.BatchRefs, tuple[common.Ref, ...], jax.Array, jax.Array, jax.Array],
    tuple[jax.Array, jax.Array],
]


class Parts(NamedTuple):
    """Partial softmax states of items that several programs share.

    P programs have two places each, and a place has M members (queries). All are float32 arrays, or
    refs of them, indexed by place * M + member.

    Attributes:
        peak: [2 * P * M], highest score.
        total: [2 * P * M], sum of weights relative to the peak.
        acc: [2 * P * M, padded head_dim], weighted sum of values; written only where total is above
            0.
    """

    peak: common.Ref
    total: common.Ref
    acc: common.Ref


def part_shapes(programs: int, members: int, width: int) -> Parts:
    """The shapes of the parts that a kernel returns beside its output, for outputs `width` wide."""
    count = 2 * programs * members
    stats = jax.ShapeDtypeStruct((count,), jnp.float32)
    return Parts(stats, stats, jax.ShapeDtypeStruct((count, width), jnp.float32))


def store_segment(
    out_ref: common.Ref,
    parts: Parts | None,
    segment: Segment,
    state: Softmax,
    rows: jax.Array,
    used: jax.Array,
    members: int,
    sinks: common.Ref | None = None,
    *,
    before: int = 0,
) -> None:
    """Stores a segment's result: to the output if the segment is its whole item, else as a part.

    Args:
        out_ref: The output, [rows, D].
        parts: Refs of all parts; None where no item is cut.
        segment: What the program has computed.
        state: The softmax of its members, M' of them with padding.
        rows: int32 [M'], their rows in the output.
        used: bool [M'], which of them to store.
        members: Members that a place has room for.
        sinks: float32 [num_heads] in units of log 2, for an output [tokens * num_heads, D]; None
            for none. They only join the softmax of segments stored to the output.
        before: Members of the item before these.
    """
    done = state
    if sinks is not None:
        heads = lax.rem(rows, jnp.int32(sinks.shape[0]))
        extra = plgpu.load(sinks.at[heads], mask=used, other=online_softmax.NOTHING_SEEN)
        done = online_softmax.with_sinks(state, extra)
    if parts is None:
        return common.store_rows(out_ref, rows, online_softmax.finish(done), used)
    common.store_rows(out_ref, rows, online_softmax.finish(done), used & segment.whole)
    at = segment.place * members + before + jnp.arange(rows.shape[0], dtype=jnp.int32)
    used = used & ~segment.whole
    plgpu.store(parts.peak.at[at], state.peak, mask=used)
    plgpu.store(parts.total.at[at], state.total, mask=used)
    common.store_rows(parts.acc, at, state.acc, used & (state.total > 0))


def _kernel(*refs: common.Ref, members: int, head_dim: int, more: int, place: Place) -> None:
    """Merges one member of the item inside of which share 1 + program_id(1) begins, unless an
    earlier share does, too. refs: the batch, `more` others for `place`, the shares, the parts, the
    sinks if there are any, the output so far (aliased) and the output [rows, D]."""
    batch, others, shares, rest = unpacked(refs, more)
    parts, sinks, out_ref = Parts(*rest[:3]), rest[3:-2], rest[-1]
    member, program, size = pl.program_id(0), pl.program_id(1) + 1, shares.size[0]

    @pl.when(shares.first[program] < shares.end[program])
    def _has_work() -> None:
        head, item, begin, end = bounds(shares, shares.first[program])
        row, used = place(batch, others, item, head, member)
        cut_here = program * size
        used &= (begin < cut_here) & (begin >= cut_here - size)

        @pl.when(used)
        def _merge() -> None:
            count = lax.div(end - 1, size) - program + 2
            sink = sinks[0][lax.rem(row, jnp.int32(sinks[0].shape[0]))] if sinks else None
            out = _merged(parts, program - 1, count, member, members, sink)
            column = jnp.arange(out.shape[0], dtype=jnp.int32)
            at = out_ref.at[row, column]
            plgpu.store(at, out.astype(out_ref.dtype), mask=column < head_dim)


def _merged(
    parts: Parts,
    first: jax.Array,
    count: jax.Array,
    member: jax.Array,
    members: int,
    sink: jax.Array | None,
) -> jax.Array:
    """The output [padded head_dim] of one member, merged from the parts of `count` programs from
    `first` on, and the sink if it has one."""
    padded = parts.acc.shape[1]

    def some(i: jax.Array, state: Softmax) -> Softmax:
        index = i * TOGETHER + jnp.arange(TOGETHER, dtype=jnp.int32)
        at = 2 * (first + index) + (index == 0).astype(jnp.int32)
        at = at * members + member
        exists = index < count
        peaks = plgpu.load(parts.peak.at[at], mask=exists, other=online_softmax.NOTHING_SEEN)
        totals = plgpu.load(parts.total.at[at], mask=exists, other=0)
        acc = common.load_rows(parts.acc, at, totals > 0, padded, padded)
        peak = jnp.maximum(state.peak, peaks.max(axis=0))
        fade, weights = jnp.exp2(state.peak - peak), jnp.exp2(peaks - peak)
        total = state.total * fade + (weights * totals).sum(axis=0)
        return Softmax(peak, total, state.acc * fade + (acc * weights[:, None]).sum(axis=0))

    start = Softmax(
        jnp.float32(online_softmax.NOTHING_SEEN), jnp.float32(0), jnp.zeros(padded, jnp.float32)
    )
    peak, total, acc = lax.fori_loop(0, common.cdiv(count, TOGETHER), some, start)
    if sink is not None:
        top = jnp.maximum(peak, sink)
        fade = jnp.exp2(peak - top)
        total, acc = total * fade + jnp.exp2(sink - top), acc * fade
    return acc / jnp.where(total == 0, 1.0, total)


def merge_parts(
    out: jax.Array,
    parts: Parts,
    fields: tuple[jax.Array, ...],
    shares: Shares,
    others: tuple[jax.Array, ...],
    place: Place,
    *,
    sinks: tuple[jax.Array, ...] = (),
    interpret: bool,
) -> jax.Array:
    """Merges the parts of all items that several programs share into the output.

    Args:
        out: [rows, D], the output so far.
        parts: The parts of all programs.
        fields: From `batch_arguments`.
        shares: The work of all programs.
        others: Other arguments of `place`.
        place: Maps a member to its row in the output.
        sinks: As for `run_shares`.
        interpret: Run in the interpreter.

    Returns:
        [rows, D], aliasing `out`.
    """
    programs = shares.first.shape[0]
    if programs == 1:
        return out
    members = parts.total.shape[0] // (2 * programs)
    arguments = (*fields, *others, *shares, *parts, *sinks, out)
    kernel = functools.partial(
        _kernel, members=members, head_dim=out.shape[1], more=len(others), place=place
    )
    done: jax.Array = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        grid=(members, programs - 1),
        input_output_aliases={len(arguments) - 1: 0},
        compiler_params=plgpu.CompilerParams(num_warps=2, num_stages=1),
        interpret=interpret,
        name="merge_parts",
    )(*arguments)
    return done


def run_shares(
    kernel: Callable[..., None],
    layer: jax.Array | int,
    batch: AttentionBatch,
    shares: Shares,
    arguments: tuple[jax.Array, ...],
    out: jax.ShapeDtypeStruct,
    launch: tuning.Launch,
    place: Place,
    *,
    others: tuple[jax.Array, ...] = (),
    members: int,
    width: int,
    zeros: int = 0,
    in_place: bool = False,
    sinks: tuple[jax.Array, ...] = (),
    uncut: bool = False,
    interpret: bool,
    name: str,
) -> jax.Array:
    """Runs a kernel over shares of work, and merges the parts of items that are cut.

    The kernel's refs are the batch, `others`, the shares, `sinks`, `arguments`, the output and the
    parts, of which there are none if `uncut`.

    Args:
        kernel: The kernel body.
        layer: Index into the whole pool; may be traced.
        batch: The step's rows and tokens.
        shares: The work, one share a program.
        arguments: The kernel's own arrays; with `in_place` the last is the output so far.
        out: Shape [rows, D] and dtype of the output.
        launch: Compiler parameters.
        place: Maps a member to its row in the output.
        others: Other arguments of `place`.
        members: Members of an item.
        width: Elements of a part's sum: head_dim, padded.
        zeros: Programs after those with shares, which write zeros.
        in_place: Whether the output aliases the last of `arguments`.
        sinks: Empty, or the sinks for `store_segment`.
        uncut: No item is cut, see `tiles.plan_work`.
        interpret: Run in the interpreter.
        name: Name of the kernel, for profiles.
    """
    fields, programs = common.batch_arguments(layer, batch), shares.first.shape[0]
    given = (*fields, *others, *shares, *sinks, *arguments)
    done, *parts = pl.pallas_call(
        kernel,
        out_shape=(out, *(() if uncut else part_shapes(programs, members, width))),
        grid=(programs + zeros,),
        input_output_aliases={len(given) - 1: 0} if in_place else {},
        compiler_params=plgpu.CompilerParams(num_warps=launch.warps, num_stages=launch.stages),
        interpret=interpret,
        name=name,
    )(*given)
    if uncut:
        return done
    more: dict[str, Any] = {"sinks": sinks, "interpret": interpret}
    return merge_parts(done, Parts(*parts), fields, shares, others, place, **more)
