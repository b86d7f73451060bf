"""Earliest deadline first on Sarathi's batches: the baseline for policies with service-level
objectives.

The deadline of a request's token j (from 0) is arrival + TTFT + j TBT. It orders the decodes, then
prefills and waiting requests together, and the latest deadline is preempted.

In an overload this order makes every request late, one after the other, since late ones come first.
So a request that can no longer be in time, or never could, is due `patience` seconds after its
arrival instead: it waits for those that can, but not for ever. The same holds for real-time
requests without targets. Best-effort ones without targets come behind all others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from jaxserve.sched.registry import register
from jaxserve.sched.request import Tier
from jaxserve.sched.unified.policy_spec import Key, Lapse, where
from jaxserve.sched.unified.unified_policy import Group, Phase, UnifiedPolicy

_REALTIME = int(Tier.REALTIME)
_DECODES_FIRST = (Group(Phase.DECODE, preempts=True), Group(Phase.PREFILL | Phase.WAITING))


@register(
    "edf",
    summary="sarathi by earliest deadline, arrival + TTFT + j TBT; late requests let others pass",
    source="earliest deadline first on InferMax 3.1",
)
@dataclass(frozen=True)
class EarliestDeadline(UnifiedPolicy):
    """Orders decodes by deadline, then prefills and waiting requests; only decodes preempt.

    patience: seconds after its arrival at which a request is due if it is late, or real-time
        without targets. With 0, plain earliest deadline first: late requests stay in front, and
        those without targets go last. ValueError if it is negative or not a number."""

    groups: tuple[Group, ...] = field(default=_DECODES_FIRST)
    mixed_batches: bool = True
    chunked: bool = True
    patience: float = 60.0
    key: Key | None = field(default=None, init=False, repr=False, compare=False)
    lapse: Lapse | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.patience < math.inf:
            raise ValueError(f"patience must be at least 0, got {self.patience}")
        object.__setattr__(self, "key", _deadline(self.patience or math.inf))
        if self.patience:
            object.__setattr__(self, "lapse", Lapse(_lead, _overdue(self.patience)))


@cache
def _deadline(patience: float) -> Key:
    def due(r: Any) -> Any:
        """When the next token is due, seconds. Without targets, `patience` after the arrival; never
        for best-effort requests.

        Without a TTFT, each token after the first is due one TBT after the token before. A JCT
        bounds them all.
        """
        later = r.generated > 0
        steps = where(later, r.tbt, 0.0) * np.maximum(r.generated, 1)
        token = where(later & np.isinf(r.ttft), r.last_token + r.tbt, r.arrival + r.ttft + steps)
        none = np.isinf(r.ttft) & np.isinf(r.tbt) & np.isinf(r.jct) & (r.tier == _REALTIME)
        return where(none, r.arrival + patience, np.minimum(token, r.arrival + r.jct))

    return due


def _lead(r: Any) -> Any:
    """How long before that an idle engine would have to begin with the pending tokens, seconds."""
    return r.alone * (r.prompt_len + r.generated - r.computed) / r.prompt_len


@cache  # one function per value: a compiled simulation compiles every new one
def _overdue(patience: float) -> Key:
    def due(r: Any) -> Any:
        return r.arrival + patience

    return due
