"""When a policy gets nowhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.sched.plan import InvalidPlan
from jaxserve.sched.progress import FUTILE, IDLE, Progress

NOBODY = np.zeros(0, np.int64)


def rows(*which: int) -> np.ndarray:
    return np.array(which, np.int64)


def test_losses_count_until_something_new_is_computed() -> None:
    progress = Progress(4)
    for _ in range(FUTILE - 1):
        progress.note(8, 8, rows(1))
    progress.note(8, 7, rows(1))
    for _ in range(FUTILE - 1):
        progress.note(8, 8, rows(1, 2))
    progress.check()
    progress.note(8, 8, rows(2))
    with pytest.raises(InvalidPlan, match=f"^by step {2 * FUTILE} it has preempted a request 100 "):
        progress.check()


def test_another_request_in_the_row_has_lost_nothing() -> None:
    progress = Progress(1)
    for _ in range(2):
        progress.forget(0)
        progress.follow(10)  # as in simulations, where the table grows
        progress.forget(9)
        for _ in range(FUTILE - 1):
            progress.note(8, 8, rows(0, 9))
    progress.check()


@given(st.lists(st.lists(st.integers(0, 3), unique=True), max_size=FUTILE - 1))
def test_that_many_steps_may_preempt_anybody(steps: list[list[int]]) -> None:
    progress = Progress(4)
    for preempted in steps:
        progress.note(5, 5, rows(*preempted))
        progress.check()


def test_plans_without_a_batch_come_to_an_end() -> None:
    progress = Progress(4)
    for _ in range(IDLE - 1):
        progress.note(0, 0, NOBODY)
    progress.advance(3)
    for _ in range(IDLE):
        progress.check()
        progress.note(0, 0, NOBODY)
    with pytest.raises(InvalidPlan, match=f"^after step 3, {IDLE} plans had operations but no bat"):
        progress.check()
