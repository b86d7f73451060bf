"""Whether to refuse an arriving request because its first token would come too late."""

from __future__ import annotations

import math

from jaxserve.sched.request import SLO, Request, Tier
from jaxserve.sched.slo.ttft_estimator import Wait


def first_target(slo: SLO) -> tuple[str, float]:
    """When the first token must come, and the target that says so: TTFT, or JCT if that is less.
    JCT counts because a request with only a JCT overtakes others by its deadline, because of which
    they are refused; so it is refused like them.

    Returns:
        The target's name, and seconds from arrival, inf for none.
    """
    ttft, jct = (math.inf if target is None else target for target in (slo.ttft, slo.jct))
    return ("ttft", ttft) if ttft <= jct else ("jct", jct)


def is_late(wait: Wait, request: Request, share: float) -> bool:
    """Whether a real-time request would wait for others for more than `share` of the time that its
    TTFT leaves beside its own prompt. A request whose prompt alone takes longer is not late: trying
    again would not help."""
    return retry_s(wait, request, share) > 0


def retry_s(wait: Wait, request: Request, share: float) -> float:
    """Seconds until it would be accepted if no other request came; 0 if it would be accepted
    now."""
    _, target = first_target(request.slo)
    if target == math.inf or request.tier is not Tier.REALTIME or request.serve_late:
        return 0.0
    spare = target - wait.alone
    return max(0.0, wait.seconds - wait.alone - share * spare) if spare >= 0 else 0.0
