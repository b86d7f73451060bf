"""One simulation of the league of programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jaxserve.sched.registry import make_policy
from jaxserve.sched.request import Rule
from jaxserve.sched.slo.metrics import attained
from jaxserve.simulator.results import SimulationResult
from jaxserve.simulator.settings import EngineOptions, RunOptions
from jaxserve.simulator.simulator import default_limits, simulate
from jaxserve.simulator.systems.systems import system
from jaxserve_lab.experiments.common.runs import digits, say_compiling
from jaxserve_lab.experiments.league.runs import ROWS
from jaxserve_lab.experiments.programs.workloads import LONGEST, PLACE, WORKLOADS, make_workload


@dataclass(frozen=True)
class ProgramCase:
    """A policy on a workload of programs.

    Attributes:
        workload: Name in WORKLOADS.
        load: In LOADS.
        host: Whether host memory holds as much as the pool.
        policy: Name of the policy.
        retention: Which cached prefixes are kept.
        seed: Of the workload.
        share: Of the workload's requests.
    """

    workload: str
    load: str
    host: bool
    policy: str
    retention: str
    seed: int = 0
    share: float = 1.0

    @property
    def cost(self) -> float:
        """See `AnyCase`."""
        entry = WORKLOADS[self.workload]
        return self.share * (entry.calls + entry.chats)

    def named(self) -> dict[str, Any]:
        """See `AnyCase`."""
        return asdict(self)


@dataclass(frozen=True)
class ProgramNumbers:
    """What a run comes to.

    Attributes:
        in_time: Share of the programs that end within their deadlines.
        slowdown: Mean of the programs' times over those on an idle system, tools and people
        included.
        slowdown_p95: Its 95th percentile.
        goodput: Requests within their targets by the papers' rule, a second.
    """

    in_time: float
    slowdown: float
    slowdown_p95: float
    goodput: float


def simulated(case: ProgramCase, *, record_rows: bool = False) -> SimulationResult:
    """The simulation of a case. ValueError if it is impossible."""
    place = system(PLACE)
    workload = make_workload(case.workload, case.load, case.seed, place, case.share)
    limits = default_limits(
        make_policy(case.policy), place, max_batch_tokens=LONGEST, max_rows=ROWS
    )
    host = place.kv_tokens if case.host else 0
    engine = EngineOptions(
        limits=limits, host_tokens=host, prefix_caching=True, retention=case.retention
    )
    options = RunOptions(seed=case.seed, compiling=say_compiling, record_rows=record_rows)
    return simulate(case.policy, workload, place, engine=engine, run=options)


def run(case: ProgramCase) -> ProgramNumbers:
    """The numbers of a simulation. ValueError if it is impossible."""
    result = simulated(case)
    programs, requests = result.programs, result.requests
    assert programs is not None
    slowdown = programs.slowdown[programs.finished]
    asked = requests.workload
    met = attained(requests.times, asked.terms).slo(Rule.PAPERS)
    seconds = float(np.nanmax(programs.end) - asked.arrival.min())
    return ProgramNumbers(
        in_time=digits(programs.in_time.mean()),
        slowdown=digits(slowdown.mean()),
        slowdown_p95=digits(np.percentile(slowdown, 95)),
        goodput=digits(met.sum() / seconds),
    )
