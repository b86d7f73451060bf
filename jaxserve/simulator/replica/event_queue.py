"""The event queue of the virtual clock."""

from __future__ import annotations

import heapq
import math


class Events:
    """A heap of `count` events, numbered from 0, each with at most one time. Ties go to the
    smallest number."""

    def __init__(self, count: int) -> None:
        self._times = [math.inf] * count
        self._heap: list[tuple[float, int]] = []

    def at(self, event: int, time: float) -> None:
        """Sets the event's time, inf for never."""
        if time != self._times[event]:
            self._times[event] = time
            if time < math.inf:
                heapq.heappush(self._heap, (time, event))

    def first(self) -> tuple[float, int]:
        """The time and number of the next event; inf and -1 if there is none."""
        heap = self._heap
        while heap and self._times[heap[0][1]] != heap[0][0]:
            heapq.heappop(heap)  # its time has changed
        return heap[0] if heap else (math.inf, -1)
