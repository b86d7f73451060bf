"""The requests that an engine has, and how many of its places are whose."""

from __future__ import annotations

from collections import Counter

from jaxserve.engine.errors import QueueFull
from jaxserve.sched.fairness.fair_share import may_have
from jaxserve.sched.request import InvalidRequest, Request


class RequestPlaces:
    """capacity: continuations that are queued or running at most. Not thread-safe."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._left: dict[str, int] = {}  # request id -> continuations not yet over
        self._tenants: dict[str, str] = {}  # request id -> whose
        self._mine: Counter[str] = Counter()
        self._weights: dict[str, float] = {}  # of all tenants that ever came

    def __len__(self) -> int:
        return len(self._left)

    @property
    def ids(self) -> list[str]:
        """Of the requests that are not over."""
        return list(self._left)

    def check(self, request: Request) -> None:
        """Raises InvalidRequest for more continuations than there are places."""
        n = request.sampling.n
        if n > self._capacity:
            raise InvalidRequest("n", f"{n} continuations; at most {self._capacity} fit the queue")

    def reserve(self, request: Request) -> None:
        """One more, that `check` has let pass. Raises InvalidRequest for an id that is there;
        QueueFull where no places are left, or, where several tenants come, too few to let this one
        have more."""
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
        """One of its continuations is over; whether it was the last."""
        self._left[request_id] -= 1
        self._mine[self._tenants[request_id]] -= 1
        if self._left[request_id]:
            return False
        del self._left[request_id], self._tenants[request_id]
        return True

    def clear(self) -> None:
        """There are none any more."""
        self._left.clear()
        self._tenants.clear()
        self._mine.clear()
