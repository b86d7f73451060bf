"""What a second of prompts costs: the worth that it must bring if not all prompts can be in time.

In an overload that lasts, a prompt that can just be in time may keep out several that come after
it. Prompts get the share of the time that leaves enough for the decodes of their outputs. If those
of the last seconds would have needed more, only the cheapest for their worth come first that would
have fitted in: the bid price of a knapsack (Talluri and van Ryzin, "An analysis of bid-price
controls for network revenue management", 1998).
"""

from __future__ import annotations

import math

import numpy as np

from jaxserve.sched.cache.cache_kinds import KV
from jaxserve.sched.cost.cost_model import BatchFeatures
from jaxserve.sched.policy import View
from jaxserve.sched.row_columns import grow_columns
from jaxserve.sched.state.request_table import RUNNING

SECONDS = 20.0  # how long an arrival counts
LEAST, MOST = 64, 512  # arrivals that count at least, if there were so many, and at most
FEW = 16  # arrivals without which there is no price
WARM = 1.0  # seconds of arrivals before there is a price
CREDIT = 0.5  # seconds of prompts that may be saved up, or owed
PRIOR, TOKENS = 8, 256  # outputs of so many tokens that count as ended before any has


class Prices:
    """The price of prompts by recent arrivals.

    Attributes:
        most: Seconds of prompt that a request of worth 1 may cost; inf if there is time for all.
    """

    def __init__(self) -> None:
        self.most = np.inf
        self._seconds = np.zeros(0)  # by row, of its prompt
        self._last = -1  # the newest arrival that is known
        self._known = np.zeros((5, 0))  # arrival, seconds of prompt, its tokens, most output, worth
        self._share = 1.0  # of the time, for prompts
        self._credit, self._clock = 0.0, 0.0

    def read(self, view: View, waiting: np.ndarray, worth: np.ndarray, clock: float) -> None:
        """Updates the price; called once per plan.

        Args:
            view: What the policy sees.
            waiting: int64 [n], rows that hold no cache, in order of arrival.
            worth: float64 [n], of each.
            clock: When the planned step begins, seconds.
        """
        passed = max(clock - self._clock, 0.0)
        self._credit = min(self._credit + self._share * passed, CREDIT)
        self._clock = clock
        self._see(view, waiting, worth)
        self.most = np.inf
        arrival, seconds, tokens, most, values = self._known
        first = max(min(int(arrival.searchsorted(clock - SECONDS)), len(arrival) - LEAST), 0)
        if len(arrival) < FEW or clock - arrival[first] < WARM:
            return
        decodes, rows = _decode_seconds(view, float(tokens.mean()), float(most.mean()))
        cost, values, passed = seconds[first:], values[first:], clock - arrival[first]
        total = float(cost.sum())
        # While some are paused, more share the memory than fit at a time, up to all rows.
        decodes *= math.sqrt(rows / view.limits.max_rows)
        self._share = total / (total + decodes * len(cost))
        left = self._share * passed
        if total > left:
            order = np.argsort(cost / values)
            # The last sum may be rounded down to what is left.
            fits = int(np.searchsorted(cost[order].cumsum()[:-1], left))
            last = order[fits]
            self.most = float(cost[last] / values[last])

    def affordable(self, rows: np.ndarray, worth: np.ndarray) -> np.ndarray:
        """Which of these rows' prompts are worth their time, bool [n]. worth: float64 [n]."""
        if self.most == np.inf:
            return np.ones(len(rows), bool)
        return np.asarray(self._seconds[rows] <= self.most * worth)

    @property
    def overdrawn(self) -> bool:
        """Whether prompts have had more than their share of the time, and not all can be in
        time."""
        return self.most < np.inf and self._credit < 0

    def spend(self, seconds: float) -> None:
        """Notes that prompts take so many seconds of the planned step."""
        self._credit = max(self._credit - seconds, -CREDIT)

    def _see(self, view: View, waiting: np.ndarray, worth: np.ndarray) -> None:
        table = view.table
        if not len(waiting) or table.seq[waiting[-1]] <= self._last:
            return
        new = table.seq[waiting] > self._last
        rows = waiting[new]
        self._last = int(table.seq[rows].max())
        grow_columns(self, table.capacity, _seconds=0.0)
        seconds = self._seconds[rows] = prompt_seconds(view, table.pending(rows))
        sizes = table.prompt_len[rows], table.max_tokens[rows]
        found = np.array([table.arrival[rows], seconds, *sizes, worth[new]])
        self._known = np.concatenate([self._known, found], axis=1)[:, -MOST:]


def prompt_seconds(view: View, tokens: np.ndarray) -> np.ndarray:
    """Seconds that these prompts add to a step, float64 [n]. tokens: int64 [n]."""
    fixed = float(view.refill_time(np.ones(1, np.int64))[0])
    return np.maximum(view.refill_time(tokens) - fixed, 1e-9)


def _decode_seconds(view: View, prompt: float, most: float) -> tuple[float, int]:
    """Seconds that the decodes of an output take beside as many others as rows and memory hold, and
    how many these are, itself included.

    Args:
        view: What the policy sees.
        prompt: Mean tokens of a prompt.
        most: Mean of the most tokens that outputs may have.
    """
    table, ended = view.table, view.table.output_lengths.count
    before = ended * float(table.output_lengths.expected(np.zeros(1, np.int64))[0]) if ended else 0
    written = before + int(table.generated[table.in_state(RUNNING)].sum())
    output = (written + PRIOR * min(TOKENS, most)) / (ended + PRIOR)
    tokens = prompt + output / 2
    blocks = float(view.pool.blocks_for(np.array([int(tokens)]), np.array([KV]))[0])
    rows = max(int(min(view.limits.max_rows, view.pool.num_blocks / max(blocks, 1))), 1)
    batch = BatchFeatures(rows, rows, int(rows * tokens), rows, 0, 0, 0)
    return output * float(view.step_time(batch)) / rows, rows
