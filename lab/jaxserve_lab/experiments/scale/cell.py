"""One simulation of many replicas, and what comes of it; and what a decision costs."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np

from jaxserve.sched.cache.prefix_sketch import KEY_BYTES, PrefixSketch, marks_of
from jaxserve.sched.policy import Limits
from jaxserve.sched.registry import make_policy
from jaxserve.sched.request import Rule
from jaxserve.sched.routing.behind import Sent
from jaxserve.sched.routing.fleet import Fleet, RoutingRequest
from jaxserve.sched.routing.routers import Router
from jaxserve.sched.routing.take_snapshot import constant_fields, idle_snapshot
from jaxserve.sched.slo.metrics import attained
from jaxserve.simulator.results import RequestRecords
from jaxserve.simulator.settings import EngineOptions, Fault, FleetOptions, Routing, RunOptions
from jaxserve.simulator.simulator import simulate
from jaxserve.simulator.systems.systems import system
from jaxserve_lab.experiments.common.runs import digits, say_compiling
from jaxserve_lab.experiments.scale.apart import LINK, Apart, ServedApart, serve_apart
from jaxserve_lab.experiments.scale.talks import Said, Talk, converse
from jaxserve_lab.experiments.scale.traffic import KINDS, LONGEST, traffic

SYSTEM, POLICY = "llama-3-8b@a100", "sarathi"
LIMITS = Limits(LONGEST, 512, 256)
SOME = 64  # requests at a replica
MOVES = {
    "begins": "with a link: a prompt",
    "goes on": "behind its first token",
    "behind": f"a snapshot, with {SOME} requests that are behind",
}
PART = 50_000  # requests that are judged at once: it takes memory
SLOWDOWN = 3.0
SCENES = {
    "live": Routing(),
    "published": Routing(interval=0.5, age=0.1, loss=0.05),
    "stale": Routing(interval=1.0, age=0.5, loss=0.2),
    "slow": Routing(interval=0.5, age=0.1, loss=0.05),
    "dead": Routing(interval=0.5, age=0.1, loss=0.05),
}


@dataclass(frozen=True)
class Cell:
    """A router at work.

    Attributes:
        router: Name of the router.
        replicas: How many serve.
        load: Share of the replicas' capacity (`most`) that requests come at.
        scene: Of SCENES. Once a third of the requests have come, the first replica becomes SLOWDOWN
            times slower in `slow`, and dies in `dead`.
        requests: How many come.
        routers: How many there are, each before a disjoint sample of the replicas.
        azure: Folder of the traces; "" to draw.
    """

    router: str
    replicas: int
    load: float
    scene: str
    requests: int
    routers: int = 1
    azure: str = ""

    @property
    def cost(self) -> float:
        """As `AnyCase`."""
        return self.requests * (1 + self.replicas / 100)

    def named(self) -> dict[str, Any]:
        """As `AnyCase`. Of the traces it says only whether there are any."""
        return {**asdict(self), "azure": bool(self.azure)}


@dataclass(frozen=True)
class Decision:
    """A measurement of what one routing decision costs.

    Attributes:
        router: Name of the router.
        replicas: How many it chooses among.
        prefixes: Whether it looks at these, of prompts of which half is somewhere.
        move: Of MOVES, with a link; "" without.
        cost: As `AnyCase`; these take no time.
    """

    router: str
    replicas: int
    prefixes: bool = False
    move: str = ""
    cost: float = dataclasses.field(default=0.0, init=False)

    def named(self) -> dict[str, Any]:
        """As `AnyCase`."""
        named = {"router": self.router, "replicas": self.replicas}
        named |= {"prefixes": True} if self.prefixes else {}
        return named | ({"move": self.move} if self.move else {})


@dataclass(frozen=True)
class Numbers:
    """What a cell comes to.

    Attributes:
        attainment: Share of the requests within all of their targets.
        conv, code: The same of each hour's requests.
        p50, p99: TTFT in seconds.
        failed: Requests that ended with a dead replica.
        rate: Requests/s that came.
        per_s: Requests simulated in a second of CPU time.
    """

    attainment: float
    conv: float
    code: float
    p50: float
    p99: float
    failed: int
    rate: float
    per_s: float


@dataclass(frozen=True)
class Cost:
    """seconds: median CPU time of choosing a replica and noting the choice."""

    seconds: float


Case = Cell | Decision | Talk | Apart
Found = Numbers | Cost | Said | ServedApart
KINDS_OF = {Cell: Numbers, Decision: Cost, Talk: Said, Apart: ServedApart}
"""What a case of each kind comes to."""


@cache
def most(azure: str) -> float:
    """Requests/s that one replica serves when all requests of both hours are there at once. Samples
    of them would differ: a short one may have half or twice the share of long prompts."""
    flood = traffic(sum(kind.size for kind in KINDS), 1.0, 1, azure)
    flood = dataclasses.replace(flood, arrival=np.zeros(len(flood)))
    result = simulate(
        POLICY,
        flood,
        system(SYSTEM),
        engine=EngineOptions(limits=LIMITS),
        run=RunOptions(compiling=say_compiling),
    )
    return len(flood) / float(result.requests.finish.max())


def run(case: Case) -> Found:
    """Simulates a cell, conversations or requests that move, or measures a decision."""
    if isinstance(case, Apart):
        return serve_apart(case)
    if isinstance(case, Talk):
        return converse(case)
    return _measured(case) if isinstance(case, Decision) else _simulated(case)


def _simulated(cell: Cell) -> Numbers:
    rate = cell.load * cell.replicas * most(cell.azure)
    workload = traffic(cell.requests, rate, 0, cell.azure)
    faults: tuple[Fault, ...] = ()
    if cell.scene in ("slow", "dead"):
        at = float(workload.arrival[len(workload) // 3])
        faults = (Fault(0, at, SLOWDOWN if cell.scene == "slow" else math.inf),)
    routing = dataclasses.replace(
        SCENES[cell.scene], name=cell.router, routers=cell.routers, faults=faults
    )
    begin = time.thread_time()
    result = simulate(
        POLICY,
        workload,
        system(SYSTEM),
        engine=EngineOptions(limits=LIMITS),
        fleet=FleetOptions(replicas=cell.replicas, routing=routing),
        run=RunOptions(record_batches=False, compiling=say_compiling),
    )
    took = time.thread_time() - begin
    requests = result.requests
    met = _met(requests)
    p50, p99 = np.nanpercentile(requests.ttft, (50, 99)).tolist()
    conv, code = (float(met[workload.slo_class == kind].mean()) for kind in (0, 1))
    return Numbers(
        attainment=digits(float(met.mean())),
        conv=digits(conv),
        code=digits(code),
        p50=digits(p50),
        p99=digits(p99),
        failed=int(requests.failed.sum()),
        rate=digits(rate),
        per_s=digits(len(workload) / took),
    )


def _met(requests: RequestRecords) -> np.ndarray:
    """Which requests are within all of their targets, bool [n]; judged PART at a time."""
    times, terms, found = requests.times, requests.workload.terms, []
    offsets = times.offsets
    for first in range(0, len(times), PART):
        which = np.arange(first, min(first + PART, len(times)))
        last = which[-1]
        part = dataclasses.replace(
            times,
            due=times.due[which],
            token_times=times.token_times[offsets[first] : offsets[last] + times.tokens[last]],
            tokens=times.tokens[which],
            finished=times.finished[which],
            going=None,
        )
        found.append(attained(part, terms.select(which)).slo(Rule.PAPERS))
    return np.concatenate(found)


def _chain(rng: np.random.Generator) -> list[bytes]:
    """Keys of the blocks of 4,000 tokens."""
    raw = rng.bytes(KEY_BYTES * 250)
    return [raw[first : first + KEY_BYTES] for first in range(0, len(raw), KEY_BYTES)]


def _sketch(chains: Sequence[list[bytes]], rng: np.random.Generator) -> str:
    """Of a replica that has half of each of ten of them, and most of many that nobody asks for."""
    if not chains:
        return ""
    sketch = PrefixSketch()
    for which in rng.integers(len(chains), size=10).tolist():
        sketch.add(chains[which][:125])
    for _ in range(50):
        sketch.add(_chain(rng))
    return sketch.text()


def _measured(case: Decision) -> Cost:
    """With a busy fleet, in Python, as a server's router runs."""
    place, rng = system(SYSTEM), np.random.default_rng(case.replicas)
    size = (place.kv_tokens // 16 * 2, 16)
    known = constant_fields(place.cost_model, make_policy(POLICY), LIMITS, *size)
    fleet = Fleet(case.replicas)
    router, took = Router(case.router, fleet, link=LINK if case.move else None), []
    chains = [_chain(rng) for _ in range(200 if case.prefixes else 0)]
    for replica in range(case.replicas):
        running = int(rng.integers(1, 80))
        busy = dataclasses.replace(
            idle_snapshot(known),
            unfinished=running,
            running=running,
            cached=1000 * running,
            pace=10.0 if case.move == "behind" else 1.0,
            realtime_tokens=int(rng.integers(0, 9000)),
            mean_output=140.0,
            sketch=_sketch(chains, rng),
        )
        fleet.hear(replica, busy)
    for number, length in enumerate(rng.integers(10, 4000, 1000).tolist()):
        marks = b""
        if chains:
            marks = marks_of(chains[number % len(chains)], (length - 1) // 16)
        ask = RoutingRequest(length, 0, 1.0, 0.2, marks=marks)
        there = [Sent(ask._replace(tbt=0.02), 0.0, 0.0, begun=i % 2 > 0) for i in range(SOME)]
        begin = time.thread_time()
        if case.move == "behind":
            router.behind(0, there, 0.1)
        elif case.move == "goes on":
            fleet.send(router.goes_on_at(number % len(fleet), ask, 0.1), ask, 0.1, moves=True)
        else:
            fleet.send(router.choose(ask, 0.1), ask, 0.1)
        took.append(time.thread_time() - begin)
    return Cost(digits(float(np.median(took))))
