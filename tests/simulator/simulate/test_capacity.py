"""The search for the rate that a system sustains."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.simulator.capacity import (
    COARSE,
    FINE,
    Crossing,
    Grid,
    crossing,
    mean,
    ratio,
    sustained,
)


def test_between_two_rates_attainment_is_linear() -> None:
    points = {1.0: 1.0, 2.0: 0.95, 4.0: 0.75, 8.0: 0.1}
    assert crossing(points, 0.9) == Crossing(pytest.approx(2.5))
    assert crossing(points, 0.75).rate == pytest.approx(4.0)
    assert crossing(points, 0.6).rate == pytest.approx(4 + 4 * 0.15 / 0.65)


def test_the_first_fall_counts() -> None:
    assert crossing({1: 1.0, 2: 0.8, 3: 0.95, 4: 0.0}, 0.9).rate == pytest.approx(1.5)


def test_what_was_not_crossed_is_a_bound() -> None:
    assert str(crossing({1: 0.95, 3: 0.92}, 0.9)) == ">3"
    assert str(crossing({0.5: 0.2, 3: 0.1}, 0.9)) == "<0.5"


@pytest.mark.parametrize(
    ("above", "below", "text"),
    [
        (Crossing(6), Crossing(2), "3x"),
        (Crossing(6, ">"), Crossing(2), ">3x"),
        (Crossing(6), Crossing(2, ">"), "<3x"),
        (Crossing(6), Crossing(2, "<"), ">3x"),
        (Crossing(6, ">"), Crossing(2, "<"), ">3x"),
        (Crossing(6, ">"), Crossing(2, ">"), "unknown"),
    ],
)
def test_ratios_of_bounds(above: Crossing, below: Crossing, text: str) -> None:
    assert ratio(above, below).times() == text


def test_means_of_bounds() -> None:
    assert mean([Crossing(1), Crossing(4)]).times() == "2.5x"
    assert mean([Crossing(1, ">"), Crossing(4)]).times() == ">2.5x"
    assert mean([Crossing(1, ">"), Crossing(4, "<")]).times() == "unknown"


def test_what_is_sustained_was_tried() -> None:
    points = {1.0: 1.0, 2.0: 0.9, 4.0: 0.75, 8.0: 0.95}
    assert sustained(points, 0.9) == Crossing(2.0)
    assert sustained(points, 0.7) == Crossing(8.0, ">")
    assert sustained({2.0: 0.5, 1.0: 0.6}, 0.9) == Crossing(1.0, "<")


def test_the_fine_grid_says_the_rate_within_some_percent() -> None:
    rates = [FINE.rate(index) for index in range(-320, 321)]
    assert all(1.01 < b / a < 1.033 for a, b in itertools.pairwise(rates))
    assert all(FINE.nearest(rate) == i - 320 for i, rate in enumerate(rates))


@given(
    grid=st.sampled_from([COARSE, FINE]),
    at=st.floats(-0.6, 0.6),
    start=st.integers(-6, 6),
    levels=st.sampled_from([(0.9,), (0.6,), (0.9, 0.6)]),
)
def test_every_fall_is_found_between_neighbours(
    grid: Grid, at: float, start: int, levels: tuple[float, ...]
) -> None:
    """Attainment falls smoothly around index start + at x reach, wherever that is."""
    middle = start + at * grid.reach

    def attain(index: int) -> float:
        return 1 / (1 + math.exp((index - middle) * 3 / grid.steps))

    found, missing = grid.tried(attain, start, levels)
    assert not missing
    for level in levels:
        above = [i for i in found if attain(i) >= level]
        below = [i for i in found if attain(i) < level]
        assert max(above) + 1 == min(below)
        exact = middle - grid.steps / 3 * math.log(level / (1 - level))
        rates = {grid.rate(i): value for i, value in found.items()}
        low, high = grid.rate(math.floor(exact) - 1), grid.rate(math.ceil(exact) + 1)
        assert low <= sustained(rates, level).rate <= crossing(rates, level).rate <= high
    assert len(found) < 24


@pytest.mark.parametrize("grid", [COARSE, FINE])
@pytest.mark.parametrize("level", [0.0, 1.0])
def test_the_search_ends_where_there_is_no_fall(grid: Grid, level: float) -> None:
    found, missing = grid.tried(lambda index: level, 3, (0.9, 0.6))
    assert not missing
    assert abs((max if level else min)(found) - 3) >= grid.reach
    assert crossing({grid.rate(i): v for i, v in found.items()}, 0.9).bound == "<>"[int(level)]


def test_the_search_says_what_it_wants_next() -> None:
    assert COARSE.wanted({}, 5, (0.9,)) == [5]
    assert COARSE.wanted({5: 1.0}, 5, (0.9,)) == [7]
    assert COARSE.wanted({5: 0.0}, 5, (0.9,)) == [3]
    assert COARSE.wanted({5: 1.0, 7: 0.7}, 5, (0.9, 0.6)) == [6, 9]
    assert COARSE.wanted({5: 1.0, 6: 0.8}, 5, (0.9,)) == []
    assert COARSE.tried({5: 1.0}.get, 5, (0.9,)) == ({5: 1.0}, [7])
    assert FINE.wanted({0: 1.0, 32: 0.1}, 0, (0.9,)) == [16]
