"""When the requests of a workload are due: at their own times, or after those that they wait for.

Simulations and load tests both ask this, and tell it what has ended.
"""

from __future__ import annotations

import heapq
import math
from collections import deque

import numpy as np

from jaxserve.simulator.workloads.programs import NO_PROGRAM
from jaxserve.simulator.workloads.workload import Workload


class Releases:
    """The requests of a workload, as they become due. Times in seconds from the workload's start.

    Args:
        workload: The n requests.

    Attributes:
        arrival: By number: when each came, or will come as far as that is known.
        came: Numbers of the requests that have come, in order.
        ends: By program: when its last call ended.
        given_up: By program: when a call of it was refused or failed. Its other calls end, but none
            comes any more.
    """

    def __init__(self, workload: Workload) -> None:
        programs = workload.programs
        self.arrival: list[float] = workload.arrival.tolist()
        self.came: list[int] = []
        self.ends: dict[int, float] = {}
        self.given_up: dict[int, float] = {}
        self._program: list[int] = programs.program.tolist()
        self._due: list[tuple[float, int]] = []  # heap of those whose time was not known at first
        self._own = np.flatnonzero(~programs.waits).tolist()  # come at their own times
        self._next = 0  # of these
        self._going: dict[int, int] = {}  # calls of each program that have not ended
        self._left: dict[int, int] = {}  # that have not come
        self._last: dict[int, float] = {}  # when a call of each ended, the last one so far
        self._waiting = deque[list[int]]()  # programs that begin when others end: their first calls
        if not programs.closed:
            return
        numbers, counts = np.unique(programs.program, return_counts=True)
        self._left = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
        self._going = dict.fromkeys(self._left, 0)
        self._children: dict[int, list[int]] = {}
        for parent, child in zip(programs.parent.tolist(), programs.child.tolist(), strict=True):
            self._children.setdefault(parent, []).append(child)
        self._wait: list[float] = programs.wait.tolist()
        self._missing = np.bincount(programs.child, minlength=len(workload)).tolist()
        self._ready = [0.0] * len(workload)  # the last end of its parents so far
        # Shortest waits first, without those that have come.
        waits = np.flatnonzero(programs.waits)
        self._waits = waits[np.argsort(programs.wait[waits], kind="stable")].tolist()
        self._shortest = 0
        if programs.at_once:
            self._hold(programs.at_once)

    def _hold(self, at_once: int) -> None:
        """Lets the first programs begin at 0, and keeps the first calls of the others."""
        firsts: dict[int, list[int]] = {}
        for number in self._own:
            firsts.setdefault(self._program[number], []).append(number)
        self._own = firsts.pop(NO_PROGRAM, [])
        self._waiting.extend(firsts.values())
        for _ in range(min(at_once, len(firsts))):
            self._begin(0.0)

    def _begin(self, time: float) -> None:
        calls = self._waiting.popleft()
        first = self.arrival[calls[0]]
        for number in calls:
            self._release(number, time + self.arrival[number] - first)

    def _release(self, number: int, time: float) -> None:
        self.arrival[number] = time
        heapq.heappush(self._due, (time, number))

    @property
    def next_time(self) -> float:
        """When the next request of which that is known is due; inf if there is none."""
        return self._first()[0]

    def _first(self) -> tuple[float, int]:
        own, due = self._own, self._due
        if self.given_up:
            while self._next < len(own) and self._program[own[self._next]] in self.given_up:
                self._next += 1
            while due and self._program[due[0][1]] in self.given_up:
                heapq.heappop(due)
        first = (math.inf, -1)
        if self._next < len(own):
            first = (self.arrival[own[self._next]], own[self._next])
        return min(first, due[0]) if due else first

    @property
    def more(self) -> bool:
        """Whether any request may still come."""
        return self.next_time < math.inf or self.unknown_after < math.inf

    @property
    def unknown_after(self) -> float:
        """At least how long after an end a request comes whose time is not known yet; inf if there
        is none."""
        if self._waiting:
            return 0.0
        if not self._left:
            return math.inf
        while self._shortest < len(self._waits):
            number = self._waits[self._shortest]
            if self._missing[number] and self._program[number] not in self.given_up:
                return self._wait[number]
            self._shortest += 1
        return math.inf

    def take_first(self) -> int:
        """The next request to come. Call it only if there is one."""
        _, number = self._first()
        if self._next < len(self._own) and self._own[self._next] == number:
            self._next += 1
        else:
            heapq.heappop(self._due)
        self.came.append(number)
        program = self._program[number]
        if program >= 0:
            self._left[program] -= 1
            self._going[program] += 1
        return number

    def left(self, number: int) -> int:
        """Calls of a request's program that have not come; 0 without a program."""
        return self._left.get(self._program[number], 0)

    def ended(self, number: int, time: float) -> None:
        """Tells that a request that has come ended at `time`, with its whole output."""
        program = self._program[number]
        if program < 0:
            return
        for child in self._children.get(number, ()):
            self._missing[child] -= 1
            self._ready[child] = max(self._ready[child], time)
            if not self._missing[child] and program not in self.given_up:
                self._release(child, self._ready[child] + self._wait[child])
        self._over(program, time)

    def gave_up(self, number: int, time: float) -> None:
        """Tells that a request that has come was refused, or failed, at `time`: its program is
        given up."""
        program = self._program[number]
        if program >= 0:
            self.given_up.setdefault(program, time)
            self._over(program, time)

    def _over(self, program: int, time: float) -> None:
        """A call of the program ended."""
        self._going[program] -= 1
        self._last[program] = max(self._last.get(program, 0.0), time)
        if self._going[program] or (self._left[program] and program not in self.given_up):
            return
        self.ends[program] = self._last[program]
        if self._waiting:
            self._begin(self.ends[program])
