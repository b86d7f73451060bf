"""InferMax Algorithm 1: one scheduler that becomes the known ones by its parameters (section 3.1).

Order and group the requests (1), skip those whose phase does not match the batch unless hybrid
batching is on (2), check C, P and M (3), and if M is short preempt requests of lower priority (4).
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.policy import Policy, View
from jaxserve.sched.registry import register_variant
from jaxserve.sched.state.request_table import RequestTable
from jaxserve.sched.unified.batch_budget import BatchBudget, Candidates, Expected
from jaxserve.sched.unified.batch_filling import Filling
from jaxserve.sched.unified.policy_spec import Columns, CompiledSpec, Key, Lapse, current
from jaxserve.sched.unified.ranking import Ranking, rank


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


# Looking up a member of an enum is slow.
_CHUNK, _WHOLE = Reserve.CHUNK, Reserve.WHOLE


@dataclass(frozen=True)
class Group:
    """Requests in some phases, considered one after the other in the policy's order.

    preempts: if memory (or a slot for a cache) is short, preempt running requests of lower
        priority, and a running candidate itself last. If not, or if that is not enough, no further
        request starts in this step (head-of-line blocking), except for policies that probe.
    """

    phases: Phase
    preempts: bool = False


@dataclass(frozen=True)
class UnifiedPolicy(Policy):
    """The unified scheduler. One order serves for going through groups and for choosing victims: by
    the key, then by arrival. If the order changes with time in other ways than by `lapse`, override
    `ranking`.

    Attributes:
        groups: In order of priority.
        mixed_batches: Whether prefills and decodes may share a batch.
        chunked: Whether a prefill may be cut to what C and P leave.
        full_prefill: P = C, whatever the limits say.
        reserve: Memory for a request that starts.
        watermark: Fraction of the pool that a start leaves free while others run, so that the next
        decodes do not preempt at once.
        max_rows: Most requests that hold a cache, if the policy has its own limit.
        key: A number for each request, see `policy_spec.py`. The smallest comes first.
        lapse: When the key is replaced by a later one, if ever.
        requeue: As in InferMax's own simulator: a preempted request goes to the head of the waiting
        queue, and running ones that arrived together are in the order of their last batches.
        probing: Whether requests behind one that finds no room, or is preempted, may start.
        Otherwise they wait behind it (section 3.1: "can be probed or skipped").

    Raises:
        ValueError: If max_rows or watermark is out of range.
    """

    groups: tuple[Group, ...]
    mixed_batches: bool
    chunked: bool
    full_prefill: bool = False
    reserve: Reserve = Reserve.PROMPT
    watermark: float = 0.01
    max_rows: int | None = None
    key: Key | None = None
    lapse: Lapse | None = None
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
            max_rows=self.row_limit(view.limits),
            prefill_tokens=view.limits.max_batch_tokens if self.full_prefill else None,
            expected=self.expected(view),
        )
        filling = Filling(self, budget, ranking, cuts_room=self.reserve is _CHUNK)
        for group in self.groups:
            if not (_parts(group.phases)[0] or filling.takes_prefills):
                continue
            rows = _members(group.phases, ranking, view.table)
            if self.mixed_batches:
                filling.fill(rows, group.preempts)
            elif len(rows):
                self._fill_one_phase(filling, rows, group.preempts)
        return budget.finish()

    def ranking(self, view: View, now: float) -> Ranking:
        """The order of requests. now: seconds."""
        key = self.key
        if key is None:
            return rank(view, requeue=self.requeue)

        def keys(rows: np.ndarray) -> np.ndarray:
            found = current(key, self.lapse, Columns(view, rows, 0.0), now)
            return np.broadcast_to(found, rows.shape)

        return rank(view, keys, self.requeue)

    def queue_priority(self, requests: Any, now: float) -> Any:
        """The present value of the key, or the order of arrival."""
        return requests.seq if self.key is None else current(self.key, self.lapse, requests, now)

    def makes_room(self, running: Any, request: Any, now: float) -> Any:
        """Requests behind it, if waiting requests preempt."""
        if not any(group.preempts and Phase.WAITING in group.phases for group in self.groups):
            return False
        ours = self.queue_priority(request, now)
        return ours is None or np.greater(self.queue_priority(running, now), ours)

    def compiled_spec(self) -> CompiledSpec | None:
        """Properties for compiled simulations; None if they cannot run the policy. A subclass that
        overrides another method must override this one as well: otherwise its simulations run in
        Python, which is slower."""
        phases = [phase for group in self.groups for phase in group.phases]
        return CompiledSpec(self.key, lapse=self.lapse) if len(phases) == len(set(phases)) else None

    def expected(self, view: View) -> Expected | None:
        """Memory that requests are expected to need, if the policy estimates it."""
        return None

    def candidates(self, view: View, rows: np.ndarray) -> Candidates:
        """The rows with all their pending tokens, in KV; P applies to rows that do not decode.
        reserve: by the policy's `Reserve`, for CHUNK as if it were not cut."""
        table = view.table
        generated = table.generated[rows]
        reserve = table.prompt_len[rows] + generated
        tokens = reserve - table.computed[rows]
        prefill = (tokens != 1) | (generated == 0)
        if self.reserve is _WHOLE:
            whole = table.prompt_len[rows] + view.most_output(rows) - 1
            reserve = np.maximum(reserve, whole)
        return Candidates(rows, tokens, reserve, np.zeros(len(rows), np.int64), prefill)

    def cut(self, budget: BatchBudget, head: Candidates) -> Candidates | None:
        """The prefill `head` shortened to what C and P leave, or None if it cannot be."""
        room = min(budget.batch_left, budget.prefill_left)
        if not (self.chunked and head.prefill[0] and 0 < room < head.tokens[0]):
            return None
        tokens = np.array([room])
        reserve, new = head.reserve, head.new
        if self.reserve is _CHUNK:
            reserve, new = budget.view.table.computed[head.rows] + tokens, None
        return Candidates(head.rows, tokens, reserve, head.kinds, head.prefill, new)

    def _fill_one_phase(self, filling: Filling, rows: np.ndarray, preempts: bool) -> None:
        """Fills a batch of one phase: that of the first request in it."""
        budget = filling.budget
        prefill = ~budget.view.table.decoding(rows)
        if not budget.chosen:
            filling.fill(rows[prefill == prefill[0]], preempts)
            if budget.chosen:
                return
            filling.fill(rows[prefill != prefill[0]], preempts)
        else:
            filling.fill(rows[prefill == budget.chosen[0].prefill[0]], preempts)


@lru_cache
def _parts(phases: Phase) -> tuple[bool, bool, bool]:
    """Whether DECODE, PREFILL and WAITING are among the phases."""
    return Phase.DECODE in phases, Phase.PREFILL in phases, Phase.WAITING in phases


def _members(phases: Phase, ranking: Ranking, table: RequestTable) -> np.ndarray:
    decode, prefill, waiting = _parts(phases)
    if decode and prefill and waiting:
        return ranking.order
    if not (decode or prefill):
        return ranking.waiting
    running = ranking.running
    if not (decode and prefill):
        decoding = table.decoding(running)
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
    """The policy with all memory of a request reserved when it starts."""
    if not isinstance(policy, UnifiedPolicy):
        raise ValueError("+ef is for policies of the unified scheduler")
    return dataclasses.replace(
        policy,
        groups=tuple(dataclasses.replace(group, preempts=False) for group in policy.groups),
        reserve=Reserve.WHOLE,
        watermark=0.0,
        hypothetical=True,
    )
