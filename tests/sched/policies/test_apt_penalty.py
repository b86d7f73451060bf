"""What Apt-Serve charges a hidden cache (section 4.2), and kinds of cache decided on anew."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxserve.sched.policies.apt.value import ENOUGH, STEPS_AHEAD, steps_ahead, weigh
from jaxserve.sched.registry import make_policy
from tests.sched.driver import Drive

RHO = 1e-3


def knows(drive: Drive, *lengths: int) -> None:
    """ENOUGH outputs of each of these lengths have ended."""
    for length in lengths * ENOUGH:
        drive.table.output_lengths.add(length)


def test_steps_ahead_are_those_of_outputs_that_got_as_far() -> None:
    drive = Drive("aptserve", c=1000, p=1000, max_model_len=4000)
    rows = np.array([drive.add(4, 2000), drive.add(4, 40), drive.add(4, 2000), drive.add(4, 2000)])
    drive.table.generated[rows] = [0, 0, 30, 900]
    view = drive.scheduler.view
    assert steps_ahead(view, rows).tolist() == [STEPS_AHEAD, 40, STEPS_AHEAD, STEPS_AHEAD]
    knows(drive, 10, 100)
    found = steps_ahead(view, rows)
    assert found == pytest.approx([55, 40, 70, STEPS_AHEAD], rel=0.01), "nobody got to 900"


def test_charged_for_every_token_that_it_will_have_read() -> None:
    """The mean of 8, 9 and 10 tokens for three steps, where one step reads 8."""
    drive = Drive("aptserve")
    rows = np.array([drive.add(8, 3)])
    options: dict[str, Any] = {"clock": 1.0, "step": 0.01, "delay": RHO, "decay": 0.0}
    once, often = (
        weigh(drive.scheduler.view, rows, lasting=lasting, **options).penalty
        for lasting in (False, True)
    )
    assert once is not None and often is not None
    assert once == pytest.approx([8 * RHO]) and often == pytest.approx([3 * (8 + 1.5) * RHO])


@pytest.mark.parametrize(
    ("penalty", "projects", "hidden"),
    [
        *[("auto", False, True), ("auto", True, False)],
        *[("step", True, True), ("remaining", False, False)],
    ],
)
def test_who_projects_is_charged_for_all_steps(penalty: str, projects: bool, hidden: bool) -> None:
    """Two prompts, and K and V of one: 2 x 13 tokens x RHO against a second, or 50 times that."""
    drive = Drive("aptserve", blocks=10, rho=RHO, projects=projects, penalty=penalty)
    for _ in range(2):
        drive.add(13, 50)
    drive.step(1.0)
    assert bool(drive.hidden) == hidden


def test_anew_means_that_who_changes_its_kind_computes_its_cache_again() -> None:
    """Two hidden caches have the pool to themselves when the others have ended."""
    drives = {
        name: Drive("aptserve", blocks=17, rho=1e-4, headroom=0.0, penalty=name)
        for name in ("step", "redecide")
    }
    for drive in drives.values():
        rows = [drive.add(13, 3) for _ in range(2)] + [drive.add(13, 9) for _ in range(2)]
        assert set(drive.step(1.0)) == drive.hidden == set(rows)
        drive.to_the_end()
    assert set(drives["step"].projected) == set(rows[2:]) and not drives["step"].preempted
    assert set(drives["redecide"].preempted) >= set(rows[2:])
    assert not drives["redecide"].projected


def test_nobody_coasts_whose_kind_may_change() -> None:
    assert make_policy("aptserve").steady and make_policy("aptserve:penalty=step").steady
    assert not make_policy("aptserve:penalty=redecide").steady


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("aptserve_kv:penalty=step", "penalty is for those that choose kinds"),
        ("aptserve_fcfs:penalty=remaining", "penalty is for those that choose kinds"),
        ("aptserve_s:penalty=redecide", "penalty=redecide needs whole prompts"),
    ],
)
def test_penalties_that_mean_nothing(policy: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make_policy(policy)
