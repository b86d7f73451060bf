"""Refuses real-time requests whose first token would come too late (`sched/lateness.py`)."""

from __future__ import annotations

import random

from jaxserve.sched.lateness import is_late, retry_s
from jaxserve.sched.request import Request
from jaxserve.server.requests.contract import ServedEngine


class ExpectedLate(RuntimeError):
    """The request would miss its target; try again later. retry_s: when, in seconds from now."""

    def __init__(self, message: str, retry_s: float) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class LateRefusal:
    """share: as `server.refuse_late`; 0 refuses nobody."""

    def __init__(self, engine: ServedEngine, share: float) -> None:
        self._engine, self._share = engine, share

    def check(self, request: Request) -> None:
        """Raises ExpectedLate for one that is not to be submitted now."""
        target = request.slo.ttft
        if not self._share or target is None:
            return
        wait = self._engine.expected_wait(request)
        if is_late(wait, request, self._share):
            problem = f"the first token is expected in {1000 * wait.seconds:.0f} ms"
            way_out = "try again later, or set serve_late"
            # Not all of them at once.
            again = retry_s(wait, request, self._share) * random.uniform(1.0, 1.5)
            raise ExpectedLate(
                f"slo.ttft_ms: {problem}, too late for {1000 * target:g} ms; {way_out}", again
            )
