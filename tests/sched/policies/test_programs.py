"""What tells the policies for programs from others, each by its own rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxserve.sched.policies.programs.autellix import Autellix
from jaxserve.sched.policies.programs.hexagent import risk
from jaxserve.sched.registry import deployable, make_policy, policies
from jaxserve.sched.request import Program
from jaxserve.sched.unified.unified_policy import UnifiedPolicy
from tests.sched.driver import Drive


def waiting(drive: Drive, now: float) -> list[int]:
    policy = drive.policy
    assert isinstance(policy, UnifiedPolicy)
    return policy.ranking(drive.scheduler.view, now).waiting.tolist()


def serve(drive: Drive, row: int, now: float) -> None:
    """Steps until the request has ended."""
    ended = len(drive.ended)
    while row not in drive.ended[ended:]:
        drive.step(now)


def begun(policy: str, **options: Any) -> tuple[Drive, int, int, int]:
    """Program a has had a call; then those wait: the first call of b, a's second, and a call of no
    program, in this order of arrival."""
    drive = Drive(policy, **options)
    serve(drive, drive.add(8, 4, program=Program("a")), 0.0)
    b = drive.add(4, 4, arrival=1.0, program=Program("b"))
    a = drive.add(4, 4, arrival=2.0, program=Program("a"))
    return drive, b, a, drive.add(4, 4, arrival=3.0)


def test_those_for_programs_are_told_apart() -> None:
    mine = {name for name, one in policies().items() if one.for_programs}
    assert mine == {"program_fcfs", "autellix", "continuum", "thunderagent", "hexagent"}
    assert mine <= set(deployable()) and not mine & set(deployable(for_programs=False))


@pytest.mark.parametrize("policy", ["program_fcfs", "continuum"])
def test_the_program_that_began_first_comes_first(policy: str) -> None:
    drive, b, a, other = begun(policy)
    assert waiting(drive, 4.0) == [a, b, other]
    assert waiting(Drive("sarathi"), 4.0) == []


def test_autellix_ranks_by_what_a_program_has_had() -> None:
    drive, b, a, other = begun("autellix:quantum=4")
    assert waiting(drive, 4.0) == [b, other, a]
    # As much service again, by the call itself, is a queue further down.
    queue = drive.policy.queue_of(drive.scheduler.view, np.array([a, b]))  # type: ignore[attr-defined]
    assert queue.tolist() == [2, 0], "11 tokens had, of which 4 and 8 are bounds"


def test_autellix_takes_memory_for_the_program_that_has_had_less() -> None:
    drive = Drive("autellix:quantum=4", rows=1)
    serve(drive, drive.add(8, 4, program=Program("a")), 0.0)
    a = drive.add(4, 4, arrival=1.0, program=Program("a"))
    assert drive.step(1.0) == {a: 4}
    b = drive.add(4, 4, arrival=2.0, program=Program("b"))
    assert drive.step(2.0) == {b: 4} and drive.preempted == [a]


def test_autellix_lets_nobody_starve() -> None:
    drive = Drive("autellix:quantum=4:patience=3")
    serve(drive, drive.add(8, 4, program=Program("a")), 0.0)
    a, b = (drive.add(4, 40, arrival=2.0, program=Program(name)) for name in "ab")
    view, policy = drive.scheduler.view, drive.policy
    assert isinstance(policy, Autellix)
    policy.ranking(view, 2.0)
    drive.step(2.0)
    policy.ranking(view, 3.0)  # both have been served for a second
    drive.scheduler.finish(a)
    a = drive.add(4, 4, arrival=3.0, program=Program("a"))
    for now, queue in ((5.9, 2), (6.0, 0)):
        policy.ranking(view, now)
        assert policy.queue_of(view, np.array([a])).tolist() == [queue], now
    assert drive.table.state[b], "b still runs"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("queues=0", "queues must be 1 to 64"),
        ("quantum=0", "quantum must be more than 0"),
        ("ratio=1", "ratio must be more than 1"),
        ("ratio=1e300", "is not a finite number"),
        ("patience=0", "patience must be more than 0"),
    ],
)
def test_autellix_refuses_what_is_out_of_range(wrong: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_policy(f"autellix:{wrong}")


def test_hexagent_puts_the_program_at_most_risk_first() -> None:
    drive = Drive("hexagent")
    late = drive.add(4, 4, program=Program("late", deadline=200.0))
    soon = drive.add(4, 4, program=Program("soon", deadline=100.0))
    long = drive.add(4, 4, program=Program("long", deadline=200.0, expected_calls=40))
    assert waiting(drive, 0.0) == [long, soon, late]
    rows = np.array([late, soon, long])
    first, second, third = risk(drive.scheduler.view, rows, 0.0).tolist()
    assert second == pytest.approx(2 * first) and third == pytest.approx(41 * first)
    later = risk(drive.scheduler.view, rows, 50.0)
    assert later[0] == pytest.approx(first + 50 / 200)


def test_without_a_deadline_a_program_is_held_to_its_own_time_alone() -> None:
    drive = Drive("hexagent")
    rows = np.array([drive.add(4, 4, program=Program("a", expected_calls=n)) for n in (0, 3)][:1])
    assert risk(drive.scheduler.view, rows, 0.0).tolist() == [1.0]
    assert risk(drive.scheduler.view, rows, 1e6)[0] > 1e4


def agents(room: int) -> Drive:
    """A drive of `thunderagent` whose pool has room for so many tokens."""
    blocks = 2 * -(-room // 4)
    return Drive("thunderagent", blocks=blocks, max_model_len=1024, c=1024, p=1024)


def test_thunderagent_pauses_the_smallest_whose_tool_runs() -> None:
    drive = agents(room=640)  # of which each may still write 100
    small, big = (
        drive.add(60, 2, program=Program("small")),
        drive.add(150, 90, program=Program("big")),
    )
    other = drive.add(62, 90, program=Program("other"))
    serve(drive, small, 0.0)
    assert not paused(drive)
    drive.add(240, 2, arrival=1.0, program=Program("big"))  # 162, 340 and 164 do not fit
    drive.step(4.0)
    assert not paused(drive), "nobody is looked at for five seconds"
    drive.step(5.0)
    assert paused(drive) == ["small"]
    again = drive.add(66, 2, arrival=6.0, program=Program("small"))
    assert again not in drive.step(9.0)
    drive.scheduler.finish(other)
    assert again in drive.step(10.0)
    assert big in drive.plans[-1]


def paused(drive: Drive) -> list[str]:
    known = drive.policy._programs.known  # type: ignore[attr-defined]
    names = {number: name for (_, name), number in numbers(drive).items()}
    return sorted(names[number] for number, one in known.items() if one.paused)


def numbers(drive: Drive) -> dict[tuple[str, str], int]:
    return {key: one.number for key, one in drive.scheduler.programs._by_id.items()}


def test_thunderagent_lets_new_programs_wait_for_room_and_resumes_them() -> None:
    drive = agents(room=600)
    drive.step(0.0)
    first = drive.add(300, 40, program=Program("first"))
    second = drive.add(300, 40, program=Program("second"))
    third = drive.add(8, 2, program=Program("third"))
    assert drive.step(0.0) == {first: 300}, (
        "400 and 400 do not fit into 600, and others wait behind"
    )
    assert paused(drive) == ["second", "third"]
    assert drive.step(1.0) == {first: 1}, "nobody is looked at for five seconds"
    assert set(drive.step(5.0)) == {first, third}, "the smallest goes on, as there is room for it"
    drive.scheduler.finish(first)
    assert set(drive.step(6.0)) >= {third}
    drive.step(20.0)
    assert "second" not in paused(drive) and second in drive.plans[-1]


def test_thunderagent_serves_somebody_if_nobody_fits() -> None:
    drive = agents(room=80)
    one, two = drive.add(40, 2, program=Program("one")), drive.add(30, 2, program=Program("two"))
    assert drive.step(0.0) == {two: 30}
    drive.to_the_end()
    assert drive.ended == [two, one]
