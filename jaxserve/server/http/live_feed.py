"""The data for the console's view of operations, collected twice a second."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from itertools import takewhile
from typing import Any

import numpy as np

from jaxserve.config import SchedulerConfig
from jaxserve.engine.stats import EngineStats, Observer, RequestStats, StepStats
from jaxserve.sched.cache.pool_map import BlockUse
from jaxserve.sched.programs.verdict import ProgramVerdict
from jaxserve.sched.request import SLO, Request, Tier
from jaxserve.server.requests.call_outcome import CallOutcome, CallRecord
from jaxserve.server.requests.engine_client import EngineClient

STEPS, WINDOW_S, MAX_CELLS = 120, 300.0, 4096
PARTS = 20  # of the window; met targets are counted in each
_MAX_TIMES = 50_000  # most times of tokens and of requests that are kept
_FULL = 0.02  # the pool counts as full below this free share
_TURNED_AWAY = (CallOutcome.EXPECTED_LATE, CallOutcome.QUEUE_FULL)
MET, MISSED, REFUSED = range(3)
"""Outcomes of a request's targets."""

_Times = deque[tuple[float, float]]  # (when, how long it took), in seconds


class LiveFeed(Observer):
    """Observes the engine on its thread, and calls on the event loop's thread. `snapshot` may be
    called on any other thread. limits: limits of what the policy may put into a batch."""

    def __init__(self, engine: EngineClient, limits: SchedulerConfig) -> None:
        self._engine, self._limits = engine, limits
        self._steps: deque[StepStats] = deque(maxlen=STEPS)
        self._first: dict[Tier, _Times] = {tier: deque(maxlen=_MAX_TIMES) for tier in Tier}
        self._between: dict[Tier, _Times] = {tier: deque(maxlen=_MAX_TIMES) for tier in Tier}
        self._verdicts: deque[tuple[float, str, int]] = deque(maxlen=_MAX_TIMES)
        self._given_up: Counter[str] = Counter()  # requests that have not ended, by class
        self._programs: deque[tuple[float, str]] = deque(maxlen=_MAX_TIMES)  # when, outcome
        self._prompts: deque[tuple[float, int]] = deque(maxlen=_MAX_TIMES)
        self._seen = 0  # steps

    # Called on the engine's thread.

    def on_step(self, stats: StepStats) -> None:
        """Keeps the step's composition."""
        self._steps.append(stats)
        self._seen += 1

    def on_given_up(self, request: Request) -> None:
        """Counts the request by its class."""
        self._given_up[request.slo_class] += 1

    def on_first_token(self, ttft: float, tier: Tier) -> None:
        """ttft: seconds from arrival."""
        self._first[tier].append((time.monotonic(), ttft))

    def on_inter_token(self, tbt: float, tier: Tier) -> None:
        """tbt: seconds since the token before."""
        self._between[tier].append((time.monotonic(), tbt))

    def on_finish(self, stats: RequestStats) -> None:
        """Keeps the prompt's length, and whether the targets were met."""
        self._prompts.append((time.monotonic(), stats.prompt_tokens))
        verdict = stats.verdict
        if verdict is not None:
            self._given_up[verdict.slo_class] -= stats.given_up
            came_of_it = MET if verdict.met else MISSED
            self._verdicts.append((time.monotonic(), verdict.slo_class, came_of_it))

    def on_program(self, verdict: ProgramVerdict) -> None:
        """Keeps what came of the program."""
        self._programs.append((time.monotonic(), verdict.outcome))

    # Called on the event loop's thread.

    def on_call(self, record: CallRecord) -> None:
        """A call has ended. The engine never sees a call that was refused, but its targets count as
        missed."""
        if record.outcome in _TURNED_AWAY:
            targets = [request for request in record.requests if request.slo != SLO()]
            count = sum(request.sampling.n for request in targets) - len(record.last)
            for _ in range(count):
                self._verdicts.append((time.monotonic(), targets[0].slo_class, REFUSED))

    # Called on any other thread.

    def snapshot(self) -> dict[str, Any]:
        """All that the page shows, for JSON."""
        stats = self._engine.stats()
        since = time.monotonic() - WINDOW_S
        return {
            "requests": self._requests(),
            "waiting": stats.waiting,
            "running": stats.running,
            "newcomer": self._newcomer(since),
            "steps": [_strip(step) for step in tuple(self._steps)],
            "seen": self._seen,
            "programs": {
                "running": stats.programs_running,
                "waiting": stats.programs_waiting,
                "ended": Counter(what for at, what in tuple(self._programs) if at >= since),
            },
            "pool": self._pool(stats),
            "prefix_cache_hits": _share(stats.prefix_cache_hits, stats.prefix_cache_queries),
            "attainment": self._attained(since),
            "latency": self._latency(since),
            "tokens_per_s": self._rate(),
            "preemptions": stats.preemptions,
            "decision": scheduling_decision(self._steps[-1], stats, self._limits)
            if self._steps
            else "Nothing has been served yet.",
        }

    def _latency(self, since: float) -> list[dict[str, Any]]:
        """Percentiles by tier, of requests that have had a token."""
        return [
            {
                "tier": tier.name.lower(),
                "ttft_ms": _percentiles(self._first[tier], since),
                "tbt_ms": _percentiles(self._between[tier], since),
            }
            for tier in Tier
            if any(at >= since for at, _ in tuple(self._first[tier])[-1:])
        ]

    def _requests(self) -> list[dict[str, Any]]:
        counts: Counter[tuple[str, str]] = Counter()
        running: Counter[tuple[str, str]] = Counter()
        for (name, tier, holds), count in self._engine.live_counts().items():
            counts[tier, name] += count
            running[tier, name] += count * holds
        return [
            {
                "tier": tier,
                "class": name,
                "running": running[tier, name],
                "waiting": counts[tier, name] - running[tier, name],
            }
            for tier, name in sorted(counts)
        ]

    def _pool(self, stats: EngineStats) -> dict[str, Any]:
        uses = self._engine.block_map()
        every = -(-len(uses) // MAX_CELLS)
        return {
            "blocks": stats.blocks_total,
            "free": stats.blocks_free,
            "every": every,  # one of every so many blocks is shown
            "map": (_sample(uses, every) + ord("0")).astype(np.uint8).tobytes().decode(),
            "counts": np.bincount(uses, minlength=len(BlockUse)).tolist(),
        }

    def _newcomer(self, since: float) -> dict[str, float] | None:
        """Expected wait for the first token of a real-time request that came now, with a prompt of
        the median length of requests that ended lately; None if none ended lately."""
        lengths = [tokens for at, tokens in tuple(self._prompts) if at >= since]
        if not lengths:
            return None
        tokens = int(np.median(lengths))
        wait = self._engine.expected_wait(Request("", (0,) * tokens, tier=Tier.REALTIME))
        return {"prompt_tokens": tokens, "ttft_ms": 1000 * wait.seconds}

    def _rate(self) -> float:
        """Output tokens a second over the last ten seconds."""
        recent = 10.0
        since = time.monotonic() - recent
        latest = (
            reversed(tuple(times))
            for by_tier in (self._first, self._between)
            for times in by_tier.values()
        )
        return sum(len(list(takewhile(lambda seen: seen[0] >= since, t))) for t in latest) / recent

    def _attained(self, since: float) -> list[dict[str, Any]]:
        """For each class, how many requests met their targets, missed them or were refused, and how
        many are running although their targets were given up. Also the first three counts in each
        of PARTS equal parts of the time since then, the latest last."""
        parts: defaultdict[str, list[list[int]]] = defaultdict(
            lambda: [[0, 0, 0] for _ in range(PARTS)]
        )
        for at, name, what in tuple(self._verdicts):
            if at >= since:
                part = min(int(PARTS * (at - since) / WINDOW_S), PARTS - 1)
                parts[name][part][what] += 1
        live: Counter[str] = Counter()
        for (name, _, _), count in self._engine.live_counts().items():
            live[name] += count
        # A request whose end was never reported counts only as long as its class has running
        # requests.
        lost = {name: min(count, live[name]) for name, count in self._given_up.copy().items()}
        classes = []
        for name in sorted({*parts, *(name for name, count in lost.items() if count)}):
            met, missed, refused = (sum(kind) for kind in zip(*parts[name], strict=True))
            counts = {"class": name, "met": met, "missed": missed, "refused": refused}
            classes.append({**counts, "given_up": lost.get(name, 0), "history": parts[name]})
        return classes


def _sample(uses: np.ndarray, every: int) -> np.ndarray:
    """One of every `every` blocks, so that uses keep their shares among the blocks around it. K and
    V blocks alternate in the pool, so taking every second block could show K blocks only."""
    if every <= 1:
        return uses
    around = np.arange(len(uses)) // every**2
    return np.sort(around * len(BlockUse) + uses)[every // 2 :: every] % len(BlockUse)


def scheduling_decision(step: StepStats, stats: EngineStats, limits: SchedulerConfig) -> str:
    """One line on what the last batch was, and why it was not larger."""
    parts = []
    if step.num_decodes:
        parts.append(_counted(step.num_decodes, "decode"))
    if step.num_draft_tokens:
        parts.append(f"{_counted(step.num_draft_tokens, 'draft')}, {step.num_accepted} right")
    if step.num_prefill_tokens:
        parts.append(_counted(step.num_prefill_tokens, "prompt token"))
    if step.num_recomputed_tokens:
        parts.append(f"{step.num_recomputed_tokens} tokens again after a preemption")
    if step.preemptions:
        parts.append(f"preempted {step.preemptions} for memory")
    took = f"{1000 * step.device_time:.1f} ms, predicted {1000 * step.predicted_time:.1f}"
    return f"{' + '.join(parts) or 'no tokens'} ({took}): {_why(step, stats, limits)}"


def _why(step: StepStats, stats: EngineStats, limits: SchedulerConfig) -> str:
    if not stats.waiting:
        return "nobody else waits"
    waiting = f"{stats.waiting} wait" if stats.waiting > 1 else "1 waits"
    if step.num_tokens >= limits.max_batch_tokens:
        return f"the batch is full, {waiting}"
    if step.num_rows >= limits.max_rows:
        return f"all {limits.max_rows} rows are taken, {waiting}"
    if stats.blocks_free <= _FULL * stats.blocks_total:
        return f"the pool is full, {waiting}"
    return f"the policy holds back, {waiting}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("s" if count > 1 else "")


def _strip(step: StepStats) -> list[int]:
    """Decode, prompt and recomputed tokens; preemptions; moves of caches."""
    return [
        step.num_decode_tokens,
        step.num_prefill_tokens,
        step.num_recomputed_tokens,
        step.preemptions,
        step.num_moves,
    ]


def _share(hits: dict[str, int], queries: dict[str, int]) -> float | None:
    """Share of prompt tokens since the start that were cache hits; None before the first
    look-up."""
    asked = sum(queries.values())
    return sum(hits.values()) / asked if asked else None


def _percentiles(times: _Times, since: float) -> dict[str, float] | None:
    recent = [1000 * value for at, value in tuple(times) if at >= since]
    if not recent:
        return None
    p50, p99 = np.percentile(recent, (50, 99))
    return {"p50": float(p50), "p99": float(p99)}
