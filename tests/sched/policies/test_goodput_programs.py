"""Goodput's pausing of whole programs: whose calls wait while the caches of all do not fit."""

from __future__ import annotations

import pytest

from jaxserve.sched.policies.goodput import programs
from jaxserve.sched.policies.goodput.programs import Programs
from jaxserve.sched.request import Program
from jaxserve.sched.state.request_table import RUNNING, WAITING
from tests.sched.driver import Drive

PACE = 0.1  # seconds of a step


def drive_of(num_blocks: int) -> Drive:
    return Drive("goodput", c=256, p=256, rows=16, blocks=num_blocks, max_model_len=4096)


def call(drive: Drive, name: str, deadline: float | None, prompt: int = 64, **more: object) -> int:
    return drive.add(prompt=prompt, output=8, program=Program(name, deadline), ttft=60.0, **more)


def pausing(drive: Drive, found: Programs, clock: float) -> list[int]:
    """The rows that pause."""
    table = drive.table
    running, waiting = table.in_state(RUNNING), table.in_state(WAITING)
    which = found.pausing(drive.scheduler.view, running, waiting, clock, PACE)
    return [int(row) for row in waiting[which]]


def test_nobody_pauses_while_all_fit() -> None:
    drive, found = drive_of(256), Programs()
    for name in "abc":
        call(drive, name, 60.0)
    assert pausing(drive, found, 0.0) == []


def test_those_with_the_least_time_left_go_on_and_those_that_are_late_wait() -> None:
    drive, found = drive_of(256), Programs()
    rows = {
        name: call(drive, name, deadline, prompt=drive.scheduler.view.pool.pool_tokens // 3)
        for name, deadline in (("late", 1e-3), ("far", 900.0), ("soon", 60.0), ("near", 90.0))
    }
    chats = drive.add(prompt=8, output=8)
    assert pausing(drive, found, 1.0) == [rows["late"]]
    more = call(drive, "more", 50.0, prompt=drive.scheduler.view.pool.pool_tokens // 3)
    assert sorted(pausing(drive, found, 1.0)) == sorted([rows["late"], rows["far"]])
    assert chats not in pausing(drive, found, 1.0) and more not in pausing(drive, found, 1.0)


def test_one_goes_on_even_if_none_fits() -> None:
    drive, found = drive_of(64), Programs()
    tokens = drive.scheduler.view.pool.pool_tokens - 8
    rows = [call(drive, name, 60.0, prompt=tokens) for name in "ab"]
    drive.add(prompt=8, output=8)
    assert pausing(drive, found, 0.0) == rows[1:]


@pytest.mark.parametrize(("later", "waits"), [(0.5, True), (programs.TOOL + 0.5, False)])
def test_the_cache_of_a_program_counts_for_a_short_time_while_its_tool_runs(
    later: float, waits: bool
) -> None:
    drive, found = drive_of(256), Programs()
    tokens = drive.scheduler.view.pool.pool_tokens * 2 // 3
    first = call(drive, "a", 60.0, prompt=tokens)
    pausing(drive, found, 0.0)
    while first not in drive.ended:
        drive.step(1.0)
    drive.add(prompt=8, output=64, arrival=1.0)
    drive.step(1.0)  # something runs, otherwise b would go on all the same
    other = call(drive, "b", 60.0, prompt=tokens, arrival=1.0)
    assert pausing(drive, found, 1.0 + later) == ([other] if waits else [])


@pytest.mark.promise(14)
def test_programs_that_lie_pause_themselves() -> None:
    """A deadline that nobody could meet, or calls without end, leave no time to be in time in."""
    drive, found = drive_of(256), Programs()
    third = drive.scheduler.view.pool.pool_tokens // 3
    honest = [call(drive, name, 60.0, prompt=third - 16) for name in "ab"]
    past = call(drive, "past", 1e-9, prompt=third - 16)
    endless = drive.add(
        prompt=third - 16, output=8, program=Program("endless", 60.0, 10_000), ttft=60.0
    )
    assert set(pausing(drive, found, 0.5)) <= {past, endless}
    assert not set(pausing(drive, found, 0.5)) & set(honest)


def test_all_programs_end_in_a_pool_that_holds_one() -> None:
    drive = drive_of(64)
    tokens = drive.scheduler.view.pool.pool_tokens - 32
    rows = {call(drive, f"p{i}", 0.5 * (i + 1), prompt=tokens) for i in range(4)}
    clock = 0.0
    while not rows <= set(drive.ended):
        clock += 0.5
        drive.step(clock)
        assert clock < 4000
    assert not len(drive.table.in_state(WAITING))


@pytest.mark.promise(14)
def test_tight_deadlines_of_one_tenant_take_no_turn_of_anothers() -> None:
    drive, found = drive_of(256), Programs()
    third = drive.scheduler.view.pool.pool_tokens // 3
    tight = {call(drive, f"tight{i}", 20.0 + i, prompt=third - 16, tenant="liar") for i in range(3)}
    honest = call(drive, "honest", 900.0, prompt=third - 16, tenant="honest")
    assert honest not in pausing(drive, found, 0.0)
    assert len(tight & set(pausing(drive, found, 0.0))) == 1


@pytest.mark.promise(14)
@pytest.mark.parametrize("alone", [False, True])
def test_an_id_for_each_call_takes_no_more_than_a_tenants_share(alone: bool) -> None:
    """Their contexts count for a short time, of one tenant's as a half at most."""
    drive, found = drive_of(256), Programs()
    pool = drive.scheduler.view.pool.pool_tokens
    for i in range(6):
        row = call(drive, f"once{i}", 60.0, prompt=pool // 5, tenant="liar")
        pausing(drive, found, 0.0)
        while row not in drive.ended:
            drive.step(0.0)
    drive.add(prompt=8, output=64)
    drive.step(0.0)  # something runs, otherwise it would go on all the same
    other = call(drive, "a", 60.0, prompt=pool // 3, tenant="liar" if alone else "honest")
    assert (other in pausing(drive, found, 0.5)) == alone
