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
    """The first token is expected after its target; try again later.

    Args:
        field_name: the target, such as "slo.ttft_ms".
        message: why.
        retry_s: seconds after which to try again.
    """

    def __init__(self, field_name: str, message: str, retry_s: float) -> None:
        super().__init__(f"{field_name}: {message}")
        self.field_name, self.retry_s = field_name, retry_s


def check_expected(engine: EngineClient, request: Request, share: float) -> None:
    """Raises ExpectedLate if the request should be refused now. share: as `server.refuse_late`; 0
    refuses nobody."""
    name, target = first_target(request.slo)
    if not share or target == math.inf:
        return
    wait = engine.expected_wait(request)
    if is_late(wait, request, share):
        # Random, so that clients do not all come back at once.
        again = retry_s(wait, request, share) * random.uniform(1.0, 1.5)
        raise ExpectedLate(f"slo.{name}_ms", _comparison(wait, target, share), again)


def _comparison(wait: Wait, target: float, share: float) -> str:
    """The rule of `sched/slo/slo_admission.py`, with its numbers."""
    waits, spare = wait.seconds - wait.alone, target - wait.alone
    expected = f"the first token is expected in {_ms(wait.seconds)} ms"
    parts = f"{_ms(wait.alone)} for its own prompt and {_ms(waits)} of waiting for others"
    of = f"{share:g} (server.refuse_late) of the {_ms(spare)} ms"
    rule = f"it may wait for {_ms(share * spare)} ms, {of} that {_ms(target)} ms leave"
    return f"{expected}, {parts}; {rule}; try again later, or set serve_late"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.4g}" if seconds < 1 else f"{1000 * seconds:.0f}"
