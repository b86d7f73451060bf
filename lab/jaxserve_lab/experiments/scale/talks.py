"""Conversations before many replicas with prefix caches: who goes where what was said is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jaxserve.sched.policy import Limits
from jaxserve.sched.request import Rule
from jaxserve.sched.slo.metrics import attained
from jaxserve.sched.slo.slo_columns import SloColumns
from jaxserve.simulator.settings import EngineOptions, FleetOptions, Routing, RunOptions
from jaxserve.simulator.simulator import simulate
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.shared_prefixes import reusable_tokens
from jaxserve.simulator.workloads.specs import WorkloadSpec
from jaxserve.simulator.workloads.workload import Workload
from jaxserve_lab.experiments.common.runs import digits

TALK_SYSTEM, TALK_POLICY, TALK_BLOCK = "llama-3-8b@l4", "sarathi", 16
TALK_LIMITS = Limits(8192, 512, 256)
TALK_RATE = 1.0  # requests/s of a replica
TALK_TTFT, TALK_TBT = 1.0, 0.3  # seconds, of all
TALK_ROUTERS = {
    "least_loaded": ("least_loaded", True),
    "prefix_affinity": ("prefix_affinity", True),
    "slo, blind to prefixes": ("slo", False),
    "slo": ("slo", True),
}
"""What the page compares: a router, and whether it looks at prefixes."""


@dataclass(frozen=True)
class Talk:
    """A router before conversations.

    Attributes:
        router: Of TALK_ROUTERS.
        replicas: How many serve.
        talks: How many requests come.
    """

    router: str
    replicas: int
    talks: int

    @property
    def cost(self) -> float:
        """As `AnyCase`."""
        return 25.0 * self.talks  # in Python, step by step

    def named(self) -> dict[str, Any]:
        """As `AnyCase`."""
        return asdict(self)


@dataclass(frozen=True)
class Said:
    """What a `Talk` comes to.

    Attributes:
        attainment: Share of the requests within all of their targets.
        goodput: Such requests/s, until the last has ended.
        found: Share of the prompts' tokens that were found.
        there: Share that earlier requests had, wherever.
        p50, p99: TTFT in seconds.
    """

    attainment: float
    goodput: float
    found: float
    there: float
    p50: float
    p99: float


def converse(talk: Talk) -> Said:
    """Simulates it."""
    workload = conversations(talk, TALK_RATE * talk.replicas)
    name, prefixes = TALK_ROUTERS[talk.router]
    requests = simulate(
        TALK_POLICY,
        workload,
        system(TALK_SYSTEM),
        engine=EngineOptions(limits=TALK_LIMITS, block_size=TALK_BLOCK, prefix_caching=True),
        fleet=FleetOptions(
            replicas=talk.replicas,
            routing=Routing(name, interval=0.5, age=0.1, loss=0.05, prefixes=prefixes),
        ),
        run=RunOptions(record_batches=False),
    ).requests
    met, prompts = (
        attained(requests.times, workload.terms).slo(Rule.PAPERS),
        workload.prompt_len.sum(),
    )
    assert requests.found is not None
    p50, p99 = np.nanpercentile(requests.ttft, (50, 99)).tolist()
    return Said(
        attainment=digits(float(met.mean())),
        goodput=digits(float(met.sum() / np.nanmax(requests.finish))),
        found=digits(float(requests.found.sum() / prompts)),
        there=digits(float(reusable_tokens(workload, TALK_BLOCK).sum() / prompts)),
        p50=digits(p50),
        p99=digits(p99),
    )


def conversations(talk: Talk, rate: float) -> Workload:
    """The requests. rate: how many come in a second."""
    spec = WorkloadSpec("conversation", talk.talks, rate=rate)
    drawn = spec.make_workload(0)
    count, never = len(drawn), np.full(len(drawn), np.inf)
    terms = SloColumns(
        tier=np.zeros(count, np.int8),
        ttft=np.full(count, TALK_TTFT),
        tbt=np.full(count, TALK_TBT),
        jct=never,
        max_tbt=never,
        slo_class=np.zeros(count, np.int64),
        greedy=np.ones(count, bool),
        classes=("conversation",),
    )
    return drawn.with_terms(terms)
