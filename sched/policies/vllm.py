"""vLLM's first scheduler, and its variant with hybrid batches (InferMax section 3.1, Table 1)."""

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
    """A batch of whole prompts if any can start, otherwise of all decodes, which preempt the latest
    arrivals when memory runs out."""
    return UnifiedPolicy(PREFILL_FIRST, mixed_batches=False, chunked=False, full_prefill=True)


@register(
    "vllm_hy",
    summary="vllm, but decodes fill what prefills, which still come first, leave of a batch",
    source="InferMax Table 1",
)
def vllm_hy() -> UnifiedPolicy:
    """Hybrid batching: decodes fill what the prompts leave of C. Prefills come first, as in Table 1
    ("priority: prefill"); for decodes first and whole prompts see `sarathi_nocp`."""
    return UnifiedPolicy(PREFILL_FIRST, mixed_batches=True, chunked=False, full_prefill=True)
