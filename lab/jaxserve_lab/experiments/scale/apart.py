"""Prompts apart from decodes: requests that go on at another replica after their first token."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jaxserve.sched.cost.model_shapes import MODELS
from jaxserve.sched.policy import Limits
from jaxserve.sched.request import SLO, Rule
from jaxserve.sched.routing.moves import Link
from jaxserve.sched.slo.classes import with_targets
from jaxserve.sched.slo.metrics import attained
from jaxserve.simulator.settings import EngineOptions, Fault, FleetOptions, Routing, RunOptions
from jaxserve.simulator.simulator import simulate
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.specs import WorkloadSpec
from jaxserve.simulator.workloads.workload import Workload
from jaxserve_lab.experiments.common.runs import digits
from jaxserve_lab.experiments.scale.talks import Talk, conversations
from jaxserve_lab.experiments.scale.traffic import traffic

MODEL, DEVICE = "llama-3-8b", "a100"
BYTES_PER_S, LATENCY = 25e9, 0.002  # of a link of 200 Gb/s
SHAPE = MODELS[MODEL]
LINK = Link(LATENCY, SHAPE.kv_layers * SHAPE.kv_bytes / BYTES_PER_S)
SLOWDOWN = 4.0
LIMITS = Limits(8192, 512, 256)
LONG_TTFT, LONG_TBT = 1.0, 0.05  # seconds, of long prompts
LONG = "long prompts"
WORK = {"Azure": (3.5, 4.5), "conversations": (1.0, 1.5), LONG: (2.5, 4.0)}
"""Requests/s of a replica, by workload."""
SHARES = (0.375, 0.5, 0.625, 0.75)  # of the replicas for prompts only
WAYS = ("together", "moves", *SHARES)


@dataclass(frozen=True)
class Apart:
    """Replicas at work.

    Attributes:
        work: Of WORK.
        replicas: How many serve.
        rate: Requests/s of each.
        way: Of WAYS: `slo` without moves, with moves, or with a fixed share for prompts only.
        requests: How many come.
        dead: Whether the first replica dies once a third of them have come.
        slow: Whether it takes SLOWDOWN times as long for every step from then on.
        azure: As `Cell` has it.
    """

    work: str
    replicas: int
    rate: float
    way: str | float
    requests: int
    dead: bool = False
    slow: bool = False
    azure: str = ""

    @property
    def cost(self) -> float:
        """As `AnyCase`."""
        return 25.0 * self.requests  # in Python, step by step

    def named(self) -> dict[str, Any]:
        """As `AnyCase`."""
        named = {"apart": self.work, **asdict(self), "azure": bool(self.azure)}
        return named if self.slow else {k: value for k, value in named.items() if k != "slow"}


@dataclass(frozen=True)
class ServedApart:
    """What comes of it.

    Attributes:
        attainment: Share of the requests within all of their targets.
        p99: TTFT in seconds.
        finished: Share of the requests that came to their ends.
        goodput: Requests/s within all of their targets.
    """

    attainment: float
    p99: float
    finished: float
    goodput: float


def serve_apart(case: Apart) -> ServedApart:
    """Simulates it."""
    workload, link, roles = _workload(case), None, None
    if case.way != "together":
        link = LINK
    if not isinstance(case.way, str):
        prompts = math.ceil(case.way * case.replicas)
        roles = prompts, case.replicas - prompts
    faults: tuple[Fault, ...] = ()
    if case.dead or case.slow:
        at = float(workload.arrival[len(workload) // 3])
        faults = (Fault(0, at, SLOWDOWN if case.slow else math.inf),)
    routing = Routing(
        "slo", interval=0.5, age=0.1, loss=0.05, faults=faults, link=link, roles=roles
    )
    place = system(f"{MODEL}@{DEVICE}")
    requests = simulate(
        "sarathi",
        workload,
        place,
        engine=EngineOptions(
            limits=LIMITS, block_size=16, prefix_caching=True, host_tokens=place.kv_tokens
        ),
        fleet=FleetOptions(replicas=case.replicas, routing=routing),
        run=RunOptions(record_batches=False),
    ).requests
    met = attained(requests.times, workload.terms).slo(Rule.PAPERS)
    return ServedApart(
        attainment=digits(float(met.mean())),
        p99=digits(float(np.nanpercentile(requests.ttft, 99))),
        finished=digits(float(requests.finished.mean())),
        goodput=digits(float(met.sum() / np.nanmax(requests.finish))),
    )


def _workload(case: Apart) -> Workload:
    rate = case.rate * case.replicas
    if case.work == "Azure":
        return traffic(case.requests, rate, 0, case.azure)
    if case.work == "conversations":
        return conversations(Talk("slo", case.replicas, case.requests), rate)
    spec = WorkloadSpec("longbench", case.requests, rate=rate, max_tokens="length")
    drawn = spec.make_workload(0)
    return drawn.with_terms(with_targets(drawn.terms, SLO(ttft=LONG_TTFT, tbt=LONG_TBT)))
