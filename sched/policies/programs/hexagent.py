"""HexAGenT: the calls whose programs are most at risk come first.

Peng et al., "HexAGenT: Efficient Agentic LLM Serving via Workflow- and Heterogeneity-Aware
Scheduling" (arXiv 2605.16637). A call's risk is the time from its program's start to its projected
end, over the time that the program may take, or would take alone. The paper's target is a multiple
of the time alone of what is known of the program so far; here a program's own deadline counts, or
the call's JCT, if it has one. The end is projected from this call's remaining tokens, from the
calls that are expected after it, each like this one, and from the mean time of the tools in
between.

Its placement of prefills and decodes on different devices is about clusters: here there is one.
Batches are Sarathi's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxserve.sched.cost.cost_model import BatchFeatures
from jaxserve.sched.policies.sarathi import DECODE_FIRST
from jaxserve.sched.policy import View
from jaxserve.sched.registry import register
from jaxserve.sched.state.request_table import WAITING
from jaxserve.sched.unified.ranking import Ranking, rank
from jaxserve.sched.unified.unified_policy import Group, UnifiedPolicy


@register(
    "hexagent",
    summary="sarathi by risk: a program's projected time over the time that it may take",
    source="HexAGenT",
    for_programs=True,
)
@dataclass(frozen=True)
class Hexagent(UnifiedPolicy):
    """Chunked prefill in mixed batches, decodes first, each by the risk of its program."""

    groups: tuple[Group, ...] = field(default=DECODE_FIRST)
    mixed_batches: bool = True
    chunked: bool = True
    steady = False

    def ranking(self, view: View, now: float) -> Ranking:
        """By risk, the highest first, then by arrival."""
        return rank(view, lambda rows: -risk(view, rows, now), self.requeue)

    def queue_priority(self, requests: Any, now: float) -> Any:
        """Unknown: it depends on what follows the request."""
        return None

    def compiled_spec(self) -> None:
        """Not compiled: risks change with time."""
        return None


def risk(view: View, rows: np.ndarray, now: float) -> np.ndarray:
    """The projected time of each request's program, from its start to its end, over the time that
    it may take, float64 [n].

    Args:
        view: What the policy sees.
        rows: Table rows, int64 [n].
        now: Seconds.
    """
    table = view.table
    done, known = table.generated[rows], table.prompt_len[rows] + table.generated[rows]
    ahead = table.tokens_ahead(rows)
    middle = known + (ahead / 2).astype(np.int64)
    single = BatchFeatures.of_decodes(np.ones(len(rows), np.int64), middle, view.padding)
    token = np.asarray(view.step_time(single))
    decoding = table.decoding(rows)
    left = view.refill_time(np.where(decoding, 0, table.pending(rows))) + ahead * token
    found = np.where(
        table.state[rows] == WAITING, table.computed[rows], table.cached_at_start[rows]
    )
    prompt = np.maximum(table.prompt_len[rows] - found, 1)
    call = view.refill_time(prompt) + (done + ahead) * token
    after, before = table.calls_after[rows], table.calls_before[rows]
    start, tools = table.program_start[rows], table.tool_time_after[rows]
    earlier = before * (call + tools / np.maximum(after, 1.0))
    alone = earlier + call + after * call + tools
    due = table.program_deadline[rows]
    due = np.where(np.isfinite(due), due, table.arrival[rows] + table.jct[rows])
    allowed = due - start
    allowed = np.where(np.isfinite(allowed), allowed, alone)
    projected = np.maximum(now - start, 0.0) + left + after * call + tools
    return np.asarray(projected / np.maximum(allowed, 1e-9))
