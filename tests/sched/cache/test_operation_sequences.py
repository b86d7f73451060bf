"""Any sequence of pool operations leaves the accounting whole, and each cached token where the pool
says it is."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxserve.sched.cache.cache_kinds import CacheKind, Direction
from jaxserve.sched.plan import (
    Checkpoint,
    Copy,
    InvalidPlan,
    Join,
    Operation,
    Preempt,
    ProjectToKV,
    Restore,
)
from jaxserve.sched.request import Request, SamplingParams
from jaxserve.sched.restore_plan import left_filled, overwritten_ranges, plan_restore
from jaxserve.sched.state.request_table import RUNNING, WAITING
from jaxserve.sched.step import Step
from tests.sched.cache.device_contents import DeviceContents
from tests.sched.cache.invariants import TableMirror, check_host, check_pool
from tests.sched.cache.lending import lend
from tests.sched.cache.operations import BLOCK, HIDDEN, KV, LEFT, RIGHT, array, run, scheduler

ROWS = 4
rows = st.integers(0, ROWS - 1)


class Operations(RuleBasedStateMachine):
    """Random operations in random order: what is refused changes nothing, what is booked keeps the
    accounting whole, and each cached token stays where the pool says."""

    @initialize(blocks=st.integers(6, 20), host=st.integers(0, 40), running=st.integers(0, 3))
    def start(self, blocks: int, host: int, running: int) -> None:
        self.made = scheduler(blocks=blocks, host_slots=host)
        self.mirror = TableMirror(self.made.pool)
        self.device, self.numbers = DeviceContents(blocks, BLOCK), count()
        self.tokens = {row: self.text() for row in range(ROWS)}
        self.readers: set[int] = set()  # of others' prefixes
        for row in range(running):
            kind, side = (HIDDEN if row == 1 else KV), Direction(int(row < 2))
            self.book({row: 7}, kinds={row: kind}, directions={row: side})

    def text(self) -> np.ndarray:
        """A text that nobody else has."""
        return np.full(20, next(self.numbers))

    def book(self, tokens: dict[int, int], *operations: Operation, **options: Any) -> None:
        made = self.made
        before = made.table.computed.copy(), made.pool.num_free, made.host.num_used
        try:
            step = run(made, tokens, *operations, **options)
        except InvalidPlan:
            after = made.table.computed, made.pool.num_free, made.host.num_used
            assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
            return
        self.carry_out(step)

    def carry_out(self, step: Step) -> None:
        self.mirror.follow(step)
        self.device.run(step, self.made.pool, self.tokens)
        for row in self.made.release_finished(step).tolist():
            self.end(row)

    def end(self, row: int) -> None:
        """The row is another request's from now on."""
        self.readers.discard(int(self.made.table.seq[row]))
        self.made.finish(row)
        assert self.made.add(Request("r", (1,) * 10, SamplingParams(max_tokens=9))) == row
        self.tokens[row] = self.text()
        assert not self.made.host.tokens[row] and not self.made.pool.held[row]

    @rule(row=rows)
    def cancel(self, row: int) -> None:
        """Whatever it shares, and wherever its tokens are."""
        self.end(row)

    @rule(row=rows, tokens=st.integers(1, 10), kind=st.sampled_from(CacheKind),
          side=st.sampled_from(Direction))  # fmt: skip
    def compute(self, row: int, tokens: int, kind: CacheKind, side: Direction) -> None:
        if self.made.table.state[row] == WAITING:
            self.book({row: tokens}, kinds={row: kind}, directions={row: side})
        else:
            self.book({row: tokens})

    @rule(row=rows, keep=st.integers(0, 12))
    def preempt(self, row: int, keep: int) -> None:
        self.book({}, Preempt(array(row), array(keep)))

    @rule(row=rows, keep=st.integers(1, 12), tokens=st.integers(1, 4))
    def preempt_and_go_on(self, row: int, keep: int, tokens: int) -> None:
        self.book({row: tokens}, Preempt(array(row), array(keep)))

    @rule(row=rows, index=st.lists(st.integers(0, 3), min_size=1, max_size=2))
    def copy(self, row: int, index: list[int]) -> None:
        self.book({}, Copy(array(*[row] * len(index)), array(*index)))

    @rule(row=rows, first=st.integers(0, 12), count=st.integers(1, 8), drop=st.booleans())
    def checkpoint(self, row: int, first: int, count: int, drop: bool) -> None:
        ops: list[Operation] = [Checkpoint(array(row), array(first), array(first + count))]
        if drop:
            ops.append(Preempt(array(row), array(first)))
        self.book({}, *ops)

    @rule(row=rows, index=st.integers(0, 3), count=st.integers(1, 4), drop=st.booleans())
    def checkpoint_the_end_of_a_block(self, row: int, index: int, count: int, drop: bool) -> None:
        pool = self.made.pool
        there = min(int(self.made.table.computed[row]) - index * BLOCK, int(pool.cap[row, index]))
        end = index * BLOCK + there
        if there >= count:
            ops: list[Operation] = [Checkpoint(array(row), array(end - count), array(end))]
            if drop:
                ops.append(Preempt(array(row), array(0)))
            self.book({}, *ops)

    @rule(row=rows, which=st.integers(0, 3))
    def restore(self, row: int, which: int) -> None:
        segments = self.made.host.segments(row)
        if segments:
            self.book({}, Restore(array(row), array(segments[which % len(segments)].first)))

    @rule(row=rows, other=rows, index=st.integers(0, 3), tokens=st.integers(1, 4),
          save=st.booleans())  # fmt: skip
    def join(self, row: int, other: int, index: int, tokens: int, save: bool) -> None:
        """A row that waits starts in the free ends of another's blocks; what it writes over goes to
        the host, or the plan is refused."""
        pool, table = self.made.pool, self.made.table
        if row == other or table.state[row] != WAITING or index >= pool.held[other]:
            return
        side = 1 - int(pool.direction[other])
        ends = pool.blocks_of(other)[:, index : index + 1].T.copy()
        kind = int(pool.kind[other])
        operations: list[Operation] = [Join(row, ends)]
        if save and side == LEFT:
            filled = np.full(ends.size, tokens)
            operations.append(Checkpoint(*overwritten_ranges(self.made.view, ends.ravel(), filled)))
        self.book({row: tokens}, *operations, kinds={row: kind}, directions={row: side})

    @rule(row=rows, tokens=st.integers(1, 4))
    def write_over(self, row: int, tokens: int) -> None:
        """A row goes on in blocks that somebody fills from the right; its tokens leave."""
        pool, table = self.made.pool, self.made.table
        if table.state[row] != RUNNING or pool.direction[row] != LEFT:
            return
        end = int(table.computed[row]) + tokens
        index = np.arange(min(-(-end // BLOCK), int(pool.held[row])))
        ids = pool.blocks_of(row)[:, index]
        filled = np.broadcast_to(np.clip(end - index * BLOCK, 0, BLOCK), ids.shape)
        lost = overwritten_ranges(self.made.view, ids.ravel(), filled.ravel())
        self.book({row: tokens}, *([Checkpoint(*lost)] if len(lost[0]) else []))

    @rule(row=rows, tokens=st.integers(1, 3))
    def come_back(self, row: int, tokens: int) -> None:
        """All that makes a row's cache whole again, as `plan_restore` says: never refused, but
        for lack of blocks or of a place among the rows."""
        made = self.made
        if not made.host.tokens[row] or made.table.state[row] not in (WAITING, RUNNING):
            return
        if made.table.state[row] == RUNNING and made.pool.direction[row] != RIGHT:
            return
        back = plan_restore(made.view, row, left_filled(made.view))
        readers = made.table.seq[row] in self.readers
        if back.blocks > made.pool.num_free or not len(back.first) or readers:
            return
        holders = len(made.table.in_state(RUNNING)) + int(made.table.state[row] == WAITING)
        if holders > made.view.limits.max_rows:  # prefixes are shared here without asking
            return
        ones = np.full_like
        operations = [Copy(ones(back.copy, row), back.copy)] if len(back.copy) else []
        free = made.pool.num_free
        left = made.pool.blocks_of(row)[:, back.copy]
        given_back = np.count_nonzero(made.pool.refs[left] == 1)  # a V block that nobody shares
        restore = Restore(ones(back.first, row), back.first)
        step = run(made, {}, *operations, restore)
        self.carry_out(step)
        assert free - made.pool.num_free == back.blocks - given_back
        assert made.table.computed[row] == back.computed
        features = step.features()
        assert (features.copied_slots, features.loaded_slots) == (back.copied, back.loaded)
        self.book({row: tokens})

    @rule(row=rows)
    def to_kv(self, row: int) -> None:
        if self.made.table.state[row] == RUNNING:
            self.book({row: 1}, ProjectToKV(array(row)), kinds={row: KV})

    @rule(source=rows, row=rows, blocks=st.integers(1, 2))
    def share(self, source: int, row: int, blocks: int) -> None:
        """As prefix caching will: the reader begins as the other one."""
        table, pool = self.made.table, self.made.pool
        ids = pool.blocks_of(source)
        if table.state[row] != WAITING or table.computed[source] < blocks * BLOCK:
            return
        if (pool.cap[source, :blocks] < BLOCK).any():
            return
        if (pool.owners[ids[:, :blocks], 1 - pool.direction[source]] != -1).any():
            return
        lend(pool, source, row, blocks)
        table.computed[row] = blocks * BLOCK
        table.move(array(row), RUNNING)
        self.readers.add(int(table.seq[row]))
        own, read = self.tokens[row], self.tokens[source][: blocks * BLOCK]
        self.tokens[row] = np.concatenate([read, own[len(read) :]])

    @rule(data=st.data(), count=st.integers(2, 4))
    def several(self, data: st.DataObject, count: int) -> None:
        """Operations of a plan, one after the other."""
        operations = [self.operation(data.draw) for _ in range(count)]
        kinds = {row: int(self.made.pool.kind[row]) for row in range(ROWS)}
        tokens = data.draw(st.dictionaries(rows, st.integers(1, 3), max_size=2))
        for op in operations:
            if isinstance(op, ProjectToKV):
                kinds[int(op.rows[0])] = KV
                tokens[int(op.rows[0])] = 1
            elif isinstance(op, Join):
                kinds[op.row] = KV if op.blocks.shape[1] == 2 else HIDDEN
                tokens[op.row] = 1
        for op in operations:
            if isinstance(op, Preempt) and not op.keep.any():
                tokens.pop(int(op.rows[0]), None)
        self.book(tokens, *operations, kinds=kinds, directions=dict.fromkeys(tokens, 0))

    def operation(self, draw: Any) -> Operation:
        """One that is allowed, as far as that is easily seen, if nothing comes before it."""
        pool, table, host = self.made.pool, self.made.table, self.made.host
        running, waiting = table.in_state(RUNNING).tolist(), table.in_state(WAITING).tolist()
        kept = [(row, s.first) for row in range(ROWS) for s in host.segments(row)]
        which = [Preempt, Copy, Checkpoint] if running else [Preempt]
        which += [Restore] * 2 * bool(kept) + [Join] * 2 * bool(running and waiting)
        hidden = [row for row in running if pool.kind[row] == HIDDEN]
        what = draw(st.sampled_from(which + [ProjectToKV] * bool(hidden)))
        row = draw(st.sampled_from(running or [0]))
        cached, held = int(table.computed[row]), int(pool.held[row])
        if what is ProjectToKV:
            return ProjectToKV(array(draw(st.sampled_from(hidden))))
        if what is Preempt:
            keep = draw(st.integers(0, max(cached - 1, 0)))
            return Preempt(array(row), array(keep * draw(st.integers(0, 1))))
        if what is Copy:
            return Copy(array(row), array(draw(st.integers(0, held - 1))))
        if what is Checkpoint:
            first = draw(st.integers(0, cached - 1))
            return Checkpoint(array(row), array(first), array(draw(st.integers(first + 1, cached))))
        if what is Restore:
            row, first = draw(st.sampled_from(kept))
            return Restore(array(row), array(first))
        ends = pool.blocks_of(row)[:, -1:].T.astype(np.int64)
        return Join(draw(st.sampled_from(waiting)), ends)

    @invariant()
    def every_cached_token_is_where_the_pool_says(self) -> None:
        if not hasattr(self, "made"):
            return
        made = self.made
        check_pool(made.pool)
        check_host(made.host)
        for row in range(ROWS):
            there = np.ones(int(made.table.computed[row]), bool)
            for segment in made.host.segments(row):
                there[segment.first : segment.end] = False
                assert self.device.has_on_host(segment, self.tokens[row])
            found = self.device.has(made.pool, row, self.tokens[row][: len(there)])
            assert found[:, there].all(), f"row {row}"


TestOperations = Operations.TestCase
TestOperations.settings = settings(max_examples=30, deadline=None)
