"""Orca: iteration-level scheduling of a fixed number of requests.

First come, first served, with whole prompts beside decodes. A request that starts gets memory for
its prompt and all tokens it may write (`max_tokens`), so nothing is ever preempted.
"""

from __future__ import annotations

from jaxserve.sched.registry import register
from jaxserve.sched.unified.unified_policy import Group, Phase, Reserve, UnifiedPolicy

BATCH_SIZE = 8  # in AccelGen's comparison (section 3), after Orca's own


@register(
    "orca",
    summary="fixed batch size, first come first served, reserves prompt + max_tokens",
    source="Orca; AccelGen section 3",
)
def orca() -> UnifiedPolicy:
    """At most BATCH_SIZE requests hold a cache, and none preempts."""
    return UnifiedPolicy(
        (Group(Phase.ANY),),
        mixed_batches=True,
        chunked=False,
        full_prefill=True,
        reserve=Reserve.WHOLE,
        watermark=0.0,
        max_rows=BATCH_SIZE,
    )
