"""The state of every request in the engine, one NumPy array per property.

A policy ranks thousands of requests with array operations; there are no objects per request. Tokens
are counted in three numbers: `prompt_len + generated` are known, `computed` of them are in the
cache, and the rest are pending. There are no phases: a prefill, a chunk, a refill after a
preemption and a decode are all "compute the next c of the pending tokens".
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np

from jaxserve.sched.cost.reachability import NOTHING, Alone, targets_that_count
from jaxserve.sched.request import Request, Tier
from jaxserve.sched.state.ordered_rows import OrderedRows
from jaxserve.sched.state.output_lengths import ENOUGH, OutputLengths


class State(enum.IntEnum):
    """WAITING requests hold no cache, RUNNING ones do. DRAINING ones have launched their last
    token, which is in flight; HELD ones wait while it is other tenants' turn
    (`sched/fairness/fair_queue.py`), or until another continuation of their prompt has computed it.
    Policies see neither DRAINING nor HELD requests."""

    FREE = 0
    WAITING = 1
    RUNNING = 2
    DRAINING = 3
    HELD = 4


class Outlook(enum.IntEnum):
    """What the policy expects for a request (`BatchPlan`). A MISSED request will not meet its
    targets. A RELEGATED one is also served with what is left, behind all others."""

    OPEN = 0
    MISSED = 1
    RELEGATED = 2


# Looking up, or comparing, a member of an enum takes longer than the comparison that needs it.
FREE, WAITING, RUNNING, DRAINING, HELD = map(int, State)
RESUMED = 1 << 31  # more than requests will ever come; policies pack numbers of 32 bits
MISSED, RELEGATED = int(Outlook.MISSED), int(Outlook.RELEGATED)


class RequestTable:
    """Struct of arrays over `capacity` rows, one row per request. Times in seconds, lengths in
    tokens.

    `state` changes only through `add`, `move` and `remove`.

    Attributes:
        state: int8, `State`.
        seq: int64, order of arrival, with those first that another engine has begun.
        last_batch_order: int64, order of the requests' last times in a batch.
        preempted_order: int64, order of the last preemptions, from 1; 0 for none.
        arrival: float64.
        first_token: float64, when the first token reached the host; inf before.
        last_token: float64, when the last token reached the host; the arrival before the first.
        prompt_len: int64.
        max_tokens: int64.
        generated: int64, counted from the launch of the step that makes them.
        received: int64, generated tokens that have reached the host.
        late_gaps: int64, times between two received tokens that were longer than `tbt`.
        longest_gap: float64, the longest time between two received tokens; 0 before the second.
        computed: int64, cached tokens, counted from the launch of the step; for a waiting request,
        the tokens that it would find cached.
        cached_at_start: int64, tokens that were cached when it first started.
        preemptions: int64.
        lost_from: int64, cached tokens when it lost some; the largest such number.
        tier: int8, `Tier`.
        greedy: bool, `SamplingParams.is_plain_greedy`.
        ttft, tbt, jct, max_tbt: float64, targets as policies see them; inf for none. A target that
        an idle engine would miss is raised to the reachable latency.
        alone: float64, time to the first token on an idle engine; 0 without targets.
        outlook: int8, `Outlook`; it never gets better.
        offered: int64, drafted tokens that may follow all known tokens, see `sched/speculation/`.
        acceptance: float64, estimated probability that the first of them is right.
        drafted: int64, drafted tokens computed so far.
        accepted: int64, drafted tokens that were right.
        value: float64, value of meeting its targets (`Request.value`).
        tenant: int64, number in `FairShares`.
        weight: float64, weight of its tenant when it came.
        adapter: int32, number of its adapter; 0 for the base model.
        program: int64, number of its program (`sched/programs/`); -1 for none.
        program_start: float64, when the program's first call came; its own arrival without one.
        program_deadline: float64, when the program's last call has to end; inf for never.
        calls_before: int64, calls of the program before this one.
        calls_after: float64, calls that are expected after it; 0 if nothing is known.
        tool_time_after: float64, seconds that tools are expected to take before these; 0 if nothing
            is known.
        attained: float64, tokens computed for all calls of the program, each counted once.
        output_lengths: Lengths of finished outputs.
        num_sampling: Requests that are not greedy.
        num_timed: Requests with a TTFT or a TBT.
        num_adapted: Requests with an adapter.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.state = np.zeros(capacity, np.int8)
        self.seq = np.zeros(capacity, np.int64)  # order of arrival
        self.last_batch_order = np.zeros(capacity, np.int64)  # order of the last times in a batch
        self.preempted_order = np.zeros(capacity, np.int64)  # order of the last preemptions, from 1
        self.arrival = np.zeros(capacity)
        self.first_token = np.full(capacity, np.inf)
        self.last_token = np.zeros(capacity)
        self.prompt_len = np.zeros(capacity, np.int64)
        self.max_tokens = np.zeros(capacity, np.int64)
        self.generated = np.zeros(capacity, np.int64)
        self.received = np.zeros(capacity, np.int64)  # generated tokens that reached the host
        self.late_gaps = np.zeros(capacity, np.int64)  # between received tokens, over the TBT
        self.longest_gap = np.zeros(capacity)
        self.computed = np.zeros(capacity, np.int64)
        self.cached_at_start = np.zeros(capacity, np.int64)
        self.preemptions = np.zeros(capacity, np.int64)
        self.lost_from = np.zeros(capacity, np.int64)  # most cached tokens when it lost some
        self.tier = np.zeros(capacity, np.int8)
        self.greedy = np.ones(capacity, bool)  # takes the most likely token
        self.ttft = np.full(capacity, np.inf)
        self.tbt = np.full(capacity, np.inf)
        self.jct = np.full(capacity, np.inf)
        self.max_tbt = np.full(capacity, np.inf)
        self.alone = np.zeros(capacity)
        self.outlook = np.zeros(capacity, np.int8)
        self.offered = np.zeros(capacity, np.int64)
        self.acceptance = np.zeros(capacity)
        self.drafted = np.zeros(capacity, np.int64)
        self.accepted = np.zeros(capacity, np.int64)
        self.value = np.ones(capacity)
        self.tenant = np.zeros(capacity, np.int64)  # numbered by `FairShares`
        self.weight = np.ones(capacity)
        self.adapter = np.zeros(capacity, np.int32)
        self.program = np.full(capacity, -1, np.int64)  # set by `ProgramTable`, as what follows
        self.program_start = np.zeros(capacity)
        self.program_deadline = np.full(capacity, np.inf)
        self.calls_before = np.zeros(capacity, np.int64)
        self.calls_after = np.zeros(capacity)
        self.tool_time_after = np.zeros(capacity)
        self.attained = np.zeros(capacity)
        self.output_lengths = OutputLengths()
        self._free = list(range(capacity - 1, -1, -1))
        self._next_seq = 0
        self.num_sampling = 0  # requests that are not greedy
        self.num_timed = 0  # requests that have a TTFT or a TBT
        self.num_adapted = 0
        self._waiting, self._running = OrderedRows(WAITING), OrderedRows(RUNNING)
        self._requeued = OrderedRows(WAITING)
        self._listings = (self._waiting, self._requeued, self._running)

    @property
    def num_free(self) -> int:
        """Rows without a request: how many more `add` can take."""
        return len(self._free)

    @property
    def num_added(self) -> int:
        """Requests so far, including removed ones."""
        return self._next_seq

    def add(self, request: Request, alone: Alone = NOTHING, reachable: Alone | None = None) -> int:
        """Gives the request a row and returns it.

        Args:
            request: The request.
            alone: Its latency on an idle engine that computes all of it.
            reachable: The same given the cached part of its prompt, to compare its targets with;
                None for `alone`.

        Raises:
            IndexError: The table is full.
        """
        row = self._free[-1]  # taken only later, since the following may fail
        self.seq[row] = self._next_seq
        self.arrival[row] = self.last_token[row] = request.arrival
        self.first_token[row] = np.inf
        self.prompt_len[row] = len(request.prompt)
        self.max_tokens[row] = request.sampling.max_tokens
        for column in (self.generated, self.received, self.computed, self.cached_at_start):
            column[row] = 0
        for column in (self.offered, self.drafted, self.accepted):
            column[row] = 0
        self.late_gaps[row] = self.longest_gap[row] = 0
        self.preemptions[row] = self.lost_from[row] = self.outlook[row] = 0
        self.last_batch_order[row] = self.preempted_order[row] = 0
        self.program[row], self.program_start[row] = -1, request.arrival
        self.program_deadline[row] = np.inf
        self.calls_before[row] = self.calls_after[row] = self.attained[row] = 0
        self.tool_time_after[row] = 0
        self.tier[row], self.adapter[row] = request.tier, 0
        self.greedy[row] = request.sampling.is_plain_greedy
        self.alone[row], self.value[row] = alone.ttft, request.value
        targets = targets_that_count(request.slo, alone if reachable is None else reachable)
        self.ttft[row], self.tbt[row], self.jct[row], self.max_tbt[row] = targets
        self._free.pop()
        self._next_seq += 1
        self.num_sampling += not self.greedy[row]
        self.num_timed += self._is_timed(row)
        self.move(np.array([row]), WAITING)
        return row

    def resume(self, row: int, times: Sequence[float]) -> None:
        """Notes that another engine has generated tokens of a request that was just added.

        Args:
            row: Its row.
            times: When each token came, ascending, at least one.
        """
        steps, counts = np.unique(times, return_counts=True)
        gaps, counts = np.diff(steps) / counts[1:], counts[1:]  # as in `receive`
        self.seq[row] -= RESUMED  # its reader waits for the next token, and has waited for the move
        self.generated[row] = self.received[row] = len(times)
        self.first_token[row], self.last_token[row] = times[0], times[-1]
        self.late_gaps[row] = counts[gaps > self.tbt[row]].sum()
        self.longest_gap[row] = gaps.max(initial=0.0)

    def remove(self, row: int) -> None:
        """Frees the row; its columns become stale. ValueError if it is free already."""
        if self.state[row] == FREE:
            raise ValueError(f"row {row} is free already")
        self.num_sampling -= not self.greedy[row]
        self.num_timed -= self._is_timed(row)
        self.num_adapted -= bool(self.adapter[row])
        self.move(np.array([row]), FREE)
        self._free.append(row)

    def adapt(self, row: int, adapter: int) -> None:
        """Sets the number of the adapter of a request that was just added; 0 for none."""
        self.adapter[row] = adapter
        self.num_adapted += adapter > 0

    def receive(self, rows: np.ndarray, now: float, counts: np.ndarray | None = None) -> None:
        """Notes that tokens of these rows, which are distinct, reach the host now.

        Args:
            rows: int64 [n].
            now: Seconds.
            counts: int64 [n], number of tokens per row; None for one each. The time since the token
                before is spread over them (`sched/slo/deliveries.py`).
        """
        gap = now - self.last_token[rows]
        several = np.ones(len(rows), np.int64) if counts is None else counts
        first = self.received[rows] == 0
        if np.count_nonzero(first):
            self.first_token[rows[first]] = now
            gap[first] = 0.0  # the first gap would count from the arrival
        if counts is not None:
            gap /= counts
        self.late_gaps[rows] += several * (gap > self.tbt[rows])
        self.longest_gap[rows] = np.maximum(self.longest_gap[rows], gap)
        self.received[rows] += several
        self.last_token[rows] = now

    def give_up(self, rows: np.ndarray, outlook: int) -> np.ndarray:
        """Lowers the rows' outlook to this one, unless it is worse already. Returns the rows that
        were not expected to miss their targets before."""
        new = rows[self.outlook[rows] < MISSED]
        self.outlook[rows] = np.maximum(self.outlook[rows], outlook)
        return new

    def has_targets(self, rows: np.ndarray) -> np.ndarray:
        """Which rows have targets, bool [n]."""
        first, gaps = self.ttft[rows], self.tbt[rows]
        least = np.minimum(np.minimum(first, gaps), np.minimum(self.jct[rows], self.max_tbt[rows]))
        return np.asarray(least < np.inf)

    def bare(self, rows: np.ndarray) -> np.ndarray:
        """Which rows are best-effort requests without targets, bool [n]."""
        found = self.tier[rows] == Tier.BEST_EFFORT
        return found & ~self.has_targets(rows) if found.any() else found

    def move(self, rows: np.ndarray, to: int) -> None:
        """Moves the rows to another state."""
        if not len(rows):
            return
        before = self.state[rows]
        for listing in self._listings:
            if not listing.stale:
                listing.stale = bool(np.count_nonzero(before == listing.state))
        self.state[rows] = to
        for listing in self._listings:
            if listing.state == to:
                listing.join(rows)

    def _is_timed(self, row: int) -> bool:
        return bool(min(self.ttft[row], self.tbt[row]) < np.inf)

    def queued(self) -> np.ndarray:
        """Rows that hold no cache, held back or not, in order of arrival."""
        held = np.flatnonzero(self.state == HELD)
        waiting = self.in_state(WAITING)
        if not len(held):
            return waiting
        rows = np.concatenate([waiting, held])
        return np.asarray(rows[np.argsort(self.seq[rows])])

    def pending(self, rows: np.ndarray) -> np.ndarray:
        """Known tokens that are not in the cache, [len(rows)]."""
        return self.prompt_len[rows] + self.generated[rows] - self.computed[rows]

    def decoding(self, rows: np.ndarray) -> np.ndarray:
        """Which rows have all but their newest generated token in the cache, bool [len(rows)]."""
        return (self.generated[rows] > 0) & (self.pending(rows) == 1)

    def tokens_ahead(self, rows: np.ndarray) -> np.ndarray:
        """Tokens that each is expected to write (AccelGen's S_g), float64 [len(rows)]: as many as
        earlier outputs of its length did; all that it may before ENOUGH outputs have ended."""
        generated = self.generated[rows]
        most = (self.max_tokens[rows] - generated).astype(np.float64)
        if self.output_lengths.count < ENOUGH:
            return most
        return np.minimum(self.output_lengths.expected(generated) - generated, most)

    def in_state(self, state: int) -> np.ndarray:
        """Rows in `state` (WAITING or RUNNING), in order of arrival. Read-only; the same array as
        long as nothing changes."""
        listing = self._waiting if state == WAITING else self._running
        return listing.rows(self.state, self._by_arrival)

    def requeued(self) -> np.ndarray:
        """Waiting rows: preempted ones first, starting with the latest, then the others in order of
        arrival. Read-only, like `in_state`."""
        return self._requeued.rows(self.state, self._by_preemption)

    def _by_arrival(self, rows: np.ndarray) -> np.ndarray:
        return self.seq[rows]

    def _by_preemption(self, rows: np.ndarray) -> np.ndarray:
        order = self.preempted_order[rows]
        return np.where(order > 0, -order, self.seq[rows])
