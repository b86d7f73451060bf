"""Times and targets in milliseconds, as every frontend reports them."""

from __future__ import annotations

from typing import Any

from jaxserve.engine.output import Timings
from jaxserve.sched.request import SLO
from jaxserve.sched.slo.slo_columns import ALL_TARGETS
from jaxserve.sched.slo.verdict import Verdict


def timings_ms(timings: Timings) -> dict[str, float | None]:
    """The latencies of a continuation, as clients get them."""
    times = {
        name: getattr(timings, name) for name in ("preprocess", "queue", "ttft", "tbt", "total")
    }
    times["max_tbt"] = timings.tbt_max
    return {f"{name}_ms": None if time is None else time * 1000 for name, time in times.items()}


def targets_ms(slo: SLO) -> dict[str, float]:
    """The targets that are set."""
    targets = ((name, getattr(slo, name)) for name in ALL_TARGETS)
    return {f"{name}_ms": target * 1000 for name, target in targets if target is not None}


def verdict_fields(verdict: Verdict) -> dict[str, Any]:
    """Which targets were set, which were met, and the problems with them; the client's records have
    the same."""
    judged = {f"{name}_ms": getattr(verdict, name) for name in ALL_TARGETS}
    return {
        "targets": targets_ms(verdict.slo),
        "targets_met": {name: met for name, met in judged.items() if met is not None},
        "met": verdict.met,
        "problems": [
            {
                "kind": str(problem.kind),
                "target_ms": problem.target * 1000,
                "limit_ms": problem.limit * 1000,
            }
            for problem in verdict.problems
        ],
    }
