"""Goodput's prices: which prompts come first if there is not enough time for all."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxserve.sched.cost.cost_model import Coefficients, LinearCostModel
from jaxserve.sched.policies.goodput import prices
from jaxserve.sched.policies.goodput.prices import Prices
from jaxserve.sched.request import Program
from jaxserve.sched.state.request_table import WAITING
from tests.sched.driver import Drive

SLOW = LinearCostModel(Coefficients(1 / 16, 0, 0, 0, 0, 0, 0, 0, 0), 1)
"""A token takes a sixteenth of a second, and decodes are no dearer than prompts."""


def seen(drive: Drive, found: Prices, clock: float, worth: float = 1.0) -> None:
    """The prices at this time."""
    waiting = drive.table.in_state(WAITING)
    found.read(drive.scheduler.view, waiting, np.full(len(waiting), worth), clock)


def arrivals(drive: Drive, prompts: list[int], until: float, **more: Any) -> list[int]:
    times = np.linspace(0.0, until, len(prompts)).tolist()
    each = zip(prompts, times, strict=True)
    return [drive.add(prompt=p, output=1, arrival=at, ttft=9.0, **more) for p, at in each]


def test_with_time_for_all_nothing_has_a_price() -> None:
    drive, found = Drive("goodput", cost_model=SLOW), Prices()
    rows = arrivals(drive, [4, 8] * 8, 90.0)
    seen(drive, found, 91.0)
    assert found.most == np.inf and not found.overdrawn
    assert found.affordable(np.array(rows), np.zeros(16)).all()


def test_the_cheapest_for_their_worth_that_fit_are_worth_their_time() -> None:
    """More than forty tokens of prompts a second, where sixteen fit at the most."""
    drive, found = Drive("goodput", cost_model=SLOW), Prices()
    lengths = [2 + i for i in range(40)]
    rows = np.array(arrivals(drive, lengths, 10.0))
    seen(drive, found, 10.0)
    fits = found.affordable(rows, np.ones(40)).tolist()
    count = fits.index(False)
    assert not any(fits[count:]), "the shortest"
    assert 6 < sum(lengths[:count]) / 16 < 11, "of ten seconds, less what decodes take"
    # The long ones are worth their time if they bring as much for it.
    assert found.affordable(rows, np.full(40, 10.0)).all()
    assert not found.affordable(rows, np.full(40, 0.01)).any()


def test_all_but_a_rounding_error_fit() -> None:
    """The sum in order of costs may be less than the sum by pairs, which exceeds what is left."""
    drive, found = Drive("goodput", cost_model=SLOW), Prices()
    arrivals(drive, [2 + i % 7 for i in range(40)], 10.0)
    seen(drive, found, 10.0)
    needed = float(found._known[1].sum()) / found._share
    for clock in np.linspace(0.999999, 1.000001, 41) * needed:
        seen(drive, found, float(clock))
        assert found.most > 0


def test_a_price_lapses_with_the_arrivals_that_made_it() -> None:
    drive, found = Drive("goodput", cost_model=SLOW), Prices()
    arrivals(drive, [18] * 40, 10.0)
    seen(drive, found, 10.0)
    assert found.most < np.inf
    seen(drive, found, 500.0)
    assert found.most == np.inf


def test_what_is_saved_up_or_owed_is_bounded() -> None:
    drive, found = Drive("goodput", cost_model=SLOW), Prices()
    arrivals(drive, [18] * 40, 10.0)
    seen(drive, found, 10.0)
    assert not found.overdrawn
    found.spend(1e6)
    assert found.overdrawn
    seen(drive, found, 10.0 + 2 * prices.CREDIT / found._share)
    assert not found.overdrawn


def program(name: str, deadline: float, to_come: int = 0) -> Program:
    return Program(name, deadline=deadline, expected_calls=to_come)


def test_the_fewer_calls_a_program_has_left_the_more_each_is_worth() -> None:
    """There is time for one of two calls with equal prompts and targets."""
    for first in (0, 5):
        drive = Drive("goodput", cost_model=SLOW, c=16, p=16)
        rows = [
            drive.add(prompt=16, output=1, ttft=1.2, program=program(name, 9.0, to_come))
            for name, to_come in (("a", first), ("b", 5 - first))
        ]
        assert drive.step(0.1) == {rows[first > 0]: 16}
