"""Times steps of given shapes on an executor that is not serving."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxserve.sched.cache.cache_kinds import CacheKind
from jaxserve.sched.cost.cost_model import BatchFeatures
from jaxserve.sched.cost.padding import Padding
from jaxserve.sched.request import Request, SamplingParams
from jaxserve.sched.step import ProjectSlots

if TYPE_CHECKING:  # jax takes seconds to import; shapes alone do without
    from jaxserve.engine.device.batch_layout import Layout
    from jaxserve.engine.device.executor import Executor

CHAIN = 4  # steps launched one after the other before anything waits
SAMPLING = SamplingParams(temperature=1.0, top_p=0.95)
"""How the rows of a step sample that does not sample greedily."""

_KEYS = itertools.count(-1, -1)  # of what goes to the host; those of served caches count up
_VOCABULARY = 2**31 - 1  # more than any, so that it stands for no token


@dataclass(frozen=True)
class Shape:
    """A batch to measure.

    Attributes:
        decodes: cached tokens of each row that decodes, without the one being fed.
        chunks: (tokens, cached tokens before) of each prefill.
        hidden: whether all rows have hidden caches; else all have KV.
        sampling: whether all rows sample as `SAMPLING` says; else greedily.
        projected: tokens of one request's hidden cache that become KV before it.
        swapped: slots that go to the host and come back before it.
    """

    decodes: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    hidden: bool = False
    sampling: bool = False
    projected: int = 0
    swapped: int = 0

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
        return BatchFeatures.from_rows(
            self.counts,
            self.contexts,
            rows < len(self.decodes),
            padding=padding,
            hidden=np.full(len(rows), self.hidden),
            projected_tokens=self.projected,
            saved_slots=self.swapped,
            loaded_slots=self.swapped,
            sampling=self.sampling,
        )


class StepTimer:
    """Runs steps on an executor and times them. It writes over the cache and the slots' sampling
    state, so nothing else may be running.

    Args:
        executor: runs them.
        num_blocks: of its pool.
        vocab_size: of the model. Tokens are drawn, since alike ones would go to the same experts.
    """

    def __init__(self, executor: Executor, num_blocks: int, vocab_size: int) -> None:
        self._executor = executor
        self._num_blocks = num_blocks
        self._vocab_size = vocab_size
        self.padding = executor.buckets.padding

    def seconds(self, shape: Shape, chain: int = CHAIN) -> float:
        """Seconds of one step among `chain` in a row. A chain hides the host's part as far as the
        device does."""
        layout, packed, whole = self._pack(shape)
        projection_batches = self._projection_batches(shape.projected)
        slots = self._swapped(shape.swapped)
        if shape.sampling:
            self._admit(len(shape.counts))
        submit = self._executor.submit
        if whole is not packed:
            submit(layout, whole, full=shape.sampling).result()
        begin = time.perf_counter()
        for _ in range(chain):
            for projected in projection_batches:
                self._executor.project_to_kv(*projected)
            if len(slots):
                self._swap(slots)
            last = submit(layout, packed, full=shape.sampling)
        last.result()
        return (time.perf_counter() - begin) / chain

    def _pack(self, shape: Shape) -> tuple[Layout, np.ndarray, np.ndarray]:
        """The step as it is sent where its tables are on the device but for what is new, and as it
        is sent whole."""
        from jaxserve.engine.device.batch_layout import Rows

        buckets, counts = self._executor.buckets, shape.counts
        n = len(counts)
        kind = np.full(n, CacheKind.HIDDEN if shape.hidden else CacheKind.KV)
        layout = buckets.fitting(counts, kind)
        rows = Rows(
            counts=counts,
            contexts=shape.contexts,
            tables=self._tables(n),
            kind=kind,
            tokens=self._tokens(counts),
            slots=np.arange(n),
            emits=1,
        )
        whole = layout.pack(rows).buffer
        if not layout.mirrors:
            return layout, whole, whole
        there = shape.contexts // layout.block_size
        return layout, layout.pack(dataclasses.replace(rows, mirrored=there)).buffer, whole

    def _tokens(self, counts: np.ndarray) -> list[list[int]]:
        """Of each row, the same ones each time."""
        drawn = np.random.default_rng(0).integers(0, self._vocab_size, int(counts.sum()))
        return [row.tolist() for row in np.split(drawn, np.cumsum(counts)[:-1])]

    def _tables(self, rows: int) -> np.ndarray:
        size = (rows, self._executor.buckets.planes, self._executor.buckets.width)
        blocks = np.arange(math.prod(size), dtype=np.int32) % self._num_blocks
        return blocks.reshape(size)

    def _projection_batches(self, tokens: int) -> list[tuple[Layout, np.ndarray]]:
        """The arguments of `Executor.project_to_kv` for so many hidden vectors of one request."""
        from jaxserve.engine.device.batching import projection_batches

        if not tokens:
            return []
        one = np.zeros(1, np.int64)
        move = ProjectSlots(one, one + tokens, self._tables(1), one.astype(np.int8))
        return list(projection_batches(self._executor.buckets, move))

    def _swapped(self, count: int) -> np.ndarray:
        """So many slots, int32 [count, 2], all of them different where the pool is large enough."""
        block = np.arange(count, dtype=np.int32) % self._num_blocks
        return np.stack([block, np.zeros_like(block)], axis=1)

    def _swap(self, slots: np.ndarray) -> None:
        key = next(_KEYS)
        self._executor.save((key,), (len(slots),), slots)
        self._executor.load((key,), (len(slots),), slots)
        self._executor.discard((key,))

    def _admit(self, slots: int) -> None:
        from jaxserve.engine.device.sampling_state import RequestRow

        row = RequestRow(Request("timed", (0,), SAMPLING), _VOCABULARY, ())
        for slot in range(slots):
            self._executor.admit(slot, row.slot_params(0, ()))
