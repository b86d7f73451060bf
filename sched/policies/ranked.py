"""Requests ranked by their lengths, not by their phases (InferMax section 4.6).

All requests, waiting or running, are in one order, and a request that lacks memory takes it from
the last running one. Batches are mixed and prompts chunked, as in Sarathi. The authors' simulator
has P = C, and a request that finds no memory does not block those behind it:
`rank_i:full_prefill=true:probing=true`.
"""

from __future__ import annotations

from typing import Any

from jaxserve.sched.registry import register
from jaxserve.sched.unified.policy_spec import Key
from jaxserve.sched.unified.unified_policy import Group, Phase, UnifiedPolicy


def _ranked(key: Key | None, hypothetical: bool = False) -> UnifiedPolicy:
    groups = (Group(Phase.ANY, preempts=True),)
    return UnifiedPolicy(
        groups, mixed_batches=True, chunked=True, key=key, hypothetical=hypothetical
    )


@register(
    "rank_org",
    summary="one order for all phases: first come, first served",
    source="InferMax 4.6",
)
def rank_org() -> UnifiedPolicy:
    """RankOrg: by arrival."""
    return _ranked(None)


@register(
    "rank_i",
    summary="one order for all phases: short prompts first",
    source="InferMax 4.6",
)
def rank_i() -> UnifiedPolicy:
    """RankI: by the length of the prompt, the shortest first."""
    return _ranked(_prompt_len)


@register(
    "rank_o",
    summary="one order for all phases: short outputs first, knowing their lengths",
    source="InferMax 4.6",
)
def rank_o() -> UnifiedPolicy:
    """RankO: by the length of the output, the shortest first; only a simulation knows it."""
    return _ranked(_output_len, hypothetical=True)


def _prompt_len(r: Any) -> Any:
    return r.prompt_len


def _output_len(r: Any) -> Any:
    return r.most_output
