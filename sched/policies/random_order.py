"""A random order: the baseline for any ordering."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxserve.sched.registry import register
from jaxserve.sched.unified.unified_policy import Group, Phase, UnifiedPolicy


@register(
    "random",
    summary="one random order for all phases, drawn as requests arrive",
    source="baseline",
)
def random_order() -> UnifiedPolicy:
    """The random numbers are the same in every step, and in every run with the view's seed."""
    groups = (Group(Phase.ANY, preempts=True),)
    return UnifiedPolicy(groups, mixed_batches=True, chunked=True, key=_lot)


def _lot(r: Any) -> Any:
    """A number that depends only on the seed and the request (the finaliser of SplitMix64)."""
    x = np.uint64(r.seq) + np.uint64(((r.seed + 1) & 0xFFFFFFFF) << 32)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))
