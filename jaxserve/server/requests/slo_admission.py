"""Refuses real-time requests whose first token would come too late
(`sched/slo/slo_admission.py`)."""

from __future__ import annotations

import math
import random

from jaxserve.sched.request import Request
from jaxserve.sched.slo.slo_admission import first_target, is_late, retry_s
from jaxserve.sched.slo.ttft_estimator import Wait
from jaxserve.server.requests.engine_client import EngineClient


class ExpectedLate(RuntimeError):
    """The first token is expected too late; try again later.

    Args:
        field_name: the target, such as "slo.ttft_ms".
        message: why.
        retry_s: seconds after which to try again.
    """

    def __init__(self, field_name: str, message: str, retry_s: float) -> None:
        super().__init__(f"{field_name}: {message}")
        self.field_name, self.retry_s = field_name, retry_s


class SloAdmission:
    """Refuses requests whose first token is expected late. share: as `server.refuse_late`; 0
    refuses nobody."""

    def __init__(self, engine: EngineClient, share: float) -> None:
        self._engine, self._share = engine, share

    def check(self, request: Request) -> None:
        """Raises ExpectedLate if the request is to be refused now."""
        name, target = first_target(request.slo)
        if not self._share or target == math.inf:
            return
        wait = self._engine.expected_wait(request)
        if is_late(wait, request, self._share):
            # Not all of them at once.
            again = retry_s(wait, request, self._share) * random.uniform(1.0, 1.5)
            raise ExpectedLate(f"slo.{name}_ms", self._comparison(wait, target), again)

    def _comparison(self, wait: Wait, target: float) -> str:
        """The rule of `sched/slo/slo_admission.py`, with its numbers."""
        waits, spare = wait.seconds - wait.alone, target - wait.alone
        expected = f"the first token is expected in {_ms(wait.seconds)} ms"
        parts = f"{_ms(wait.alone)} for its own prompt and {_ms(waits)} of waiting for others"
        share = f"{self._share:g} (server.refuse_late) of the {_ms(spare)} ms"
        rule = f"it may wait for {_ms(self._share * spare)} ms, {share} that {_ms(target)} ms leave"
        return f"{expected}, {parts}; {rule}; try again later, or set serve_late"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.4g}" if seconds < 1 else f"{1000 * seconds:.0f}"
