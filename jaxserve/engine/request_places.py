"""Counts the engine's requests, in total and by tenant, against the size of its queue."""

from __future__ import annotations

from collections import Counter

from jaxserve.engine.errors import QueueFull
from jaxserve.sched.fairness.fair_share import may_have
from jaxserve.sched.request import InvalidRequest, Request


class RequestPlaces:
    """Admission to the queue. capacity: most continuations that may be queued or running. Not
    thread-safe."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._left: dict[str, int] = {}  # request id -> continuations that have not ended
        self._tenants: dict[str, str] = {}  # request id -> tenant
        self._mine: Counter[str] = Counter()
        self._weights: dict[str, float] = {}  # of all tenants that have ever come

    def __len__(self) -> int:
        return len(self._left)

    @property
    def ids(self) -> list[str]:
        """Ids of the requests that have not ended."""
        return list(self._left)

    def check(self, request: Request) -> None:
        """Raises InvalidRequest if the request has more continuations than the capacity."""
        n = request.sampling.n
        if n > self._capacity:
            raise InvalidRequest("n", f"{n} continuations; at most {self._capacity} fit the queue")

    def reserve(self, request: Request) -> None:
        """Counts a request that has passed `check`. Raises InvalidRequest if its id is in use,
        QueueFull if no places are left or its tenant has used up its share of them."""
        n, tenant, limit = request.sampling.n, request.tenant, self._capacity
        if request.id in self._left:
            raise InvalidRequest("request_id", f"{request.id!r} is already being served")
        weight = self._weights.get(tenant, 1.0) if request.weight is None else request.weight
        self._weights[tenant] = weight
        taken, mine = self._mine.total(), self._mine[tenant]
        if taken + n > limit:
            raise QueueFull(
                f"{limit} continuations are queued or running, as many as scheduler.max_queue "
                "and scheduler.max_rows allow; try again later"
            )
        if len(self._weights) > 1 and mine + n > may_have(taken, limit, weight) and mine:
            raise QueueFull(
                f"{mine} continuations of key {tenant} are queued or running, its share of "
                f"{limit} places, of which {limit - taken} are free; try again later"
            )
        self._left[request.id], self._tenants[request.id] = n, tenant
        self._mine[tenant] += n

    def end(self, request_id: str) -> bool:
        """Counts a continuation that has ended. Returns whether it was the request's last."""
        self._left[request_id] -= 1
        self._mine[self._tenants[request_id]] -= 1
        if self._left[request_id]:
            return False
        del self._left[request_id], self._tenants[request_id]
        return True

    def clear(self) -> None:
        """Forgets all requests."""
        self._left.clear()
        self._tenants.clear()
        self._mine.clear()
