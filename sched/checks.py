"""Checks a plan before anything is booked, so that a refused plan changes nothing.

The checks go through operations in order, on a copy of the columns that they change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxserve.sched.cache.block_sizes import blocks_a_plane
from jaxserve.sched.cache.cache_kinds import HIDDEN, KV, LEFT, NOBODY, CacheKind, Direction
from jaxserve.sched.cache.groups.state_pool import StatePool
from jaxserve.sched.cache.groups.windowed_pool import WindowedPool
from jaxserve.sched.cache.kv_offload import Segment
from jaxserve.sched.cache.prefix_cache import PrefixCache
from jaxserve.sched.plan import (
    BatchPlan,
    Checkpoint,
    Copy,
    InvalidPlan,
    Join,
    Preempt,
    ProjectToKV,
    Restore,
)
from jaxserve.sched.policy import View
from jaxserve.sched.state.request_table import RUNNING, WAITING


def check_plan(plan: BatchPlan, view: View, *, moves_cache: bool) -> None:
    """Raises InvalidPlan if the pool, the host memory or the limits do not allow the plan.
    moves_cache: `Policy.moves_cache`; without it, operations that move caches are not allowed."""
    moving = any(isinstance(op, Copy | Checkpoint | Restore) for op in plan.operations)
    _demand(moves_cache or not moving, "a policy without moves_cache moves caches")
    hidden = plan.kinds == HIDDEN
    _demand((hidden | (plan.kinds == KV)).all(), "a row is planned with no kind of cache")
    after = _After(plan, view)
    for operation in plan.operations:
        _CHECKS[type(operation)](after, operation)
    table, limits, rows, tokens = view.table, view.limits, plan.rows, plan.num_tokens
    _demand(_different(rows, table.capacity), "a row is planned twice")
    _demand(not after.lost[rows].any(), "a row is planned and preempted")
    state = after.state[rows]
    waiting, running = state == WAITING, state == RUNNING
    _demand((waiting | running).all(), "a row with nothing to compute is planned")
    computed = after.computed[rows]
    pending = table.prompt_len[rows] + table.generated[rows] - computed
    known = tokens if plan.drafts is None else tokens - plan.drafts
    _demand(((known > 0) & (known <= pending)).all(), "more tokens than are pending")
    if plan.drafts is not None:
        _check_drafts(plan, view, known == pending)
    _demand((plan.reserve >= computed + tokens).all(), "less room than tokens")
    widest = view.pool.width * view.pool.block_size
    _demand((plan.reserve <= widest).all(), "more room than the longest request takes")
    _demand(plan.total_tokens <= limits.max_batch_tokens, "more tokens than max_batch_tokens")
    holders = after.holders + int(np.count_nonzero(waiting))
    _demand(holders <= limits.max_rows, "more requests than max_rows hold cache")
    needed = view.pool.needed(rows, plan.reserve, plan.kinds, after.held, after.kind)
    needed = needed + after.set_aside(rows, plan.reserve)
    _demand(needed.sum() <= after.free, "more blocks than are free")
    offered = view.rho is not None or not hidden.any()
    _demand(offered, "hidden caches are planned where there are none")
    adapted = table.adapter[rows] > 0
    _demand(not (hidden & adapted).any(), "a hidden cache is planned for a row with an adapter")
    kind = after.kind[rows]
    stays_hidden = running & ~hidden & (kind == HIDDEN)
    _demand(not stays_hidden.any(), "a hidden cache is planned as KV without ProjectToKV")
    _demand(((kind == plan.kinds) | waiting).all(), "a KV cache becomes hidden without preemption")
    right = plan.directions is not None and plan.directions.any()
    _demand(after.alike or not right, "a cache with groups of layers is filled from the right")
    own = after.owned(rows, computed, computed + tokens)
    _demand(own, "a row would write into blocks that it shares; copy them")
    _demand(after.whole(rows), "a row whose cache is partly on the host is planned")
    apart = after.apart(rows, computed + tokens)
    _demand(apart, "a row would overwrite tokens that the other owner of a block has nowhere else")
    for rows in (plan.missed, plan.relegated):
        _check_given_up(rows, view)


def _check_drafts(plan: BatchPlan, view: View, all_known: np.ndarray) -> None:
    """all_known: which rows compute all of their known tokens."""
    table, drafts, rows = view.table, plan.drafts, plan.rows
    assert drafts is not None
    _demand(((drafts >= 0) & (drafts <= table.offered[rows])).all(), "more drafts than there are")
    some = drafts > 0
    there = (
        all_known & (table.generated[rows] > 0) & (table.generated[rows] == table.received[rows])
    )
    _demand((there | ~some).all(), "drafts are planned behind tokens that are not known")
    most = table.max_tokens[rows] - table.generated[rows] - 1
    _demand((drafts <= np.maximum(most, 0)).all(), "drafts are planned beyond max_tokens")
    _demand((plan.kinds[some] == KV).all(), "drafts are planned for a hidden cache")


def _check_given_up(rows: np.ndarray, view: View) -> None:
    if not len(rows):
        return
    table = view.table
    _demand(_different(rows, table.capacity), "a row is given up twice")
    there = np.isin(table.state[rows], (WAITING, RUNNING))
    _demand(there.all(), "a row with nothing to compute is given up")
    _demand(table.has_targets(rows).all(), "a row without targets is given up")


class _After:
    """The columns after the operations so far, and the holders of each block if any block may have
    two. lost: rows that have lost all of their cache; changed: rows that an operation has touched;
    known: blocks per plane that each row has had since before the plan."""

    def __init__(self, plan: BatchPlan, view: View) -> None:
        self.plan, self.view = plan, view
        self.table, self.pool, self.host = view.table, view.pool, view.host
        cache = self.pool.cache
        finds = plan.rows[:0] if cache is None else plan.rows[cache.found[plan.rows] > 0]
        changes = bool(plan.operations) or len(finds) > 0
        own: Callable[[np.ndarray], np.ndarray] = np.copy if changes else np.asarray
        self.state, self.computed = own(self.table.state), own(self.table.computed)
        self.held, self.known = own(self.pool.held), own(self.pool.held)
        self.kind, self.direction = own(self.pool.kind), own(self.pool.direction)
        self.lost = np.zeros(self.table.capacity, bool)
        self.changed = np.zeros(self.table.capacity, bool)
        self.copied: set[tuple[int, int]] = set()
        self.shares = self.pool.shares or any(isinstance(op, Join) for op in plan.operations)
        self.shares = self.shares or len(finds) > 0
        self.refs, self.owners, self.at = self.pool.refs, self.pool.owners, self.pool.at
        if self.shares and changes:
            self.refs, self.owners, self.at = map(np.copy, (self.refs, self.owners, self.at))
        self.cap = own(self.pool.cap)
        self.alike = self.pool.groups is None  # all layers
        self.windowed = self.pool if isinstance(self.pool, WindowedPool) else None
        self.stateful = self.pool if isinstance(self.pool, StatePool) else None
        # What rows hold in groups with a window begins there.
        self.first = np.zeros(0) if self.windowed is None else own(self.windowed.first)
        self.owns = np.zeros(0) if self.stateful is None else own(self.stateful.owns)
        self.free = self.pool.num_free
        self.host_free = self.host.num_free
        self.holders = len(self.table.in_state(RUNNING))
        self._segments: dict[int, dict[int, Segment]] = {}  # by row, then by first token
        if cache is not None:
            self._pin(cache, finds)

    def _pin(self, cache: PrefixCache, rows: np.ndarray) -> None:
        """Makes the starting rows read what they find, before any operation."""
        for row in rows.tolist():
            chain = [page for page in cache.chain(row) if page.ids]  # others take new blocks
            for index, page in enumerate(chain):
                ids, side = list(page.ids), cache.side(row)
                alone = not self.refs[ids[0]]
                self.free -= len(ids) * alone
                self.refs[ids] += 1
                self.owners[ids] = NOBODY
                if alone:
                    self.owners[ids, side], self.at[ids, side] = row, index
            self.held[row] = self.known[row] = len(chain)
            self.direction[row] = cache.side(row)
            if self.windowed is not None:
                self._begin_windows(self.windowed, row, len(chain) * self.pool.block_size)
            if self.stateful is not None and chain[-1].beside is not None:
                ids = list(chain[-1].beside.ids)
                self.free -= len(ids) * (not self.refs[ids[0]])
                self.refs[ids] += 1
        for at in np.flatnonzero(np.isin(self.plan.rows, rows)).tolist():
            kind, side = _start_of(self.plan, at)
            same = kind == self.kind[self.plan.rows[at]]
            _demand(same, "a found prefix is planned as a cache of the other kind")
            same = side == self.direction[self.plan.rows[at]]
            _demand(same, "a found prefix is planned to be filled from the other side")

    def _begin_windows(self, pool: WindowedPool, row: int, computed: int) -> None:
        """A row begins with so many cached tokens, for which it has blocks in `held`."""
        self.first[row] = pool.groups.behind(computed, pool.block_size)
        self.free -= int(pool.set_aside(self.first[row], self.held[row]))

    def preempt(self, op: Preempt) -> None:
        rows, keep = op.rows, op.keep
        _demand(_different(rows, self.table.capacity), "a row is preempted twice")
        cached = self.state[rows] == RUNNING
        _demand(cached.all(), "a row without cache is preempted")
        _demand(not self.changed[rows].any(), "a row is preempted after another operation on it")
        _demand(
            ((keep >= 0) & (keep < np.maximum(self.computed[rows], 1))).all(),
            "a preempted row must keep at least 0 tokens and fewer than it has",
        )
        whole = keep == 0
        stay = np.minimum(blocks_a_plane(keep, self.pool.block_size), self.held[rows])
        for row, kept, blocks in _triples(rows, keep, stay):
            self._give_back(row, self.pool.blocks_of(row)[:, blocks:].ravel())
            if self.windowed is not None:
                self._cut_windows(self.windowed, row, kept, blocks)
            if self.stateful is not None:
                _attempt(self.stateful.check_keeps, row, kept)
                self._give_back(row, self.stateful.states_of(row).ravel())
                self.owns[row] = False
            self._cut(row, kept)
            self.cap[row, blocks:] = self.pool.block_size
            if blocks and kept - (blocks - 1) * self.pool.block_size <= self.cap[row, blocks - 1]:
                self.cap[row, blocks - 1] = self.pool.block_size
        self.holders -= int(np.count_nonzero(whole))
        self.lost[rows[whole]] = self.changed[rows] = True
        self.state[rows[whole]] = WAITING
        self.computed[rows], self.held[rows], self.known[rows] = keep, stay, stay
        self.kind[rows[whole]], self.direction[rows[whole]] = KV, LEFT

    def _cut_windows(self, pool: WindowedPool, row: int, kept: int, blocks: int) -> None:
        _attempt(pool.check_keeps, row, kept)
        first, held = self.first[row], self.held[row]
        self.free += int(pool.set_aside(first, held) - pool.set_aside(first, max(blocks, first)))
        if not kept:
            self.first[row] = 0

    def to_kv(self, op: ProjectToKV) -> None:
        rows = op.rows
        _demand(_different(rows, self.table.capacity), "a row becomes KV twice")
        planned = np.isin(rows, self.plan.rows[self.plan.kinds == KV])
        _demand(planned.all(), "a row that is not planned as KV becomes KV")
        _demand(not self.changed[rows].any(), "a row becomes KV after another operation on it")
        for row in rows.tolist():
            _attempt(self.pool.check_projects, row, self.refs)
        kinds = np.full(len(rows), KV)
        need = self.pool.needed(rows, self.computed[rows], kinds, self.held, self.kind)
        self._take(int(need.sum()))
        self.kind[rows], self.changed[rows] = CacheKind.KV, True

    def copy(self, op: Copy) -> None:
        _demand(self.alike, "blocks of a cache with groups of layers are copied")
        before = []
        for row, index in zip(op.rows.tolist(), op.index.tolist(), strict=True):
            _demand(self.state[row] == RUNNING, "a block of a row without cache is copied")
            inside = 0 <= index < self.known[row]
            _demand(
                inside and (row, index) not in self.copied,
                "a copied block is not there, or is copied twice",
            )
            self._take(int(self.pool.blocks_for(1, self.kind[row])))
            before.append((row, self.pool.blocks_of(row)[:, index]))
            self.copied.add((row, index))
            self.changed[row] = True
        for row, ids in before:
            self._give_back(row, ids)
            # A V block that comes from `ProjectToKV` in this plan has no other holder.
            self.free += int(self.pool.blocks_for(1, self.kind[row])) - len(ids)

    def checkpoint(self, op: Checkpoint) -> None:
        size = self.pool.block_size
        for row, first, end in _triples(op.rows, op.first, op.end):
            _demand(self.state[row] == RUNNING, "a row without cache is checkpointed")
            inside = 0 <= first < end <= self.computed[row]
            _demand(inside, "tokens that are not cached are checkpointed")
            whole = not first and end == self.computed[row]
            _demand(whole or self.alike, "a cache with groups of layers is checkpointed in part")
            mine = self._on_host(row)
            there = any(s.first < end and first < s.end for s in mine.values())
            _demand(not there, "tokens that are on the host already are checkpointed")
            last = (end - 1) // size
            until = min(last * size + int(self.cap[row, last]), int(self.computed[row]))
            _demand(end == until, "a checkpoint ends before the last cached token of its block")
            own = self.owned(np.array([row]), np.array([first]), np.array([end]))
            _demand(own, "tokens that others read are checkpointed; copy their blocks")
            kind, side = CacheKind(self.kind[row]), Direction(self.direction[row])
            mine[first] = Segment(0, first, end, kind, side)
            index = np.arange(first // size, last + 1)
            self.cap[row, index] = np.maximum(first - index * size, 0)
            self.host_free -= self.host.slots(mine[first])
            _demand(self.host_free >= 0, "more is checkpointed than host memory holds")

    def restore(self, op: Restore) -> None:
        size = self.pool.block_size
        for row, first in zip(op.rows.tolist(), op.first.tolist(), strict=True):
            segment = self._on_host(row).pop(first, None)
            _demand(segment is not None, "nothing is on the host to be restored")
            assert segment is not None
            alive = self.state[row] in (WAITING, RUNNING) and not self.lost[row]
            _demand(alive, "a row that has ended or has just been preempted is restored")
            if self.state[row] == WAITING:
                self._open(row, segment.kind, segment.direction)
            _demand(self.kind[row] == segment.kind, "a checkpoint of the other kind is restored")
            one = np.array([row])
            own = self.owned(one, np.array([first]), np.array([segment.end]))
            _demand(own, "a checkpoint is restored into blocks that are shared; copy them")
            if segment.end <= self.computed[row]:
                self._fill(row, segment)
            else:
                on = first == self.computed[row]
                _demand(on, "a restored checkpoint does not begin where the cache ends")
                # `cap` counts a block's tokens from its beginning, so an earlier hole must be
                # filled first.
                filled = not first % size or self.cap[row, first // size] == size
                _demand(filled, "missing tokens of a block are not restored in order")
                self._extend(row, segment)
            self.changed[row] = True
            self.host_free += self.host.slots(segment)
        # A row that leaves its slots later in this plan would take restored tokens along.
        clear = self.apart(op.rows[:0], op.rows[:0])
        _demand(clear, "a checkpoint is restored over tokens of the other owner of a block")

    def _fill(self, row: int, segment: Segment) -> None:
        """Fills a hole in the row's cache."""
        size = self.pool.block_size
        index = np.arange(segment.first // size, blocks_a_plane(segment.end, size))
        on = self.cap[row, index[0]] == segment.first - index[0] * size
        _demand(on, "missing tokens of a block are not restored in order")
        left = segment.end - int(index[-1]) * size
        self.cap[row, index] = size
        if segment.end < self.computed[row] and left < size:
            self.cap[row, index[-1]] = left

    def _extend(self, row: int, segment: Segment) -> None:
        """Appends tokens from the host to the row's cache."""
        one, tokens = np.array([row]), np.array([segment.end])
        need = self.pool.needed(one, tokens, self.kind[one], self.held, self.kind)
        self._take(int(need[0]))
        blocks = blocks_a_plane(segment.end, self.pool.block_size)
        self.held[row] = max(self.held[row], blocks)
        self.computed[row] = segment.end
        if self.windowed is not None:
            self._begin_windows(self.windowed, row, segment.end)
            _demand(self.free >= 0, "more blocks than are free")
        if self.stateful is not None and not self.owns[row]:
            self._take(self.stateful.groups.planes)
            self.owns[row] = True

    def join(self, op: Join) -> None:
        _demand(self.alike, "blocks of a cache with groups of layers are lent")
        row, at = op.row, np.flatnonzero(self.plan.rows == op.row)
        if self.state[row] == WAITING and len(at) == 1 and not self.lost[row]:
            self._open(row, *_start_of(self.plan, int(at[0])))
        _demand(self.state[row] == RUNNING, "a row that neither runs nor starts joins")
        kind, side = CacheKind(self.kind[row]), Direction(self.direction[row])
        held = int(self.held[row])
        blocks = _attempt(self.pool.check_join, row, op.blocks, kind, side, held, self.owners)
        self.owners[blocks, side] = row
        self.at[blocks, side] = np.arange(held, held + len(blocks))[:, None]
        self.refs[blocks] += 1
        self.held[row] = held + len(blocks)
        self.changed[row] = True

    def set_aside(self, rows: np.ndarray, tokens: np.ndarray) -> Any:
        """Further blocks that these rows take in other groups, or that are set aside there, once
        they have room for so many tokens."""
        if self.stateful is not None:
            return self.stateful.groups.planes * ~self.owns[rows]
        if self.windowed is None:
            return 0
        first, held = self.first[rows], self.held[rows]
        more = np.maximum(blocks_a_plane(tokens, self.pool.block_size), held)
        return self.windowed.set_aside(first, more) - self.windowed.set_aside(first, held)

    def owned(self, rows: np.ndarray, first: np.ndarray, end: np.ndarray) -> bool:
        """Whether each row may write its tokens from first[i] to end[i] (exclusive): whether the
        row owns their blocks on its side, or they have been copied."""
        if not self.shares:
            return True
        pool, index = self.pool, first // self.pool.block_size
        last = np.minimum(blocks_a_plane(end, pool.block_size), self.known[rows])
        while (inside := index < last).any():
            rows, index, last = rows[inside], index[inside], last[inside]
            ids, side = pool.tables[rows, :2, index], self.direction[rows, None]
            ok = (self.refs[ids] == 1) | (self.owners[ids, side] == rows[:, None])
            ok[:, 1] |= pool.kind[rows] == HIDDEN  # hidden caches have no second plane
            bad = ~ok.all(axis=1)
            pairs = zip(rows[bad].tolist(), index[bad].tolist(), strict=True)
            if not all(pair in self.copied for pair in pairs):
                return False
            index = index + 1
        return True

    def whole(self, rows: np.ndarray) -> bool:
        """Whether no cached token of these rows is on the host."""
        if not (self.host.num_used or self._segments):
            return True
        touched = np.isin(rows, list(self._segments)) | (self.host.tokens[rows] > 0)
        return all(
            min(self._on_host(row), default=end) >= end
            for row, end in zip(rows[touched].tolist(), self.computed[rows[touched]], strict=True)
        )

    def apart(self, rows: np.ndarray, end: np.ndarray) -> bool:
        """Whether the tokens of both owners fit into every block that two rows fill, once these
        rows have cached tokens up to `end`."""
        if not self.shares:
            return True
        ids = np.flatnonzero((self.owners != NOBODY).all(axis=1))
        computed, size = self.computed.copy(), self.pool.block_size
        computed[rows] = end
        owner, at = self.owners[ids], self.at[ids]
        there = np.minimum(computed[owner] - at * size, self.cap[owner, at])
        return bool((np.maximum(there, 0).sum(axis=1) <= size).all())

    def _open(self, row: int, kind: CacheKind, side: Direction) -> None:
        self.state[row], self.kind[row], self.direction[row] = RUNNING, kind, side
        self.holders += 1

    def _on_host(self, row: int) -> dict[int, Segment]:
        if row not in self._segments:
            self._segments[row] = {s.first: s for s in self.host.segments(row)}
        return self._segments[row]

    def _cut(self, row: int, keep: int) -> None:
        """Drops what the row has on the host beyond `keep` tokens, except segments that continue
        there."""
        mine = self._on_host(row)
        for segment in sorted(mine.values(), key=lambda s: s.first):
            inside = segment.first < keep < segment.end
            _demand(not inside, "a preemption cuts what is on the host in two")
            if segment.first == keep:
                keep = segment.end
            elif segment.first > keep:
                del mine[segment.first]
                self.host_free += self.host.slots(segment)

    def _take(self, blocks: int) -> None:
        self.free -= blocks
        _demand(self.free >= 0, "more blocks than are free")

    def _give_back(self, row: int, ids: np.ndarray) -> None:
        if not self.shares:
            self.free += len(ids)
            return
        side = self.direction[row]
        self.refs[ids] -= 1
        self.owners[ids[self.owners[ids, side] == row], side] = NOBODY
        self.free += int(np.count_nonzero(self.refs[ids] == 0))


def _start_of(plan: BatchPlan, at: int) -> tuple[CacheKind, Direction]:
    """Kind and direction with which the plan's row number `at` starts."""
    side = Direction.LEFT if plan.directions is None else Direction(int(plan.directions[at]))
    return CacheKind(int(plan.kinds[at])), side


def _triples(*arrays: np.ndarray) -> Any:
    return zip(*(a.tolist() for a in arrays), strict=True)


def _different(rows: np.ndarray, capacity: int) -> bool:
    last = np.empty(capacity, np.int64)
    order = np.arange(len(rows))
    last[rows] = order
    return bool((last[rows] == order).all())


def _attempt(act: Callable[..., Any], *args: Any) -> Any:
    try:
        return act(*args)
    except ValueError as error:
        raise InvalidPlan(str(error)) from error


def _demand(condition: bool | np.bool_, problem: str) -> None:
    if not condition:
        raise InvalidPlan(problem)


_CHECKS: dict[type, Callable[[_After, Any], None]] = {
    Preempt: _After.preempt,
    ProjectToKV: _After.to_kv,
    Copy: _After.copy,
    Checkpoint: _After.checkpoint,
    Restore: _After.restore,
    Join: _After.join,
}
