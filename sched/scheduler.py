"""Owns the request table and the block accounting, for the engine and the simulator.

`schedule` asks the policy for a plan, checks it, and books it: from then on the planned tokens
count as computed and the tokens that the step will sample as generated, although the device may
still be at work. `receive` reports tokens that have come, `finish` requests that have ended.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from jaxserve.sched.cache.block_pool import BlockPool
from jaxserve.sched.cache.block_sizes import blocks_a_plane, slots_for
from jaxserve.sched.cache.cache_kinds import HIDDEN, LEFT
from jaxserve.sched.cache.groups.grouped_pool import GroupedPool
from jaxserve.sched.cache.groups.grouped_prefix_cache import GroupedPrefixCache
from jaxserve.sched.cache.groups.groups import Groups, kept_slots
from jaxserve.sched.cache.groups.state_pool import StatePool
from jaxserve.sched.cache.groups.states import StateGroups
from jaxserve.sched.cache.groups.windowed_pool import WindowedPool
from jaxserve.sched.cache.groups.windows import WindowGroups
from jaxserve.sched.cache.host_pages import HostPages
from jaxserve.sched.cache.kv_offload import HostMemory
from jaxserve.sched.cache.prefix_cache import PrefixCache
from jaxserve.sched.cache.retention import Retention
from jaxserve.sched.checks import check_plan
from jaxserve.sched.cost.cost_model import BatchFeatures, CostModel
from jaxserve.sched.cost.padding import Padding
from jaxserve.sched.cost.reachability import Alone, slo_problems
from jaxserve.sched.fairness.fair_queue import hold_back, waiting_tenants
from jaxserve.sched.fairness.fair_share import DECODE_COST, FairShares
from jaxserve.sched.plan import BatchPlan, Checkpoint, Copy, Join, Preempt, ProjectToKV, Restore
from jaxserve.sched.policy import Limits, Oracle, Policy, View
from jaxserve.sched.programs.cache_lives import CacheLives
from jaxserve.sched.programs.program_table import NO_ANSWER, SILENCE, Answer, ProgramTable
from jaxserve.sched.progress import Progress
from jaxserve.sched.request import Request
from jaxserve.sched.speculation.choice import (
    DraftPrices,
    Patience,
    Trials,
    expects_drafts,
    with_drafts,
)
from jaxserve.sched.state.request_table import (
    DRAINING,
    HELD,
    MISSED,
    RELEGATED,
    RUNNING,
    WAITING,
    RequestTable,
)
from jaxserve.sched.step import CopySlots, Discard, Load, Move, ProjectSlots, Save, Step

T = TypeVar("T")
_NOBODY = np.zeros(0, np.int64)
_POOLS: dict[type, type[GroupedPool]] = {WindowGroups: WindowedPool, StateGroups: StatePool}


def request_bytes(max_model_len: int, block_size: int, groups: Groups | None = None) -> int:
    """Memory of a scheduler for each request of its capacity, present or not: a row of the table,
    and one of the pool's with the ids of all blocks that it may hold. groups: see `Scheduler`."""
    width = blocks_a_plane(max_model_len, block_size)
    pool = BlockPool(0, block_size, 1, width)
    if groups is not None:
        pool = _POOLS[type(groups)](0, block_size, 1, width, groups=groups, ahead=1)
    columns = [*vars(RequestTable(1)).values(), *vars(pool).values()]
    return sum(column.nbytes for column in columns if isinstance(column, np.ndarray))


class Scheduler:
    """The request table and the pool, with a policy. Requests are named by their rows of the table.
    Not thread-safe: one thread plans.

    Args:
        policy: Decides what to compute.
        limits: C, P and rows.
        num_blocks, block_size: Size of the pool.
        max_model_len: Tokens of the longest request.
        capacity: Most requests at a time.
        cost_model, padding, seed, rho, projects: For the policy, see `View`.
        host_slots: Capacity of host memory, for checkpoints and for evicted pages; no pages if
        tiers fill blocks from both sides.
        prefix_caching: Whether requests reuse full blocks with the same tokens
        (`sched/cache/prefix_cache.py`).
        retention: Which of these are kept; None for `lru`.
        checked: Whether every plan is checked before it is booked.
        groups: The groups of layers that keep less than all K and V; None for none. With some,
            pages do not go to host memory.
        infer_programs, program_silence: See `ProgramTable`.
    """

    def __init__(
        self,
        policy: Policy,
        limits: Limits,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        capacity: int,
        cost_model: CostModel,
        padding: Padding | None = None,
        host_slots: int = 0,
        prefix_caching: bool = False,
        retention: Retention | None = None,
        seed: int = 0,
        rho: float | None = None,
        projects: bool = False,
        checked: bool = True,
        groups: Groups | None = None,
        infer_programs: bool = False,
        program_silence: float = SILENCE,
    ) -> None:
        width = blocks_a_plane(max_model_len, block_size)
        self.policy, self.checked, self.groups = policy, checked, groups
        self.table = self._make_table(capacity)
        self.programs = ProgramTable(
            self.table, infers=infer_programs, silence=program_silence, block_size=block_size
        )
        self.host = HostMemory(host_slots, capacity)
        if groups is not None:
            kept = functools.partial(kept_slots, block_size=block_size, groups=groups)
            self.host = HostMemory(host_slots, capacity, kept)
        hidden = policy.hybrid_cache and rho is not None
        self.cache = self._make_cache(block_size, retention, hidden) if prefix_caching else None
        self._ahead = limits.max_batch_tokens
        self.pool = self._make_pool(num_blocks, block_size, capacity, width)
        self.pool.cache = self.cache
        self._lengths = Oracle(capacity)
        oracle = self._lengths if policy.hypothetical else None
        self.view = View(
            self.table,
            self.pool,
            limits,
            cost_model,
            padding,
            seed,
            rho,
            projects,
            host=self.host,
            oracle=oracle,
            programs=self.programs,
        )
        if self.cache is not None:
            retained = self.cache.retention
            retained.seconds, retained.lost = self._page_seconds, self._lost_seconds
            retained.lives = CacheLives(self.programs)
            self.programs.on_tools = retained.waits
        self.preemptions, self._loses = 0, False
        self.shares = FairShares()
        self._patience, self._trials, self._trial = Patience(), Trials(), False
        self._draft_prices = DraftPrices()
        self._progress = Progress(capacity)
        self._known_twice: list[tuple[int, int, int]] = []  # row, seq and index of the block
        self._firsts: dict[int, tuple[int, int]] = {}  # by waiting row: row and seq
        self._batch_order = 0

    def _make_table(self, capacity: int) -> RequestTable:
        return RequestTable(capacity)

    def _make_pool(self, num_blocks: int, block_size: int, capacity: int, width: int) -> BlockPool:
        if self.groups is None:
            return BlockPool(num_blocks, block_size, capacity, width)
        own: dict[str, Any] = {"groups": self.groups, "ahead": self._ahead}
        return _POOLS[type(self.groups)](num_blocks, block_size, capacity, width, **own)

    def _make_cache(
        self, block_size: int, retention: Retention | None, hidden: bool
    ) -> PrefixCache:
        memory, rows, host = self.host, self.table.capacity, None
        if self.groups is not None:
            return GroupedPrefixCache(rows, retention, groups=self.groups, block_size=block_size)
        if memory.capacity and not self.policy.two_sided:
            host = HostPages(memory, int(slots_for(block_size)), self._least_depth)
        return PrefixCache(rows, retention, host, hidden=hidden)

    def _least_depth(self) -> float:
        """Number of blocks before one from which copying it to host memory and back takes no longer
        than computing it."""
        first, second = self._page_seconds(np.arange(2)).tolist()
        lacking = float(self.view.swap_time(np.array([self.pool.block_size]))[0]) - first
        if lacking <= 0:
            return 0.0
        return lacking / (second - first) if second > first else math.inf

    def add(
        self,
        request: Request,
        output_len: int | None = None,
        number: int = 0,
        alone: Alone | None = None,
        first: int | None = None,
        adapter: int = 0,
        times: Sequence[float] = (),
        keys: Sequence[bytes] = (),
    ) -> int:
        """Adds a request, which waits at first.

        Args:
            request: The request.
            output_len: Tokens that it will write, if that is known, as in simulations; None if not.
            Only hypothetical policies see it.
            number: Its index in the simulated workload, from 0.
            alone: Its latency on an idle engine, if the caller has it from `alone`.
            first: Row of another continuation of the same request, which has just come. If its
            blocks can be reused, this one waits for it.
            adapter: Number of its adapter; 0 for none.
            times: When each token came that another engine has generated. It waits before all that
            begin here.
            keys: Keys of the further blocks that these tokens fill.

        Returns:
            Its row.

        Raises:
            IndexError: The table is full.
        """
        waiting = functools.partial(waiting_tenants, self.view)
        tenant = self.shares.join(request.tenant, request.weight, waiting)
        alone = self.alone(request) if alone is None else alone
        row = self.table.add(request, alone, self.reachable(request, alone))
        self.table.tenant[row], self.table.weight[row] = tenant, self.shares.weight(tenant)
        self.table.adapt(row, adapter)
        if times:
            self.table.resume(row, times)
        if len(self.pool.held) < (capacity := self.table.capacity):
            for owner in (self.pool, self.host, self._progress, self._lengths, self.cache):
                if owner is not None:
                    owner.follow(capacity)
        self._progress.forget(row)
        length = request.sampling.max_tokens if output_len is None else output_len
        self._lengths.set_output(row, length, number)
        self.programs.begin(row, request, first)
        if self.cache is not None and request.block_keys is not None:
            side = self.policy.side(request.tier)
            self.cache.tenants.weight[tenant] = self.shares.weight(tenant)
            program = int(self.table.program[row])
            self.cache.add(row, request.block_keys, side, request.tier, tenant, program)
            self.cache.extend(row, keys)
            self._look_up(row)
            if first is not None:
                self._firsts[row] = first, int(self.table.seq[first])
        return row

    def know(self, row: int, keys: Sequence[bytes]) -> None:
        """Adds the keys of the row's next full blocks, after its tokens have come."""
        if self.cache is None or not self.cache.knows(row):
            return
        first = self.cache.num_keys(row)
        self.cache.extend(row, keys)
        if self.table.state[row] == RUNNING:
            full = int(self.table.computed[row]) // self.pool.block_size
            self._register(row, first, full, launched=True)

    def pages(
        self, row: int, sent: Collection[bytes] = (), most: float = math.inf
    ) -> tuple[list[tuple[bytes, int]], Save | None]:
        """The row's full blocks of K and V that are computed, if there is host memory for such
        pages.

        Args:
            row: The row.
            sent: Keys of those that somebody has already, which are left out.
            most: Most pages, with those.

        Returns:
            Their keys, in order, each with a key in host memory; and how to save those that are not
            there.
        """
        cache, found, ids = self.cache, list[tuple[bytes, int]](), list[int]()
        if cache is None or cache.host is None or self.groups is not None:
            return found, None
        new: list[int] = []
        for index in range(int(self.table.computed[row]) // self.pool.block_size):
            page = cache.page(row, index)
            if page is None or not page.is_known or len(sent) + len(found) >= most:
                break
            if page.key in sent:
                continue
            if page.host is None:
                new.append(self.host.new_key())
                ids += page.ids
            found.append((page.key, new[-1] if page.host is None else page.host))
        return found, Save(tuple(new), *self._slots(np.array(ids))) if new else None

    def adopt(self, row: int, sent: Mapping[bytes, T]) -> list[tuple[int, T]]:
        """Takes in pages that another engine has sent for a row that was just added.

        Args:
            row: The row.
            sent: The content of each by key.

        Returns:
            The keys in host memory of those that are to be kept there, and their content.
        """
        cache, kept = self.cache, list[tuple[int, T]]()
        if cache is None or cache.host is None or self.groups is not None:
            return kept
        for index, key in enumerate(cache.keys(row)):
            if cache.page(row, index) is None:
                place = cache.adopt(row, index) if key in sent else None
                if place is None:
                    break
                kept.append((place, sent[key]))
        return kept

    def forget_all(self) -> None:
        """Forgets all cached prefixes, since some of them may be wrong; also blocks that running
        requests have begun."""
        if self.cache is not None:
            self.pool.forget_all()
            for row in self.table.in_state(RUNNING).tolist():
                self.cache.remove(row)

    def _look_up(self, row: int) -> None:
        """Looks up the cached prefix of a waiting row without a cache. The last block is always
        computed, since the step has to sample the next token. A row with a cache on the host gets
        it back from there."""
        if self.cache is None:
            return
        known = int(self.table.prompt_len[row] + self.table.generated[row])
        there = self.host.tokens[row] > 0
        self.cache.watch_row(row, 0 if there else (known - 1) // self.pool.block_size)

    def _register(self, row: int, first: int, end: int, *, launched: bool) -> None:
        """Registers the row's full blocks [first, end). launched: whether the step that fills them
        has been launched. Until then it writes to the blocks in the row's table."""
        for index in range(first, end):
            if not self.pool.register(row, index, swap=launched):
                if not launched:  # the following blocks use the other block, too
                    seq = int(self.table.seq[row])
                    self._known_twice += [(row, seq, later) for later in range(index, end)]
                break

    def _register_again(self) -> None:
        """Registers blocks whose contents are already cached in another block, once the step that
        fills them is launched, so that one of the two copies is freed."""
        twice, self._known_twice = self._known_twice, []
        for row, seq, index in twice:
            if self.table.seq[row] == seq and self.table.state[row] == RUNNING:
                self.pool.register(row, index, swap=True)

    def alone(self, request: Request, cached: int = 0) -> Alone:
        """The request's latency on an idle engine, as predicted now, if this many tokens of its
        prompt are cached. Any thread may ask."""
        chunk = self.policy.prefill_limit(self.view.limits)
        return Alone.from_request(request, self.view.step_time, chunk, cached)

    def reachable(self, request: Request, alone: Alone) -> Alone:
        """The request's latency on an idle engine given its cached prefix, if it has targets that
        cannot be met without. alone: latency without it. Any thread may ask."""
        if self.cache is None or not slo_problems(request, alone):
            return alone
        return self.alone(request, self.cached(request))

    def cached(self, request: Request) -> int:
        """Tokens of its prompt that a request would find cached now. Any thread may ask."""
        keys = request.block_keys
        if self.cache is None or not keys:
            return 0
        size = self.pool.block_size
        most = (len(request.prompt) - 1) // size  # the last block is always computed
        return size * self.cache.longest(keys[:most], self.policy.side(request.tier))

    def recompute_seconds(self, keys: Sequence[bytes]) -> float:
        """Predicted seconds to compute the blocks with these keys of `pages` again, without those
        that are cached here. Any thread may ask."""
        cache = self.cache
        missing = [cache is None or not cache.has(key) for key in keys]
        return float(self._page_seconds(np.flatnonzero(missing)).sum())

    def schedule(self, now: float, free_at: float = -math.inf, overrun: float = 1.0) -> Step:
        """Plans and books the next step.

        Args:
            now: Seconds.
            free_at: When the device is predicted to finish what has been launched
                (`StepWatch.free_at`).
            overrun: Bound on the ratio of measured to predicted step time (`StepWatch.overrun`).

        Raises:
            InvalidPlan: The policy over-commits, or makes no progress (`sched/progress.py`);
                nothing is booked.
        """
        return self.book(self.plan(now, free_at, overrun))

    def plan(self, now: float, free_at: float = -math.inf, overrun: float = 1.0) -> BatchPlan:
        """The first half of `schedule`: the policy's next plan, checked. It changes only which
        waiting requests are held back, and which of two equal blocks is read."""
        self._progress.check()
        self.programs.expire(now)
        if self.cache is not None:
            self.cache.look(now, len(self.table.in_state(RUNNING)))
            self._register_again()
            self._note_found(self.cache)
        self.view.device.free_at, self.view.device.overrun = free_at, overrun
        apart = self._hold_siblings() if self._firsts else _NOBODY
        if len(self.shares) > 1:
            hold_back(self.policy, self.view, self.shares, now, apart)
        plan = self.policy.plan(self.view, now)
        if self.checked:
            check_plan(plan, self.view, moves_cache=self.policy.moves_cache)
        if isinstance(self.pool, StatePool) and self.cache is not None and self.policy.chunked:
            plan = self._with_snapshots(plan, self.pool, self.cache)
        return self._with_drafts(plan, now) if self.policy.speculates else plan

    def _with_snapshots(self, plan: BatchPlan, pool: StatePool, cache: PrefixCache) -> BatchPlan:
        """The plan with chunks cut where a snapshot of the state can be found again later: a step
        only leaves the state behind its last token."""
        size, counts = pool.block_size, plan.num_tokens.copy()
        restored = [op.rows for op in plan.operations if isinstance(op, Restore)]
        computed = self.table.computed[plan.rows]
        for i in np.flatnonzero(computed + counts > pool.groups.apart * size).tolist():
            row, end = int(plan.rows[i]), pool.next_snapshot(int(computed[i]))
            if end >= computed[i] + counts[i] or any(row in rows for rows in restored):
                continue
            page = cache.page(row, end // size - 1)
            if end // size <= cache.num_keys(row) and (page is None or page.beside is None):
                counts[i] = end - computed[i]
        return dataclasses.replace(plan, num_tokens=counts)

    def _with_drafts(self, plan: BatchPlan, now: float) -> BatchPlan:
        drafting = with_drafts(plan, self.view, now, self._draft_prices, trial=self._trial)
        self._trial = False
        self._patience.planned(drafting.drafts is not None)
        if self.checked and drafting.drafts is not None:
            check_plan(drafting, self.view, moves_cache=self.policy.moves_cache)
        return drafting

    def _page_seconds(self, before: np.ndarray) -> np.ndarray:
        """Seconds to compute a page after `before` others, in a batch full of prompt tokens."""
        size, chunk = self.pool.block_size, self.policy.prefill_limit(self.view.limits)
        cached = before * size
        batch = BatchFeatures(chunk, chunk, 0, 0, chunk * (chunk + 2 * cached), 1, cached)
        return np.broadcast_to(self.view.step_time(batch) * size / chunk, before.shape)

    def _lost_seconds(self, pages: int) -> float:
        """Seconds to get back the first pages of a request: computed again, or from host memory if
        that is faster."""
        computed = float(self._page_seconds(np.arange(pages)).sum())
        if self.cache is None or self.cache.host is None:
            return computed
        tokens = np.array([pages * self.pool.block_size])
        return min(computed, float(self.view.swap_time(tokens)[0]) / 2)

    def _hold_siblings(self) -> np.ndarray:
        """Holds back continuations of a prompt until the first has computed it, or has ended.
        Returns the rows held back, int64 [n]."""
        table, cache = self.table, self.cache
        assert cache is not None
        apart: list[int] = []
        for row, (first, seq) in list(self._firsts.items()):
            waits = table.state[row] in (WAITING, HELD)
            going = table.seq[first] == seq and table.state[first] in (WAITING, HELD, RUNNING)
            held = waits and going and not table.generated[first] and not cache.finds_all(row)
            if held:
                apart.append(row)
                continue
            del self._firsts[row]
            if waits and len(self.shares) < 2:  # otherwise the fair queue decides
                table.move(np.array([row]), WAITING)
        rows = np.array(apart, np.int64)
        table.move(rows, HELD)
        return rows

    def _note_found(self, cache: PrefixCache) -> None:
        """Counts cached prefixes of waiting requests as computed."""
        for row in cache.take_changed():
            if self.table.state[row] in (WAITING, HELD):
                self.table.computed[row] = int(cache.found[row]) * self.pool.block_size
                self.pool.kind[row] = cache.kind[row]

    def book(self, plan: BatchPlan) -> Step:
        """The second half of `schedule`: from here on the plan counts as carried out. If it fails,
        it may be partly booked, and all requests have to be finished."""
        moves: list[Move] = []
        try:
            return self._book(plan, moves)
        except BaseException:
            for move in moves:
                if isinstance(move, Discard):
                    self.host.drop_again(move.keys)
            raise

    def _book(self, plan: BatchPlan, moves: list[Move]) -> Step:
        """moves: receives the moves of the step."""
        table, rows, counts = self.table, plan.rows, plan.num_tokens
        if plan.drafts is not None:
            counts = counts - plan.drafts  # booked by `receive` once they are accepted
        arriving = [] if self.cache is None else self._pin(plan)
        self._operate(plan, moves)
        self._start(plan)
        if self.host.num_used:
            for row in rows[self.host.tokens[rows] > 0].tolist():
                self.host.release(row)  # whatever it does not restore is computed again
        self.pool.grow_all(rows, plan.reserve)
        if self.groups is not None:
            done = table.computed[rows]
            self.pool.reach(rows, done, done + plan.num_tokens, plan.drafts)
        if self.cache is not None and self.cache.host is not None:
            self._move_pages(self.cache, self.cache.host, arriving, moves)
        start, before = table.computed[rows], table.generated[rows]
        end = start + counts
        emits = end == table.prompt_len[rows] + before
        feeds_back = emits & (before > 0)
        decodes = feeds_back & (counts == 1)
        generated = before + emits
        if len(self.shares) > 1 or self.programs.num_calls:
            new = end - np.clip(table.lost_from[rows], start, end)  # without recomputed tokens
            if plan.drafts is not None:
                new += plan.drafts
            self.programs.charge(rows, new)
            if len(self.shares) > 1:
                self.shares.charge(table.tenant[rows], new + (DECODE_COST - 1.0) * emits)
        table.computed[rows], table.generated[rows] = end, generated
        if plan.drafts is not None:
            table.drafted[rows] += plan.drafts
        if self.cache is not None:
            self._register_all(rows, start, end)
        self._note_batch(rows, plan.num_tokens)
        sampling = table.num_sampling > 0 and not table.greedy[rows[emits]].all()
        hidden = plan.kinds == HIDDEN if np.count_nonzero(plan.kinds) else None
        step = Step(
            plan,
            start,
            end,
            emits,
            decodes,
            feeds_back,
            generated,
            hidden,
            tuple(moves),
            plan.preempted if plan.operations else _NOBODY,
            sampling,
            table.num_adapted > 0 and bool(table.adapter[rows].any()),
            self._recomputed(rows, start, end),
            self._give_up(plan),
        )
        losers = _losers(plan) if plan.operations else _NOBODY
        self._progress.note(step.num_tokens, step.num_recomputed_tokens, losers)
        return step

    def _pin(self, plan: BatchPlan) -> list[tuple[int, int, list[int]]]:
        """Lets starting rows read their cached prefixes before anything else takes the blocks.
        Returns prefixes in host memory: row, index of its first block there, keys of all."""
        cache, table, size = self.cache, self.table, self.pool.block_size
        assert cache is not None
        arriving: list[tuple[int, int, list[int]]] = []
        starts = plan.rows[table.state[plan.rows] == WAITING]
        for row in starts.tolist():
            pages = cache.claim_hit(row)
            keys = [page.host for page in pages if page.host is not None]
            here = len(pages) - len(keys)
            if here:
                self.pool.share(row, pages[:here], cache.side(row))
            if keys:
                arriving.append((row, here, keys))
            cache.num_reused += len(pages)
            if cache.knows(row) and not table.preemptions[row]:
                tier = table.tier[row]
                known = table.prompt_len[row] + table.generated[row]
                table.cached_at_start[row] = min(len(pages) * size, table.prompt_len[row])
                cache.retention.started(cache.retention.now - float(table.arrival[row]))
                cache.num_queried[tier] += known
                cache.num_hit[tier] += len(pages) * size
                cache.num_host_hit[tier] += len(keys) * size
        reading = starts[self.pool.held[starts] > 0]
        if len(reading):
            table.move(reading, RUNNING)
            self.shares.left(int(table.tenant[reading[-1]]))
        return arriving

    def _move_pages(
        self,
        cache: PrefixCache,
        host: HostPages,
        arriving: list[tuple[int, int, list[int]]],
        moves: list[Move],
    ) -> None:
        """Adds the moves of pages to host memory, before all other moves, which may overwrite them,
        and the moves back. arriving: from `_pin`; those rows have blocks for them by now."""
        pool, keys, blocks = self.pool, list[int](), list[np.ndarray]()
        for row, first, mine in arriving:
            end = first + len(mine)
            keys += mine
            blocks.append(pool.tables[row, :, first:end].T.ravel())
            self._register(row, first, end, launched=False)
        cache.trim_host()
        new, dropped, loaded = host.take_new(), host.take_dropped(), set(keys)
        if early := [key for key in dropped if key not in loaded]:
            moves.insert(0, Discard(tuple(early)))
        if new:
            ids = np.array([ids for _, ids in new]).ravel()
            moves.insert(len(early) > 0, Save(tuple(key for key, _ in new), *self._slots(ids)))
            self.host.num_saved += pool.block_size * len(ids)
        if keys:
            ids = np.concatenate(blocks)
            moves.append(Load(tuple(keys), *self._slots(ids)))
            self.host.num_restored += pool.block_size * len(ids)
        if late := [key for key in dropped if key in loaded]:
            moves.append(Discard(tuple(late)))

    def _slots(self, ids: np.ndarray) -> tuple[tuple[int, ...], np.ndarray]:
        """Slots of the pages in these blocks: the number of each, and all of them."""
        size = self.pool.block_size
        slots = np.stack([np.repeat(ids, size), np.tile(np.arange(size), len(ids))], axis=1)
        return (2 * size,) * (len(ids) // 2), slots.astype(np.int32)

    def _register_all(self, rows: np.ndarray, start: np.ndarray, end: np.ndarray) -> None:
        """Registers the blocks that these rows fill up to `end`. Later steps run after this one, so
        others may read them from now on."""
        size = self.pool.block_size
        for i in np.flatnonzero(end // size > start // size).tolist():
            blocks = int(start[i]) // size, int(end[i]) // size
            self._register(int(rows[i]), *blocks, launched=False)

    def _give_up(self, plan: BatchPlan) -> np.ndarray:
        """Returns the rows that the plan newly gives up: they will miss their targets, and no
        earlier plan has said so."""
        if not (len(plan.missed) or len(plan.relegated)):
            return _NOBODY
        relegated = self.table.give_up(plan.relegated, RELEGATED)
        new = np.concatenate([relegated, self.table.give_up(plan.missed, MISSED)])
        if self.cache is not None:
            self.cache.hopeless.update(new.tolist())
        return new

    def _recomputed(self, rows: np.ndarray, start: np.ndarray, end: np.ndarray) -> int:
        """Number of tokens that had been in the cache before."""
        if not self._loses:
            return 0
        again = np.minimum(end, self.table.lost_from[rows]) - start
        return int(np.add.reduce(np.maximum(again, 0)))

    def _note_batch(self, rows: np.ndarray, counts: np.ndarray) -> None:
        """Records the order of rows in the batch, single tokens first."""
        order, single = np.arange(self._batch_order, self._batch_order + len(rows)), counts == 1
        if np.count_nonzero(single) < len(rows):
            rows = np.concatenate([rows[single], rows[~single]])
        self.table.last_batch_order[rows] = order
        self._batch_order += len(rows)

    def release_finished(self, step: Step) -> np.ndarray:
        """Frees the blocks of the step's requests that have reached their limit, and returns their
        rows. Called once the step is launched: later steps run after it, so the blocks can be
        reused at once."""
        table = self.table
        self._register_again()
        if self.groups is not None:
            self.pool.slide(step.rows, table.computed[step.rows])
        done = step.rows[step.generated >= table.max_tokens[step.rows]]
        if len(done):
            self.pool.release_all(done)
            table.move(done, DRAINING)
        return done

    def receive(self, rows: np.ndarray, now: float, counts: np.ndarray | None = None) -> None:
        """Notes that tokens of these rows have reached the host.

        Args:
            rows: int64 [n], distinct.
            now: Seconds.
            counts: int64 [n], number of tokens per row if the step had drafts: accepted drafts, and
            one more. None for one each.
        """
        if counts is not None:
            self._book_accepted(rows, counts - 1)
        self.table.receive(rows, now, counts)

    def _book_accepted(self, rows: np.ndarray, accepted: np.ndarray) -> None:
        """Books the accepted drafts of each row as generated and cached. Blocks that they fill are
        registered once their keys are known (`know`)."""
        table = self.table
        for column in (table.computed, table.generated, table.accepted):
            column[rows] += accepted
        back, keep = self.pool.settle(rows, accepted)
        if len(back):
            self._lose(back, keep)
        if len(self.shares) > 1:
            self.shares.charge(table.tenant[rows], accepted * (DECODE_COST - 1.0))

    def offer(self, row: int, tokens: int, acceptance: float) -> None:
        """Offers drafted tokens that may follow all known tokens of a row.

        Args:
            row: The row.
            tokens: Number of drafted tokens; 0 for none.
            acceptance: Probability that the first of them is right.
        """
        self.table.offered[row], self.table.acceptance[row] = tokens, acceptance

    def would_draft(self, now: float) -> bool:
        """Whether the next plan is expected to draft if it waits for the tokens in flight. The
        caller then waits."""
        if not self.policy.speculates:
            return False
        if not expects_drafts(self.view, now, self._draft_prices):
            self._trial = self._trials.due(self.view)
            return self._trial
        return self._patience.waits()

    def finish(
        self,
        row: int,
        *,
        complete: bool = True,
        length: int | None = None,
        now: float | None = None,
        answer: Answer = NO_ANSWER,
    ) -> None:
        """Ends the request, whatever its state, and frees its blocks and its row.

        Args:
            row: Its row.
            complete: Whether its output ended by itself or at its limit, so that its length is
            learned from; False if it was cancelled, timed out or failed.
            length: Tokens of its output, if that ended before the last token received with it; None
            for all of them.
            now: When it ended, in seconds; None: with the last token received.
            answer: Where its output ends, by which a call that goes on from it is known.
        """
        table = self.table
        if self.programs.num_calls:
            ended = float(table.last_token[row]) if now is None else now
            self.programs.end(row, ended, complete=complete, answer=answer)
        if self.cache is not None:
            if self.cache.retention.by_program and table.state[row] == DRAINING:
                self.cache.stay_again(row)  # its blocks were released before it ended
            self.cache.remove(row)
            self._firsts.pop(row, None)
        self.pool.release(row)
        self.host.release(row)
        length = int(table.received[row]) if length is None else length
        if complete and length:
            table.output_lengths.add(length, cut=length >= table.max_tokens[row])
        table.remove(row)
        if table.num_free == table.capacity:  # no request is left to make progress
            self._progress.advance(0)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held: no blocks, and no host memory."""
        return not (self.pool.num_used or self.host.num_used)

    def _start(self, plan: BatchPlan) -> None:
        """Opens a cache for planned rows that have none."""
        table, rows = self.table, plan.rows
        starts = table.state[rows] == WAITING
        if not np.count_nonzero(starts):
            return
        rows = rows[starts]
        sides = LEFT if plan.directions is None else plan.directions[starts]
        self.pool.open_caches(rows, plan.kinds[starts], sides)
        table.move(rows, RUNNING)
        self.shares.left(int(table.tenant[rows[-1]]))

    # Operations: each returns the moves on the device.

    def _operate(self, plan: BatchPlan, moves: list[Move]) -> None:
        moves += self._discard()  # left there by requests that have ended
        for operation in plan.operations:
            moves += _BOOKING[type(operation)](self, plan, operation)
            moves += self._discard()

    def _discard(self) -> list[Move]:
        keys = self.host.take_dropped()
        return [Discard(keys)] if keys else []

    def _preempt(self, plan: BatchPlan, op: Preempt) -> list[Move]:
        table, rows, computed = self.table, op.rows, self.table.computed[op.rows]
        part, kinds = np.flatnonzero(op.keep), self.pool.kind[rows]
        whole = rows if not len(part) else rows[op.keep == 0]
        self.pool.release_all(whole)
        for row, keep in zip(rows[part].tolist(), op.keep[part].tolist(), strict=True):
            self.pool.truncate(row, keep)
        if self.policy.moves_cache:
            self.host.keep_chains(rows, op.keep)
            self.host.note_losses(rows, op.keep, computed, kinds)
        self._lose(rows, op.keep)
        table.preemptions[rows] += 1
        order = self.preemptions + 1
        table.preempted_order[rows] = np.arange(order, order + len(rows))
        self.preemptions += len(rows)
        table.move(whole, WAITING)
        if self.cache is not None:
            for row in whole.tolist():
                self._look_up(row)
        return []

    def _lose(self, rows: np.ndarray, keep: np.ndarray) -> None:
        """Notes that these rows have no more than so many cached tokens left."""
        table, self._loses = self.table, True
        table.lost_from[rows] = np.maximum(table.lost_from[rows], table.computed[rows])
        table.computed[rows] = keep

    def _to_kv(self, plan: BatchPlan, op: ProjectToKV) -> list[Move]:
        rows = op.rows
        self.pool.project_to_kv(rows)
        if self.cache is not None:
            for row, full in zip(rows.tolist(), self.table.computed[rows].tolist(), strict=True):
                self._register(row, 0, full // self.pool.block_size, launched=False)
        tables, sides = self.pool.tables[rows], self.pool.direction[rows]
        return [ProjectSlots(rows, self.table.computed[rows], tables, sides)]

    def _copy(self, plan: BatchPlan, op: Copy) -> list[Move]:
        if not len(op.rows):
            return []
        places = self.pool.copy_all(op.rows, op.index, self.table.computed)
        return [CopySlots(places)] if len(places) else []

    def _checkpoint(self, plan: BatchPlan, op: Checkpoint) -> list[Move]:
        if not len(op.rows):
            return []
        pool, rows = self.pool, op.rows
        kinds, sides = pool.kind[rows], pool.direction[rows]
        keys = self.host.add(rows, op.first, op.end, kinds, sides)
        counts, slots = pool.slots_of_all(rows, op.first, op.end)
        for row, first, end in zip(rows.tolist(), op.first.tolist(), op.end.tolist(), strict=True):
            pool.lose(row, first, end)
        return [Save(tuple(keys.tolist()), counts, slots)]

    def _restore(self, plan: BatchPlan, op: Restore) -> list[Move]:
        rows, first = op.rows, op.first
        if not len(rows):
            return []
        table, pool = self.table, self.pool
        found = self.host.restore(rows, first)
        end = found["end"]
        further = end > table.computed[rows]
        for i in np.flatnonzero(~further).tolist():
            row = int(rows[i])
            pool.regain(row, int(first[i]), int(end[i]), int(table.computed[row]))
        # The first segment of a row determines the kind of its cache, the last how far it goes.
        opening = _firsts(rows)
        opening = opening[table.state[rows[opening]] == WAITING]
        if len(opening):
            opened = rows[opening]
            pool.open_caches(opened, found["kind"][opening], found["side"][opening])
            table.move(opened, RUNNING)
        if np.count_nonzero(further):
            longer = rows[further]
            table.computed[longer] = end[further]
            longer = longer[_firsts(longer)]
            pool.grow_all(longer, table.computed[longer])
            pool.reach(longer, table.computed[longer], table.computed[longer])
        if self.cache is not None:  # they were forgotten when they left
            for row in rows[_firsts(rows)].tolist():
                begin = int(first[rows == row].min()) // pool.block_size
                full = int(table.computed[row]) // pool.block_size
                self._register(row, begin, full, launched=False)
        counts, slots = pool.slots_of_all(rows, first, end)
        return [Load(tuple(found["key"].tolist()), counts, slots)]

    def _join(self, plan: BatchPlan, op: Join) -> list[Move]:
        if self.table.state[op.row] == WAITING:
            mine = plan.rows == op.row
            directions = None if plan.directions is None else plan.directions[mine]
            self._start(BatchPlan(plan.rows[mine], kinds=plan.kinds[mine], directions=directions))
        self.pool.join(op.row, op.blocks)
        return []


def _firsts(rows: np.ndarray) -> np.ndarray:
    """Index of the first occurrence of each row, in order."""
    return np.sort(np.unique(rows, return_index=True)[1])


def _losers(plan: BatchPlan) -> np.ndarray:
    """Rows that lose some of their cache, or all of it."""
    found = [op.rows for op in plan.operations if isinstance(op, Preempt)]
    return np.concatenate(found) if found else _NOBODY


_BOOKING: dict[type, Callable[[Scheduler, BatchPlan, Any], list[Move]]] = {
    Preempt: Scheduler._preempt,
    ProjectToKV: Scheduler._to_kv,
    Copy: Scheduler._copy,
    Checkpoint: Scheduler._checkpoint,
    Restore: Scheduler._restore,
    Join: Scheduler._join,
}
