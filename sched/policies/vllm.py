"""vLLM's first scheduler (InferMax section 3.1 and Table 1)."""

from __future__ import annotations

from collections.abc import Iterator

from jaxserve.sched.policy import View, register
from jaxserve.sched.table import State
from jaxserve.sched.unified import Group, UnifiedPolicy


def _prefill_first(view: View) -> Iterator[Group]:
    yield Group(view.table.in_state(State.WAITING), evicts=False)
    yield Group(view.table.in_state(State.RUNNING), evicts=True)


@register(
    "vllm",
    summary="prefill first, first come first served, whole prompts, recompute on preemption",
    source="InferMax 3.1, Table 1",
)
def vllm() -> UnifiedPolicy:
    return UnifiedPolicy(_prefill_first, hybrid=False, chunked=False)
