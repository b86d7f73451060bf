"""QoServe (first called Niyama): chunks as large as the decodes' slack allows, an order between
earliest deadline and shortest remaining prompt, and requests that cannot be saved are set aside.

Three queues: all decodes are in every batch, prompts share the time that they leave, and relegated
prompts get what the others leave. docs/slack-policies.md says which parts are guesses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxserve.sched.policies.slack.slack_batch import SlackBatch, least_slack
from jaxserve.sched.policies.slack.slack_policy import Outlook, SlackPolicy
from jaxserve.sched.policies.slack.token_deadlines import gap_targets
from jaxserve.sched.registry import register
from jaxserve.sched.request import Tier


@register(
    "qoserve",
    summary="chunks as large as the decodes' slack allows; deadline plus a price for each token",
    source="QoServe (Niyama) 3",
)
@dataclass(frozen=True)
class QoServe(SlackPolicy):
    """alpha: seconds by which each pending token moves a request back in the order, in an overload;
    it grows to this with the share that would be late by earliest deadline. relegates: whether
    prompts that cannot be in time come last, and best-effort ones if they would make others late.
    For the rest, see `SlackPolicy`.

    Raises ValueError for a value out of range."""

    alpha: float = 0.05
    relegates: bool = True
    _price: list[float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha < math.inf:
            raise ValueError(f"alpha must be at least 0, got {self.alpha}")
        object.__setattr__(self, "_price", [0.0])

    def fill(self, batch: SlackBatch, outlook: Outlook) -> None:
        """Adds all decodes, and the largest chunk that fits beside them into the least slack."""
        work, going = outlook.work, outlook.decodes
        going = going[batch.decode(work[going], outlook.rows[outlook.keepers])]
        tbt = gap_targets(batch.view, outlook.rows[going])
        limit = least_slack(batch, outlook.slack[going], tbt)
        limit = outlook.prompt_limit(batch, limit) / self.margin
        prompts = batch.admissible(work[self._sorted(batch, outlook)])
        if prompts.tokens:
            batch.compute(prompts, batch.chunk(prompts, limit, self.least))

    def queue_priority(self, requests: Any, now: float) -> Any:
        """By deadline and pending tokens, as priced by the last plan; requests that can no longer
        be in time come last."""
        return self._deadlines.waiting_order(requests, now, self._price[0])

    def _sorted(self, batch: SlackBatch, outlook: Outlook) -> np.ndarray:
        """Indices of the prompts in order; the relegated are last."""
        which, clock = outlook.prompts, outlook.clock
        if not len(which):
            self._price[0] = 0.0
            return which
        tokens, due = outlook.work.tokens[which], outlook.due[which]
        seconds = tokens / self._times.rate(batch.view)
        late = clock + seconds > due
        self._price[0] = self.alpha * float(_overdue(clock, due, seconds, due, ~late).mean())
        key = due + self._price[0] * tokens
        if not self.relegates:
            return which[np.argsort(key, kind="stable")]
        batch.relegated = outlook.rows[which[late]]
        low = batch.view.table.tier[outlook.rows[which]] == Tier.BEST_EFFORT
        if (_overdue(clock, due, seconds, key, ~late) & ~low).any():
            late |= low
        return which[np.lexsort((key, low & late, late))]


def _overdue(
    clock: float, due: np.ndarray, seconds: np.ndarray, key: np.ndarray, counts: np.ndarray
) -> np.ndarray:
    """Which prompts would be late if they were computed one after the other by their keys; only
    those in `counts` are computed."""
    found = np.zeros(len(due), bool)
    order = np.flatnonzero(counts)
    order = order[np.argsort(key[order], kind="stable")]
    found[order] = clock + np.cumsum(seconds[order]) > due[order]
    return found
