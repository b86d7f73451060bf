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
from jaxserve.sched.step import CopyBlocks, Discard, Load, Save
from jaxserve.sched.table import RUNNING, WAITING
from tests.sched.operations import BLOCK, HIDDEN, KV, array, run, scheduler

ROWS = 4
rows = st.integers(0, ROWS - 1)


class Operations(RuleBasedStateMachine):
    """Random operations in random order: what is refused changes nothing, what is booked keeps the
    accounting whole, and a model of what each cached token holds stays right."""

    @initialize(blocks=st.integers(6, 20), host=st.integers(0, 40))
    def start(self, blocks: int, host: int) -> None:
        self.made = scheduler(blocks=blocks, host_slots=host)
        self.device: dict[tuple[int, int], tuple[int, int]] = {}  # (block, slot) -> (row, token)
        self.host: dict[int, list[tuple[int, int]]] = {}
        self.numbers = [0, 1, 2, 3]
        # Requests whose tokens another owner of the block may have overwritten: the policy's
        # business, and of no consequence to anybody else.
        self.spoiled: set[int] = set()

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
                    self.device[tuple(place)] = what
            elif isinstance(move, Discard):
                for key in move.keys:
                    del self.host[key]
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
            made.finish(row)
            number = max(self.numbers) + 1
            fresh = made.add(Request(str(number), (1,) * 10, SamplingParams(max_tokens=9)))
            self.numbers.append(number)
            assert fresh == row

    def write(self, row: int, first: int, end: int) -> None:
        places = self.made.pool.slots_of(row, first, end).tolist()
        planes = len(self.made.pool.blocks_of(row))
        seq = int(self.made.table.seq[row])
        what = [(seq, token) for _ in range(planes) for token in range(first, end)]
        for place, one in zip(places, what, strict=True):
            before, _ = self.device.get(tuple(place), (seq, 0))
            if before != seq and self.made.pool.shares:
                self.spoiled.add(before)
            self.device[tuple(place)] = one

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
        made = self.made
        if made.table.state[row] == RUNNING and not made.pool.shares:
            before = int(made.table.computed[row])
            was_hidden = made.pool.kind[row] == HIDDEN
            self.book({row: 1}, ToKV(array(row)), kinds={row: KV})
            if was_hidden and made.pool.kind[row] == KV and made.table.state[row] == RUNNING:
                self.write(row, 0, before)

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
