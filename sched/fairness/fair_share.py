"""Weighted fair shares of an engine between tenants: the Virtual Token Counter (Sheng et al.,
"Fairness in Serving Large Language Models", OSDI 2024).

Each tenant has a counter of the tokens computed for it, divided by its weight; the waiting tenant
with the lowest counter is next. A tenant that was idle is lifted to the others' level, so that
shares cannot be saved up. Nothing is reserved: a tenant may use what others leave. The order within
a tenant is decided elsewhere.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

DECODE_COST = 2.0
"""Of a token that is written, in those of a prompt (section 4.1 of the paper, w_p and w_q)."""
KEPT = 7
"""A tenant of weight 1 may have so many times the places that are free: with one tenant there is
an eighth left for others to come in, with two there is a fifteenth."""


@dataclass(frozen=True)
class Share:
    """A tenant's share.

    Attributes:
        counter: Tokens computed for it, over its weight.
        weight: Its weight.
    """

    counter: float = 0.0
    weight: float = 1.0


class FairShares:
    """The tenants' counters. Tenants are numbered in the order in which they first came. One thread
    changes it."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._counter = np.zeros(0)
        self._weight = np.zeros(0)
        self._left = 0.0  # counter of the tenant that left the queue last

    def __len__(self) -> int:
        return len(self._numbers)

    def join(self, name: str, weight: float | None, waiting: Callable[[], np.ndarray]) -> int:
        """Adds a tenant with a new request. Returns its number. weight: None keeps the current one,
        initially 1. waiting: returns the tenants of the waiting requests."""
        number = self._numbers.setdefault(name, len(self._numbers))
        if number == len(self._counter):
            self._counter = np.append(self._counter, 0.0)
            self._weight = np.append(self._weight, 1.0)
        if weight is not None:
            self._weight[number] = weight
        if len(self) > 1:
            others = waiting()
            if not (others == number).any():
                least = self._counter[others].min() if len(others) else self._left
                self._counter[number] = max(self._counter[number], least)
        return number

    def weight(self, number: int) -> float:
        """The weight of that tenant."""
        return float(self._weight[number])

    def left(self, number: int) -> None:
        """Notes that a request of that tenant no longer waits."""
        self._left = float(self._counter[number])

    def charge(self, tenants: np.ndarray, cost: np.ndarray) -> None:
        """Charges tenants, int64 [n], for what was computed for them, float64 [n]."""
        np.add.at(self._counter, tenants, cost / self._weight[tenants])

    def shares(self) -> dict[str, Share]:
        """All tenants' shares, by name."""
        return {
            name: Share(float(self._counter[number]), float(self._weight[number]))
            for name, number in self._numbers.items()
        }

    def in_turn(self, tenants: np.ndarray, cost: np.ndarray) -> Iterator[int]:
        """Indices of n requests in the order in which they would be taken if each were computed at
        once: always the next request of the tenant with the lowest counter, in the given order
        within a tenant. tenants, cost: int64 [n]."""
        some = np.flatnonzero(np.bincount(tenants)).tolist()
        mine = {number: np.flatnonzero(tenants == number) for number in some}
        heap = [(self._counter[number], int(at[0]), 0, number) for number, at in mine.items()]
        heapq.heapify(heap)
        while heap:
            counter, index, place, number = heap[0]
            yield index
            place += 1
            if place < len(mine[number]):
                counter += cost[index] / self._weight[number]
                heapq.heapreplace(heap, (counter, int(mine[number][place]), place, number))
            else:
                heapq.heappop(heap)


def may_have(taken: int, capacity: int, weight: float) -> int:
    """Places that a tenant may have in a shared queue with `taken` places in use: the fuller the
    queue, the fewer (Choudhury and Hahne's dynamic threshold)."""
    return int(min(KEPT * weight * (capacity - taken), capacity))
