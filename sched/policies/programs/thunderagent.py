"""ThunderAgent: when the caches of all programs do not fit, some programs pause as a whole.

Kang et al., "ThunderAgent: A Simple, Fast and Program-Aware Agentic Inference System" (arXiv
2602.13692). A program is as large as its context. Every few seconds, or when nothing else could
run:

1. Paused programs go on as long as there is room: those in the middle of their work first, then new
   ones, then those whose tools run, the smallest of each first. Here the caches of programs whose
   tools run count half after each second, since they may go.
2. If the others do not fit, programs pause: first those whose tools run, then those that run, which
   pause when their calls end, the smallest first.

The calls of a paused program wait, and its cache may be evicted. New programs wait behind paused
ones, and for room. Nobody is paused for more than half an hour.

What is assumed: programs that are marked to pause count as paused already, and a call of no program
is a program of its own. Shared prefixes count for each program. The paper's scheduler is in front
of several engines, and places programs, too; here there is one, with Sarathi's batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.policies.sarathi import DECODE_FIRST
from jaxserve.sched.policy import View
from jaxserve.sched.registry import register
from jaxserve.sched.state.request_table import RUNNING, WAITING
from jaxserve.sched.unified.batch_budget import Candidates
from jaxserve.sched.unified.unified_policy import Group, UnifiedPolicy

BUFFER = 100  # tokens that each program may still write
PERIOD = 5.0  # seconds from one look at all programs to the next
HALF_LIFE = 1.0  # seconds after which a cache counts half while a tool runs
LONGEST_PAUSE = 1800.0  # seconds
_TOOL, _WAITS, _RUNS = range(3)


@dataclass(slots=True, eq=False)
class _Program:
    """A program, or a call of none. Times in seconds.

    Attributes:
        start: when its first call came.
        tokens: of its context.
        state: whether a tool runs, a call waits, or a call runs.
        since: when its last call ended, while a tool runs.
        new: whether nothing of it has run yet.
        admitted: whether it was decided if it waits for room.
        paused: whether its calls wait.
        paused_at: when it was paused.
        seen: number of the last look that found it.
    """

    start: float
    tokens: int = 0
    state: int = _WAITS
    since: float = 0.0
    new: bool = True
    admitted: bool = False
    paused: bool = False
    paused_at: float = 0.0
    seen: int = 0

    def size(self) -> int:
        """Tokens to have room for."""
        return self.tokens + BUFFER

    def decayed(self, now: float) -> float:
        """The size that counts when others are to go on."""
        if self.state != _TOOL:
            return float(self.size())
        return self.size() * 2.0 ** -(max(now - self.since, 0.0) / HALF_LIFE)

    def pause(self, now: float) -> None:
        """Its calls wait from now on."""
        self.paused, self.paused_at = True, now


class _Programs:
    """All programs, by their numbers, and calls of none by -1 less their rows."""

    def __init__(self) -> None:
        self.known: dict[int, _Program] = {}
        self.next_look, self._looks = -math.inf, 0

    def follow(self, view: View, now: float) -> None:
        """Brings the programs up to date."""
        table, self._looks = view.table, self._looks + 1
        rows = np.concatenate([table.queued(), table.in_state(RUNNING)])
        numbers = _numbers(view, rows)
        columns = (table.program_start, table.prompt_len, table.generated, table.state)
        each = zip(numbers.tolist(), *(column[rows].tolist() for column in columns), strict=True)
        for number, start, prompt, generated, state in each:
            one = self.known.get(number)
            if one is None or one.start != start:  # the number was given again
                one = self.known[number] = _Program(start)
            first = one.seen != self._looks
            runs = _RUNS if state == RUNNING else _WAITS
            one.state = runs if first else max(one.state, runs)
            one.tokens = max(prompt + generated, 0 if first else one.tokens)
            one.new &= one.state != _RUNS
            one.seen = self._looks
        for number, one in [*self.known.items()]:
            if one.seen == self._looks:
                continue
            since = view.programs.silent_since(number)
            if since is None:
                del self.known[number]
            else:
                one.state, one.since = _TOOL, since

    def look(self, capacity: int, now: float) -> None:
        """Lets programs go on, and pauses others. capacity: tokens of the pool."""
        programs = self.known.values()
        for one in programs:
            if one.paused and now - one.paused_at > LONGEST_PAUSE:
                one.paused = False
        room = capacity - sum(one.decayed(now) for one in programs if not one.paused)
        for one in self._in_turn():
            if one.size() > room:
                continue
            one.paused, room = False, room - one.size()
        used = sum(one.size() for one in programs if not one.paused)
        active = [one for one in programs if not one.paused]
        for one in sorted(active, key=lambda one: (one.state != _TOOL, one.tokens)):
            if used <= capacity:
                break
            one.pause(now)
            used -= one.size()
        self.next_look = now + PERIOD

    def admit(self, capacity: int, now: float) -> None:
        """Decides about programs that have just come: they wait behind paused ones, and for
        room."""
        new = [one for one in self.known.values() if not one.admitted]
        if not new:
            return
        others = [one for one in self.known.values() if one.admitted]
        used = sum(one.size() for one in others if not one.paused)
        waits = any(one.paused for one in others)
        for one in sorted(new, key=lambda one: one.start):
            waits |= used + one.size() > capacity
            if waits:
                one.pause(now)
            used += one.size()
            one.admitted = True

    def resume_first(self, numbers: np.ndarray) -> None:
        """Lets the first of these programs, all of which are paused, go on. numbers: int64 [n]."""
        offered = [self.known[number] for number in numbers.tolist()]
        next(one for one in self._in_turn() if one in offered).paused = False

    def _in_turn(self) -> list[_Program]:
        """Paused programs, in the order in which they go on."""
        paused = [one for one in self.known.values() if one.paused]
        return sorted(paused, key=lambda one: (2 if one.state == _TOOL else one.new, one.tokens))


@register(
    "thunderagent",
    summary="sarathi; when caches do not fit, the smallest programs pause as a whole",
    source="ThunderAgent",
    for_programs=True,
)
@dataclass(frozen=True)
class ThunderAgent(UnifiedPolicy):
    """Chunked prefill in mixed batches, decodes first, in order of arrival."""

    groups: tuple[Group, ...] = field(default=DECODE_FIRST)
    mixed_batches: bool = True
    chunked: bool = True
    _programs: _Programs = field(default_factory=_Programs, init=False, repr=False, compare=False)
    steady = False

    def plan(self, view: View, now: float) -> BatchPlan:
        """Fills one batch without the waiting calls of paused programs."""
        table, programs, capacity = view.table, self._programs, view.pool.pool_tokens
        programs.follow(view, now)
        programs.admit(capacity, now)
        # Those that others' turns hold back are not offered.
        waiting, idle = table.in_state(WAITING), not len(table.in_state(RUNNING))
        stuck = idle and len(waiting) > 0 and bool(self._paused(view, waiting).all())
        if stuck or now >= programs.next_look:
            programs.look(capacity, now)
        if stuck and self._paused(view, waiting).all():
            programs.resume_first(_numbers(view, waiting))
        return super().plan(view, now)

    def candidates(self, view: View, rows: np.ndarray) -> Candidates:
        """As in the unified scheduler, without waiting calls of paused programs."""
        found = super().candidates(view, rows)
        waits = view.table.state[found.rows] == WAITING
        return found[~(waits & self._paused(view, found.rows))]

    def _paused(self, view: View, rows: np.ndarray) -> np.ndarray:
        """Which requests are of paused programs, bool [n]."""
        known = self._programs.known
        return np.array([known[one].paused for one in _numbers(view, rows).tolist()], bool)

    def compiled_spec(self) -> None:
        """Not compiled: who is paused depends on what was before."""
        return None


def _numbers(view: View, rows: np.ndarray) -> np.ndarray:
    """Numbers of the rows' programs, below 0 for calls of none, int64 [n]."""
    numbers = view.table.program[rows]
    return np.where(numbers >= 0, numbers, -1 - rows)
