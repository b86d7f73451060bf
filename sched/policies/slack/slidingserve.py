"""SlidingServe: the chunk of a step is chosen together with that of the next one, and if prompts
would miss their targets, a knapsack chooses which of them are saved.

docs/slack-policies.md says which parts are guesses: only the paper's abstract and a review were
known.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxserve.sched.policies.slack.knapsack import most_valuable
from jaxserve.sched.policies.slack.slack_batch import Prompts, SlackBatch, least_slack
from jaxserve.sched.policies.slack.slack_policy import Outlook, SlackPolicy
from jaxserve.sched.policies.slack.token_deadlines import FAR, Pacing, gap_targets
from jaxserve.sched.policies.slack.window import Window
from jaxserve.sched.registry import register
from jaxserve.sched.request import Tier

_ITEMS = 64  # most items of a knapsack: those with the fewest tokens
_WORTH = 2.0  # worth of a real-time request; a best-effort one has 1


@register(
    "slidingserve",
    summary="chunks of two steps chosen together; a knapsack of prompts where some would be late",
    source="SlidingServe",
)
@dataclass(frozen=True)
class SlidingServe(SlackPolicy):
    """window: whether the next step's chunk counts; otherwise, each chunk is as large as the least
    slack allows. saves: whether a knapsack chooses among the prompts that would be late if they
    waited; otherwise, they come in order. For the rest, see `SlackPolicy`.

    Raises ValueError for a value out of range."""

    window: bool = True
    saves: bool = True

    def fill(self, batch: SlackBatch, outlook: Outlook) -> None:
        """Adds all decodes, and the first of the two chunks that are best together."""
        work, going = outlook.work, outlook.decodes
        going = going[batch.decode(work[going], outlook.rows[outlook.keepers])]
        slack, tbt = outlook.slack[going], gap_targets(batch.view, outlook.rows[going])
        limit = outlook.prompt_limit(batch, least_slack(batch, slack, tbt)) / self.margin
        order, must = self._sorted(batch, outlook, limit)
        prompts = batch.admissible(work[order])
        if not prompts.tokens:
            return
        tokens = batch.chunk(prompts, limit, self.least)
        if self.window and limit < np.inf and tokens < prompts.tokens:
            tokens = self._two(batch, prompts, slack, tbt).first(min(must, tokens), tokens)
        batch.compute(prompts, max(tokens, 0 if batch.tokens else 1))

    def _sorted(self, batch: SlackBatch, outlook: Outlook, limit: float) -> tuple[np.ndarray, int]:
        """Indices of the prompts, most urgent first, and how many of their tokens cannot wait.

        First the chosen ones among those that would be late if they waited for another step; then
        by the number of steps they could wait, in levels of doubling width, and in a level those
        with the fewest tokens first; last those that are late already, or not chosen.
        """
        which, view = outlook.prompts, batch.view
        tokens, rate = outlook.work.tokens[which], self._times.rate(view)
        spare = outlook.due[which] - outlook.clock - tokens / rate
        room = max(batch.tokens_left, 1)
        one = min(limit, room / rate)  # seconds of the step
        room = max(min(int(one * rate), room), 1)
        late, risk = spare < 0, np.flatnonzero((spare >= 0) & (spare < one))
        chosen = np.zeros(len(which), bool)
        if self.saves and int(tokens[risk].sum()) > room:
            items = risk[np.argsort(tokens[risk], kind="stable")][:_ITEMS]
            low = view.table.tier[outlook.rows[which[items]]] == Tier.BEST_EFFORT
            worth = np.where(low, 1.0, _WORTH)
            chosen[items[most_valuable(np.minimum(tokens[items], room), worth, room)]] = True
            late[risk] = ~chosen[risk]
        else:
            chosen[risk] = True
        steps = np.minimum(np.maximum(spare, 0.0) / max(one, 1e-6), FAR)
        order = np.lexsort((tokens, np.floor(np.log2(1.0 + steps)), ~chosen, late))
        return which[order], int(tokens[chosen].sum())

    def _two(
        self, batch: SlackBatch, prompts: Prompts, slack: np.ndarray, tbt: np.ndarray
    ) -> Window:
        """Plans for both steps. A decode's token after next is due one TBT after the next one is
        due, or after it came."""
        after = np.where(np.isinf(tbt), slack, tbt)
        ahead = np.full(len(slack), -np.inf)
        if self.pacing is Pacing.ENVELOPE:
            ahead = slack + tbt
        joining = gap_targets(batch.view, prompts.work.rows)
        return Window(
            batch, prompts, ahead / self.margin, after / self.margin, joining / self.margin
        )
