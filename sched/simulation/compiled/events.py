"""What happens next in the compiled simulation: an event heap in which every event has a place.

An event is a number, kind x replicas + replica, of the kinds below. times: by event, inf for what
does not happen; heap: events, each before its two children; place: where an event is in the heap.
Of those at the same time the smallest is first.
"""

from __future__ import annotations

import numpy as np

from jaxserve.sched.simulation.compiled.jit import kernel

FAULT, NOTICE, PUBLISH, DELIVER, LOOP = range(5)
KINDS = 5


@kernel
def at(times: np.ndarray, heap: np.ndarray, place: np.ndarray, event: int, time: float) -> None:
    """The event happens at that time, and at no other."""
    times[event] = time
    here = place[event]
    while here > 0:
        parent = (here - 1) // 2
        other = heap[parent]
        if times[other] < time or (times[other] == time and other < event):
            break
        heap[here], place[other] = other, here
        here = parent
    while True:
        child = 2 * here + 1
        if child >= len(heap):
            break
        right = child + 1
        if right < len(heap):
            a, b = heap[child], heap[right]
            if times[b] < times[a] or (times[b] == times[a] and b < a):
                child = right
        other = heap[child]
        if time < times[other] or (time == times[other] and event < other):
            break
        heap[here], place[other] = other, here
        here = child
    heap[here], place[event] = event, here


def first_heap(times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """heap and place for these times."""
    heap = np.lexsort((np.arange(len(times)), times)).astype(np.int64)  # sorted is a heap
    place = np.zeros_like(heap)
    place[heap] = np.arange(len(heap))
    return heap, place
