"""A summary of what the engine's own steps took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.engine.stats import StepStats
from jaxserve.sched.slo.metrics import summarise


def step_metrics(steps: Sequence[StepStats]) -> dict[str, Any]:
    """Times of all steps, of those that only decode, of those with prompt tokens, and of the
    decode steps with the most rows there were."""
    decode = [s for s in steps if s.num_decodes == s.num_rows]
    most = max((s.num_rows for s in decode), default=0)
    return {
        "all": _group(steps),
        "decode": _group(decode),
        "with_prefill": _group([s for s in steps if s.num_decodes < s.num_rows]),
        "fullest_decode": {"rows": most, **_group([s for s in decode if s.num_rows == most])},
        "preemptions": sum(s.preemptions for s in steps),
        "padded_tokens": sum(s.padded_tokens - s.num_tokens for s in steps),
    }


def _group(steps: Sequence[StepStats]) -> dict[str, Any]:
    return {
        "count": len(steps),
        "step_ms": summarise([s.step_time for s in steps], 1e3),
        "host_ms": summarise([s.host_time for s in steps], 1e3),
    }
