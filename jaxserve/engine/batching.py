"""Turns a plan into the padded batch of a step, and of what has to happen before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxserve.engine.buckets import Buckets
from jaxserve.engine.layout import PLACEHOLDER, Layout
from jaxserve.sched.blocks import BlockPool
from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.table import RequestTable


def build_batch(
    buckets: Buckets,
    plan: BatchPlan,
    emits: np.ndarray,
    table: RequestTable,
    pool: BlockPool,
    slots: np.ndarray,
    tokens_of: Callable[[int, int, int], Sequence[int]],
) -> tuple[Layout, np.ndarray]:
    """The layout and its packed buffer, for a plan that `Scheduler.schedule` has booked.

    emits [n]: rows that sample. slots [n]: device slots. tokens_of(row, first, end): a request's
    known tokens, asked only for those that have reached the host.
    """
    rows, counts = plan.rows, plan.num_tokens
    n, total = len(rows), plan.total_tokens
    singles = int((counts == 1).sum())
    hidden = bool(plan.kinds.any())
    size, bucket = (n, buckets.decode) if singles == n else (total, buckets.mixed)
    layout = bucket(size, hidden=hidden)
    packed = layout.empty()
    fields = layout.views(packed)
    end = table.computed[rows]
    start = end - counts
    first = np.cumsum(counts) - counts
    fields["token_row"][:total] = np.repeat(np.arange(n, dtype=np.int32), counts)
    fields["tables"][:n] = pool.tables[rows]
    fields["context_lens"][:n] = end
    fields["query_start"][:n] = first
    fields["query_lens"][:n] = counts
    fields["direction"][:n] = pool.direction[rows]
    fields["kind"][:n] = pool.kind[rows]
    fields["last"][:n] = first + counts - 1
    fields["slots"][:n] = slots
    fields["emit"][:n] = emits
    fields["num_decodes"][...] = singles
    fields["num_rows"][...] = n
    # A lone token behind the prompt is the newest generated one, which its slot remembers; every
    # other token has been on the host since before the plan.
    newest = (counts == 1) & (start >= table.prompt_len[rows])
    newest &= end == table.prompt_len[rows] + table.generated[rows] - emits
    tokens = fields["tokens"]
    tokens[first[newest]] = PLACEHOLDER
    for i in np.flatnonzero(~newest).tolist():
        chunk = tokens_of(int(rows[i]), int(start[i]), int(end[i]))
        tokens[first[i] : first[i] + counts[i]] = chunk
    return layout, packed


def widening(
    buckets: Buckets, plan: BatchPlan, table: RequestTable, pool: BlockPool
) -> Iterator[tuple[Layout, np.ndarray]]:
    """The batches of `executor.widen` that make KV caches of the plan's hidden ones, for a plan
    that `Scheduler.schedule` has booked. Their tokens are those in the cache before the step."""
    layout = buckets.widening()
    where = np.isin(plan.rows, plan.project)
    cached = table.computed[plan.rows] - plan.num_tokens
    pieces = [
        (row, first, min(first + layout.tokens, length))
        for row, length in zip(plan.rows[where].tolist(), cached[where].tolist(), strict=True)
        for first in range(0, length, layout.tokens)
    ]
    while pieces:
        packed, used, taken = layout.empty(), 0, 0
        fields = layout.views(packed)
        for row, first, end in pieces[: layout.rows]:
            count = end - first
            if used + count > layout.tokens:
                break
            fields["token_row"][used : used + count] = taken
            fields["tables"][taken] = pool.tables[row]
            fields["context_lens"][taken] = end
            fields["query_start"][taken] = used
            fields["query_lens"][taken] = count
            fields["direction"][taken] = pool.direction[row]
            used, taken = used + count, taken + 1
        fields["num_rows"][...] = taken
        pieces = pieces[taken:]
        yield layout, packed
