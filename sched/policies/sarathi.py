"""Sarathi-Serve: stall-free batches of decodes and prompt chunks (InferMax section 3.1), and its
variants without some parts (Table 1)."""

from __future__ import annotations

from jaxserve.sched.registry import register
from jaxserve.sched.unified.unified_policy import Group, Phase, UnifiedPolicy

DECODE_FIRST = (Group(Phase.DECODE, preempts=True), Group(Phase.PREFILL), Group(Phase.WAITING))


@register(
    "sarathi",
    summary="decode first, chunked prefill, mixed batches within a token budget",
    source="InferMax 3.1, Table 1",
)
def sarathi() -> UnifiedPolicy:
    """All decodes, then chunks of prompts as far as the batch stays within P."""
    return UnifiedPolicy(DECODE_FIRST, mixed_batches=True, chunked=True)


@register(
    "sarathi_pc",
    summary="sarathi with P = C: prefills may fill the batch",
    source="InferMax Table 1",
)
def sarathi_pc() -> UnifiedPolicy:
    """P = C: chunks may be as long as the batch."""
    return UnifiedPolicy(DECODE_FIRST, mixed_batches=True, chunked=True, full_prefill=True)


@register(
    "sarathi_nocp",
    summary="sarathi with whole prompts instead of chunks, P = C",
    source="InferMax Table 1",
)
def sarathi_nocp() -> UnifiedPolicy:
    """Whole prompts, which may be as long as the batch."""
    return UnifiedPolicy(DECODE_FIRST, mixed_batches=True, chunked=False, full_prefill=True)


@register(
    "sarathi_nohy",
    summary="sarathi with whole prompts and without mixed batches, P = C",
    source="InferMax Table 1",
)
def sarathi_nohy() -> UnifiedPolicy:
    """No hybrid batching and no chunked prefill: a batch has either whole prompts or decodes."""
    return UnifiedPolicy(DECODE_FIRST, mixed_batches=False, chunked=False, full_prefill=True)
