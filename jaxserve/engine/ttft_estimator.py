"""Expected waits of requests that arrive now: published by the engine thread, read by others."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from jaxserve.engine.in_flight import InFlight
from jaxserve.sched.request import Request, Tier
from jaxserve.sched.scheduler import Scheduler
from jaxserve.sched.slo.backlog import Backlog
from jaxserve.sched.slo.ttft_estimator import TtftEstimator, Wait
from jaxserve.sched.step_timing import StepWatch

log = logging.getLogger(__name__)


class LiveTtftEstimator:
    """Predicts the time to first token of requests. Only the engine thread calls `publish`. Any
    thread may call the other methods, which do not block the engine.

    Args:
        scheduler: the engine's scheduler.
        watch: knows when the device was last free.
        clock: seconds; `Request.arrival` is on it.
        arrivals: returns the number of continuations that the engine thread has admitted or
        refused.

    Attributes:
        backlog: the work left when the last step had been launched.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        watch: StepWatch,
        clock: Callable[[], float],
        arrivals: Callable[[], int],
    ) -> None:
        self._scheduler, self._watch, self._clock = scheduler, watch, clock
        self._arrivals = arrivals
        self._lock = threading.Lock()
        self._submitted = 0  # continuations
        # Earlier submissions, the request, when it was submitted, tokens that it finds cached.
        self._since: deque[tuple[int, Request, float, int]] = deque()
        self._seen: TtftEstimator | None = None
        self.publish()

    def publish(self, *flying: InFlight | None) -> None:
        """Publishes the work left now. flying: the launched steps whose tokens have not come, in
        order."""
        now = self._clock()
        free_at = self._watch.free_at(*(step.watched for step in flying if step is not None))
        backlog = self.backlog = Backlog.from_scheduler(self._scheduler, now, free_at)
        self._latest = self._arrivals(), TtftEstimator(backlog)

    def submitted(self, request: Request, now: float) -> None:
        """Counts a request that the engine may not have admitted yet."""
        with self._lock:
            predicts = self._current()
            if self._submitted >= self._latest[0]:
                cached = self._scheduler.cached(request)
                self._since.append((self._submitted, request, now, cached))
                _arrived(predicts, request, now, cached)
            self._submitted += request.sampling.n

    def wait(self, request: Request) -> Wait:
        """The expected wait of a request that is submitted now, from its arrival on."""
        with self._lock:
            return self._current().wait(request, self._clock(), self._scheduler.cached(request))

    def by_tier(self) -> dict[str, float]:
        """Seconds until the first token of the shortest prompt without targets, for each tier."""
        shortest = {tier: Request("", (0,), tier=tier) for tier in Tier}
        return {tier.name.lower(): self.wait(one).seconds for tier, one in shortest.items()}

    def _current(self) -> TtftEstimator:
        received, predicts = self._latest
        if predicts is not self._seen:
            self._seen = predicts
            while self._since and self._since[0][0] < received:
                self._since.popleft()
            for _, request, submitted, cached in self._since:
                _arrived(predicts, request, submitted, cached)
        return predicts


def _arrived(predicts: TtftEstimator, request: Request, now: float, cached: int) -> None:
    """Adds the request to the queue. If the policy fails to rank it, only the predictions get
    worse."""
    try:
        predicts.arrived(request, now, cached)
    except Exception:
        log.debug("the policy does not say where %r stands", request.id, exc_info=True)
