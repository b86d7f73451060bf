"""What happens next on the virtual clock."""

from __future__ import annotations

import heapq
import math


class Events:
    """A heap of events, each a number with one time at most; of those at the same time the smallest
    is first."""

    def __init__(self, count: int) -> None:
        self._times = [math.inf] * count
        self._heap: list[tuple[float, int]] = []

    def at(self, event: int, time: float) -> None:
        """The event happens at that time, inf for never, and at no other."""
        if time != self._times[event]:
            self._times[event] = time
            if time < math.inf:
                heapq.heappush(self._heap, (time, event))

    def first(self) -> tuple[float, int]:
        """When the next one happens, and which; inf and -1 if none does."""
        heap = self._heap
        while heap and self._times[heap[0][1]] != heap[0][0]:
            heapq.heappop(heap)  # it has another time by now
        return heap[0] if heap else (math.inf, -1)
