"""DeepSpeed-FastGen's dynamic split-fuse: every batch has the same number of tokens.

Decodes come first and prompts, cut if necessary, fill the batch up to C. Unlike Sarathi it takes
memory chunk by chunk, so a prompt may start before there is room for all of it; if memory runs out
midway, the latest arrival is preempted.
"""

from __future__ import annotations

from jaxserve.sched.registry import register
from jaxserve.sched.unified.unified_policy import Group, Phase, Reserve, UnifiedPolicy


@register(
    "fastgen",
    summary="dynamic split-fuse: prompt chunks fill each batch to C, memory chunk by chunk",
    source="DeepSpeed-FastGen",
)
def fastgen() -> UnifiedPolicy:
    """Decodes, then prompts in progress, then waiting ones, up to C tokens. A start reserves blocks
    only for its chunk, so a running request may have to preempt for its next chunk."""
    groups = (
        Group(Phase.DECODE, preempts=True),
        Group(Phase.PREFILL, preempts=True),
        Group(Phase.WAITING),
    )
    return UnifiedPolicy(
        groups, mixed_batches=True, chunked=True, full_prefill=True, reserve=Reserve.CHUNK
    )
