"""What each program of a simulation did when: its calls ran or waited, or its tools did and its
cache was kept for them or not."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxserve.simulator.results import SimulationResult

KEPT = 0.5
"""Share of its context that a call finds again if its program's cache was kept."""


class Doing(enum.StrEnum):
    """What a program does."""

    READING = "a call computes its prompt"
    WRITING = "a call writes"
    PAUSED = "paused: a call waits without a cache"
    KEPT = "a tool runs, its next call finds the cache"
    GIVEN_AWAY = "a tool runs, the cache is given away"


class Span(NamedTuple):
    """A time of a program.

    Attributes:
        program: Its number.
        doing: What it does.
        begin, end: Seconds.
    """

    program: int
    doing: Doing
    begin: float
    end: float


def spans(result: SimulationResult) -> list[Span]:
    """The times of all programs of a simulation of one replica that recorded rows and has ended, in
    order of their begins. Those of calls that run at once overlap."""
    found = [*_calls(result), *_tools(result)]
    return sorted(found, key=lambda span: (span.begin, span.program))


def _calls(result: SimulationResult) -> Iterator[Span]:
    """What each call did from its arrival to its end. It holds a cache from its first step on,
    until it ends or is preempted."""
    requests = result.requests
    assert result.rows is not None
    program = requests.workload.programs.program.tolist()
    now = {call: (Doing.PAUSED, at) for call, at in enumerate(requests.arrival.tolist())}

    def change(call: int, doing: Doing, at: float) -> Iterator[Span]:
        before, begin = now[call]
        if before is not doing:
            now[call] = doing, at
            if at > begin:
                yield Span(program[call], before, begin, at)

    for start, batch in zip(result.batches.start.tolist(), result.rows[0], strict=True):
        for call in batch.preempted.tolist():
            yield from change(call, Doing.PAUSED, start)
        for call, decodes in zip(batch.requests.tolist(), batch.decoding.tolist(), strict=True):
            yield from change(call, Doing.WRITING if decodes else Doing.READING, start)
    for call, (doing, begin) in now.items():
        yield Span(program[call], doing, begin, float(requests.finish[call]))


def _tools(result: SimulationResult) -> Iterator[Span]:
    """When each call's tool, or person, took its time."""
    requests = result.requests
    asked, finish = requests.workload, requests.finish
    programs, found = asked.programs, requests.found
    assert found is not None
    before = np.full(len(requests), -np.inf)
    np.maximum.at(before, programs.child, finish[programs.parent])
    kept = found >= KEPT * asked.prefix_len
    for call in np.flatnonzero(programs.waits & (before < requests.arrival)).tolist():
        doing = Doing.KEPT if kept[call] else Doing.GIVEN_AWAY
        begin, end = float(before[call]), float(requests.arrival[call])
        yield Span(int(programs.program[call]), doing, begin, end)
