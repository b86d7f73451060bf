"""BROS: real-time requests by deadline, best-effort ones in the room that is left (Algorithm 1).

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

BURST = 1.0  # seconds of the floor's work that may be caught up, or be ahead
_FAR = 1e12  # seconds: sorts behind all requests that are not late
MEAN_WEIGHT = 0.1  # weight of the last batch in the moving average
WAITS = 3  # batches until a first token: on the device, being planned, its own


@dataclass
class _Memory:
    """size: B, number of requests up to which best-effort ones may fill a batch. rows, seconds: of
    the last batch. mean: recent seconds of batches. now: time of the last plan. owed: tokens by
    which best-effort work is behind the floor. passed: requests that have started since a late
    prompt got any tokens. until: when the last batch ends, on the clock of plans, if it brings no
    token."""

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
    """ttft, tbt: targets, in seconds, of real-time requests without their own. initial: number of
    requests up to which best-effort ones may fill a batch at first, and after an early return, a
    batch that left out a request that was not late; growth: by how many this rises with each other
    batch. watermark: share of the pool that best-effort starts leave free while others run.

    chunked: whether prompts are cut to the time that deadlines leave in a batch; false: whole
        prompts, as in the paper. A prompt that fits no deadline then waits until no others come.

    late_last: whether requests that have to compute a prompt or a lost cache, and whose next token
        can no longer be in time, come behind all others; false: they keep their place, as in the
        paper. In an overload far more requests are in time with true. late_turn: after this many
        starts of others, late requests come before all other prompts until one has got tokens, so
        that none waits for the end of an overload; 0: never, nor with whole prompts.
        late_watermark: like watermark, for starts of late requests that are not in their turn, so
        that requests in time find memory; what best-effort requests hold counts as free.

    headroom: whether late prompts and best-effort requests leave a batch short enough for a
        real-time request that comes right after it was planned, with the median TTFT of the present
        ones; false: only present requests count, as in the paper.

    replace: whether best-effort requests take places of real-time ones in a full batch if those
        would have more to restore from the host, and can wait for the next batch.

    in_order: whether best-effort requests are served in order of arrival; false: those with the
        least to restore from the host first, as in the paper. A request with much on the host then
        waits as long as others keep coming, even once real-time requests have become few.

    sharing: whether real-time requests join the blocks of best-effort ones, and caches go to the
        host; otherwise lost caches are computed again, the paper's "No Bi-cache".

    max_age: seconds without a token after which a best-effort request comes before all others;
    floor: tokens per second of best-effort work, which comes before real-time work while it is
    behind this rate. Both may miss deadlines; without them best-effort requests may starve, as in
    the paper.

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
        """B, the number of requests up to which best-effort ones may fill the next batch."""
        return self._memory.size

    def plan(self, view: View, now: float) -> BatchPlan:
        """Real-time requests first, except for best-effort ones that must not wait; then the
        rest."""
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
            if not len(batch):  # no request could take a place
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
        """Best-effort requests fill blocks from the right if blocks are shared."""
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
        """Requests behind it."""
        return np.greater(self.queue_priority(running, now), self.queue_priority(request, now))

    def _in_flight(self, view: View, now: float) -> float:
        """Seconds until the step on the device ends; 0 if there is none. The end of a step that
        brings no token is not reported, so its predicted time is used."""
        memory, table = self._memory, view.table
        rows = memory.rows
        if np.count_nonzero(table.generated[rows] > table.received[rows]):
            return memory.seconds
        return max(memory.until - now, 0.0)

    def _rules(self, view: View, rows: np.ndarray) -> Rules:
        """The rules for these real-time rows."""
        late, headroom, memory = Late.IN_PLACE, np.inf, self._memory
        if self.late_last:
            turn = self.chunked and 0 < self.late_turn <= memory.passed  # whole prompts may not fit
            late = Late.TURN if turn else Late.LAST
        if self.headroom and len(rows):
            ttft = view.table.ttft[rows]
            headroom = float(np.median(np.where(np.isinf(ttft), self.ttft, ttft))) / WAITS
        return Rules(late, self.chunked, memory.mean if self.replace else np.inf, headroom)

    def _first(self, view: View, rows: np.ndarray, now: float, clock: float) -> np.ndarray:
        """The best-effort rows that come before real-time ones, in their order."""
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
        """Tokens by which best-effort work is behind the floor; wanted: whether there is any."""
        memory, most = self._memory, floor * BURST
        elapsed = 0.0 if memory.now is None else now - memory.now
        memory.now = now
        memory.owed = min(memory.owed + floor * elapsed, most if wanted else 0.0)
        return memory.owed

    def _remember(
        self, batch: BrosBatch, done: BrosWork, packed: Packed, forced: int, clock: float
    ) -> None:
        """Notes the batch and its consequences for the next. It begins at `clock`, and its first
        `forced` rows came before real-time ones."""
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
            new = end - np.clip(view.table.lost_from[rows], done.start, end)  # not again
            new[view.table.tier[rows] != BEST_EFFORT] = 0
            # Other best-effort work counts, too, but not for longer than a burst.
            owed = memory.owed - float(new[:forced].sum())
            least = min(owed, -self.floor * BURST)
            memory.owed = max(owed - float(new[forced:].sum()), least)


def _tiers(view: View, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The real-time and the best-effort rows."""
    best = view.table.tier[rows] == BEST_EFFORT
    return rows[~best], rows[best]
