"""The contract of a scheduling policy: what it sees, what it answers, what it says of itself.

The policies themselves are in `sched/policies/`, and known by name in `sched/registry.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from jaxserve.sched.blocks import BlockPool
from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.table import RequestTable

if TYPE_CHECKING:
    from jaxserve.sched.cost_model import CostModel


@dataclass(frozen=True)
class Limits:
    """Names and letters as in InferMax section 3.1. max_batch_tokens: C, tokens of one batch.
    max_prefill_tokens: P <= C; a prefill joins a batch only as far as the batch, decodes included,
    stays within it. max_rows: requests of one batch, and requests holding cache."""

    max_batch_tokens: int
    max_prefill_tokens: int
    max_rows: int

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_prefill_tokens", "max_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_prefill_tokens > self.max_batch_tokens:
            raise ValueError(
                f"max_prefill_tokens ({self.max_prefill_tokens}) must not exceed "
                f"max_batch_tokens ({self.max_batch_tokens})"
            )


@dataclass(frozen=True)
class View:
    """All that a policy sees. It changes none of it.

    cost_model: predicts the time of a batch; None where nobody has profiled the device. seed: for
    policies that draw lots. rho: seconds that a step takes longer for every token that it reads
    from a hidden cache instead of from K and V (Apt-Serve Eq. 6); negative if that is faster, None
    where hidden caches cannot be had.
    """

    table: RequestTable
    pool: BlockPool
    limits: Limits
    cost_model: CostModel | None = None
    seed: int = 0
    rho: float | None = None


class Policy(Protocol):
    """One scheduling system. It keeps no clock and touches no device. A new one is made for every
    scheduler, so it may remember things between plans."""

    @property
    def chunked(self) -> bool:
        """Whether a prompt may be computed in parts; if not, max_batch_tokens must hold a whole
        one."""
        ...

    @property
    def hypothetical(self) -> bool:
        """Whether it knows what nobody can: it reads `RequestTable.max_tokens` as the output's
        length (InferMax section 3). Simulations run it, the live server refuses it."""
        ...

    def plan(self, view: View, now: float) -> BatchPlan:
        """The next iteration. now: seconds, on the clock of `RequestTable.arrival`."""
        ...


def uses_hidden(policy: Policy) -> bool:
    """Whether the policy ever plans hidden caches, where the view offers them: its attribute
    `hybrid_cache`, false for those without. What serves the others need not be ready for them."""
    return bool(getattr(policy, "hybrid_cache", False))
