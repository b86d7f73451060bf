"""The event queue of the compiled simulation: a heap that events can be moved in.

An event is a number, kind x replicas + replica, of the kinds below; each has one time. Ties go to
the smallest number. The queue is three arrays, see `at`.
"""

from __future__ import annotations

import numpy as np

from jaxserve.simulator.compiled.jit import kernel

FAULT, NOTICE, PUBLISH, DELIVER, LOOP = range(5)
KINDS = 5


@kernel
def at(times: np.ndarray, heap: np.ndarray, place: np.ndarray, event: int, time: float) -> None:
    """Sets the time of an event, and moves it in the heap.

    Args:
        times: float64, by event; inf for never.
        heap: int64, events, each before its two children.
        place: int64, by event, its index in the heap.
        event: The event.
        time: Seconds; inf for never.
    """
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
    """The initial heap for these times, and the index of each event in it."""
    heap = np.lexsort((np.arange(len(times)), times)).astype(np.int64)  # sorted is a heap
    place = np.zeros_like(heap)
    place[heap] = np.arange(len(heap))
    return heap, place
