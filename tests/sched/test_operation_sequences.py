"""Any sequence of pool operations leaves the accounting whole, and each cached token where the pool
says it is."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxserve.sched.kinds import CacheKind, Direction
from jaxserve.sched.plan import (
    Checkpoint,
    Copy,
    InvalidPlan,
    Join,
    Operation,
    Preempt,
    Restore,
    ToKV,
)
from jaxserve.sched.request import Request, SamplingParams
from jaxserve.sched.step import CopyBlocks, Discard, Load, Save, Widen
from jaxserve.sched.table import RUNNING, WAITING
from tests.sched.operations import BLOCK, HIDDEN, KV, array, run, scheduler

ROWS = 4
rows = st.integers(0, ROWS - 1)


class Operations(RuleBasedStateMachine):
    """Random operations in random order: what is refused changes nothing, what is booked keeps the
    accounting whole, and a model of what each cached token holds stays right."""

    @initialize(blocks=st.integers(6, 20), host=st.integers(0, 40), running=st.integers(0, 3))
    def start(self, blocks: int, host: int, running: int) -> None:
        self.made = scheduler(blocks=blocks, host_slots=host)
        self.device: dict[tuple[int, int], tuple[int, int]] = {}  # (block, slot) -> (row, token)
        self.host: dict[int, list[tuple[int, int]]] = {}
        self.spoiled: set[int] = set()  # whom another owner of a block has written over
        self.numbers = [0, 1, 2, 3]
        for row in range(running):
            kind, side = (HIDDEN if row == 1 else KV), Direction(int(row < 2))
            self.book({row: 7}, kinds={row: kind}, directions={row: side})

    def book(self, tokens: dict[int, int], *operations: Operation, **options: Any) -> None:
        made = self.made
        before = made.table.computed.copy(), made.pool.num_free, made.host.num_used
        try:
            step = run(made, tokens, *operations, **options)
        except InvalidPlan:
            after = made.table.computed, made.pool.num_free, made.host.num_used
            assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
            return
        for move in step.moves:
            if isinstance(move, Save):
                self.host[move.key] = [self.device[tuple(s)] for s in move.slots.tolist()]
            elif isinstance(move, Load):
                for place, what in zip(move.slots.tolist(), self.host[move.key], strict=True):
                    self.put(tuple(place), what)
            elif isinstance(move, Discard):
                for key in move.keys:
                    del self.host[key]
            elif isinstance(move, Widen):
                self.widen(move)
            elif isinstance(move, CopyBlocks):
                for source, target in move.pairs.tolist():
                    for slot in range(BLOCK):
                        if (source, slot) in self.device:
                            self.device[target, slot] = self.device[source, slot]
        for row, first, end in zip(
            step.rows.tolist(), step.start.tolist(), step.end.tolist(), strict=True
        ):
            self.write(row, first, end)
        for row in made.release_finished(step).tolist():
            self.spoiled.discard(int(made.table.seq[row]))
            made.finish(row)
            number = max(self.numbers) + 1
            fresh = made.add(Request(str(number), (1,) * 10, SamplingParams(max_tokens=9)))
            self.numbers.append(number)
            assert fresh == row

    def widen(self, move: Widen) -> None:
        for row, cached, table, side in zip(
            move.rows.tolist(), move.cached.tolist(), move.tables, move.directions, strict=True
        ):
            for token in range(cached):
                slot = token % BLOCK if side == Direction.LEFT else BLOCK - 1 - token % BLOCK
                for block in table[:, token // BLOCK].tolist():
                    self.put((block, slot), (int(self.made.table.seq[row]), token))

    def write(self, row: int, first: int, end: int) -> None:
        places = self.made.pool.slots_of(row, first, end).tolist()
        planes = len(self.made.pool.blocks_of(row))
        seq = int(self.made.table.seq[row])
        what = [(seq, token) for _ in range(planes) for token in range(first, end)]
        for place, one in zip(places, what, strict=True):
            self.put(tuple(place), one)

    def put(self, place: tuple[int, int], what: tuple[int, int]) -> None:
        """Two owners may write over each other's tokens: that is the policy's business."""
        table, pool = self.made.table, self.made.pool
        for row in table.in_state(RUNNING).tolist() if pool.shares else ():
            mine = pool.slots_of(row, 0, int(table.computed[row])).tolist()
            if table.seq[row] != what[0] and list(place) in mine:
                self.spoiled.add(int(table.seq[row]))
        self.device[place] = what

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

    @rule(row=rows, which=st.integers(0, 3))
    def restore(self, row: int, which: int) -> None:
        segments = self.made.host.segments(row)
        if segments:
            self.book({}, Restore(array(row), array(segments[which % len(segments)].first)))

    @rule(row=rows, other=rows, tokens=st.integers(1, 4))
    def join(self, row: int, other: int, tokens: int) -> None:
        """A row that waits starts in the free ends of another's last blocks."""
        pool, table = self.made.pool, self.made.table
        if row == other or table.state[row] != WAITING or not pool.held[other]:
            return
        side = 1 - int(pool.direction[other])
        ends = pool.blocks_of(other)[:, -1:].T.copy()
        # The policy's part: the slots that it takes are not in use.
        used = int(table.computed[other]) - (int(pool.held[other]) - 1) * BLOCK
        if 0 <= used <= BLOCK - tokens and (pool.refs[ends] == 1).all():
            kind = int(pool.kind[other])
            self.book({row: tokens}, Join(row, ends), kinds={row: kind}, directions={row: side})

    @rule(row=rows)
    def to_kv(self, row: int) -> None:
        if self.made.table.state[row] == RUNNING:
            self.book({row: 1}, ToKV(array(row)), kinds={row: KV})

    @rule(source=rows, row=rows, blocks=st.integers(1, 2))
    def share(self, source: int, row: int, blocks: int) -> None:
        """As prefix caching will; here the prompts are told apart, so the reader has to be, too."""
        table, pool = self.made.table, self.made.pool
        ids = pool.blocks_of(source)
        if table.state[row] != WAITING or table.computed[source] < blocks * BLOCK:
            return
        if (pool.owners[ids[:, :blocks], 1 - pool.direction[source]] != -1).any():
            return
        pool.share(source, row, blocks)
        table.computed[row] = blocks * BLOCK
        table.move(array(row), RUNNING)
        self.spoiled.add(int(table.seq[row]))

    @rule(data=st.data(), count=st.integers(2, 4))
    def several(self, data: st.DataObject, count: int) -> None:
        """Operations of a plan, one after the other."""
        operations = [self.operation(data.draw) for _ in range(count)]
        kinds = {row: int(self.made.pool.kind[row]) for row in range(ROWS)}
        tokens = data.draw(st.dictionaries(rows, st.integers(1, 3), max_size=2))
        for op in operations:
            if isinstance(op, ToKV):
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
        what = draw(st.sampled_from(which + [ToKV] * bool(hidden)))
        row = draw(st.sampled_from(running or [0]))
        cached, held = int(table.computed[row]), int(pool.held[row])
        if what is ToKV:
            return ToKV(array(draw(st.sampled_from(hidden))))
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
        made.pool.check()
        made.host.check()
        for row in made.table.in_state(RUNNING).tolist():
            end = int(made.table.computed[row])
            planes = len(made.pool.blocks_of(row))
            places = made.pool.slots_of(row, 0, end).tolist()
            seq = int(made.table.seq[row])
            expected = [(seq, token) for _ in range(planes) for token in range(end)]
            found = [self.device.get((block, slot)) for block, slot in places]
            if seq not in self.spoiled:
                assert found == expected


TestOperations = Operations.TestCase
