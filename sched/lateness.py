"""Whether a request that comes is refused, since its first token would come too late."""

from __future__ import annotations

from jaxserve.sched.first_token import Wait
from jaxserve.sched.request import Request, Tier


def is_late(wait: Wait, request: Request, share: float) -> bool:
    """Whether a real-time request is expected to wait for longer than `share` of its TTFT. One
    whose target even an idle engine would miss is not: it would not help to come again."""
    target = request.slo.ttft
    if target is None or request.tier is not Tier.REALTIME or request.serve_late:
        return False
    return wait.alone <= share * target < wait.seconds


def retry_s(wait: Wait, request: Request, share: float) -> float:
    """Seconds after which it would be taken if nobody else came until then."""
    assert request.slo.ttft is not None
    return wait.seconds - share * request.slo.ttft
