"""Times steps of given shapes on an executor that serves nobody."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxserve.sched.cost_model import BatchFeatures, Padding
from jaxserve.sched.kinds import CacheKind

if TYPE_CHECKING:  # jax takes seconds to import; shapes alone do without
    from jaxserve.engine.executor import Executor
    from jaxserve.engine.layout import Layout

CHAIN = 4  # steps launched one after the other before anything waits


@dataclass(frozen=True)
class Shape:
    """A batch to measure. decodes: cached tokens of each row that decodes, the one being fed not
    counted; chunks: (tokens, cached tokens before) of each prefill; hidden: whether all rows have
    hidden caches, or all KV."""

    decodes: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    hidden: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of all rows in the step, without padding."""
        return len(self.decodes) + sum(count for count, _ in self.chunks)

    @property
    def counts(self) -> np.ndarray:
        """Tokens of each row in the step."""
        return np.array([1] * len(self.decodes) + [count for count, _ in self.chunks])

    @property
    def contexts(self) -> np.ndarray:
        """Tokens of each row in the cache before it."""
        return np.array([*self.decodes, *(before for _, before in self.chunks)])

    def features(self, padding: Padding) -> BatchFeatures:
        """What a cost model knows of the step. padding: the buckets that it is rounded up to."""
        rows = np.arange(len(self.counts))
        return BatchFeatures.of(
            self.counts,
            self.contexts,
            rows < len(self.decodes),
            padding=padding,
            hidden=np.full(len(rows), self.hidden),
        )


class StepTimer:
    """Runs steps on an executor and times them. What is in the cache meanwhile is noise, so nothing
    may be running."""

    def __init__(self, executor: Executor, num_blocks: int) -> None:
        self._executor = executor
        self._num_blocks = num_blocks
        self.padding = executor.buckets.padding

    def seconds(self, shape: Shape, chain: int = CHAIN) -> float:
        """Seconds of one step among `chain` in a row, so that the host's part is hidden as far as
        the device hides it."""
        layout, packed = self._pack(shape)
        submit = self._executor.submit
        begin = time.perf_counter()
        for _ in range(chain):
            last = submit(layout, packed, full=False)
        last.result()
        return (time.perf_counter() - begin) / chain

    def _pack(self, shape: Shape) -> tuple[Layout, np.ndarray]:
        from jaxserve.engine.layout import Rows

        buckets, counts = self._executor.buckets, shape.counts
        layout, n = buckets.fitting(counts, hidden=shape.hidden), len(counts)
        size = (n, 2, buckets.width)  # of block tables
        blocks = np.arange(math.prod(size), dtype=np.int32) % self._num_blocks
        rows = Rows(
            counts=counts,
            contexts=shape.contexts,
            tables=blocks.reshape(size),
            kind=int(CacheKind.HIDDEN if shape.hidden else CacheKind.KV),
            slots=np.arange(n),
            emits=1,
        )
        return layout, layout.pack(rows).buffer
