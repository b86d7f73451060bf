"""The same requests on two replicas that move them, live and simulated: which of them move?

Readers have long prompts, short answers and no hurry between tokens; talkers have short prompts,
long answers and a tight TBT. So those that move should be talkers, away from where readers are.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import openai

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
from jaxserve_lab.experiments.scale_live.streams import MODEL, client

COUNT, RATE = 120, 3.0  # requests, and how many come in a second
READERS = 0.5  # share of the requests
READ, SAID = 460, 32  # tokens of a reader's prompt and answer
SHORT, TALKED = 24, 64  # of a talker's
TTFT, TBT = 2.0, 0.008  # seconds; the latter of talkers


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


@dataclass
class _One:
    """A request that was served: whether it moved, and when its pieces came."""

    moved: bool
    times: list[float]


def agree(cluster: Cluster, plain: Settings, roles: str = "") -> Agreed:
    """Serves the requests on two replicas with a link, and simulates them on what these say of
    themselves.

    Args:
        cluster: Where they are served.
        plain: Settings of two replicas without a link.
        roles: As of `Settings`.
    """
    drawn = np.random.default_rng(0)
    arrival = np.cumsum(drawn.exponential(1 / RATE, COUNT))
    reads = drawn.random(COUNT) < READERS
    served, recordings = list[list[_One]](), list[replay.Recording]()
    for _ in range(2):
        with TemporaryDirectory() as folder:
            flags = [*plain.flags, f"--config.engine.record={folder}/served", "--policy=sarathi"]
            cluster.deploy(plain.model_copy(update={"link": LINK, "roles": roles, "flags": flags}))
            served.append(asyncio.run(_serve(cluster, arrival, reads)))
            cluster.deploy(plain)  # closes the recordings
            recordings += [replay.read(path) for path in Path(folder).glob("served.*[!k]")]
    live = served[0]
    recording = max(recordings, key=lambda one: len(one.steps))
    result = _simulated(recording, arrival, reads, roles)
    moves = result.requests.moves
    assert moves is not None
    moved = np.array([one.moved for one in live]), moves > 0
    first, last = np.array([[one.times[0], one.times[-1]] for one in live]).T
    wrote = np.where(reads, SAID, TALKED)
    return Agreed(
        roles=roles,
        requests=COUNT,
        live=int(moved[0].sum()),
        simulated=int(moved[1].sum()),
        same=int((moved[0] == moved[1]).sum()),
        again=sum(one.moved == other.moved for one, other in zip(*served, strict=True)),
        talkers=(_share(~reads, moved[0]), _share(~reads, moved[1])),
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


async def _serve(cluster: Cluster, arrival: np.ndarray, reads: np.ndarray) -> list[_One]:
    drawn = np.random.default_rng(1)
    prompts = [drawn.integers(10, 400, READ if long else SHORT).tolist() for long in reads.tolist()]
    began = time.monotonic()
    async with client(cluster.http) as api:

        async def ask(number: int) -> _One:
            await asyncio.sleep(began + arrival[number] - time.monotonic())
            return await _ask(api, prompts[number], reads=bool(reads[number]))

        return list(await asyncio.gather(*(ask(number) for number in range(COUNT))))


async def _ask(api: openai.AsyncOpenAI, prompt: list[int], *, reads: bool) -> _One:
    slo = {"ttft_ms": 1000 * TTFT} | ({} if reads else {"tbt_ms": 1000 * TBT})
    began, found = time.monotonic(), _One(False, [])
    chunks = await api.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=SAID if reads else TALKED,
        temperature=0,
        stream=True,
        extra_body={"slo": slo, "ignore_eos": True, "serve_late": True},
    )
    async for chunk in chunks:
        found.times.append(time.monotonic() - began)
        found.moved |= bool((chunk.choices[0].model_extra or {}).get("moved"))
    return found


def _simulated(
    recording: replay.Recording, arrival: np.ndarray, reads: np.ndarray, roles: str
) -> SimulationResult:
    header, none = recording.header, np.full(COUNT, np.inf)
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
    workload = Workload.create(arrival, lengths, limit=lengths.output_len, terms=terms)
    split = parse_roles(roles) if roles else None
    routing = Routing("slo", interval=0.5, age=0.1, link=parse_link(LINK), roles=split)
    return simulate(
        header.policy,
        workload,
        replay.system_of(recording),
        engine=dataclasses.replace(replay.engine_of(header), online=header.cost_model),
        fleet=FleetOptions(replicas=2, routing=routing),
    )
