"""The arrivals of a simulation: the workload's requests, and those of a closed loop."""

from __future__ import annotations

import math

import numpy as np

from jaxserve.sched.request import SLO, Request, SamplingParams, Tier
from jaxserve.sched.slo.slo_columns import ALL_TARGETS
from jaxserve.simulator.replica.outputs import Outputs
from jaxserve.simulator.workloads.closed_loop import ClosedLoop
from jaxserve.simulator.workloads.workload import Workload


class Requests:
    """Makes the workload's requests when they arrive."""

    def __init__(self, workload: Workload) -> None:
        self.arrival = [*workload.arrival.tolist(), math.inf]
        self._prompts = workload.prompt_len.tolist()
        self._limits = workload.limit.tolist()
        self._tiers, self._greedy = workload.tier.tolist(), workload.greedy.tolist()
        self._values = workload.value.tolist()
        targets = zip(*(getattr(workload, name).tolist() for name in ALL_TARGETS), strict=True)
        self._targets = list(targets)
        self._adapters = workload.adapter.tolist()
        self._sampling: dict[tuple[int, bool], SamplingParams] = {}
        self._slo: dict[tuple[float, ...], SLO] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def make_request(self, number: int) -> Request:
        """Request `number`, from 0 in order of arrival."""
        asked = limit, greedy = self._limits[number], self._greedy[number]
        if asked not in self._sampling:
            self._sampling[asked] = SamplingParams(limit, temperature=0.0 if greedy else 1.0)
        return Request(
            str(number),
            (0,) * self._prompts[number],
            self._sampling[asked],
            self._slo_of(number),
            Tier(self._tiers[number]),
            self.arrival[number],
            value=self._values[number],
            adapter=str(adapter) if (adapter := self._adapters[number]) else "",
        )

    def _slo_of(self, number: int) -> SLO:
        targets = self._targets[number]
        if targets not in self._slo:
            named = zip(ALL_TARGETS, targets, strict=True)
            self._slo[targets] = SLO(**{name: t for name, t in named if t < math.inf})
        return self._slo[targets]


class Arrivals:
    """Numbers the requests: first the workload's in order of arrival, then the closed loop's, batch
    by batch.

    A batch follows as soon as the host has the last token of the one before it, so its time is not
    known in advance. Its lengths do not depend on the time.

    Args:
        workload: The open workload.
        loop: The closed loop, if any.
        seed: Seed of the loop's lengths.

    Attributes:
        outputs: Outputs of all requests known so far.
        num_open: Requests of the workload.
    """

    def __init__(self, workload: Workload, loop: ClosedLoop | None, seed: int) -> None:
        self.outputs = Outputs()
        self.outputs.add(workload.output_len)
        self._loop, self._seed = loop, seed
        self._open, self._next = Requests(workload), 0
        self._workload, self._batches = workload, list[Workload]()
        self._batch: Requests | None = None  # the loop's last batch
        self.num_open = len(workload)
        self._first = self._coming = self.num_open  # its first number, and that of the next arrival
        if loop is not None:
            self._submit(0.0)

    @property
    def next_time(self) -> float:
        """When the next known request arrives; inf if there is none."""
        return min(self._open.arrival[self._next], self._batch_time)

    @property
    def horizon(self) -> float:
        """No request arrives before this time; 0 while a batch may follow at any time."""
        return self.next_time if self._loop is None else 0.0

    def take_first(self) -> tuple[int, Request]:
        """The next request to arrive, with its number."""
        if self._open.arrival[self._next] <= self._batch_time:
            self._next += 1
            return self._next - 1, self._open.make_request(self._next - 1)
        assert self._batch is not None
        self._coming += 1
        return self._coming - 1, self._batch.make_request(self._coming - 1 - self._first)

    def follow(self) -> None:
        """Submits the loop's next batch if all requests of the last one have ended."""
        if self._batch is None:
            return
        mine = np.arange(self._first, self._first + len(self._batch))
        if self.outputs.over[mine].all():
            self._submit(float(self.outputs.last_times(mine).max()))

    def came(self) -> tuple[Workload, np.ndarray]:
        """All requests that have arrived, in order, and their numbers, int64 [n]."""
        batches = self._batches if self._coming > self._first else self._batches[:-1]
        looped = sum(map(len, batches))
        numbers = np.r_[: self._next, self.num_open : self.num_open + looped]
        merged, order = Workload.merged([self._workload.select(np.arange(self._next)), *batches])
        return merged, numbers[order]

    @property
    def _batch_time(self) -> float:
        """The arrival time of the loop's next request."""
        if self._batch is None:
            return math.inf
        return self._batch.arrival[self._coming - self._first]

    def _submit(self, time: float) -> None:
        assert self._loop is not None
        batch = self._loop.requests(len(self._batches), time, self._seed)
        self._first = self._coming = len(self.outputs.lengths)
        self.outputs.add(batch.output_len)
        self._batch = Requests(batch)
        self._batches.append(batch)
