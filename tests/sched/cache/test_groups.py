"""Groups of layers with a window or a state: whatever happens, a row finds what it needs in each
group, and no block is lost, lent twice or kept for nothing."""

from __future__ import annotations

import dataclasses
from itertools import count

import numpy as np
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxserve.sched.cache.cache_kinds import CacheKind
from jaxserve.sched.cache.groups.grouped_pool import GroupedPool
from jaxserve.sched.cache.groups.groups import Groups
from jaxserve.sched.cache.groups.state_pool import StatePool
from jaxserve.sched.cache.groups.states import StateGroups
from jaxserve.sched.cache.groups.windowed_pool import WindowedPool
from jaxserve.sched.cache.groups.windows import WindowGroups
from jaxserve.sched.plan import BatchPlan, Checkpoint, InvalidPlan, Operation, Preempt, Restore
from jaxserve.sched.policy import Limits
from jaxserve.sched.request import Request, SamplingParams
from jaxserve.sched.scheduler import Scheduler
from jaxserve.sched.state.request_table import RUNNING, WAITING
from jaxserve.sched.step import Discard, Load, Save, Step
from tests.cost_models import FLAT
from tests.sched.cache.invariants import TableMirror, check_host, check_pool
from tests.sched.cache.operations import BLOCK, Scripted, array

ROWS, LONGEST, AHEAD = 4, 64, 24
rows = st.integers(0, ROWS - 1)


class Contents:
    """What is in the slots: a number for a token with all before it, negative for V."""

    def __init__(self, blocks: int, groups: Groups) -> None:
        self.slots, self.host = np.zeros((blocks, BLOCK), np.int64), dict[int, np.ndarray]()
        self.groups = groups

    def carry_out(self, step: Step) -> None:
        for move in step.moves:
            if isinstance(move, Save):
                block, slot = move.slots.T
                ends = np.cumsum(move.counts)[:-1]
                self.host |= zip(move.keys, np.split(self.slots[block, slot], ends), strict=True)
            elif isinstance(move, Load):
                block, slot = move.slots.T
                self.slots[block, slot] = np.concatenate([self.host[key] for key in move.keys])
            elif isinstance(move, Discard):
                for key in move.keys:
                    del self.host[key]

    def write(self, pool: GroupedPool, row: int, first: int, end: int, text: list[int]) -> None:
        if isinstance(pool, StatePool):
            self.check_state(pool, row, 0, first, text)
            self.slots[pool.states[row, 1]] = text[end - 1]
        index, slot = np.divmod(np.arange(first, end), BLOCK)
        for plane, table in enumerate(pool.tables[row]):
            self.slots[table[index], slot] = np.array(text[first:end]) * (-1) ** plane

    def check_state(
        self, pool: StatePool, row: int, which: int, cached: int, text: list[int]
    ) -> None:
        """AssertionError if the state before a step, or behind it, is not that of these tokens."""
        if cached:
            state = self.slots[pool.states[row, which]]
            assert (state == text[cached - 1]).all(), f"row {row} has another state"

    def check(self, pool: GroupedPool, row: int, cached: int, text: list[int]) -> None:
        """AssertionError if the row lacks anything that its next token sees."""
        if isinstance(pool, StatePool):
            self.check_state(pool, row, 1, cached, text)
        for plane, table in enumerate(pool.tables[row]):
            begin = 0
            if isinstance(self.groups, WindowGroups) and plane > 1:
                begin = max(cached - self.groups.window + 1, 0)
            index, slot = np.divmod(np.arange(begin, cached), BLOCK)
            found = self.slots[table[index], slot] * (-1) ** plane
            assert found.tolist() == text[begin:cached], f"row {row}, plane {plane}"


class Machine(RuleBasedStateMachine):
    """Random operations. Texts begin alike in one of two ways, and go on by themselves."""

    def begin(self, blocks: int, groups: Groups, host: int) -> None:
        self.groups, self.numbers = groups, count(1000)
        self.made = Scheduler(
            Scripted(),
            Limits(AHEAD, AHEAD, ROWS),
            num_blocks=blocks,
            block_size=BLOCK,
            max_model_len=LONGEST,
            capacity=ROWS,
            cost_model=FLAT,
            host_slots=host,
            prefix_caching=True,
            groups=self.groups,
        )
        self.mirror = TableMirror(self.made.pool)
        self.device = Contents(blocks, self.groups)
        self.texts = [self.add(row, row % 2, 30) for row in range(ROWS)]

    @property
    def pool(self) -> GroupedPool:
        pool = self.made.pool
        assert isinstance(pool, GroupedPool)
        return pool

    def add(self, row: int, start: int, alike: int) -> list[int]:
        """A request of 50 tokens of which so many begin in that way."""
        text = [1 + start + 2 * i for i in range(alike)]
        text += [next(self.numbers) for _ in range(LONGEST - alike)]
        for i in range(1, LONGEST):  # each stands for all before it, too
            text[i] = hash((text[i - 1], text[i])) % (1 << 40) + 1
        keys = tuple(str(text[end - 1]).encode() for end in range(BLOCK, 51, BLOCK))
        made = self.made.add(Request("r", (1,) * 50, SamplingParams(max_tokens=9), block_keys=keys))
        assert made == row
        return text

    def book(
        self,
        tokens: dict[int, int],
        *operations: Operation,
        reserve: int = 0,
        drafted: tuple[int, int] = (0, 0),
    ) -> Step | None:
        """drafted: drafts of the first row, and how many of them are right."""
        made, pool = self.made, self.pool
        drafts, right = drafted
        if made.cache is not None:
            made._note_found(made.cache)
        picked = array(*tokens)
        counts, computed = array(*tokens.values()), made.table.computed[picked]
        for op in operations:
            for row in op.rows.tolist():  # type: ignore[union-attr]
                keep = op.keep[0] if isinstance(op, Preempt) else made.host.tokens[row]
                computed = np.where(picked == row, keep, computed)
        kinds = np.full(len(picked), int(CacheKind.KV))
        room = np.minimum(computed + counts + reserve, LONGEST)
        plan = BatchPlan(picked, counts, room, kinds, operations)
        before = pool.num_free
        needed = pool.needed(picked, room, kinds).sum()
        made.policy.next = plan  # type: ignore[attr-defined]
        made.policy.speculates = drafts > 0
        if drafts:
            needed += pool.needed_to_draft(picked[:1]).sum()
            if needed > before:
                return None
            of_rows = array(drafts, *[0] * (len(tokens) - 1))

            def with_drafts(plan: BatchPlan, now: float) -> BatchPlan:
                all_of_it = plan.num_tokens + of_rows
                return dataclasses.replace(plan, num_tokens=all_of_it, drafts=of_rows)

            made._with_drafts = with_drafts  # type: ignore[method-assign]
        try:
            step = made.schedule(0.0)
        except InvalidPlan:
            assert pool.num_free == before, "a refused plan changes nothing"
            assert operations or needed > before, "it takes more than it says"
            return None
        if not operations:
            assert before - pool.num_free <= needed, "it takes more than it says"
        self.mirror.follow(step)
        self.device.carry_out(step)
        for row, first, end in zip(
            step.rows.tolist(), step.start.tolist(), step.end.tolist(), strict=True
        ):
            if isinstance(pool, WindowedPool):
                self.device.check(pool, row, first, self.texts[row])
            text, extra = self.texts[row], drafts * (row == picked[0]) if len(picked) else 0
            guessed = [*text[: end + right], *[-1] * (extra - right), *text[end + extra :]]
            self.device.write(pool, row, first, end + extra, guessed)
        done, launched = made.release_finished(step), made.table.computed.copy()
        if drafts:
            assert isinstance(pool, WindowedPool) or pool.moves[picked[0]], "it cannot go back"
            made.receive(step.emitting, 0.0, (step.emitting == picked[0]) * right + 1)
            back = isinstance(pool, StatePool) and right < drafts
            kept = step.start[0] if back else step.end[0] + right
            assert made.table.computed[picked[0]] == kept
        else:
            made.receive(step.emitting, 0.0)
        for row in done.tolist():
            self.end(row, 0, 30)
        self.check_groups(step, launched)
        return step

    def check_groups(self, step: Step, launched: np.ndarray) -> None:
        """launched: cached tokens by row when the step was launched."""
        pool, held = self.pool, np.flatnonzero(self.pool.held)
        if isinstance(pool, WindowedPool):
            behind = pool.groups.behind(launched[held], BLOCK)
            planned = np.isin(held, step.rows)
            assert (pool.first[held][planned] == behind[planned]).all(), "it is kept behind"
        if isinstance(pool, StatePool):
            assert not pool.moves.any(), "a state that was read is kept"
            assert (pool.reached[held] == self.made.table.computed[held]).all()
            for row in np.flatnonzero(pool.owns).tolist():
                assert not pool._is_snapshot(row), "a snapshot would be written to"

    def end(self, row: int, start: int, alike: int) -> None:
        self.made.finish(row)
        self.texts[row] = self.add(row, start, alike)

    @rule(row=rows, start=st.integers(0, 1), alike=st.integers(0, 50))
    def another(self, row: int, start: int, alike: int) -> None:
        self.end(row, start, alike)

    @rule(
        row=rows,
        other=rows,
        tokens=st.integers(1, AHEAD),
        reserve=st.sampled_from([0, 0, 1, 30, 60]),
    )
    def compute(self, row: int, other: int, tokens: int, reserve: int) -> None:
        table = self.made.table
        made = self.made
        if made.cache is not None:
            made._note_found(made.cache)
        pending = (table.prompt_len + table.generated - table.computed).tolist()
        first = min(tokens, pending[row])
        planned = {row: first}
        if other != row and AHEAD - first > 0:
            planned[other] = min(AHEAD - first, pending[other])
        self.book(planned, reserve=reserve)

    @rule(row=rows, other=rows, drafts=st.integers(1, 7), right=st.integers(0, 7))
    def draft(self, row: int, other: int, drafts: int, right: int) -> None:
        """A row that decodes guesses some tokens; another one goes on beside it."""
        table, cache = self.made.table, self.made.cache
        assert cache is not None
        self.made._note_found(cache)
        while table.computed[row] < table.prompt_len[row]:
            left = int(table.prompt_len[row] - table.computed[row])
            if self.book({row: min(left, AHEAD)}) is None:
                return
        pending = (table.prompt_len + table.generated - table.computed).tolist()
        drafts = min(drafts, int(table.max_tokens[row] - table.generated[row]) - 1)
        if pending[row] != 1 or drafts < 1:
            return
        planned = {row: 1} | ({other: min(5, pending[other])} if other != row else {})
        self.book(planned, reserve=drafts, drafted=(drafts, min(right, drafts)))

    @rule(row=rows, keep=st.sampled_from([0, 0, 1, 2, 3, 8, 40]))
    def preempt(self, row: int, keep: int) -> None:
        """Of tokens behind the window it cannot keep some alone, nor half of a shared block; and no
        state but the last one."""
        table = self.made.table
        keep = max(int(table.computed[row]) - keep, 0) if keep else 0
        if table.state[row] == RUNNING:
            can = keep < table.computed[row]
            if isinstance(self.pool, WindowedPool):
                can &= not keep or self.pool.first[row] <= self.pool.groups.behind(keep, BLOCK)
                can &= not (keep % BLOCK and self.pool._is_shared(row, keep // BLOCK))
            else:
                can &= not keep
            done = self.book({}, Preempt(array(row), array(keep)))
            assert (done is not None) == can

    @rule(row=rows)
    def swap(self, row: int) -> None:
        made = self.made
        cached = int(made.table.computed[row])
        if made.table.state[row] == RUNNING and cached:
            whole = Checkpoint(array(row), array(0), array(cached))
            self.book({}, whole, Preempt.whole(array(row)))

    @rule(row=rows, tokens=st.integers(1, 9))
    def swap_back(self, row: int, tokens: int) -> None:
        made = self.made
        if made.table.state[row] == WAITING and (there := int(made.host.tokens[row])):
            known = int(made.table.prompt_len[row] + made.table.generated[row])
            self.book({row: min(tokens, known - there)}, Restore(array(row), array(0)))

    @precondition(lambda self: hasattr(self, "made"))
    @rule()
    def forget(self) -> None:
        self.made.forget_all()

    @invariant()
    def everything_is_whole(self) -> None:
        if not hasattr(self, "made"):
            return
        check_pool(self.pool)
        check_host(self.made.host)
        assert self.pool.num_free >= 0
        for row in self.made.table.in_state(RUNNING).tolist():
            self.device.check(self.pool, row, int(self.made.table.computed[row]), self.texts[row])


class Windows(Machine):
    @initialize(
        blocks=st.integers(20, 150),
        window=st.integers(1, 30),
        groups=st.integers(1, 3),
        host=st.sampled_from([0, 600]),
    )
    def start(self, blocks: int, window: int, groups: int, host: int) -> None:
        self.begin(blocks, WindowGroups(window, groups), host)


class States(Machine):
    @initialize(
        blocks=st.integers(30, 150),
        each=st.integers(1, 7),
        groups=st.integers(1, 3),
        host=st.sampled_from([0, 600]),
    )
    def start(self, blocks: int, each: int, groups: int, host: int) -> None:
        self.begin(blocks, StateGroups(groups, each), host)


TestWindows, TestStates = Windows.TestCase, States.TestCase
TestWindows.settings = TestStates.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, phases=[Phase.generate]
)


def test_a_snapshot_goes_before_those_behind_it() -> None:
    """Of the last text that has several, rather than the only one of an older text."""
    made = Scheduler(
        Scripted(),
        Limits(AHEAD, AHEAD, ROWS),
        num_blocks=100,
        block_size=BLOCK,
        max_model_len=LONGEST,
        capacity=ROWS,
        cost_model=FLAT,
        prefix_caching=True,
        groups=StateGroups(count=2, blocks=4),
    )
    made.policy.chunked = True

    def serve(name: str, tokens: int) -> None:
        keys = tuple(f"{name}{end}".encode() for end in range(BLOCK, tokens + 1, BLOCK))
        prompt = (1,) * (tokens + 1)
        row = made.add(Request("r", prompt, SamplingParams(max_tokens=1), block_keys=keys))
        while made.table.computed[row] <= tokens:
            picked, computed = array(row), int(made.table.computed[row])
            room = array(tokens + 1)
            count = array(min(AHEAD, tokens + 1 - computed))
            plan = BatchPlan(picked, count, room, array(int(CacheKind.KV)))
            made.policy.next = plan  # type: ignore[attr-defined]
            step = made.schedule(0.0)
            made.receive(step.emitting, 0.0)
            made.release_finished(step)
        made.finish(row)

    def snapshots(name: str) -> list[int]:
        assert made.cache is not None
        found = (page for page in made.cache.pages() if page.beside is not None)
        return sorted(page.depth + 1 for page in found if page.key.startswith(name.encode()))

    serve("old", 8)
    serve("new", 24)
    assert (snapshots("old"), snapshots("new")) == ([2], [2, 4, 6])
    serve("other", 32)
    assert snapshots("old") == [2]
    assert snapshots("new") in ([4, 6], [6])


def test_who_goes_back_to_a_snapshot_does_not_write_to_it() -> None:
    machine = States()
    machine.begin(100, StateGroups(count=2, blocks=4), 0)
    pool, table = machine.pool, machine.made.table
    assert isinstance(pool, StatePool)
    machine.end(0, 0, 50)
    for end in (24, 48):  # snapshots are behind every eighth token
        while table.computed[0] < end:
            machine.book({0: end - int(table.computed[0])})
    machine.book({0: 2})
    assert table.generated[0] == 1
    machine.book({0: 1}, reserve=3, drafted=(3, 1))
    assert table.computed[0] == pool.reached[0] == 50 and pool.owns[0]
    pool.owns[0] = False  # as if it had begun at a snapshot
    before = pool.states[0, 1].copy()
    pool.refs[before] += 1
    pool.reach(np.array([0]), np.array([50]), np.array([54]), np.array([3]))
    assert not np.isin(pool.states[0, 1], before).any()
    pool.settle(np.array([0]), np.array([0]))
    assert (pool.states[0, 1] == before).all() and not pool.owns[0]
