"""Measures the pause of a stream that moves to another replica with what is cached of it.

    python -m jaxserve_lab.experiments.moves
    python -m jaxserve_lab.experiments.moves --ray

Two replicas in this process, each an engine with its frontends, random weights in the shape of
SmolLM2-135M. A stream moves from the first one to the other: its cache is sent ahead, and then it
leaves. Printed are medians: the pause and its parts, the pause if it leaves with its cache, as from
a replica that is to go, or without, and what it costs an answer that it could move. --ray: caches
go through Ray's object store, whose speed is measured, too. --tokens: of context when it leaves.
--rounds: streams of each kind. --flags: further ones of the replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.command_line import Parser
from jaxserve.deploy.local.cluster import local_cluster
from jaxserve.deploy.moves.transport import Transport
from jaxserve.machine import machine
from jaxserve.simulator.workload_flags import positive_int
from jaxserve_lab.experiments.moves.replicas import Pair, Streamed, shape_of_smollm2

BEFORE, BEHIND = 40, 40  # tokens said before a stream leaves, and after
STORE_BYTES = 1 << 30
PAGE_BYTES, SIZES_MIB, GET_S = 720 << 10, (64, 256), 60.0
_PARTS = ("sent", "arrived", "launched", "computed", "said")
"""What happens in a pause, in order; each part of the pause ends with it."""


@dataclass
class Found:
    """What was measured, a number for each stream. Times are in seconds.

    Attributes:
        steps: Time between tokens of streams that stay.
        plain: The same of streams that could not move.
        pauses: The longest time between tokens of those that move.
        parts: Of these pauses, by what ends each.
        ahead: From when they are to move until their cache is there.
        before: The longest time between tokens meanwhile.
        along: Pauses of those that leave with their cache.
        again: Pauses of those whose cache does not come along.
        wrong: Streams whose text or log-probabilities are not those of the ones that stay.
    """

    steps: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in _PARTS})
    ahead: list[float] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    along: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    wrong: int = 0


async def measure(flags: Sequence[str], transport: Transport, tokens: int, rounds: int) -> Found:
    """Measures all of `Found` with a pair of replicas.

    Args:
        flags: Of both.
        transport: Between them.
        tokens: Of context when a stream leaves.
        rounds: Streams of each kind.

    Raises:
        ValueError: A stream ended before it had left.
    """
    found, rng, pair = Found(), random.Random(0), Pair(flags, transport)
    try:
        for number in range(-1, rounds):  # the first one is not counted
            into = found if number >= 0 else Found()
            body = {
                "prompt": [rng.randrange(3, 1000) for _ in range(tokens - BEFORE)],
                "max_tokens": BEFORE + BEHIND,
                "temperature": 0,
                "ignore_eos": True,
                "logprobs": 0,
            }
            kinds: list[dict[str, Any]] = [{}, {"resumable": False}]
            kinds += [{way: BEFORE} for way in ("move", "leave", "lose")]
            for kind in kinds[:2] if number % 2 else kinds[1::-1]:
                await pair.fresh()
                stays = await pair.stream(body, **kind)
                (into.plain if kind else into.steps).append(statistics.median(stays.gaps))
            for kind in kinds[2:]:
                await pair.fresh()
                pair.watch.times.clear()
                pair.watch.steps.clear()
                moved = await pair.stream(body, **kind)
                into.wrong += (moved.text, moved.logprobs) != (stays.text, stays.logprobs)
                (way,) = kind
                _take(into, pair, moved, way)
    finally:
        await pair.stop()
    return found


def _take(found: Found, pair: Pair, moved: Streamed, way: str) -> None:
    """Takes in a stream that has moved. way: of `Pair.stream`."""
    if not pair.watch.steps:
        raise ValueError("a stream ended before it had left")
    times, step = pair.watch.times, pair.watch.steps[0]
    last = sum(came < times["sent"] for came in moved.times) - 1
    begin, end = moved.times[last], moved.times[last + 1]
    if way != "move":
        (found.along if way == "leave" else found.again).append(end - begin)
        return
    found.pauses.append(end - begin)
    found.before.append(max(moved.gaps[BEFORE - 1 : last], default=0.0))
    found.ahead.append(times["ahead"] - times["asked"])
    launched = step.end - step.step_time + step.plan_time + step.launch_time
    ends = {**times, "launched": launched, "computed": step.end, "said": end}
    for part in _PARTS:
        found.parts[part].append(ends[part] - begin)
        begin = ends[part]


def report(found: Found) -> list[str]:
    """For people."""
    step, middle = statistics.median(found.steps), statistics.median
    sent, arrived, launched, computed, said = (1000 * middle(found.parts[part]) for part in _PARTS)
    ratio = middle(a / b for a, b in zip(found.steps, found.plain, strict=True))
    return [
        f"time between tokens {_ms(found.plain)}; {ratio:.3f} of it if the stream can move",
        f"pause with the cache sent ahead {_ms(found.pauses)}; three such times and 20 ms are "
        f"{3000 * step + 20:.0f} ms",
        f"  of it: {sent:.1f} ms until it is sent on, {arrived:.1f} until the engine has the "
        f"request, {launched:.1f} until the cache is in the pool and the step launched, "
        f"{computed:.1f} for the step, {said:.1f} until it is said",
        f"before the pause, beside the steps: {_ms(found.ahead)}; longest time between tokens "
        f"meanwhile {_ms(found.before)}",
        f"pause with the cache along {_ms(found.along)}",
        f"pause with computing again {_ms(found.again)}",
    ]


def _ms(seconds: Sequence[float]) -> str:
    low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
    return f"{1000 * middle:.1f} ms ({1000 * low:.1f} to {1000 * high:.1f})"


def speeds(transport: Transport, sizes_mib: Sequence[int] = SIZES_MIB) -> list[str]:
    """How fast pages go through a transport, and a plain copy of them, for people."""
    told = []
    for mib in sizes_mib:
        count = (mib << 20) // PAGE_BYTES
        pages = {n.to_bytes(16, "big"): np.ones(PAGE_BYTES, np.uint8) for n in range(count)}
        size, times = count * PAGE_BYTES / 2**30, []
        for _ in range(5):
            began = time.monotonic()
            handle = transport.put(pages)
            put = time.monotonic()
            there: Mapping[bytes, np.ndarray] = transport.get(handle, GET_S)
            got = time.monotonic()
            copied = [page.copy() for page in there.values()]
            times.append((put - began, got - put, time.monotonic() - got))
            del there, copied, handle
        put, got, copied_in = (statistics.median(some) for some in zip(*times, strict=True))
        told.append(
            f"{mib} MiB: put {size / put:.2f} GiB/s, get {1000 * got:.1f} ms, both "
            f"{size / (put + got):.2f} GiB/s; a plain copy {size / copied_in:.2f} GiB/s"
        )
    return told


def flags_for(folder: Path, tokens: int, more: Sequence[str]) -> list[str]:
    """The flags of both replicas."""
    return [
        f"--config.model.path={folder}",
        "--config.model.load_format=random",
        f"--config.engine.max_model_len={tokens + BEHIND + 1}",
        "--config.cache.memory_gib=0.5",
        "--config.cache.host_gib=0.5",
        "--config.engine.stall_s=0",
        *more,
    ]


@contextlib.contextmanager
def _transport(on_ray: bool) -> Iterator[Transport]:
    """The transport between the replicas; Ray's lives as long as the context."""
    if not on_ray:
        yield Transport()
        return
    with local_cluster(cpus=1, store_bytes=STORE_BYTES):
        from jaxserve.deploy.ray import ObjectStore

        made = ObjectStore()
        yield made
        made._held.clear()  # Ray ends a process that drops references after its shutdown


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints. Returns the exit status: 1 if a text was another one."""
    parser = Parser(prog="python -m jaxserve_lab.experiments.moves", description=__doc__)
    add = parser.add_argument
    add("--tokens", type=positive_int, default=2000, help="of context (%(default)s)")
    add("--rounds", type=positive_int, default=7, help="streams of each kind (%(default)s)")
    add("--ray", action="store_true", help="through Ray's object store")
    add("--flags", type=shlex.split, default=[], help="further flags of both replicas")
    args = parser.parse_args(argv)
    if args.tokens <= BEFORE:
        parser.error(f"--tokens: must be more than {BEFORE}")
    where = machine()
    with tempfile.TemporaryDirectory() as folder, _transport(args.ray) as transport:
        given = flags_for(shape_of_smollm2(Path(folder)), args.tokens, args.flags)
        try:
            found = asyncio.run(measure(given, transport, args.tokens, args.rounds))
        except ValueError as error:
            parser.error(str(error))
        lines = [*report(found), *(speeds(transport) if args.ray else ())]
    print(f"{where['cpu']}, {where['cores']} cores, load {where['load_average']}")
    print("\n".join(lines))
    if found.wrong:
        print(f"{found.wrong} streams had another text", file=sys.stderr)
    return min(found.wrong, 1)
