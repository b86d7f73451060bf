"""InferMax Algorithm 1: one scheduler from whose parameters the known ones come (section 3.1).

Order and group the requests (1), skip those whose phase does not match the batch unless
hybrid batching is on (2), check C, P and M (3), and on a lack of M preempt those of
lower priority (4).
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from jaxserve.sched.batch_budget import BatchBudget, Candidates, Expected
from jaxserve.sched.keys import Form, Key, evaluate
from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.policy import Policy, View
from jaxserve.sched.ranking import Ranking, rank
from jaxserve.sched.registry import register_variant
from jaxserve.sched.table import RUNNING, WAITING, RequestTable

FIRST_LOOK, LOOK_GROWTH = 64, 8
NEVER = np.iinfo(np.int64).max
NOBODY = np.zeros(0, np.int64)


class Phase(enum.Flag):
    """WAITING holds no cache: it starts, or is refilled after a preemption. PREFILL is in the
    middle of that. DECODE has all but its newest token in the cache."""

    WAITING = enum.auto()
    PREFILL = enum.auto()
    DECODE = enum.auto()
    RUNNING = PREFILL | DECODE
    ANY = WAITING | PREFILL | DECODE


class Reserve(enum.Enum):
    """Cache tokens that a request gets room for when it starts."""

    CHUNK = "what this step computes"
    PROMPT = "all its pending tokens"
    WHOLE = "prompt and max_tokens, but for the last one, which is never stored"


# Looking a member up in an enum takes a while.
_CHUNK, _WHOLE = Reserve.CHUNK, Reserve.WHOLE


@dataclass(frozen=True)
class Group:
    """Requests in some phases, considered one after the other in the policy's order.

    preempts: on a lack of memory (or of a slot to hold cache in), preempt running requests of lower
    priority, a running candidate itself last. Otherwise, and if that is not enough, no further
    request starts in this step, head-of-line blocking, but for policies that probe.
    """

    phases: Phase
    preempts: bool = False


@dataclass(frozen=True)
class UnifiedPolicy(Policy):
    """groups: in order of priority. mixed_batches: prefills and decodes may share one. chunked: a
    prefill may be cut to what C and P leave.

    full_prefill: P = C, whatever the limits say. reserve: memory for a request that starts.
    watermark: fraction of the pool that a start leaves free while others run, so that the next
    decodes do not preempt at once. max_rows: requests that hold cache, where that is the policy's
    own limit.

    ValueError for a max_rows or a watermark that is none.

    key: a number for each request, see `sched/keys.py`; the smallest comes first; ties, or all if
    there is no key, by arrival. Groups are gone through, and victims chosen, in this one order.
    Where the order changes with time, override `ranking`. requeue: instead of by arrival alone, as
    InferMax's own simulator does: a preempted request goes to the head of the waiting, and those
    running that arrived at the same time are in the order of their last batches.

    probing: a request that finds no room is passed over, and those behind it may start, also those
    behind a preempted one; otherwise they wait behind it (section 3.1: "can be probed or skipped").
    """

    groups: tuple[Group, ...]
    mixed_batches: bool
    chunked: bool
    full_prefill: bool = False
    reserve: Reserve = Reserve.PROMPT
    watermark: float = 0.01
    max_rows: int | None = None
    key: Key | None = None
    requeue: bool = False
    probing: bool = False
    hypothetical: bool = False
    counts_blocks = True
    steady = True

    def __post_init__(self) -> None:
        if self.max_rows is not None and self.max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, got {self.max_rows}")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark must be at least 0 and below 1, got {self.watermark}")

    def plan(self, view: View, now: float) -> BatchPlan:
        """Fills one batch, group after group (InferMax Algorithm 1)."""
        ranking = self.ranking(view, now)
        budget = BatchBudget(
            view,
            max_rows=self.max_rows,
            prefill_tokens=view.limits.max_batch_tokens if self.full_prefill else None,
            expected=self.expected(view),
        )
        filling = _Filling(self, budget, ranking)
        decoding = view.table.decoding(ranking.running)
        for group in self.groups:
            if not (_parts(group.phases)[0] or filling.takes_prefills):
                continue
            rows = _members(group.phases, ranking, decoding)
            if self.mixed_batches:
                filling.fill(rows, group.preempts)
            elif len(rows):
                self._fill_one_phase(filling, rows, group.preempts)
        return budget.finish()

    def ranking(self, view: View, now: float) -> Ranking:
        """Who is how urgent. now: seconds."""
        key = self.key
        keys = None if key is None else (lambda rows: evaluate(key, view, rows))
        return rank(view, keys, self.requeue)

    def form(self) -> Form | None:
        """For simulations that have it compiled; None if that cannot be. A class that overrides any
        other method of this one overrides it, too, or there is no form."""
        phases = [phase for group in self.groups for phase in group.phases]
        return Form(self.key) if len(phases) == len(set(phases)) else None

    def expected(self, view: View) -> Expected | None:
        """What requests will take, if the policy has an idea."""
        return None

    def candidates(self, view: View, rows: np.ndarray) -> Candidates:
        """The rows with all that each has pending, in KV; P applies to those that do not decode.
        reserve: as the policy's `Reserve` says, that of a chunk before it is cut."""
        table = view.table
        tokens = table.pending(rows)
        prefill = (tokens != 1) | (table.generated[rows] == 0)
        reserve = table.computed[rows] + tokens
        if self.reserve is _WHOLE:
            whole = table.prompt_len[rows] + view.most_output(rows) - 1
            reserve = np.maximum(reserve, whole)
        return Candidates(rows, tokens, reserve, np.zeros(len(rows), np.int64), prefill)

    def cut(self, budget: BatchBudget, head: Candidates) -> Candidates | None:
        """The prefill `head` shortened to what C and P leave, or None if it cannot be."""
        room = min(budget.batch_left, budget.prefill_left)
        if not (self.chunked and head.prefill[0] and 0 < room < head.tokens[0]):
            return None
        tokens, reserve = np.array([room]), head.reserve
        if self.reserve is _CHUNK:
            reserve = budget.view.table.computed[head.rows] + tokens
        return Candidates(head.rows, tokens, reserve, head.kinds, head.prefill)

    def _fill_one_phase(self, filling: _Filling, rows: np.ndarray, preempts: bool) -> None:
        """The batch is of one phase: that of whoever is in it first."""
        budget = filling.budget
        prefill = ~budget.view.table.decoding(rows)
        if not budget.chosen:
            filling.fill(rows[prefill == prefill[0]], preempts)
            if budget.chosen:
                return
            filling.fill(rows[prefill != prefill[0]], preempts)
        else:
            filling.fill(rows[prefill == budget.chosen[0].prefill[0]], preempts)


class _Filling:
    """Step 3 and 4 of the algorithm for one plan."""

    def __init__(self, policy: UnifiedPolicy, budget: BatchBudget, ranking: Ranking) -> None:
        self.policy, self.budget, self.ranking = policy, budget, ranking
        self._table: RequestTable = budget.view.table
        self._watermark = int(policy.watermark * budget.view.pool.num_blocks)
        # Whoever is preempted waits again, at its place in the queue: those behind it start later.
        self._last_start = NEVER
        self._prefills = True  # C and P leave something

    @property
    def takes_prefills(self) -> bool:
        """Whether C and P leave something for a prefill."""
        return self._prefills and self.budget.prefill_left > 0

    def fill(self, rows: np.ndarray, preempts: bool) -> None:
        """Adds rows in order, as far as they fit. The queue may be long, so no more of it is looked
        at than may matter."""
        first, size = 0, FIRST_LOOK
        while first < len(rows) and self.budget.rows_left and self.budget.batch_left:
            part = rows[first : first + size]
            part = part[self._may_join(part)]
            self._fill(self.policy.candidates(self.budget.view, part), preempts)
            first, size = first + size, size * LOOK_GROWTH
            if first < len(rows) and not (self._prefills and self._last_start >= 0):
                rows, first = rows[first:], 0  # nobody who waits may join any more
                rows = rows[self._table.state[rows] == RUNNING]

    def _may_join(self, rows: np.ndarray) -> np.ndarray | slice:
        """Mask of those that are not ruled out by what has happened in this plan."""
        if self._prefills and self._last_start == NEVER and not self.budget.preempted:
            return slice(None)
        ok = ~self.budget.decided[rows]
        if not self._prefills:
            return ok & self._table.decoding(rows)
        waiting = self._table.state[rows] == WAITING
        return ok & (~waiting | (self.ranking.place[rows] < self._last_start))

    def _fill(self, cands: Candidates, preempts: bool) -> None:
        budget = self.budget
        while len(cands):
            fits = budget.fits_budget(cands)
            if fits:
                fits = min(fits, budget.fits_memory(cands, self._watermark))
            budget.add(cands if fits == len(cands) else cands[:fits])
            cands = cands[fits:]
            if not len(cands) or not budget.rows_left:
                return
            head = cands[:1]
            if not budget.fits_budget(head):
                if not head.prefill[0]:
                    return  # not a token is left
                cut = self.policy.cut(budget, head)
                if cut is None:
                    cands = self._without_long(cands)
                elif self._joins(cut, preempts):
                    self._prefills = False
                else:
                    cands = self._without_head(cands, preempts)
            elif not (preempts and self._make_room(head)):
                cands = self._without_head(cands, preempts)
            cands = cands[self._may_join(cands.rows)]

    def _joins(self, cut: Candidates, preempts: bool) -> bool:
        """Adds a prefill that was cut to what C and P leave, if there is memory for it."""
        while not self.budget.fits_memory(cut, self._watermark):
            if not (preempts and self._make_room(cut)) or self.budget.decided[cut.rows[0]]:
                return False
        self.budget.add(cut)
        return True

    def _without_long(self, cands: Candidates) -> Candidates:
        """What is left when C and P have no room for the head, which cannot be cut."""
        room = min(self.budget.batch_left, self.budget.prefill_left)
        if not self.policy.probing or room <= 0:
            self._prefills = False
            return cands
        return cands[~cands.prefill | (cands.tokens <= room)]

    def _without_head(self, cands: Candidates, preempts: bool) -> Candidates:
        """What is left when the head found no memory, or no slot."""
        rest = cands[1:]
        waits = self._table.state[cands.rows[0]] == WAITING
        if waits and not self.policy.probing:
            self._last_start = -1
            return rest
        if self.policy.reserve is Reserve.CHUNK:
            return rest  # cut, any of them may take less
        runs = self._table.state[rest.rows] == RUNNING
        if not waits:
            return rest[~runs | (self.budget.new_blocks(rest) <= self.budget.free)]
        victims = self._victims(cands.rows[0]) if preempts else NOBODY
        return rest[runs | self._would_fit(rest, victims)]

    def _make_room(self, head: Candidates) -> bool:
        """Preempts running requests of lower priority that are not in the batch, the lowest first,
        until the head fits; a running head may be the last of them. Whether any was preempted."""
        budget, row = self.budget, head.rows[0]
        victims = self._victims(row)
        if self._table.state[row] == WAITING and not self._would_fit(head, victims)[0]:
            return False
        for victim in victims[::-1].tolist():
            budget.preempt(victim)
            if not self.policy.probing:
                self._last_start = min(self._last_start, int(self.ranking.place[victim]))
            if victim == row or budget.fits_memory(head, self._watermark):
                return True
        return len(victims) > 0

    def _victims(self, row: int) -> np.ndarray:
        """Running requests, the row itself or behind it, that may be preempted for it."""
        victims, place = self.ranking.running, self.ranking.place
        return victims[~self.budget.decided[victims] & (place[victims] >= place[row])]

    def _would_fit(self, cands: Candidates, victims: np.ndarray) -> np.ndarray:
        """Which of these, who wait, could start if all the victims went, bool [n]."""
        budget = self.budget
        free = budget.free + int(budget.view.pool.returned_by(victims).sum())
        slots = budget.slots_left + len(victims)
        keep = 0 if budget.alone else self._watermark
        return (slots > 0) & (budget.new_blocks(cands) + keep <= free)


@lru_cache
def _parts(phases: Phase) -> tuple[bool, bool, bool]:
    """Whether DECODE, PREFILL and WAITING are among them."""
    return Phase.DECODE in phases, Phase.PREFILL in phases, Phase.WAITING in phases


def _members(phases: Phase, ranking: Ranking, decoding: np.ndarray) -> np.ndarray:
    running = ranking.running
    decode, prefill, waiting = _parts(phases)
    if not (decode and prefill):
        if not (decode or prefill):
            return ranking.waiting
        running = running[decoding if decode else ~decoding]
    if not waiting:
        return running
    rows = np.concatenate([running, ranking.waiting])
    return rows[np.argsort(ranking.place[rows], kind="stable")]


@register_variant(
    "ef",
    summary="eviction-free: knows output lengths, reserves prompt + output - 1; simulator only",
    source="InferMax 4.1",
)
def eviction_free(policy: Policy) -> Policy:
    """The policy with all the memory that a request will take reserved when it starts."""
    if not isinstance(policy, UnifiedPolicy):
        raise ValueError("+ef is for policies of the unified scheduler")
    return dataclasses.replace(
        policy,
        groups=tuple(dataclasses.replace(group, preempts=False) for group in policy.groups),
        reserve=Reserve.WHOLE,
        watermark=0.0,
        hypothetical=True,
    )
