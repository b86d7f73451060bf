"""What was seen of a server as a recording, as if it had written one: `--replay` reads it.

What cannot be seen from outside is chosen so that a simulation of the first part of the traffic
comes closest to it. The rest of the traffic says how far off simulations are then.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxserve.machine import versions
from jaxserve.sched.recording import (
    FEATURES,
    Arrival,
    End,
    Event,
    Header,
    RecordingError,
    Step,
    first_line,
    line,
)
from jaxserve.simulator import replay
from jaxserve.simulator.replay import Recording
from jaxserve.simulator.results import RequestRecords
from jaxserve.simulator.simulator import SimulationError
from jaxserve.simulator.systems.presets import LLAMA_2_7B
from jaxserve.twin.steps import SeenRequest, SeenStep, seen_steps

FITTED = 0.7  # share of the requests, by arrival, that the twin is fitted to
CHUNKS = (256, 512, 1024, 2048, 4096, 8192)
"""Tokens of a step that are tried where they are not known."""
ROWS = 256  # vLLM's own limit, tried where none was seen
BLOCK_SIZE = 16
_NO_QUEUE_LIMIT = 2**31 - 1
LESS = 0.01  # how much closer a twin with less room must come to be chosen
MEASURES = ("TTFT", "time between tokens", "total time")


@dataclass(frozen=True)
class ServerFacts:
    """A server, as far as it is known.

    Attributes:
        model: Its model's name.
        policy: The policy of ours that schedules as it does.
        max_batch_tokens: Most tokens of a step; None if not known.
        max_rows: Most requests of a step; None if not known.
        kv_tokens: Tokens that its cache has room for; None if not known.
        max_model_len: Tokens of its longest request; None if not known.
        source: Where the numbers are from, for people.
    """

    model: str
    policy: str
    max_batch_tokens: int | None = None
    max_rows: int | None = None
    kv_tokens: int | None = None
    max_model_len: int | None = None
    source: str = ""


@dataclass(frozen=True)
class TwinError:
    """How far a simulation is off in one measure, on requests that it was not fitted to.

    Attributes:
        name: The measure, of MEASURES.
        mean, p99: What was seen, and what was simulated, in seconds.
        apart: The mean difference between what was seen and what was simulated of the same request,
            or of the same two tokens, whatever its sign, as a share of the mean.
    """

    name: str
    mean: tuple[float, float]
    p99: tuple[float, float]
    apart: float = 0.0

    @property
    def mean_off(self) -> float:
        """Relative error of the mean."""
        return self.mean[1] / self.mean[0] - 1.0

    @property
    def p99_off(self) -> float:
        """Relative error of the 99th percentile."""
        return self.p99[1] / self.p99[0] - 1.0


@dataclass(frozen=True)
class Twin:
    """A server's twin.

    Attributes:
        header: What is known of it, and chosen.
        events: What was seen, as it would have recorded it.
        errors: Of the last requests, which it was not fitted to.
        guessed: What was chosen since it was not known, one line each.
    """

    header: Header
    events: tuple[Event, ...]
    errors: tuple[TwinError, ...]
    guessed: tuple[str, ...]

    def write(self, path: str | Path) -> None:
        """Writes the recording."""
        with Path(path).open("w", encoding="utf-8") as file:
            file.write(first_line(self.header, 0.0))
            file.writelines(map(line, self.events))


def make_twin(requests: Sequence[SeenRequest], facts: ServerFacts) -> Twin:
    """The twin of a server that served these requests.

    Args:
        requests: In order of arrival, from 0 on; those that wrote nothing count as if they had
            never come.
        facts: What is known of the server.

    Raises:
        RecordingError: There are too few.
    """
    served = [one for one in requests if len(one.times)]
    if len(served) < 2:
        raise RecordingError(f"at least 2 requests with tokens are needed, got {len(served)}")
    fitted = max(int(FITTED * len(served)), 1)
    best = _closer(_with_transport(served, facts, fitted, overlap) for overlap in (False, True))
    recording = best.recording
    errors = _errors(recording, fitted, len(served)) if fitted < len(served) else []
    return Twin(best.header, best.events, tuple(errors), tuple(_guessed(best.header, facts)))


def _with_transport(
    requests: Sequence[SeenRequest], facts: ServerFacts, fitted: int, overlap: bool
) -> _Tried:
    """The twin that comes closest, with as much time between clients and steps as first tokens come
    too early without, or twice that: without, it counts as time of steps in part."""
    plain = _closest(requests, facts, fitted, overlap)
    header, first = plain.header, plain.errors[0]
    known = dataclasses.replace(
        facts,
        max_batch_tokens=header.max_batch_tokens,
        max_rows=header.max_rows,
        kv_tokens=header.num_blocks // 2 * BLOCK_SIZE,
    )
    early = first.mean[0] - first.mean[1]
    shortest = min(float(one.times[0]) - one.arrival for one in requests)
    between = (share * early for share in (1.0, 1.5, 2.0))
    later = (
        _closest(requests, known, fitted, overlap, transport)
        for transport in between
        if 0.0 < transport < shortest
    )
    return _closer([plain, *later])


class _Tried(NamedTuple):
    """A possible twin.

    Attributes:
        errors: Of the requests that it is fitted to.
    """

    header: Header
    events: tuple[Event, ...]
    recording: Recording
    errors: list[TwinError]

    @property
    def off(self) -> float:
        """How far it is off. Means alone would not tell a step that begins later from a longer
        way."""
        return float(np.mean([one.apart for one in self.errors]))


def _closer(tried: Iterable[_Tried]) -> _Tried:
    """The first to which no later one is closer by more than LESS."""
    best, *others = tried
    for one in others:
        if one.off < best.off - LESS:
            best = one
    return best


def _closest(
    requests: Sequence[SeenRequest],
    facts: ServerFacts,
    fitted: int,
    overlap: bool,
    transport: float = 0.0,
) -> _Tried:
    """The twin that comes closest to the first `fitted` requests.

    Args:
        requests: See `make_twin`.
        facts: What is known.
        fitted: Number of requests.
        overlap: Whether steps are planned ahead.
        transport: Seconds between clients and steps.

    Raises:
        RecordingError: There is none.
    """
    there = [dataclasses.replace(one, times=one.times - transport) for one in requests]
    chunk, steps = _stepwise(there, facts, overlap=overlap)
    events = tuple(_events(there, steps, overlap=overlap))
    found, problem = list[_Tried](), ""
    for rows, kv_tokens in _room(there, facts):
        header = _header(facts, chunk, rows, kv_tokens, overlap=overlap)
        header = dataclasses.replace(header, transport=transport)
        recording = replay.of_events(header, events)
        try:
            found.append(_Tried(header, events, recording, _errors(recording, 0, fitted)))
        except (RecordingError, SimulationError) as error:
            problem = str(error)
    if not found:
        raise RecordingError(f"no twin can be made of this: {problem}")
    return _closer(found)


def _stepwise(
    requests: Sequence[SeenRequest], facts: ServerFacts, *, overlap: bool
) -> tuple[int, list[SeenStep]]:
    """The tokens of a step, and the steps: the size whose steps a cost model explains best."""
    tried = list[tuple[float, int, list[SeenStep]]]()
    for chunk in [facts.max_batch_tokens] if facts.max_batch_tokens else CHUNKS:
        steps = seen_steps(requests, chunk, overlap=overlap)
        header = _header(facts, chunk, ROWS, BLOCK_SIZE, overlap=overlap)
        events = tuple(_events(requests, steps, overlap=overlap))
        recording = replay.of_events(header, events)
        off = float(replay.system_of(recording).about["mean_error"])
        tried.append((off, chunk, steps))
    _, chunk, steps = min(tried, key=lambda one: one[:2])
    return chunk, steps


def _room(requests: Sequence[SeenRequest], facts: ServerFacts) -> Iterator[tuple[int, int]]:
    """Rows, and tokens of the cache to try: what is known, or what was seen at most, and as much as
    servers usually have."""
    times = np.sort(np.concatenate([one.times for one in requests]))
    begin = np.sort([one.times[0] for one in requests])
    end = np.sort([one.times[-1] for one in requests])
    running = begin.searchsorted(times, side="right") - end.searchsorted(times, side="left")
    longest = max(one.prompt + one.limit for one in requests)
    rows = [facts.max_rows] if facts.max_rows else sorted({int(running.max()), ROWS})[::-1]
    pools = [facts.kv_tokens or (facts.max_model_len or longest) * max(rows)]
    if not facts.kv_tokens:
        pools = sorted({max(_most_held(requests), longest), *pools})[::-1]
    yield from itertools.product(rows, pools)


def _most_held(requests: Sequence[SeenRequest]) -> int:
    """The most tokens in the cache at a time, of requests between their first and last token."""
    moments = [
        (time, size)
        for one in requests
        for time, size in (
            (float(one.times[0]), one.prompt + 1),
            *((time, 1) for time in one.times[1:].tolist()),
            (float(one.times[-1]) + 1e-9, -one.prompt - len(one.times)),
        )
    ]
    return int(np.cumsum([size for _, size in sorted(moments)]).max())


def _header(facts: ServerFacts, chunk: int, rows: int, kv_tokens: int, *, overlap: bool) -> Header:
    return Header(
        began=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions(),
        model=facts.model,
        dtype="unknown",
        device=facts.source or "seen from outside",
        policy=facts.policy,
        seed=0,
        overlap=overlap,
        max_batch_tokens=chunk,
        max_prefill_tokens=chunk,
        max_rows=rows,
        max_queue=_NO_QUEUE_LIMIT,
        max_model_len=facts.max_model_len or kv_tokens,
        num_blocks=2 * -(-kv_tokens // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        host_slots=0,
        hidden_read=None,
        rho=None,
        cost_model=LLAMA_2_7B,
        padding=None,
    )


def _guessed(header: Header, facts: ServerFacts) -> Iterator[str]:
    """What the choice fell on where the server's own number is not known."""
    if header.transport:
        yield f"{1e3 * header.transport:.1f} ms between clients and steps"
    if not facts.max_batch_tokens:
        yield f"{header.max_batch_tokens} tokens a step"
    yield f"steps planned {'ahead' if header.overlap else 'one after the other'}"
    if not facts.max_rows:
        yield f"{header.max_rows} requests at a time"
    if not facts.kv_tokens:
        yield f"a cache of {header.num_blocks // 2 * header.block_size:,} tokens"


def _events(
    requests: Sequence[SeenRequest], steps: Sequence[SeenStep], *, overlap: bool
) -> Iterator[Event]:
    """What the server would have recorded, in order of time."""
    told: list[tuple[float, int, Event]] = []
    for number, one in enumerate(requests):
        said = (one.prompt, one.limit, 0, None, None, None, 1, "")
        told.append((one.arrival, 0, Arrival(number, one.arrival, *said)))
        last = float(one.times[-1])
        end = End(number, len(one.times), "length", 0, last - one.arrival)
        told.append((last, 2, end))
    arrivals = np.array([one.arrival for one in requests])
    ends = np.sort([one.times[-1] for one in requests])
    before = 0
    for step in steps:
        came = int(arrivals.searchsorted(step.start, side="right"))
        live = came - int(ends.searchsorted(step.start, side="right"))
        idle = step.after_idle or not overlap  # as engines have it that plan one after the other
        told.append((step.end, 1, _step(step, live, came - before, after_idle=idle)))
        before = came
    yield from (event for _, _, event in sorted(told, key=lambda one: one[:2]))


def _step(step: SeenStep, live: int, new: int, *, after_idle: bool) -> Step:
    """A step; the host's times are part of the device's, since they cannot be told apart."""
    features = step.features()._asdict()
    held = sum(cached + 1 for _, cached in step.decodes)
    held += sum(count + done for _, count, done in step.chunks)
    rows = len(step.decodes) + len(step.chunks)
    return Step(
        end=step.end,
        device_time=step.end - step.start,
        wake_time=0.0,
        receive_time=0.0,
        plan_time=0.0,
        launch_time=0.0,
        finish_time=0.0,
        after_idle=int(after_idle),
        num_live=max(live, rows),
        num_received=new,
        num_rows=rows,
        num_admitted=sum(done == 0 for _, _, done in step.chunks),
        num_moves=0,
        num_emitting=len(step.received),
        preemptions=0,
        kv_used=held,
        num_hidden=0,
        num_shared=0,
        num_recomputed_tokens=0,
        features=[int(features[name]) for name in FEATURES],
        received=step.received,
    )


def _errors(recording: Recording, first: int, behind: int) -> list[TwinError]:
    """How far a system that is fitted to the first FITTED of the requests is off, of requests
    `first` to `behind` - 1."""
    requests = [*recording.arrivals.values()]
    until = requests[min(int(FITTED * len(requests)), len(requests) - 1)].time
    early = recording.columns["end"] <= until
    part = dataclasses.replace(recording, steps=recording.steps.select(early))
    simulated = replay.again(recording, replay.system_of(part)).requests
    pairs = zip(
        _measures(replay.served(recording).requests, first, behind),
        _measures(simulated, first, behind),
        strict=True,
    )
    return [
        TwinError(
            name,
            (float(seen.mean()), float(made.mean())),
            (float(np.quantile(seen, 0.99)), float(np.quantile(made, 0.99))),
            float(np.abs(made - seen).mean() / seen.mean()),
        )
        for name, (seen, made) in zip(MEASURES, pairs, strict=True)
        if len(made) and seen.any()
    ]


def _measures(requests: RequestRecords, first: int, behind: int) -> list[np.ndarray]:
    """TTFT, times between tokens, and total time of these requests, seconds."""
    some = slice(first, behind)
    gaps, count = requests.tbt
    owner = np.repeat(np.arange(len(count)), count)
    mine = (owner >= first) & (owner < behind)
    return [requests.ttft[some], gaps[mine], requests.latency[some]]
