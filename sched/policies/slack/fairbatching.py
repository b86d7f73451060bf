"""FairBatching: a batch may take as long as its tokens' deadlines allow, and decodes that are ahead
of theirs give way to prompts.

Three groups, each by slack: decodes that must run now, prompts, and the other decodes.
docs/slack-policies.md says which parts are guesses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxserve.sched.cost.batch_feature_sums import prefix
from jaxserve.sched.policies.slack.slack_batch import SlackBatch
from jaxserve.sched.policies.slack.slack_policy import Outlook, SlackPolicy
from jaxserve.sched.policies.slack.token_deadlines import Pacing, gap_targets
from jaxserve.sched.registry import register
from jaxserve.sched.unified.batch_builder import PlannedWork


@register(
    "fairbatching",
    summary="urgent decodes, then prompts, then other decodes, in the time that deadlines leave",
    source="FairBatching 3, 4",
)
@dataclass(frozen=True)
class FairBatching(SlackPolicy):
    """late_last: whether prompts that cannot be in time come behind the others. For the rest, see
    `SlackPolicy`.

    Raises ValueError for a value out of range."""

    late_last: bool = True

    def fill(self, batch: SlackBatch, outlook: Outlook) -> None:
        """Adds the three groups, as far as the time of the batch allows."""
        work, rows = outlook.work, outlook.rows
        going = outlook.decodes
        going = going[np.argsort(outlook.slack[going], kind="stable")]
        slack = outlook.slack[going]
        tbt = gap_targets(batch.view, rows[going])
        budget, tpot = capacity(slack, tbt, strict=self.pacing is Pacing.GAP)
        limit = budget / self.margin
        urgent = going[: int(np.searchsorted(slack, budget + tpot, "right"))]
        if len(urgent):
            urgent = urgent[: max(prefix(batch.times(work[urgent]) <= limit), 1)]
            batch.decode(work[urgent], rows[outlook.keepers])
        prompts = batch.admissible(work[self._sorted(batch, outlook)])
        if prompts.tokens:
            time = outlook.prompt_limit(batch, budget) / self.margin
            tokens = batch.chunk(prompts, time, self.least)
            batch.compute(prompts, min(tokens, batch.longest(prompts, limit)))
        self._rest(batch, work[going[len(urgent) :]], limit)
        if not batch.tokens and prompts.tokens:
            batch.compute(prompts, 1)

    def _sorted(self, batch: SlackBatch, outlook: Outlook) -> np.ndarray:
        """Indices of the prompts by deadline."""
        which = outlook.prompts
        due, seconds = outlook.due[which], outlook.work.tokens[which] / self._times.rate(batch.view)
        late = outlook.clock + seconds > due
        return which[np.lexsort((due, late & self.late_last))]

    def _rest(self, batch: SlackBatch, work: PlannedWork, limit: float) -> None:
        """Adds decodes that could wait, by slack, as far as time and memory allow."""
        work = work[~batch.room.is_out(work.rows)]
        fits = (batch.times(work) <= limit) & (np.cumsum(work.new) <= batch.room.free)
        batch.decode(work[: prefix(fits)], work.rows[:0])


def capacity(slack: np.ndarray, tbt: np.ndarray, *, strict: bool) -> tuple[float, float]:
    """How long a batch may take, seconds, and the least target between tokens, 0 without any.

    Args:
        slack: float64 [n], slack of all decodes.
        tbt: float64 [n], their targets; inf for none.
        strict: Whether the capacity is the least slack, except that late requests ask for no more
        than their TBT; otherwise it is at least the lowest target, if there is one (FairBatching
        section 3).
    """
    least = float(tbt.min(initial=np.inf))
    tpot = least if least < np.inf else 0.0
    strictly = float(np.where(slack >= 0, slack, tbt).min(initial=np.inf))
    if strict or tpot == 0:
        return strictly, tpot
    return max(float(slack.min()), tpot), tpot
