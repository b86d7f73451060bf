"""When each request's next token is due: the basis of slack.

The first token is due TTFT after the arrival. Later ones are due on the envelope arrival + TTFT + j
TBT (QoServe section 3, FairBatching section 3), so that early tokens leave time to others, or one
TBT after the token before (`Pacing`); but never later after it than the requested longest gap, or
the TBT without one (`gap_targets`). A request that has fallen behind the envelope is due one TBT
after its last token: it cannot catch up faster than that.

A request with only a JCT target, or with none, is "non-interactive": its last token is due at its
JCT or a default, and each token before that one typical step earlier than the next (the authors of
QoServe subtract a constant for each token of a guessed output; here its length is learned from
ended requests).
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.sched.policy import View
from jaxserve.sched.request import Tier

FAR = 1e12  # seconds: sorts behind all that can be in time


class Pacing(enum.Enum):
    """What a later token's deadline counts from."""

    ENVELOPE = "from the arrival: a request that is ahead may pause"
    GAP = "from the token before: no pause is longer than the TBT"


@dataclass(frozen=True)
class Deadlines:
    """Deadlines of tokens, on the clock of `RequestTable.arrival`.

    Attributes:
        pacing: What later tokens count from.
        ttlt: Seconds to the last token of requests without a TTFT and a JCT.

    Raises:
        ValueError: ttlt is not positive and finite.
    """

    pacing: Pacing
    ttlt: float

    def __post_init__(self) -> None:
        if not 0 < self.ttlt < math.inf:
            raise ValueError(f"ttlt must be more than 0, got {self.ttlt}")

    def due(self, view: View, rows: np.ndarray, clock: float, step: float) -> np.ndarray:
        """When each request's next token is due.

        Args:
            view: What the policy sees.
            rows: int64 [n].
            clock: When the planned step begins; a token in flight counts as received then.
            step: Seconds of a typical step.

        Returns:
            float64 [n].
        """
        table = view.table
        generated, arrival, ttft = (
            column[rows] for column in (table.generated, table.arrival, table.ttft)
        )
        tbt = gap_targets(view, rows)
        last = np.where(generated > table.received[rows], clock, table.last_token[rows])
        due = last + tbt
        if self.pacing is Pacing.ENVELOPE:
            timed = generated * np.where(np.isinf(tbt), 0.0, tbt)
            envelope = np.where(np.isinf(ttft), -np.inf, arrival + ttft + timed)
            due = np.minimum(np.maximum(due, envelope), last + table.max_tbt[rows])
        due = np.where(generated == 0, arrival + ttft, due)
        jobs = np.flatnonzero(self.of_job(ttft, table.jct[rows]) < np.inf)
        if len(jobs):
            mine = rows[jobs]
            end = arrival[jobs] + self.of_job(ttft[jobs], table.jct[mine])
            before = np.maximum(view.table.tokens_ahead(mine) - 1.0, 0.0) * step
            due[jobs] = np.minimum(due[jobs], end - before)
        return due

    def of_job(self, ttft: Any, jct: Any) -> Any:
        """Seconds from the arrival to the last token; inf without a deadline. Targets are numbers,
        or arrays; inf for none."""
        return np.where(np.isinf(ttft) & np.isinf(jct), self.ttlt, jct)

    def slack(
        self, view: View, rows: np.ndarray, due: np.ndarray, clock: float, step: float
    ) -> np.ndarray:
        """How long a step with these decodes may take, by each request's next token, float64 [n];
        negative for late ones. A job without a TBT asks for no less than a typical step, and an
        overdue one for nothing.

        Args:
            view: What the policy sees.
            rows: int64 [n].
            due: float64 [n], from `due`.
            clock: See `due`.
            step: See `due`.
        """
        table, slack, untimed = view.table, due - clock, np.isinf(gap_targets(view, rows))
        free = untimed & (slack >= 0)
        over = untimed & (
            table.arrival[rows] + self.of_job(table.ttft[rows], table.jct[rows]) <= clock
        )
        return np.where(over, np.inf, np.where(free, np.maximum(slack, step), slack))

    def waiting_order(self, requests: Any, now: float, price: float = 0.0) -> Any:
        """Numbers for `Policy.queue_priority`, the smallest first: when the first token is due. A
        request that cannot meet this even on an idle engine comes behind all others.

        Args:
            requests: See `Policy.queue_priority`.
            now: Seconds.
            price: Seconds that each pending token adds.
        """
        r = requests
        due = r.arrival + np.minimum(r.ttft, self.of_job(r.ttft, r.jct))
        tokens = r.prompt_len + r.generated - r.computed
        late = r.waiting & (now > due - r.alone * tokens / r.prompt_len)
        return due + price * tokens + np.where(late, FAR, 0.0)


def gap_targets(view: View, rows: np.ndarray) -> np.ndarray:
    """How long each request may wait between two tokens, seconds, float64 [n]: its TBT, or its
    longest gap if that is less or its only target; inf for neither."""
    return np.minimum(view.table.tbt[rows], view.table.max_tbt[rows])


def standing(view: View, rows: np.ndarray, clock: float) -> np.ndarray:
    """The order in which running requests keep their caches, indices [n]: by the envelope arrival +
    TTFT + j TBT, so that the request with most slack on it loses its cache first; best-effort
    requests come after the others, and requests behind the envelope last. clock: seconds."""
    table = view.table
    ttft, jct = table.ttft[rows], table.jct[rows]
    tbt = gap_targets(view, rows)
    tbt = np.where(np.isinf(tbt), 0.0, tbt)
    due = table.arrival[rows] + np.minimum(ttft, jct) + table.generated[rows] * tbt
    low = table.tier[rows] == Tier.BEST_EFFORT
    return np.lexsort((table.seq[rows], due, low, due < clock))
