"""vLLM's first scheduler, and the same with hybrid batches (InferMax section 3.1 and Table 1)."""

from __future__ import annotations

from jaxserve.sched.registry import register
from jaxserve.sched.unified.unified_policy import Group, Phase, UnifiedPolicy

PREFILL_FIRST = (Group(Phase.WAITING), Group(Phase.RUNNING, preempts=True))


@register(
    "vllm",
    summary="prefill first, first come first served, whole prompts, recompute on preemption",
    source="InferMax 3.1, Table 1",
)
def vllm() -> UnifiedPolicy:
    """A batch of whole prompts if any can start, else of all decodes, which preempt the latest to
    arrive when memory runs out."""
    return UnifiedPolicy(PREFILL_FIRST, mixed_batches=False, chunked=False, full_prefill=True)


@register(
    "vllm_hy",
    summary="vllm, but decodes fill what the prefills, which come first, leave of a batch",
    source="InferMax Table 1",
)
def vllm_hy() -> UnifiedPolicy:
    """Hybrid batching: decodes fill what the prompts leave of C. Prefills come first, as Table 1
    has it ("priority: prefill"); decodes first and whole prompts are `sarathi_nocp`."""
    return UnifiedPolicy(PREFILL_FIRST, mixed_batches=True, chunked=False, full_prefill=True)
