"""Turns a plan into the padded batch of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    layout = buckets.decode(n) if singles == n else buckets.mixed(total)
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
