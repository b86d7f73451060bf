"""A policy for tests that does to caches whatever can be done: parts and all of them go to the host
and come back, blocks are copied, caches are cut off and recomputed, hidden ones become KV."""

from __future__ import annotations

from collections import Counter

import numpy as np

from jaxserve.sched.cache.cache_kinds import HIDDEN, KV
from jaxserve.sched.cache.groups.grouped_pool import GroupedPool
from jaxserve.sched.cache.groups.windowed_pool import WindowedPool
from jaxserve.sched.plan import (
    BatchPlan,
    Checkpoint,
    Copy,
    Operation,
    Preempt,
    ProjectToKV,
    Restore,
)
from jaxserve.sched.policy import Policy, View
from jaxserve.sched.state.request_table import RUNNING, WAITING


class MovingCaches(Policy):
    """First come, first served, with lots drawn for what happens to caches. Wants memory for all.

    did: how often each operation was planned.
    """

    hybrid_cache = True
    moves_cache = True

    def __init__(self, seed: int = 0) -> None:
        self.did: Counter[str] = Counter()
        self._rng = np.random.default_rng(seed)

    def plan(self, view: View, now: float) -> BatchPlan:
        table, operations, out = view.table, list[Operation](), set[int]()
        computed, kinds = table.computed.copy(), view.pool.kind.copy()
        back = self._restores(view, operations, computed, kinds)
        for row in table.in_state(RUNNING).tolist():
            if row not in back:
                self._disturb(view, row, operations, computed, kinds, out)
        rows = [r for r in table.in_state(RUNNING).tolist() if r not in out]
        waiting = [r for r in table.in_state(WAITING).tolist() if r not in back]
        rows += [r for r in back if r not in rows]
        holders = len(table.in_state(RUNNING)) + len(back - set(rows))
        rows += waiting[: max(view.limits.max_rows - holders - len(back), 0)]
        return self._batch(view, rows, tuple(operations), computed, kinds)

    def _restores(
        self, view: View, operations: list[Operation], computed: np.ndarray, kinds: np.ndarray
    ) -> set[int]:
        back = set()
        live = [*view.table.in_state(RUNNING).tolist(), *view.table.in_state(WAITING).tolist()]
        for row in live:
            for segment in view.host.segments(row)[:1]:
                # Those who wait may have to, until there is a slot for them.
                free = len(view.table.in_state(RUNNING)) + len(back) < view.limits.max_rows
                waits = view.table.state[row] == WAITING
                fits = segment.first <= computed[row] < segment.end
                fits &= free if waits else view.pool.kind[row] == segment.kind
                if fits and self._rng.random() < 0.5:
                    operations.append(Restore(np.array([row]), np.array([segment.first])))
                    computed[row], kinds[row] = segment.end, segment.kind
                    back.add(row)
                    self.did["restore"] += 1
        return back

    def _disturb(
        self,
        view: View,
        row: int,
        operations: list[Operation],
        computed: np.ndarray,
        kinds: np.ndarray,
        out: set[int],
    ) -> None:
        one, cached, lot = np.array([row]), int(computed[row]), self._rng.random()
        first, grouped = int(self._rng.integers(0, cached)), isinstance(view.pool, GroupedPool)
        if isinstance(view.pool, WindowedPool):
            first = self._kept(view.pool, row, cached) if lot >= 0.12 else 0
        elif grouped:
            first = 0
        taken = any(s.end > first for s in view.host.segments(row))
        if lot < 0.12 and not taken:  # the end of the cache, or all of it, goes to the host
            operations.append(Checkpoint(one, np.array([first]), np.array([cached])))
            operations.append(Preempt(one, np.array([first])))
            computed[row] = first
            out.add(row)
            self.did["checkpoint"] += 1
        elif lot < 0.24:  # some is lost, and computed again in this very step
            if first:
                operations.append(Preempt(one, np.array([first])))
                computed[row] = first
                self.did["cut"] += 1
        elif lot < 0.36 and not grouped:
            index = int(self._rng.integers(0, view.pool.held[row]))
            operations.append(Copy(one, np.array([index])))
            self.did["copy"] += 1
        elif lot < 0.5 and kinds[row] == HIDDEN:
            operations.append(ProjectToKV(one))
            kinds[row] = KV
            self.did["to_kv"] += 1

    def _kept(self, pool: WindowedPool, row: int, cached: int) -> int:
        """Tokens to which the row can go back; 0 if it cannot."""
        least = int(pool.first[row]) * pool.block_size + pool.groups.window - 1
        return int(self._rng.integers(least, cached)) if 0 < least < cached else 0

    def _batch(
        self,
        view: View,
        rows: list[int],
        operations: tuple[Operation, ...],
        computed: np.ndarray,
        kinds: np.ndarray,
    ) -> BatchPlan:
        table, left, chosen, counts = view.table, view.limits.max_batch_tokens, [], []
        must = {int(r) for op in operations if isinstance(op, ProjectToKV) for r in op.rows}
        for row in sorted(rows, key=lambda r: r not in must):
            pending = int(table.prompt_len[row] + table.generated[row] - computed[row])
            count = min(pending, left)
            if count:
                chosen.append(row)
                counts.append(count)
                left -= count
        picked, tokens = np.array(chosen, np.int64), np.array(counts, np.int64)
        starts = table.state[picked] == WAITING
        fresh = starts & (computed[picked] == 0)
        hidden = (table.seq[picked] + table.preemptions[picked]) % 2 * (view.rho is not None)
        kind = np.where(fresh, hidden, kinds[picked]).astype(np.int64)
        side = table.seq[picked] // 2 % 2 * (view.pool.groups is None)
        return BatchPlan(picked, tokens, computed[picked] + tokens, kind, operations, side)
