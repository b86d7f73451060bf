"""What the engine's own steps took: an observer, and a summary of what it saw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.engine.stats import Observer, StepStats
from jaxserve.sched.metrics import summarise


class StepRecorder(Observer):
    """Keeps every step of the engine, in the order they end; nothing else."""

    def __init__(self) -> None:
        self.steps: list[StepStats] = []

    def on_step(self, stats: StepStats) -> None:
        """Keeps it, on the engine thread."""
        self.steps.append(stats)


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
