"""A workload's requests as a replica gets them."""

from __future__ import annotations

import math

from jaxserve.sched.request import SLO, Request, SamplingParams, Tier
from jaxserve.sched.slo.slo_columns import TARGETS
from jaxserve.sched.workloads.workload import Workload


class Requests:
    """The workload's requests, made when they arrive."""

    def __init__(self, workload: Workload) -> None:
        self.arrival = [*workload.arrival.tolist(), math.inf]
        self._prompts = workload.prompt_len.tolist()
        self._limits = workload.limit.tolist()
        self._tiers, self._greedy = workload.tier.tolist(), workload.greedy.tolist()
        targets = zip(*(getattr(workload, name).tolist() for name in TARGETS), strict=True)
        self._targets = list(targets)
        self._sampling: dict[tuple[int, bool], SamplingParams] = {}
        self._slo: dict[tuple[float, ...], SLO] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def make(self, number: int) -> Request:
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
        )

    def _slo_of(self, number: int) -> SLO:
        targets = self._targets[number]
        if targets not in self._slo:
            named = zip(TARGETS, targets, strict=True)
            self._slo[targets] = SLO(**{name: t for name, t in named if t < math.inf})
        return self._slo[targets]
