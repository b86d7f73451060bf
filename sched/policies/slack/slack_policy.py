"""Common parts of the policies that spend slack: deadlines, memory of past steps, and a batch."""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxserve.sched.cost.batch_feature_sums import prefix
from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.policies.slack.slack_batch import SlackBatch, pending
from jaxserve.sched.policies.slack.step_times import StepTimes
from jaxserve.sched.policies.slack.token_deadlines import Deadlines, Pacing, standing
from jaxserve.sched.policy import Policy, View
from jaxserve.sched.state.request_table import RUNNING, WAITING
from jaxserve.sched.unified.batch_builder import PlannedWork


@dataclass(frozen=True)
class Outlook:
    """All requests when a step is planned: arrays [n].

    Attributes:
        clock: When the step begins, seconds.
        rows: Table rows.
        work: All pending tokens of each.
        due: When each request's next token is due, on the same clock.
        slack: Seconds that the step may take for each decode, by `Deadlines.slack`; inf for
        prompts.
        keepers: Indices of the requests that hold a cache; the last lose it first.
        most: Seconds that the step may take for the sake of future requests.
    """

    clock: float
    rows: np.ndarray
    work: PlannedWork
    due: np.ndarray
    slack: np.ndarray
    keepers: np.ndarray
    most: float

    def prompt_limit(self, batch: SlackBatch, limit: float) -> float:
        """How long the batch may take with prompts, seconds: `limit`, and no longer than `most`
        unless its decodes alone do. batch: has the decodes."""
        return min(limit, self.most) if batch.seconds < self.most else limit

    def without(self, rows: np.ndarray) -> Outlook:
        """The outlook without these rows."""
        if not len(rows):
            return self
        left = ~np.isin(self.rows, rows)
        index = left.cumsum() - 1
        return replace(
            self,
            rows=self.rows[left],
            work=self.work[left],
            due=self.due[left],
            slack=self.slack[left],
            keepers=index[self.keepers[left[self.keepers]]],
        )

    @property
    def decodes(self) -> np.ndarray:
        """Indices of the decodes, in the order of `keepers`."""
        return self.keepers[self.work.decodes[self.keepers]]

    @property
    def prompts(self) -> np.ndarray:
        """Indices of all others."""
        return np.flatnonzero(self.work.starts | ~self.work.decodes)


@dataclass(frozen=True)
class SlackPolicy(Policy):
    """Plans decodes and prompts by the slack of token deadlines.

    margin: factor of the predicted time of a step before it is compared with slack. share: of the
    median TTFT, that a step with prompts may take, since the next arrival waits for up to two steps
    before its own; 0 for no limit. least: tokens of a batch with prompts for which there is always
    time, by FairBatching within its capacity. pacing: what token deadlines count from. ttlt:
    seconds to the last token of requests with neither a TTFT nor a JCT. watermark: share of the
    pool that starts leave free while others run. makes_way: whether best-effort requests without
    targets, until they are due, lose their caches to prompts that can be in time.

    Raises ValueError for a value out of range.
    """

    margin: float = 1.05
    share: float = 0.33
    least: int = 128
    pacing: Pacing = Pacing.GAP
    ttlt: float = 600.0
    watermark: float = 0.01
    makes_way: bool = True
    _deadlines: Deadlines = field(init=False, repr=False, compare=False)
    _times: StepTimes = field(init=False, repr=False, compare=False)
    counts_blocks = True
    full_prefill = True

    def __post_init__(self) -> None:
        if not 0 < self.margin < math.inf:
            raise ValueError(f"margin must be more than 0, got {self.margin}")
        if not 0 <= self.share <= 1:
            raise ValueError(f"share must be from 0 to 1, got {self.share}")
        if not 0 <= self.least < math.inf:
            raise ValueError(f"least must be at least 0, got {self.least}")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark must be at least 0 and below 1, got {self.watermark}")
        object.__setattr__(self, "_deadlines", Deadlines(self.pacing, self.ttlt))
        object.__setattr__(self, "_times", StepTimes())

    def plan(self, view: View, now: float) -> BatchPlan:
        """One batch, filled by `fill`."""
        batch = SlackBatch(view, self.watermark)
        outlook = self._outlook(view, view.step_end(now))
        if self.makes_way:
            outlook = outlook.without(self._way_for_prompts(batch, outlook))
        self.fill(batch, outlook)
        self._times.note(batch.work(), batch.seconds)
        return batch.plan()

    @abc.abstractmethod
    def fill(self, batch: SlackBatch, outlook: Outlook) -> None:
        """Fills the batch, empty at first, with the next step's work: at least one token."""

    def queue_priority(self, requests: Any, now: float) -> Any:
        """By the first token's deadline; requests that can no longer meet it come last."""
        return self._deadlines.waiting_order(requests, now)

    def makes_room(self, running: Any, request: Any, now: float) -> Any:
        """Best-effort requests without targets that are not due yet, for all others."""
        early = np.greater(running.arrival + self.ttlt, now)
        return running.bare & early & ~request.bare & self.makes_way

    def _way_for_prompts(self, batch: SlackBatch, outlook: Outlook) -> np.ndarray:
        """Preempts best-effort requests without targets for waiting requests that can be in time,
        as many as the batch has tokens for. Returns the rows that the step leaves out: the
        preempted ones, and waiting ones of their kind, which would take the room and lose it in the
        next step."""
        view, rows, work = batch.view, outlook.rows, outlook.work
        table = view.table
        gives = table.bare(rows) & (table.arrival[rows] + self.ttlt > outlook.clock)
        giving = rows[outlook.keepers[gives[outlook.keepers]]]
        if not len(giving):
            return giving
        late = outlook.clock + work.tokens / self._times.rate(view) > outlook.due
        asks = np.flatnonzero(work.starts & ~late & ~table.bare(rows))
        asks = asks[np.argsort(outlook.due[asks], kind="stable")]
        asks = asks[: max(prefix(work.tokens[asks].cumsum() <= view.limits.max_batch_tokens), 1)]
        grow = int(work.new[outlook.decodes].sum())
        gone = batch.make_way(giving[::-1], work[asks], grow)
        return np.concatenate([gone, rows[gives & work.starts]]) if len(gone) else gone

    def _outlook(self, view: View, clock: float) -> Outlook:
        table, step = view.table, self._times.step
        rows = np.concatenate([table.in_state(RUNNING), table.in_state(WAITING)])
        work = pending(view, rows)
        due = self._deadlines.due(view, rows, clock, step)
        slack = self._deadlines.slack(view, rows, due, clock, step)
        slack = np.where(work.decodes, slack, np.inf)
        runs = np.flatnonzero(~work.starts)
        keepers = runs[standing(view, rows[runs], clock)]
        most, ttft = np.inf, table.ttft[rows]
        if self.share and np.isfinite(ttft).any():
            most = self.share * float(np.median(ttft[np.isfinite(ttft)]))
        return Outlook(clock, rows, work, due, slack, keepers, most)
