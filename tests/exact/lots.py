"""Whatever may become of a request: it waits, its prompt comes in pieces of any size, its cache is
lost in part, copied, sent to the host and brought back."""

from __future__ import annotations

import dataclasses

from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.policy import View
from tests.moving_caches import MovingCaches


class Lots(MovingCaches):
    """`MovingCaches` of K and V alone, with batches of as many tokens as a lot says. quiet: first
    come, first served, and nothing else."""

    hybrid_cache = False

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.quiet = True

    def plan(self, view: View, now: float) -> BatchPlan:
        if not self.quiet:
            most = int(self._rng.integers(1, view.limits.max_batch_tokens + 1))
            limits = dataclasses.replace(
                view.limits, max_batch_tokens=most, max_prefill_tokens=most
            )
            view = dataclasses.replace(view, limits=limits)
        return super().plan(view, now)

    def _disturb(self, *given: object) -> None:  # type: ignore[override]
        if not self.quiet:
            super()._disturb(*given)  # type: ignore[arg-type]
