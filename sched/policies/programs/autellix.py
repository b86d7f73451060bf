"""Autellix: the programs that have had the least service come first.

Luo et al., "Autellix: An Efficient Serving Engine for LLM Agents as General Programs" (arXiv
2502.13965), its policy PLAS: a multi-level queue. A call joins the queue of the service that its
program has had so far, falls as that grows, and takes memory from calls of lower queues. Within a
queue calls are in order of arrival. A program that has waited too long for the service that it had
is in the first queue.

Service is counted in computed tokens, where the paper counts time; the numbers of queues, service
and waiting are assumed. ATLAS, which counts the longest path of a program with branches, needs the
dependencies of calls, which servers do not know: here branches add up. Preempted caches stay in the
prefix cache, or go to host memory, as far as there is room; the paper moves them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxserve.sched.cache.cache_kinds import NOBODY
from jaxserve.sched.policy import View
from jaxserve.sched.registry import register
from jaxserve.sched.row_columns import grow_columns
from jaxserve.sched.state.request_table import RUNNING, WAITING
from jaxserve.sched.unified.feedback_queues import check_queues
from jaxserve.sched.unified.policy_spec import Columns, where
from jaxserve.sched.unified.ranking import Ranking, rank
from jaxserve.sched.unified.unified_policy import Group, Phase, UnifiedPolicy

MOST_QUEUES = 64


class _Times:
    """How long calls or programs have waited, and have been served, by index, in seconds; and which
    one has the index."""

    def __init__(self) -> None:
        self.whose = np.zeros(0)
        self.waited, self.served = np.zeros(0), np.zeros(0)

    def add(self, index: np.ndarray, whose: np.ndarray, waited: Any, served: Any) -> None:
        """Adds times. An index may occur several times, for the same one.

        Args:
            index: int64 [n].
            whose: float64 [n], what tells this one from others that had the index.
            waited, served: Seconds, float64 [n].
        """
        most = int(index.max(initial=-1)) + 1
        if most > len(self.whose):
            grow_columns(self, max(most, 2 * len(self.whose)), whose=NOBODY, waited=0.0, served=0.0)
        new = index[self.whose[index] != whose]
        self.whose[index] = whose
        self.waited[new] = self.served[new] = 0.0
        np.add.at(self.waited, index, waited)
        np.add.at(self.served, index, served)

    def starved(self, index: np.ndarray, patience: float) -> np.ndarray:
        """Which have waited `patience` times as long as they were served, bool [n]."""
        served = self.served[index]
        return np.asarray((served > 0) & (self.waited[index] >= patience * served))


class _Memory:
    """The times of calls, by row, and of programs, by number, and when they were last added up."""

    def __init__(self) -> None:
        self.calls, self.programs, self.last = _Times(), _Times(), -math.inf


@register(
    "autellix",
    summary="least attained service first, by program: a multi-level queue that preempts",
    source="Autellix",
    for_programs=True,
)
@dataclass(frozen=True)
class Autellix(UnifiedPolicy):
    """queues: number of queues, 1 to MOST_QUEUES. quantum: the service, in tokens, up to which a
    program is in the first queue. ratio: from each such bound to the next. patience: how many times
    as long as it was served a program may have waited before it is in the first queue. ValueError
    for values out of range, and if the last bound is not a number.
    """

    groups: tuple[Group, ...] = field(default=(Group(Phase.ANY, preempts=True),))
    mixed_batches: bool = True
    chunked: bool = True
    queues: int = 8
    quantum: float = 2048.0
    ratio: float = 2.0
    patience: float = 10.0
    _memory: _Memory = field(default_factory=_Memory, init=False, repr=False, compare=False)
    steady = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_queues(MOST_QUEUES, self.queues, self.quantum, self.ratio, self.patience)

    def ranking(self, view: View, now: float) -> Ranking:
        """By queue, the first one first, then by arrival."""
        self._count(view, now)
        return rank(view, lambda rows: self.queue_of(view, rows), self.requeue)

    def queue_of(self, view: View, rows: np.ndarray) -> np.ndarray:
        """The queue of each request, 0 for the first, int64 [n]."""
        queue = self._queue(Columns(view, rows, 0.0))
        number, memory = view.table.program[rows], self._memory
        starved = memory.calls.starved(rows, self.patience)
        mine = number >= 0
        starved[mine] = memory.programs.starved(number[mine], self.patience)
        return np.where(starved, 0, queue)

    def queue_priority(self, requests: Any, now: float) -> Any:
        """The queue, as if nobody starved."""
        return self._queue(requests)

    def _queue(self, requests: Any) -> Any:
        """The queue by service. A call of no program has had what it has computed."""
        own = where(requests.generated > 0, requests.prompt_len + requests.generated, 0)
        service = where(requests.attained > 0, requests.attained, own)
        bounds = self.quantum * self.ratio ** np.arange(self.queues - 1)
        return np.searchsorted(bounds, service)

    def _count(self, view: View, now: float) -> None:
        """Adds the time since the last plan to what each call, and its program, has waited or been
        served."""
        table, memory = view.table, self._memory
        rows = np.flatnonzero((table.state == WAITING) | (table.state == RUNNING))
        passed = np.minimum(now - memory.last, np.maximum(now - table.arrival[rows], 0.0))
        memory.last = now
        runs = table.state[rows] == RUNNING
        waited, served = passed * ~runs, passed * runs
        memory.calls.add(rows, table.seq[rows].astype(np.float64), waited, served)
        number = table.program[rows]
        mine = number >= 0
        start = table.program_start[rows[mine]]
        memory.programs.add(number[mine], start, waited[mine], served[mine])

    def compiled_spec(self) -> None:
        """Not compiled: queues depend on what was before."""
        return None
