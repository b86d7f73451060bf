"""Turns a booked step into the padded batch of a device step, and carries out the cache moves
before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxserve.engine.device.batch_layout import Layout, PackedBatch, Rows
from jaxserve.engine.device.buckets import Buckets
from jaxserve.engine.device.executor import Executor
from jaxserve.sched.cache.block_pool import BlockPool
from jaxserve.sched.cache.block_sizes import blocks_a_plane
from jaxserve.sched.step import CopySlots, Discard, Load, Move, ProjectSlots, Save, Step


def build_batch(
    buckets: Buckets,
    step: Step,
    pool: BlockPool,
    slots: np.ndarray,
    tokens_of: Callable[[int, int, int], Sequence[int]],
    *,
    drafts_of: Callable[[int], Sequence[int]] = lambda row: (),
    adapters: np.ndarray | None = None,
    columns: int = 0,
    mixed: bool = False,
    deterministic: bool = False,
) -> tuple[Layout, PackedBatch]:
    """Packs a step into the smallest layout that holds it. The caller must launch the step, since
    the pool's `mirrored` then counts the batch's tables as sent.

    Args:
        buckets: the available layouts.
        step: the booked step.
        pool: the pool with the rows' caches.
        slots: int32 [n], device slots.
        tokens_of: (row, first, end) -> a request's known tokens. Not called for the newest
        generated token, which comes from the row's slot, unless drafts follow it.
        drafts_of: row -> its drafted tokens, at least as many as the step plans.
        adapters: [n], number of each row's adapter; None if no row has one.
        columns: number of leading columns that contain all of those adapters.
        mixed: whether to avoid decode layouts, even if every row has one token.
        deterministic: whether a row asks for the deterministic layout.

    Returns:
        The layout, and the packed rows.
    """
    rows, counts, drafts = step.rows, step.plan.num_tokens, step.plan.drafts
    known = step.end - step.feeds_back
    if drafts is not None:
        known[drafts > 0] += 1
    tokens = [
        tokens_of(row, first, end) if end > first else ()
        for row, first, end in zip(rows.tolist(), step.start.tolist(), known.tolist(), strict=True)
    ]
    if drafts is not None:
        for i in np.flatnonzero(drafts).tolist():
            tokens[i] = (*tokens[i], *drafts_of(int(rows[i]))[: int(drafts[i])])
    kinds = step.plan.kinds
    layout = buckets.fitting(
        counts, kinds, mixed=mixed, columns=columns, deterministic=deterministic
    )
    batch = Rows(
        counts=counts,
        contexts=step.start,
        tables=pool.tables,
        states=pool.states,
        table_rows=rows,
        direction=pool.direction[rows],
        kind=pool.kind[rows],
        tokens=tokens,
        slots=slots,
        emits=step.emits,
        drafts=drafts,
        adapters=0 if adapters is None else adapters,
        mirrored=pool.mirrored[rows],
    )
    packed = layout.pack(batch)
    if layout.mirrors:
        pool.mirrored[rows] = blocks_a_plane(step.start + counts, pool.block_size)
    return layout, packed


def sampling_rows(step: Step, batch: PackedBatch) -> list[tuple[int, int]]:
    """(index of its first sampled token in the step's result, row of the step) for each row that
    samples: rows with one token first, each group in the plan's order. Simulations use the same
    order, however the layout orders hidden caches."""
    sampling = np.flatnonzero(step.emits)
    sampling = sampling[np.argsort(step.plan.num_tokens[sampling] != 1, kind="stable")]
    place = np.empty(len(batch.order), np.int64)
    place[batch.order] = batch.begins
    return list(zip(place[sampling].tolist(), sampling.tolist(), strict=True))


def carry_out(executor: Executor, move: Move) -> None:
    """Executes a cache move of the step; all moves precede the step."""
    match move:
        case ProjectSlots():
            for layout, packed in projection_batches(executor.buckets, move):
                executor.project_to_kv(layout, packed)
        case CopySlots(places):
            executor.copy_slots(places)
        case Save(keys, counts, slots):
            executor.save(keys, counts, slots)
        case Load(keys, counts, slots):
            executor.load(keys, counts, slots)
        case Discard(keys):
            executor.discard(keys)


def projection_batches(buckets: Buckets, move: ProjectSlots) -> Iterator[tuple[Layout, np.ndarray]]:
    """The layouts and packed buffers for `Executor.project_to_kv`."""
    layout = buckets.projection_layout()
    pieces = [
        (number, first, min(first + layout.tokens, length))
        for number, length in enumerate(move.cached.tolist())
        for first in range(0, length, layout.tokens)
    ]
    while pieces:
        taken = used = 0
        for _, first, end in pieces[: layout.rows]:
            if used + end - first > layout.tokens:
                break
            used, taken = used + end - first, taken + 1
        which, begins, ends = (np.array(part) for part in zip(*pieces[:taken], strict=True))
        pieces = pieces[taken:]
        rows = Rows(
            counts=ends - begins,
            contexts=begins,
            tables=move.tables,
            table_rows=which,
            direction=move.directions[which],
        )
        yield layout, layout.pack(rows).buffer
