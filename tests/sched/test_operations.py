"""Pool operations on a plan: what they book, what they tell the device, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxserve.sched.kinds import CacheKind, Direction
from jaxserve.sched.plan import (
    BatchPlan,
    Checkpoint,
    Copy,
    InvalidPlan,
    Join,
    Operation,
    Preempt,
    Restore,
    ToKV,
)
from jaxserve.sched.policy import Limits, Policy, View
from jaxserve.sched.request import Request, SamplingParams
from jaxserve.sched.scheduler import Scheduler
from jaxserve.sched.step import CopyBlocks, Discard, Load, Save, Step, Widen
from jaxserve.sched.table import RUNNING, WAITING

KV, HIDDEN = CacheKind.KV, CacheKind.HIDDEN
LEFT, RIGHT = Direction.LEFT, Direction.RIGHT
BLOCK = 4


class Scripted(Policy):
    """A policy that says what it is told to."""

    next = BatchPlan()

    def plan(self, view: View, now: float) -> BatchPlan:
        return self.next


def array(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def scheduler(*, blocks: int = 16, host_slots: int = 64, rows: int = 3) -> Scheduler:
    """Four requests of ten tokens; blocks of four."""
    made = Scheduler(
        Scripted(),
        Limits(64, 64, rows),
        num_blocks=blocks,
        block_size=BLOCK,
        max_model_len=32,
        capacity=4,
        host_slots=host_slots,
        rho=0.0,
    )
    for i in range(4):
        made.add(Request(str(i), (1,) * 10, SamplingParams(max_tokens=9)))
    return made


def run(
    made: Scheduler,
    tokens: dict[int, int] | None = None,
    *operations: Operation,
    kinds: dict[int, int] | None = None,
    directions: dict[int, int] | None = None,
) -> Step:
    """Books a step: row -> tokens. Kinds are those of the rows' caches, KV for those that start."""
    rows = array(*(tokens or {}))
    count = array(*(tokens or {}).values())
    computed = made.table.computed[rows].copy()
    for op in operations:  # what will be cached when the tokens are computed
        if isinstance(op, Preempt):
            for row, keep in zip(op.rows.tolist(), op.keep.tolist(), strict=True):
                computed[rows == row] = keep
        if isinstance(op, Restore):
            for row, first in zip(op.rows.tolist(), op.first.tolist(), strict=True):
                segment = made.host.find(row, first)
                computed[rows == row] = 0 if segment is None else segment.end
    kind = [(kinds or {}).get(row, int(made.pool.kind[row])) for row in rows.tolist()]
    sides = [(directions or {}).get(row, 0) for row in rows.tolist()]
    made.policy.next = BatchPlan(  # type: ignore[attr-defined]
        rows, count, computed + count, array(*kind), operations, array(*sides)
    )
    step = made.schedule(0.0)
    made.pool.check()
    made.host.check()
    made.receive(step.emitting, 0.0)
    return step


def test_tokens_are_counted_by_why_they_are_computed() -> None:
    made = scheduler()
    step = run(made, {0: 10, 1: 7})
    assert (step.num_prefill_tokens, step.num_decode_tokens) == (17, 0)
    step = run(made, {0: 1, 1: 3})
    assert step.decodes.tolist() == [True, False] and step.start.tolist() == [10, 7]
    assert (step.num_prefill_tokens, step.num_decode_tokens) == (3, 1)
    assert step.num_recomputed_tokens == 0 and step.num_tokens == 4


def test_a_refill_in_single_tokens_is_no_decode_but_for_its_last() -> None:
    made = scheduler()
    run(made, {0: 10})
    run(made, {0: 1})
    run(made, {}, Preempt.whole(array(0)))
    step = run(made, {0: 9})
    assert (step.num_recomputed_tokens, step.num_decode_tokens) == (9, 0)
    for position in (9, 10):  # the first is the prompt's last token, the other is behind it
        step = run(made, {0: 1})
        assert not step.decodes.any() and not step.feeds_back.any(), position
        assert (step.num_recomputed_tokens, step.num_prefill_tokens) == (1, 0)
    step = run(made, {0: 1})
    assert step.decodes.all() and step.feeds_back.all()
    assert (step.num_recomputed_tokens, step.num_decode_tokens) == (0, 1)


def test_a_refill_at_once_ends_with_the_newest_token() -> None:
    made = scheduler()
    run(made, {0: 10})
    run(made, {0: 1})
    run(made, {}, Preempt.whole(array(0)))
    step = run(made, {0: 12})
    assert not step.decodes.any() and step.feeds_back.all() and step.emits.all()
    assert (step.num_recomputed_tokens, step.num_decode_tokens) == (11, 1)
    assert step.num_prefill_tokens == 0


def test_preempting_from_a_token_on_keeps_what_is_before() -> None:
    made = scheduler()
    run(made, {0: 10, 1: 10})
    kept = made.pool.blocks_of(0)[:, :2].copy()
    step = run(made, {0: 2}, Preempt(array(0), array(6)))
    assert step.preempted.tolist() == [] and made.table.state[0] == RUNNING
    assert step.start.tolist() == [6] and step.num_recomputed_tokens == 2
    assert made.pool.blocks_of(0).tolist() == kept.tolist(), "the third pair of blocks is free"
    assert made.table.preemptions[0] == 1
    step = run(made, {0: 3})
    assert step.emits.all() and step.num_recomputed_tokens == 2 and step.num_decode_tokens == 1


def test_copies_leave_the_old_block_to_those_who_share_it() -> None:
    made = scheduler()
    run(made, {0: 10})
    made.pool.share(0, 1, 1)  # as prefix caching will
    made.table.computed[1] = BLOCK
    made.table.move(array(1), RUNNING)
    old = made.pool.blocks_of(1)[:, 0].copy()
    with pytest.raises(InvalidPlan, match="copy them"):
        run(made, {1: 1}, Preempt(array(1), array(2)))
    step = run(made, {1: 1}, Preempt(array(1), array(2)), Copy(array(1), array(0)))
    (move,) = step.moves
    assert isinstance(move, CopyBlocks)
    assert move.pairs[:, 0].tolist() == old.tolist()
    assert made.pool.blocks_of(1)[:, 0].tolist() == move.pairs[:, 1].tolist()
    assert made.pool.blocks_of(0)[:, 0].tolist() == old.tolist()
    assert step.features().copied_slots == 2 * BLOCK


@pytest.mark.parametrize("kind", list(CacheKind))
@pytest.mark.parametrize("side", list(Direction))
def test_a_checkpoint_comes_back_where_it_is_wanted(kind: CacheKind, side: Direction) -> None:
    made = scheduler()
    run(made, {0: 10}, kinds={0: kind}, directions={0: side})
    before = made.pool.slots_of(0, 3, 9)
    planes = len(made.pool.blocks_of(0))
    step = run(made, {}, Checkpoint(array(0), array(3), array(9)))
    (save,) = step.moves
    assert isinstance(save, Save) and save.slots.tolist() == before.tolist()
    assert made.host.num_used == 6 * planes
    assert step.features().swapped_slots == 6 * planes
    step = run(made, {1: 3}, Preempt.whole(array(0)))
    step = run(made, {0: 3}, kinds={0: kind}, directions={0: side})
    step = run(made, {0: 2}, Restore(array(0), array(3)))
    load, discard = step.moves
    assert isinstance(load, Load) and load.key == save.key
    assert load.slots.tolist() == made.pool.slots_of(0, 3, 9).tolist()
    assert discard == Discard((save.key,)) and made.host.num_used == 0
    assert step.start.tolist() == [9] and step.end.tolist() == [11]


def test_a_request_that_waits_runs_again_with_its_checkpoint_alone() -> None:
    made = scheduler()
    run(made, {0: 10}, directions={0: RIGHT})
    run(made, {}, Checkpoint(array(0), array(0), array(8)), Preempt.whole(array(0)))
    assert made.table.state[0] == WAITING and made.pool.num_used == 0
    run(made, {}, Restore(array(0), array(0)))
    assert made.table.state[0] == RUNNING and made.table.computed[0] == 8
    assert made.pool.direction[0] == RIGHT and made.pool.num_used == 4


def test_host_memory_of_a_request_that_ends_is_free() -> None:
    made = scheduler()
    run(made, {0: 10})
    (save,) = run(made, {}, Checkpoint(array(0), array(0), array(8))).moves
    assert isinstance(save, Save)
    made.finish(0)
    assert made.host.num_used == 0
    assert run(made, {1: 1}).moves == (Discard((save.key,)),)


def test_a_start_may_take_the_other_end_of_blocks() -> None:
    made = scheduler()
    run(made, {0: 10}, directions={0: RIGHT})
    free = made.pool.num_free
    ends = made.pool.blocks_of(0)[:, 1:].T.copy()  # its last two pairs
    step = run(made, {1: 7}, Join(1, ends))
    assert made.pool.num_free == free and step.moves == ()
    assert made.pool.blocks_of(1).T.tolist() == ends.tolist()
    assert made.pool.owners[ends.ravel()].tolist() == [[1, 0]] * 4
    assert made.pool.returned_by(array(0, 1)).tolist() == [2, 4]
    run(made, {}, Preempt.whole(array(0)))
    assert made.pool.num_used == 4


def test_to_kv_says_what_lies_where() -> None:
    made = scheduler()
    run(made, {0: 10}, kinds={0: HIDDEN})
    (widen,) = run(made, {0: 1}, ToKV(array(0)), kinds={0: KV}).moves
    assert isinstance(widen, Widen)
    assert widen.rows.tolist() == [0] and widen.cached.tolist() == [10]
    assert widen.tables[0, :, :3].tolist() == made.pool.blocks_of(0).tolist()


def prepared() -> Scheduler:
    """Row 0 has KV, row 1 a hidden cache; tokens 4 to 8 of row 0 are on the host."""
    made = scheduler(blocks=12, host_slots=24)
    run(made, {0: 10, 1: 10}, kinds={1: HIDDEN}, directions={1: RIGHT})
    run(made, {}, Checkpoint(array(0), array(4), array(8)))
    return made


HERS = array(6)  # a block that row 1 fills from the right


@pytest.mark.parametrize(
    ("tokens", "operations", "problem"),
    [
        ({}, [Preempt.whole(array(2))], "without cache is preempted"),
        ({}, [Preempt(array(0), array(10))], "keep no fewer tokens than it has"),
        ({}, [Preempt(array(0), array(-1))], "or fewer than none"),
        ({}, [Preempt.whole(array(0)), Preempt.whole(array(0))], "without cache is preempted"),
        ({0: 1}, [Preempt.whole(array(0))], "planned and preempted"),
        ({}, [Copy(array(2), array(0))], "row without cache is copied"),
        ({}, [Copy(array(0), array(3))], "not there to be copied"),
        ({}, [Copy(array(0, 0), array(1, 1))], "not there to be copied"),
        ({}, [Copy(array(0, 0), array(0, 1))], "more blocks than are free"),
        ({}, [Copy(array(0), array(0)), Preempt.whole(array(0))], "after another operation"),
        ({}, [Checkpoint(array(2), array(0), array(1))], "row without cache is checkpointed"),
        ({}, [Checkpoint(array(0), array(0), array(11))], "not cached"),
        ({}, [Checkpoint(array(0), array(3), array(3))], "not cached"),
        ({}, [Checkpoint(array(0), array(7), array(9))], "on the host already"),
        ({}, [Checkpoint(array(1, 1), array(0, 1), array(2, 3))], "on the host already"),
        ({}, [Checkpoint(array(0, 1), array(8, 0), array(10, 10))], None),
        ({}, [Checkpoint(array(0, 0, 1), array(0, 8, 0), array(4, 10, 10))], "host memory holds"),
        ({}, [Restore(array(0), array(4))], "does not go on where the cache ends"),
        ({}, [Restore(array(1), array(0))], "nothing is on the host"),
        ({}, [Preempt(array(0), array(3)), Restore(array(0), array(4))], "does not go on where"),
        ({}, [Preempt(array(0), array(5)), Restore(array(0), array(4))], None),
        ({}, [Preempt.whole(array(0)), Restore(array(0), array(4))], "does not go on where"),
        ({}, [Join(2, HERS[None])], "neither runs nor starts"),
        ({2: 1}, [Join(2, HERS[None])], "takes 2 blocks at a time"),
        ({2: 1}, [Join(2, array(6, 0)[None])], "no free end"),
        ({2: 1}, [Join(2, array(6, 6)[None])], "different blocks"),
        ({2: 1}, [Join(2, array(6, 7)[None])], None),
        ({2: 1, 3: 1}, [Join(2, array(6, 7)[None]), Join(3, array(7, 8)[None])], "changed hands"),
        ({2: 1}, [Preempt.whole(array(1)), Join(2, array(6, 7)[None])], "changed hands"),
        ({}, [ToKV(array(1))], "not planned as KV"),
        ({0: 1}, [ToKV(array(0))], "no hidden cache"),
    ],
)
def test_refuses(tokens: dict[int, int], operations: list[Operation], problem: str | None) -> None:
    made = prepared()
    table, pool = made.table, made.pool
    state = table.state.copy(), table.computed.copy(), pool.num_free, made.host.num_used
    if problem is None:
        run(made, tokens, *operations)
        return
    with pytest.raises(InvalidPlan, match=problem):
        run(made, tokens, *operations)
    after = table.state, table.computed, pool.num_free, made.host.num_used
    assert all(np.array_equal(a, b) for a, b in zip(state, after, strict=True))
    pool.check()
    made.host.check()


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
            if not made.pool.shares:  # two owners may overwrite each other: the policy's business
                assert found == expected


TestOperations = Operations.TestCase
