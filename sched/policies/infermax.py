"""InferMax's own scheduler: Sarathi that preempts short requests (InferMax section 6).

A long request costs most to refill, so the longest running request comes first and the shortest is
preempted. A request starts only if the memory that it is expected to end with is free; output
lengths are learned from outputs that have ended.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxserve.sched.policies.sarathi import DECODE_FIRST
from jaxserve.sched.policy import View
from jaxserve.sched.registry import register
from jaxserve.sched.unified.batch_budget import Expected
from jaxserve.sched.unified.policy_spec import CompiledSpec, where
from jaxserve.sched.unified.ranking import Ranking, rank
from jaxserve.sched.unified.unified_policy import Group, UnifiedPolicy


class Expect(enum.Enum):
    """Memory that must be free for a request to start, once output lengths are known."""

    NOTHING = "its prompt"
    CANDIDATE = "all that it is expected to end with (section 3.1, M, with section 6's reserve)"
    RUNNING = "as well what those that run are expected to take yet"


@register(
    "infermax",
    summary="sarathi that keeps long requests, preempts short ones and expects outputs' lengths",
    source="InferMax 6",
)
@dataclass(frozen=True)
class InferMax(UnifiedPolicy):
    """P = C, since the paper gives no other P and 512 costs it all of its gain (docs/infermax.md).

    longest_first: running requests in order of their cached tokens, most first. expect: memory that
    must be free for a start, at least that of the prompt; only the prompt's is taken. enough:
    outputs that must have ended before their lengths are used. ValueError if it is negative."""

    groups: tuple[Group, ...] = field(default=DECODE_FIRST)
    mixed_batches: bool = True
    chunked: bool = True
    full_prefill: bool = True
    longest_first: bool = True
    expect: Expect = Expect.CANDIDATE
    enough: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.enough < 0:
            raise ValueError(f"enough must be at least 0, got {self.enough}")

    def ranking(self, view: View, now: float) -> Ranking:
        """Running requests by cached tokens, most first; waiting ones as in `UnifiedPolicy`."""
        plain = rank(view, requeue=self.requeue)
        if not self.longest_first:
            return plain
        # The waiting requests keep their order, and are many: only running ones are sorted.
        running = plain.running[np.argsort(-view.table.computed[plain.running], kind="stable")]
        return Ranking(view.table, plain.waiting, running)

    def compiled_spec(self) -> CompiledSpec | None:
        """The compiled form of these methods."""
        plain = super().compiled_spec()
        return plain and CompiledSpec(
            _longest if self.longest_first else None,
            expects=self.expect is not Expect.NOTHING,
            promises=self.expect is Expect.RUNNING,
            enough=self.enough,
        )

    def expected(self, view: View) -> Expected | None:
        """For each request, its prompt and the mean of the outputs that got as long, at most
        max_tokens. None until `enough` outputs have ended."""
        table, lengths = view.table, view.table.output_lengths
        if self.expect is Expect.NOTHING or lengths.count < self.enough:
            return None

        def peak(rows: np.ndarray) -> np.ndarray:
            output = np.ceil(lengths.expected(table.generated[rows])).astype(np.int64)
            output = np.minimum(output, table.max_tokens[rows])
            return np.maximum(table.prompt_len[rows] + output - 1, table.computed[rows])

        return Expected(peak, of_running=self.expect is Expect.RUNNING)


def _longest(r: Any) -> Any:
    """Waiting requests come behind all running ones, in their own order."""
    return where(r.waiting, np.inf, -r.computed)
