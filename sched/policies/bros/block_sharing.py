"""Blocks that best-effort requests lend to real-time ones (BROS section 5).

Real-time requests fill a block from the left, best-effort ones from the right. Only tokens that a
step is about to overwrite go to the host, or are computed again if the host is full.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from jaxserve.sched.cache.block_sizes import PLANES, slots_for
from jaxserve.sched.cache.cache_kinds import KV, LEFT, NOBODY, RIGHT
from jaxserve.sched.plan import Checkpoint, Copy, Join, Operation, Preempt, Restore
from jaxserve.sched.policies.bros.blocks import BrosBudget
from jaxserve.sched.policies.bros.cache_restore import CacheRestore
from jaxserve.sched.policies.bros.packing import BrosBatch, BrosWork
from jaxserve.sched.policy import View
from jaxserve.sched.restore_plan import left_filled, overwritten_ranges
from jaxserve.sched.unified.batch_builder import PlannedWork

_PLANES = int(PLANES[KV])
_Work = TypeVar("_Work", bound=PlannedWork)


@dataclass(frozen=True)
class _Loan:
    """Blocks that rows join.

    Attributes:
        rows: int64 [k].
        filled: int64 [k], tokens that each row will have in its block.
        blocks: int64 [k, planes], the block of each row.
    """

    rows: np.ndarray
    filled: np.ndarray
    blocks: np.ndarray


class SharedBlocksBudget(BrosBudget):
    """A memory budget in which real-time requests join the blocks of best-effort ones.

    Args:
        view: What the policy sees.
        batch: The batch in the making.
        watermark: Share of the pool that starts leave free.
        late_watermark: The same for late starts.

    Attributes:
        left: int64 [blocks], tokens that each block has from the left, including those of the step.
        host_free: Free slots in host memory.
    """

    def __init__(
        self, view: View, batch: BrosBatch, watermark: float, late_watermark: float
    ) -> None:
        super().__init__(view, batch, watermark, late_watermark)
        self.free -= self.free % _PLANES  # blocks are taken and lent in every plane
        self.left = left_filled(view)
        self.host_free = view.host.num_free
        self._refs, self._right = view.pool.refs.copy(), view.pool.owners[:, RIGHT].copy()
        self._keep: dict[int, int] = {}  # by row that loses tokens: how many it keeps
        self._given: dict[int, np.ndarray] = {}  # by row, indices of given back blocks
        self._hit = np.zeros(view.table.capacity, bool)  # rows that lose some of their cache
        self._lends = np.zeros(view.table.capacity, bool)
        self._pinned = np.zeros(len(self._refs), bool)  # blocks found by starts in the batch
        self._saved: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._joins: list[Join] = []
        self._restore = CacheRestore(view)

    def lendable(self) -> int:
        """Blocks that only best-effort requests hold: blocks that one of them fills can be joined,
        and blocks that they only read are free once all readers are preempted."""
        return int(np.count_nonzero(self._open()) + np.count_nonzero(self._only_read()))

    def returned_by(self, rows: np.ndarray) -> np.ndarray:
        """Blocks that preempting each of these best-effort rows would free, int64 [n]."""
        alone = self._right[(self._refs == 1) & (self._right != NOBODY)]
        return np.bincount(alone, minlength=len(self._hit))[rows]

    def given_by(self, rows: np.ndarray) -> np.ndarray:
        """See `BrosBudget`; the free end of a block that another row fills counts as a whole
        block."""
        pool, given = self.view.pool, np.zeros(len(rows), np.int64)
        for i, row in enumerate(rows.tolist()):
            owners = pool.owners[pool.blocks_of(row), pool.direction[row]]
            given[i] = np.count_nonzero(owners == row)
        return given

    def is_out(self, rows: np.ndarray) -> np.ndarray:
        """Which rows lose their caches in this plan, in whole or in part, bool [n]."""
        return self._hit[rows]

    def offers(self, rows: np.ndarray) -> BrosWork:
        """What these best-effort rows would do, without those that cannot be in this step, and all
        but a few of those with tokens on the host."""
        rows = rows[~self._batch.chosen[rows] & ~self._hit[rows]]
        return self._restore.offers(rows, self.left)

    def best_effort(self) -> np.ndarray:
        """Best-effort rows outside the batch that hold a cache, the latest arrivals first."""
        rows = super().best_effort()
        return rows[~self._hit[rows] & ~self._lends[rows]]

    def price(self, work: BrosWork) -> BrosWork:
        """See `BrosBudget`. The pool's numbers are right until blocks are given back."""
        finds = self._finds(work)
        if not (self._keep and len(finds)):
            return work
        work = self._beyond_found(work, finds)
        work.new[finds] += [_PLANES * self._unread(row) for row in work.rows[finds].tolist()]
        return work

    def allocate(self, work: PlannedWork) -> None:
        """Takes the blocks and places for this work, and notes its copies."""
        work = self._pin(work)
        super().allocate(work)
        rows, index = self._restore.all_copies(work.rows)
        for row, number in zip(rows.tolist(), index, strict=True):
            self._let_go(row, np.array([number]))

    def offers_first(self, rows: np.ndarray) -> BrosWork:
        """`offers` for best-effort rows that come before real-time ones. They move out of blocks in
        which running real-time rows may overwrite their tokens."""
        table = self.view.table
        runs = self.running[self.view.pool.direction[self.running] == LEFT]
        self._fill(runs, table.prompt_len[runs] + table.generated[runs])  # a chunk has many tokens
        return self._restore.offers(rows[~self._hit[rows]], self.left, every_block=True)

    def provide(self, work: BrosWork, behind: np.ndarray) -> BrosWork:
        """As without sharing, but the most urgent requests take free blocks, and the others join
        blocks of best-effort requests, the emptiest first. After that, real-time requests are
        preempted, those with the most time left first."""
        runs = behind[~self.is_out(behind) & (self.view.pool.held[behind] > 0)]
        victims = runs[::-1].tolist()
        work = self._pin(work)
        low = self.best_effort().tolist()
        while int(work.starts.sum()) > self.slots and (low or victims):
            self.preempt(low.pop(0) if low else victims.pop(0))
        need = int(work.new.sum())
        self._end_reading(need)
        have = self.free + int(np.count_nonzero(self._open()))
        while (need > have or self.free < 0) and victims:
            self.preempt(victims.pop(0))
            have = self.free + int(np.count_nonzero(self._open()))
        if self.free < 0:  # found blocks are not free any more
            finds = self._finds(work)
            self._unpin(work.rows[finds])
            work = work[np.delete(np.arange(len(work)), finds)]
            have = self.free + int(np.count_nonzero(self._open()))
        if need > have:
            fits = np.cumsum(work.new) <= have
            self._unpin(work.rows[~fits])
            work = work[fits]
        ids, filled = self._fill(work.rows[~work.starts], (work.start + work.tokens)[~work.starts])
        while True:
            loan = self._borrow(work)
            lent = loan.blocks.ravel()
            ranges = overwritten_ranges(
                self.view,
                np.concatenate([ids, lent]),
                np.concatenate([filled, np.repeat(loan.filled, _PLANES)]),
            )
            ranges = self._still_there(*ranges)
            rows, first, end = ranges
            if int(slots_for(end - first).sum()) <= self.host_free:
                break
            latest = int(rows[np.argmax(self.view.table.seq[rows])])
            self._cut(latest, int(first[rows == latest].min()))
        self._save(*ranges)
        first_of = np.flatnonzero(np.diff(loan.rows, prepend=NOBODY)).tolist()
        for one, other in itertools.pairwise([*first_of, len(loan.rows)]):
            self._joins.append(Join(int(loan.rows[one]), loan.blocks[one:other]))
        self._lends[self._right[lent]] = True
        self.left[lent] = np.repeat(loan.filled, _PLANES)
        self._refs[lent] += 1
        self.free += lent.size
        self._forget(lent)
        super().allocate(work)
        return work

    def preempt(self, row: int, gives: int | None = None) -> None:
        """Preempts the row, which must not be in the batch. The host keeps its cache if it fits and
        no other row reads it."""
        pool, size = self.view.pool, self.view.pool.block_size
        first = np.arange(pool.held[row]) * size
        there = np.minimum(pool.cap[row, : len(first)], self.view.table.computed[row] - first)
        some = there > 0
        ids = pool.blocks_of(row)
        own = (pool.owners[ids, pool.direction[row]] == row).all() and not self._pinned[ids].any()
        if own and int(slots_for(there[some].sum())) <= self.host_free:
            self._save(np.full(some.sum(), row), first[some], (first + there)[some])
            self._forget(ids[0])
        self._let_go(row, np.arange(pool.held[row]))
        self._keep[row] = 0
        self._leaves(row)

    def operations(self, work: BrosWork) -> tuple[Operation, ...]:
        """The operations on caches before the step. work: the whole batch."""
        found: list[Operation] = []
        if self._saved:
            rows, first, end = zip(*self._saved, strict=True)
            found.append(Checkpoint(*map(np.concatenate, (rows, first, end))))
        if self._keep:
            found.append(Preempt(np.array(list(self._keep)), np.array(list(self._keep.values()))))
        found += self._joins
        restores = self._restore.all_restores(work)
        # One per row, in the order in which they were added: the next may take what one leaves.
        found += [Copy(*self._restore.all_copies(row)) for row in self._restore.movers(work.rows)]
        if len(restores[0]):
            found.append(Restore(*restores))
        return tuple(found)

    def _open(self) -> np.ndarray:
        """Which blocks are held only by a best-effort request outside the batch, bool."""
        mine = self._right != NOBODY
        return mine & (self._refs == 1) & ~self._batch.chosen[self._right]

    def _only_read(self) -> np.ndarray:
        """Which blocks nobody fills, and only best-effort requests outside the batch hold, bool."""
        pool, holders = self.view.pool, np.zeros(len(self._refs), np.int64)
        if pool.cache is None or not pool.shares:
            return np.zeros(len(self._refs), bool)
        for row in self.best_effort().tolist():
            holders[pool.blocks_of(row)] += 1
        return (holders > 0) & (holders == self._refs) & (self._right == NOBODY)

    def _end_reading(self, need: int) -> None:
        """Preempts best-effort requests, the latest first, for the blocks that they only read,
        until `need` blocks are available."""
        pool = self.view.pool
        for row in self.best_effort().tolist():
            if need <= self.free + int(np.count_nonzero(self._open())):
                return
            if self._only_read()[pool.blocks_of(row)].any():
                self.preempt(row)

    def _fill(self, rows: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Notes that these running rows will have tokens up to `end`. Returns the blocks that they
        continue to fill, and the fill of each afterwards."""
        pool, size = self.view.pool, self.view.pool.block_size
        index = self.view.table.computed[rows] // size
        inside = index < pool.held[rows]
        rows, index, end = rows[inside], index[inside], end[inside]
        filled = np.repeat(np.minimum(end - index * size, size), _PLANES)
        ids = pool.tables[rows, :, index].ravel()
        self.left[ids] = filled
        return ids, filled

    def _borrow(self, work: BrosWork) -> _Loan:
        """The blocks that these rows, in order, join once the free ones are handed out."""
        size = self.view.pool.block_size
        wanted = np.clip(np.cumsum(work.new) - self.free, 0, work.new) // _PLANES
        rows = np.repeat(work.rows, wanted)
        each = np.arange(len(rows)) - np.repeat(np.cumsum(wanted) - wanted, wanted)
        index = self._held()[rows] + each
        filled = np.minimum(np.repeat(work.start + work.tokens, wanted) - index * size, size)
        blocks = self._emptiest(len(rows) * _PLANES)
        return _Loan(rows, filled, blocks.reshape(-1, _PLANES))

    def _held(self) -> np.ndarray:
        """Blocks per plane that each row holds, or finds when it starts, int64 by row."""
        pool = self.view.pool
        return pool.held if pool.cache is None else pool.held + pool.cache.found

    def _finds(self, work: PlannedWork) -> np.ndarray:
        """Which of them start and find blocks: indices [k]."""
        cache = self.view.pool.cache
        if cache is None:
            return np.zeros(0, np.int64)
        return np.flatnonzero(work.starts & (cache.found[work.rows] > 0))

    def _beyond_found(self, work: _Work, finds: np.ndarray) -> _Work:
        """The same work, where `new` excludes blocks that the rows `finds` will find."""
        pool, new, rows = self.view.pool, work.new.copy(), work.rows[finds]
        tokens, kinds = (work.start + work.tokens)[finds], np.zeros(len(finds), np.int64)
        new[finds] = pool.needed(rows, tokens, kinds, self._held())
        return replace(work, new=new)

    def _unread(self, row: int) -> int:
        """Pages that the row finds and nobody holds."""
        assert self.view.pool.cache is not None
        chain = self.view.pool.cache.chain(row)  # a row that reads a page reads all before it
        return len(chain) - bisect.bisect_left(chain, True, key=lambda p: not self._refs[p.ids[0]])

    def _pin(self, work: _Work) -> _Work:
        """Lets starting rows read the blocks that they find, which are not free any more. Returns
        the same work, where `new` has only the additional blocks."""
        finds = self._finds(work)
        if not len(finds):
            return work
        for row in work.rows[finds].tolist():
            self.free -= _PLANES * self._unread(row)
            ids = self._found(row)
            self._refs[ids] += 1
            self._pinned[ids] = True
        return self._beyond_found(work, finds)

    def _unpin(self, rows: np.ndarray) -> None:
        """Undoes `_pin` for rows that do not start after all."""
        for row in rows.tolist():
            self._refs[self._found(row)] -= 1
            self.free += _PLANES * self._unread(row)

    def _found(self, row: int) -> np.ndarray:
        """The blocks that a row finds, int [planes, n]."""
        cache = self.view.pool.cache
        pages = () if cache is None else cache.chain(row)
        return np.array([page.ids for page in pages], np.int64).reshape(-1, _PLANES).T

    def _forget(self, ids: np.ndarray) -> None:
        """The cached content of these blocks is lost: rows that would find it start another
        time."""
        cache = self.view.pool.cache
        if cache is not None and len(cache):
            self._hit[cache.finders(ids.ravel().tolist())] = True

    def _emptiest(self, count: int) -> np.ndarray:
        """`count` open blocks, those with most empty slots first; of equal ones, those of
        requests that already have tokens on the host, then of the latest, then the last. Both
        planes of a block are side by side."""
        if not count:
            return np.zeros(0, np.int64)
        view, ids = self.view, np.flatnonzero(self._open())
        rows = self._right[ids]
        filled = view.pool.filled(ids, RIGHT, view.table.computed)
        whole = view.host.tokens[rows] == 0
        at = view.pool.at[ids, RIGHT].astype(np.int64)
        latest = view.table.seq.max() - view.table.seq[rows]
        key = ((filled * 2 + whole) << 48) + (latest << 16) + (view.pool.width - at)
        if count < len(ids):
            few = np.argpartition(key, count - 1)[:count]
            ids, key = ids[few], key[few]
        return ids[np.argsort(key, kind="stable")]

    def _still_there(
        self, rows: np.ndarray, first: np.ndarray, end: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The part of the ranges that is neither lost already nor copied."""
        stays = ~self._batch.chosen[rows]
        if self._keep:
            keep = np.array([self._keep.get(row, np.iinfo(np.int64).max) for row in rows.tolist()])
            stays &= first < keep
        return rows[stays], first[stays], end[stays]

    def _save(self, rows: np.ndarray, first: np.ndarray, end: np.ndarray) -> None:
        if len(rows):
            slots = int(slots_for(end - first).sum())
            self.host_free -= slots
            self._batch.save(slots)
            self._saved.append((rows, first, end))
            self._hit[rows] = True

    def _cut(self, row: int, first: int) -> None:
        """Drops the row's cache from the block of token `first` on, since the host has no room. The
        block then belongs only to the other side, which would soon overwrite more of it."""
        index = first // self.view.pool.block_size
        self._let_go(row, np.arange(index, self.view.pool.held[row]))
        self._keep[row], self._hit[row] = index * self.view.pool.block_size, True
        if not index:
            self._leaves(row)

    def _leaves(self, row: int) -> None:
        """Notes that the row no longer holds a cache."""
        self.slots += 1
        self.running = self.running[self.running != row]
        self._hit[row] = True

    def _let_go(self, row: int, index: np.ndarray) -> None:
        """Gives back the row's blocks of these indices, unless it has before."""
        pool = self.view.pool
        given = self._given.setdefault(row, np.zeros(pool.held[row], bool))
        index = index[~given[index]]
        given[index] = True
        ids = pool.blocks_of(row)[:, index].ravel()
        if pool.direction[row] == RIGHT:
            self._right[ids[self._right[ids] == row]] = NOBODY
        else:
            self.left[ids] = 0
        self._refs[ids] -= 1
        self.free += int(np.count_nonzero(self._refs[ids] == 0))
