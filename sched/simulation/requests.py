"""A workload's requests as a replica gets them."""

from __future__ import annotations

import math

from jaxserve.sched.request import SLO, Request, SamplingParams, Tier
from jaxserve.sched.terms import TARGETS
from jaxserve.sched.workloads.workload import Workload


class Requests:
    """The workload's requests, made when they arrive."""

    def __init__(self, workload: Workload) -> None:
        self.arrival = [*workload.arrival.tolist(), math.inf]
        self._prompts = workload.prompt_len.tolist()
        self._limits = workload.limit.tolist()
        self._tiers = workload.tier.tolist()
        targets = zip(*(getattr(workload, name).tolist() for name in TARGETS), strict=True)
        self._targets = list(targets)
        self._sampling: dict[int, SamplingParams] = {}
        self._slo: dict[tuple[float, ...], SLO] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def make(self, number: int) -> Request:
        """Request `number`, from 0 in order of arrival."""
        limit = self._limits[number]
        if limit not in self._sampling:
            self._sampling[limit] = SamplingParams(max_tokens=limit)
        return Request(
            str(number),
            (0,) * self._prompts[number],
            self._sampling[limit],
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
