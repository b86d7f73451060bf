"""BROS: real-time requests by their deadlines, best-effort ones in what they leave (Algorithm 1).

In each iteration real-time requests are packed in order of the time they have left, prompts and
decodes alike, as long as the batch is predicted to end before the most urgent deadline. Then
best-effort requests fill it. docs/bros-policy.md lists the differences from the paper.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxserve.sched.cache.cache_kinds import LEFT, RIGHT
from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.policies.bros.best_effort import fill, fill_first
from jaxserve.sched.policies.bros.block_sharing import SharedBlocksBudget
from jaxserve.sched.policies.bros.blocks import BrosBudget
from jaxserve.sched.policies.bros.packing import BEST_EFFORT, BrosBatch, BrosWork
from jaxserve.sched.policies.bros.real_time import Late, Packed, Rules, pack
from jaxserve.sched.policies.bros.urgency import Targets
from jaxserve.sched.policy import Policy, View
from jaxserve.sched.registry import register
from jaxserve.sched.state.request_table import RUNNING, WAITING

BURST = 1.0  # seconds of the floor that may be made good, or ahead, at once
_FAR = 1e12  # seconds: behind all that are not late
MEAN_WEIGHT = 0.1  # of the last batch in the moving average
WAITS = 3  # batches until a first token: that on the device, the one being planned, and its own


@dataclass
class _Memory:
    """size: B, requests that best-effort ones may fill a batch up to. rows, seconds: of the last
    batch. mean: seconds of batches lately. now: of the last plan. owed: tokens of best-effort work
    that the floor is behind. passed: requests that have started since a late prompt got anything.
    until: when the last batch ends, on the clock of plans, if it brings no token."""

    size: int
    rows: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    seconds: float = 0.0
    mean: float = 0.0
    now: float | None = None
    owed: float = 0.0
    passed: int = 0
    until: float = -np.inf


@register(
    "bros",
    summary="real-time requests by time left to their deadlines, best-effort ones in the rest",
    source="BROS 4, 5",
)
@dataclass(frozen=True)
class Bros(Policy):
    """ttft, tbt: targets, seconds, of real-time requests that name none. initial: best-effort
    requests join a batch up to so many in all at first, and after an early return, a batch that
    left out somebody who was not late; growth: by how many that rises with each other batch.
    watermark: share of the pool that best-effort starts leave free while others run.

    chunked: whether prompts are cut to what the deadlines leave of a batch's time; false: they are
    whole, as in the paper. One that fits no deadline then waits until the others stop coming.

    late_last: whether those with a prompt, or a lost cache, to compute whose next token can no
    longer be in time come behind all others; false: in their place, as in the paper. In an overload
    far more requests are in time then. late_turn: after how many starts of others they come before
    all other prompts, until one of them has got something, so that none waits for the end of an
    overload; 0: never, nor where prompts are whole. late_watermark: as watermark, for the starts of
    those that are not in their turn, so that who comes in time finds memory; what best-effort
    requests hold counts as free.

    headroom: whether late prompts and best-effort requests leave a batch short enough for a
    real-time request that comes right after it was planned, with the median TTFT of those that are
    there; false: only those that are there count, as in the paper.

    replace: whether best-effort requests take places of real-time ones in a full batch, of those
    that would have more to bring back from the host, and can wait for the next one.

    in_order: whether best-effort requests are served in order of arrival; false: those with least
    to bring back from the host first, as in the paper. Who has much there then waits for as long
    as others keep coming, even once real-time requests have become few.

    sharing: whether real-time requests join the blocks of best-effort ones, and caches go to the
    host; otherwise whoever loses its cache computes it again, the paper's "No Bi-cache".

    max_age: seconds without a token after which a best-effort request comes before all others;
    floor: tokens a second of best-effort work for which it comes before real-time work, while it is
    behind. Both may miss deadlines; without them best-effort requests may starve, as in the paper.

    Raises ValueError for a value out of range.
    """

    ttft: float = 0.4
    tbt: float = 0.2
    initial: int = 64
    growth: int = 16
    watermark: float = 0.01
    late_last: bool = True
    late_turn: int = 16
    late_watermark: float = 0.1
    replace: bool = True
    headroom: bool = True
    chunked: bool = True
    in_order: bool = True
    sharing: bool = True
    max_age: float | None = None
    floor: float | None = None
    _memory: _Memory = field(init=False, repr=False, compare=False)
    moves_cache: bool = field(default=True, init=False)
    counts_blocks: bool = field(default=False, init=False)
    full_prefill = True

    def __post_init__(self) -> None:
        for name in ("ttft", "tbt", "max_age", "floor"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be more than 0, got {value}")
        for name, least in (("initial", 1), ("growth", 0), ("late_turn", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        for name in ("watermark", "late_watermark"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 0 and below 1, got {getattr(self, name)}"
                )
        object.__setattr__(self, "moves_cache", self.sharing)
        object.__setattr__(self, "counts_blocks", not self.sharing)
        object.__setattr__(self, "_memory", _Memory(self.initial))

    @property
    def size(self) -> int:
        """B, requests up to which best-effort ones may fill the next batch."""
        return self._memory.size

    def plan(self, view: View, now: float) -> BatchPlan:
        """Real-time requests first, but for best-effort ones that must not wait; then the rest."""
        table = view.table
        clock = now + self._in_flight(view, now)
        waiting, w_best = _tiers(view, table.in_state(WAITING))
        running, r_best = _tiers(view, table.in_state(RUNNING))
        queue = Targets(self.ttft, self.tbt).poll(view, waiting, running, clock)
        others = np.concatenate([r_best, w_best])
        others = others[np.argsort(table.seq[others])]
        if not self.in_order:
            others = others[np.argsort(view.host.tokens[others], kind="stable")]
        batch = BrosBatch(view, view.limits.max_rows)
        room = (SharedBlocksBudget if self.sharing else BrosBudget)(
            view, batch, self.watermark, self.late_watermark
        )
        first = self._first(view, others, now, clock)
        if len(first):
            fill_first(batch, room, first, queue.rows, chunked=self.chunked)
        forced = len(batch)
        rules = self._rules(view, queue.rows)
        packed = pack(batch, room, queue, others, rules)
        if not packed.early:
            batch.rows_left = min(batch.rows_left, max(self.size - len(batch), 0))
            fill(batch, room, room.offers(others), packed.limit, chunked=self.chunked)
            if not len(batch):  # nobody could take a place
                packed = pack(batch, room, queue, others, replace(rules, spare=np.inf))
        done = batch.work()
        self._remember(batch, done, packed, forced, clock)
        sides = view.table.tier[done.rows] == BEST_EFFORT
        return BatchPlan(
            done.rows,
            done.tokens,
            done.start + done.tokens,
            np.zeros(len(done), np.int64),
            room.operations(done),
            sides.astype(np.int64) if self.sharing else None,
        )

    def side(self, tier: int) -> int:
        """Best-effort requests fill blocks from the right, where they share them."""
        return int(RIGHT if self.sharing and tier == BEST_EFFORT else LEFT)

    def queue_priority(self, requests: Any, now: float) -> Any:
        """By deadline; with `late_last`, late requests come behind the others. Then best-effort
        requests. Running real-time requests keep what they have."""
        ttft = np.where(np.isinf(requests.ttft), self.ttft, requests.ttft)
        due = requests.arrival + ttft
        late = (due < now) & self.late_last
        due = np.where(requests.waiting, np.where(late, due + _FAR, due), -np.inf)
        return np.where(np.equal(requests.tier, BEST_EFFORT), np.inf, due)

    def makes_room(self, running: Any, request: Any, now: float) -> Any:
        """Those behind it."""
        return np.greater(self.queue_priority(running, now), self.queue_priority(request, now))

    def _in_flight(self, view: View, now: float) -> float:
        """Seconds until the step on the device ends; 0 if there is none. One that brings no token
        says nothing when it has ended, so that it takes what was predicted."""
        memory, table = self._memory, view.table
        rows = memory.rows
        if np.count_nonzero(table.generated[rows] > table.received[rows]):
            return memory.seconds
        return max(memory.until - now, 0.0)

    def _rules(self, view: View, rows: np.ndarray) -> Rules:
        """For these real-time rows."""
        late, headroom, memory = Late.IN_PLACE, np.inf, self._memory
        if self.late_last:
            turn = self.chunked and 0 < self.late_turn <= memory.passed  # whole ones may not fit
            late = Late.TURN if turn else Late.LAST
        if self.headroom and len(rows):
            ttft = view.table.ttft[rows]
            headroom = float(np.median(np.where(np.isinf(ttft), self.ttft, ttft))) / WAITS
        return Rules(late, self.chunked, memory.mean if self.replace else np.inf, headroom)

    def _first(self, view: View, rows: np.ndarray, now: float, clock: float) -> np.ndarray:
        """Those of these best-effort rows that come before real-time ones, in their order."""
        table, must = view.table, np.zeros(len(rows), bool)
        if self.max_age is not None:
            last = table.last_token[rows]
            flying = table.generated[rows] > table.received[rows]
            must |= ~flying & (clock - last > self.max_age)
        if self.floor is not None:
            behind = self._behind(now, self.floor, bool(len(rows)))
            tokens = table.pending(rows)
            must |= np.cumsum(tokens) - tokens < behind
        return rows[must]

    def _behind(self, now: float, floor: float, wanted: bool) -> float:
        """Tokens of best-effort work that the floor is behind; wanted: whether there is any."""
        memory, most = self._memory, floor * BURST
        elapsed = 0.0 if memory.now is None else now - memory.now
        memory.now = now
        memory.owed = min(memory.owed + floor * elapsed, most if wanted else 0.0)
        return memory.owed

    def _remember(
        self, batch: BrosBatch, done: BrosWork, packed: Packed, forced: int, clock: float
    ) -> None:
        """Notes the batch and what follows from it for the next. It begins at `clock`, and its
        first `forced` rows came before real-time ones."""
        memory, view = self._memory, batch.view
        grown = min(memory.size + self.growth, view.limits.max_rows)
        memory.size = self.initial if packed.early else grown
        memory.passed = memory.passed + packed.started if packed.waits else 0
        rows, end = done.rows, done.start + done.tokens
        memory.rows, memory.seconds = rows, batch.seconds
        known = view.table.prompt_len[rows] + view.table.generated[rows]
        memory.until = -np.inf if (end == known).any() else clock + batch.seconds
        memory.mean += (memory.seconds - memory.mean) * MEAN_WEIGHT
        if self.floor is not None:
            new = end - np.clip(view.table.lost_from[rows], done.start, end)  # not once more
            new[view.table.tier[rows] != BEST_EFFORT] = 0
            # What best-effort requests get beside counts, but not for longer than a burst.
            owed = memory.owed - float(new[:forced].sum())
            least = min(owed, -self.floor * BURST)
            memory.owed = max(owed - float(new[forced:].sum()), least)


def _tiers(view: View, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Real-time and best-effort ones of them."""
    best = view.table.tier[rows] == BEST_EFFORT
    return rows[~best], rows[best]
