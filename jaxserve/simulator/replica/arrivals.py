"""The arrivals of a simulation: the workload's requests, some of which wait for others, and those
of a closed loop."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np

from jaxserve.sched.request import SLO, Request, SamplingParams, Tier
from jaxserve.sched.slo.slo_columns import ALL_TARGETS
from jaxserve.simulator.replica.outputs import Outputs
from jaxserve.simulator.workloads.closed_loop import ClosedLoop
from jaxserve.simulator.workloads.releases import Releases
from jaxserve.simulator.workloads.workload import Workload


class Requests:
    """Makes the workload's requests when they arrive."""

    def __init__(self, workload: Workload) -> None:
        self._prompts = workload.prompt_len.tolist()
        self._programs = workload.programs
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

    def make_request(self, number: int, arrival: float, left: int = 0) -> Request:
        """Request `number` of the workload, which arrives at this time. left: calls of its program
        that are still to come."""
        asked = limit, greedy = self._limits[number], self._greedy[number]
        if asked not in self._sampling:
            self._sampling[asked] = SamplingParams(limit, temperature=0.0 if greedy else 1.0)
        return Request(
            str(number),
            (0,) * self._prompts[number],
            self._sampling[asked],
            self._slo_of(number),
            Tier(self._tiers[number]),
            arrival,
            value=self._values[number],
            adapter=str(adapter) if (adapter := self._adapters[number]) else "",
            program=self._programs.said(number, left),
        )

    def _slo_of(self, number: int) -> SLO:
        targets = self._targets[number]
        if targets not in self._slo:
            named = zip(ALL_TARGETS, targets, strict=True)
            self._slo[targets] = SLO(**{name: t for name, t in named if t < math.inf})
        return self._slo[targets]


class Arrivals:
    """Numbers the requests: first the workload's in its order, then the closed loop's, batch by
    batch.

    A batch follows as soon as the host has the last token of the one before it, and a call of a
    program after those that it waits for, so their times are not known in advance. Lengths do not
    depend on the time.

    Args:
        workload: The workload.
        loop: The closed loop, if any.
        seed: Seed of the loop's lengths.

    Attributes:
        outputs: Outputs of all requests known so far.
        releases: When the workload's requests come.
        num_open: Requests of the workload.
        brought: Tokens of each of these whose cached blocks come along.
    """

    def __init__(self, workload: Workload, loop: ClosedLoop | None, seed: int) -> None:
        self.outputs = Outputs()
        self.outputs.add(workload.output_len)
        self._loop, self._seed = loop, seed
        self._open, self.releases = Requests(workload), Releases(workload)
        self._workload, self._batches = workload, list[Workload]()
        self._batch: Requests | None = None  # the loop's last batch
        self.num_open, self.brought = len(workload), workload.brought.tolist()
        self._first = self._coming = self.num_open  # its first number, and that of the next arrival
        if loop is not None:
            self._submit(0.0)

    @property
    def next_time(self) -> float:
        """When the next known request arrives; inf if there is none."""
        return min(self.releases.next_time, self._batch_time)

    def horizon(self, now: float) -> float:
        """No request arrives before this time if nothing ends before `now`; 0 while a batch may
        follow at any time."""
        if self._loop is not None:
            return 0.0
        return min(self.next_time, now + self.releases.unknown_after)

    @property
    def more(self) -> bool:
        """Whether any request may still arrive."""
        return self._loop is not None or self.releases.more

    def take_first(self) -> tuple[int, Request]:
        """The next request to arrive, with its number."""
        if self.releases.next_time <= self._batch_time:
            number = self.releases.take_first()
            at, left = self.releases.arrival[number], self.releases.left(number)
            return number, self._open.make_request(number, at, left)
        assert self._batch is not None
        self._coming += 1
        place = self._coming - 1 - self._first
        return self._coming - 1, self._batch.make_request(place, self._submitted)

    def follow(self) -> None:
        """Submits the loop's next batch if all requests of the last one have ended."""
        if self._batch is None:
            return
        mine = np.arange(self._first, self._first + len(self._batch))
        if self.outputs.over[mine].all():
            self._submit(float(self.outputs.last_times(mine).max()))

    def release(self, failed: Collection[int], now: float) -> dict[str, dict[str, str]]:
        """Lets calls follow those that have ended.

        Args:
            failed: Numbers of those that failed, at `now` if they have just ended.
            now: Seconds.

        Returns:
            By the id of each that has just ended and asks for tools: their names, by the ids of the
            calls of the tools.
        """
        ended, tools = self.outputs.ended, self._workload.programs.tools_after
        asked = {str(one): tools[one] for one in ended if one in tools and one not in failed}
        for number in ended if self._workload.programs.closed else ():
            if number in failed:
                self.refused(number, now)
            elif number < self.num_open:
                self.releases.ended(number, float(self.outputs.last_times(np.array([number]))[0]))
        ended.clear()
        return asked

    def refused(self, number: int, now: float) -> None:
        """A request that has arrived was not taken at `now`."""
        if number < self.num_open:
            self.releases.gave_up(number, now)

    def came(self) -> tuple[Workload, np.ndarray]:
        """All requests that have arrived, in order, and their numbers, int64 [n]."""
        batches = self._batches if self._coming > self._first else self._batches[:-1]
        own = np.array(self.releases.came, np.int64)
        arrived = self._workload.arrived(own, np.array(self.releases.arrival)[own])
        looped = sum(map(len, batches))
        numbers = np.r_[own, self.num_open : self.num_open + looped]
        merged, order = Workload.merged([arrived, *batches])
        return merged, numbers[order]

    @property
    def _batch_time(self) -> float:
        """The arrival time of the loop's next request."""
        if self._batch is None or self._coming - self._first == len(self._batch):
            return math.inf
        return self._submitted

    def _submit(self, time: float) -> None:
        assert self._loop is not None
        batch = self._loop.requests(len(self._batches), time, self._seed)
        self._submitted = time
        self._first = self._coming = len(self.outputs.lengths)
        self.outputs.add(batch.output_len)
        self._batch = Requests(batch)
        self._batches.append(batch)
