"""The same requests on two replicas that move them, live and simulated: which of them move?"""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from jaxserve.deploy.local.cluster import Cluster
from jaxserve.deploy.settings import Settings
from jaxserve.sched.request import Tier
from jaxserve.sched.routing.moves import parse_link, parse_roles
from jaxserve.sched.slo.slo_columns import SloColumns
from jaxserve.simulator import replay
from jaxserve.simulator.results import SimulationResult
from jaxserve.simulator.settings import FleetOptions, Routing
from jaxserve.simulator.simulator import simulate
from jaxserve.simulator.workloads.workload import Lengths, Workload
from jaxserve_lab.experiments.scale_live.moves import LINK
from jaxserve_lab.experiments.scale_live.talkers import (
    READ,
    SAID,
    SHORT,
    TALKED,
    TBT,
    TTFT,
    Asked,
    Served,
    serve,
)

COUNT = 120  # requests


@dataclass(frozen=True)
class Agreed:
    """What became of the requests, live and simulated.

    Attributes:
        roles: Of the two replicas; "" where the router decides.
        requests: How many came.
        live: How many moved.
        simulated: How many did in the simulation.
        same: Those that did the same in both: move or stay.
        again: Those that did the same when all were served once more.
        talkers: Share of talkers among those that moved, live and simulated.
        ttft: Median TTFT in seconds, live and simulated.
        gap: Median of the means between tokens in seconds, live and simulated.
    """

    roles: str
    requests: int
    live: int
    simulated: int
    same: int
    again: int
    talkers: tuple[float, float]
    ttft: tuple[float, float]
    gap: tuple[float, float]


def agree(cluster: Cluster, plain: Settings, roles: str = "") -> Agreed:
    """Serves the requests on two replicas with a link, and simulates them on what these say of
    themselves.

    Args:
        cluster: Where they are served.
        plain: Settings of two replicas without a link.
        roles: As of `Settings`.
    """
    asked = Asked.draw(COUNT)
    served, recordings = list[list[Served]](), list[replay.Recording]()
    for _ in range(2):
        with TemporaryDirectory() as folder:
            flags = [*plain.flags, f"--config.engine.record={folder}/served", "--policy=sarathi"]
            cluster.deploy(plain.model_copy(update={"link": LINK, "roles": roles, "flags": flags}))
            served.append(asyncio.run(serve(cluster, asked)))
            cluster.deploy(plain)  # closes the recordings
            recordings += [replay.read(path) for path in Path(folder).glob("served.*[!k]")]
    live = served[0]
    recording = max(recordings, key=lambda one: len(one.steps))
    result = _simulated(recording, asked, roles)
    moves = result.requests.moves
    assert moves is not None
    moved = np.array([one.moved > 0 for one in live]), moves > 0
    first, last = np.array([[one.times[0], one.times[-1]] for one in live]).T
    wrote = np.where(asked.reads, SAID, TALKED)
    return Agreed(
        roles=roles,
        requests=COUNT,
        live=int(moved[0].sum()),
        simulated=int(moved[1].sum()),
        same=int((moved[0] == moved[1]).sum()),
        again=sum(bool(one.moved) == bool(other.moved) for one, other in zip(*served, strict=True)),
        talkers=(_share(~asked.reads, moved[0]), _share(~asked.reads, moved[1])),
        ttft=(
            float(np.median(first)),
            float(np.median(result.requests.ttft)),
        ),
        gap=(
            float(np.median((last - first) / (wrote - 1))),
            float(np.median(result.requests.tpot)),
        ),
    )


def _share(are: np.ndarray, among: np.ndarray) -> float:
    return float(are[among].mean()) if among.any() else 0.0


def _simulated(recording: replay.Recording, asked: Asked, roles: str) -> SimulationResult:
    header, none, reads = recording.header, np.full(COUNT, np.inf), asked.reads
    lengths = Lengths(np.where(reads, READ, SHORT), np.where(reads, SAID, TALKED))
    terms = SloColumns(
        tier=np.full(COUNT, Tier.REALTIME, np.int8),
        ttft=np.full(COUNT, TTFT),
        tbt=np.where(reads, np.inf, TBT),
        jct=none,
        max_tbt=none,
        slo_class=np.zeros(COUNT, np.int64),
        greedy=np.ones(COUNT, bool),
    )
    workload = Workload.create(asked.arrival, lengths, limit=lengths.output_len, terms=terms)
    split = parse_roles(roles) if roles else None
    routing = Routing("slo", interval=0.5, age=0.1, link=parse_link(LINK), roles=split)
    return simulate(
        header.policy,
        workload,
        replay.system_of(recording),
        engine=dataclasses.replace(replay.engine_of(header), online=header.cost_model),
        fleet=FleetOptions(replicas=2, routing=routing),
    )
