"""What a key says of its programs changes little for itself, and nothing for another key, while the
caches of all do not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from jaxserve.sched.request import Program
from tests.sched.driver import Drive

DEADLINE, CALLS, TOOL, MANY = 28.0, 3, 3.0, 4
Says = Callable[[int, int], Program]  # by program and call


def truth(program: int, call: int) -> Program:
    return Program(f"run {program}", DEADLINE, CALLS - 1 - call, over=call == CALLS - 1)


LIES: dict[str, Says] = {
    "a deadline in the past": lambda program, call: Program(f"run {program}", 1e-9),
    "an id a call": lambda program, call: Program(f"run {program} {call}", DEADLINE),
    "another key's ids": lambda program, call: replace(
        truth(program, call), id=f"honest {program}", deadline=1e-9
    ),
    "calls without end": lambda program, call: Program(f"run {program}", DEADLINE, 10_000),
}


def served(says: Says) -> tuple[int, float]:
    """How many programs of an honest key are in time, and the mean end of those of one that says
    this of its own: as many
    programs each, whose calls follow each other after a tool's time. A step takes 0.2 s."""
    drive = Drive("goodput", c=64, p=64, rows=8, blocks=240, max_model_len=512, prefix_caching=True)
    due = {(key, one): (0.0, 0) for key in ("honest", "evil") for one in range(MANY)}
    running: dict[int, tuple[str, int, int]] = {}
    ends: dict[str, list[float]] = {"honest": [], "evil": []}
    clock, seen = 0.0, 0
    while due or running:
        for (key, one), (at, call) in list(due.items()):
            if at <= clock:
                del due[key, one]
                said = says(one, call)
                if key == "honest":
                    said = replace(truth(one, call), id=f"honest {one}")
                length = 60 + 30 * call
                keys = tuple(f"{key} {one} {block}".encode() for block in range(length // 4))
                row = drive.add(
                    length,
                    12,
                    arrival=clock,
                    tenant=key,
                    keys=keys,
                    program=said,
                    ttft=30.0,
                    tbt=2.0,
                )
                running[row] = key, one, call
        if running:
            drive.step(clock)
        clock += 0.2
        for row in drive.ended[seen:]:
            key, one, call = running.pop(row)
            if call == CALLS - 1:
                ends[key].append(clock)
            else:
                due[key, one] = clock + TOOL, call + 1
        seen = len(drive.ended)
        assert clock < 1000.0
    return sum(end <= DEADLINE for end in ends["honest"]), sum(ends["evil"]) / MANY


@pytest.fixture(scope="module")
def honest() -> tuple[int, float]:
    return served(truth)


@pytest.mark.promise(14)
@pytest.mark.parametrize("lie", LIES)
def test_lies_of_programs_gain_nothing(lie: str, honest: tuple[int, float]) -> None:
    others, own = served(LIES[lie])
    assert others == honest[0] == MANY
    assert own >= 0.9 * honest[1]
