"""A schedule for one iteration: request -> tokens to compute now."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


def _none() -> np.ndarray:
    return np.zeros(0, np.int64)


@dataclass(frozen=True)
class BatchPlan:
    """What the next iteration computes. Arrays are int64.

    rows [n]: table rows, single-token ones first. num_tokens [n]: how many of its pending tokens
    each computes now. reserve [n]: cache tokens to have room for afterwards (at least computed +
    num_tokens; more where a policy allocates ahead, as Sarathi does for a whole prompt).
    kinds [n]: `CacheKind` of each row. preempt: rows that lose their cache and wait again; they are
    recomputed when next scheduled (InferMax section 2.2, "refill"). project: those of `rows` that
    hold hidden blocks and are planned as KV: their cached vectors become K and V in place before
    the step, with nothing recomputed.
    """

    rows: np.ndarray = field(default_factory=_none)
    num_tokens: np.ndarray = field(default_factory=_none)
    reserve: np.ndarray = field(default_factory=_none)
    kinds: np.ndarray = field(default_factory=_none)
    preempt: np.ndarray = field(default_factory=_none)
    project: np.ndarray = field(default_factory=_none)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def total_tokens(self) -> int:
        return int(self.num_tokens.sum())


class InvalidPlan(RuntimeError):
    """A policy asked for what the pool or the limits do not allow: a bug in the policy."""
