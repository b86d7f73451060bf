"""The chunks of this step and the next, chosen together (SlidingServe's SlidingChunker).

The largest chunk that this step has time for need not be the first of the two that compute most
together: on padded batches it may end in the middle of a bucket, and a prompt that it completes
needs a token from the next step, which may leave that one little time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxserve.sched.policies.slack.slack_batch import Prompts, SlackBatch
from jaxserve.sched.unified.batch_builder import seconds_of

LOOK = 12  # sizes of the first chunk that are tried, and prompts that it may complete
ALIKE = 9  # decimals of seconds that are compared


@dataclass(frozen=True)
class Window:
    """Two steps with the same decodes.

    Attributes:
        batch: The first step, with its decodes and no prompts yet.
        prompts: What both may compute.
        later: float64 [n], how long both steps together may take, by each decode.
        tbt: float64 [n], how long the second may take in any case, by each decode.
        joining: float64 [prompts], the same by each prompt that the first step completes.
    """

    batch: SlackBatch
    prompts: Prompts
    later: np.ndarray
    tbt: np.ndarray
    joining: np.ndarray

    def first(self, least: int, most: int) -> int:
        """The chunk of the first step with which both compute the most tokens, including those of
        completed prompts; of equal ones the fastest, then the larger one.

        Args:
            least: Fewest tokens that it may have.
            most: Most tokens that the first step's limit allows.
        """
        if least >= most:
            return most
        ones = self._sizes(least, most)
        took = self.batch.seconds_with(self.prompts, ones)
        twos, seconds = self._second(ones, took)
        total = ones + twos + self.prompts.whole(ones)
        time = np.round(took + seconds, ALIKE)
        return int(ones[np.lexsort((ones, -time, total))[-1]])

    def _sizes(self, least: int, most: int) -> np.ndarray:
        """Evenly spread sizes, full buckets, and sizes at or just before a prompt's end."""
        padding, decodes = self.batch.view.padding, self.batch.tokens
        full = np.array(padding.tokens if padding is not None else [], np.int64) - decodes
        ends = self.prompts.ends[1 : LOOK + 1]
        found = np.concatenate([np.linspace(least, most, LOOK).astype(int), full, ends, ends - 1])
        return np.unique(found[(found >= least) & (found <= most)])

    def _second(self, ones: np.ndarray, took: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The largest second chunk after each first one, int64 [m], and the time of that step.
        Prompts that the first step completes decode in it."""
        batch, prompts = self.batch, self.prompts
        whole, decodes = prompts.whole(ones), batch.work()
        joining = np.minimum.accumulate(np.append(np.inf, self.joining))[whole]
        own = np.maximum(self.later[:, None] - took, self.tbt[:, None]).min(axis=0, initial=np.inf)
        limit = np.minimum(own, joining)
        before = -prompts.columns(ones)
        known = np.append(0, np.cumsum(prompts.work.start + prompts.work.tokens))[whole]
        before[0] += len(decodes) + whole
        before[1] += int((decodes.start + 2).sum()) + known + whole
        before[2] += len(decodes) + whole
        part = ones - prompts.ends[whole]  # of the prompt that both steps share
        more = np.zeros_like(before)
        more[4] = part > 0
        more[5] = (part > 0) * (np.append(prompts.work.start, 0)[whole] + part)
        good, most = ones, np.minimum(ones + batch.tokens_left, prompts.tokens)
        while (good < most).any():  # bisection: seconds do not fall with tokens
            middle = (good + most + 1) // 2
            ok = seconds_of(batch.view, before + more + prompts.columns(middle)) <= limit
            good, most = np.where(ok, middle, good), np.where(ok, most, middle - 1)
        sums = before + more * (good > ones) + prompts.columns(good)
        return good - ones, seconds_of(batch.view, sums)
