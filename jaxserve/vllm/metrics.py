"""Verdicts and the time of plans, as Prometheus metrics of vLLM's engine process.

vLLM's own `/metrics` has them, too, if PROMETHEUS_MULTIPROC_DIR names a folder.
"""

from __future__ import annotations

from prometheus_client import Counter, Histogram

from jaxserve.sched.request import Tier
from jaxserve.sched.slo.slo_columns import ALL_TARGETS
from jaxserve.sched.slo.verdict import Verdict

_SECONDS = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5)

REQUESTS = Counter(
    "jaxserve:vllm_requests",
    "Ended requests by tier and verdict: met, missed, or none without targets",
    ("tier", "verdict"),
)
MISSED = Counter(
    "jaxserve:vllm_missed_targets", "Missed targets of ended requests, by target", ("target",)
)
HOST_SECONDS = Histogram(
    "jaxserve:vllm_host_seconds",
    "Seconds of a step before its launch: the policy's plan, and vLLM's own scheduling of it",
    ("part",),
    buckets=_SECONDS,
)


def count(tier: Tier, verdict: Verdict | None) -> None:
    """Counts a request that has ended. verdict: None without targets."""
    found = "none" if verdict is None else "met" if verdict.met else "missed"
    REQUESTS.labels(tier.name.lower(), found).inc()
    for target in ALL_TARGETS if verdict is not None else ():
        if getattr(verdict, target) is False:
            MISSED.labels(target).inc()
