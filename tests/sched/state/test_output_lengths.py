"""What is learned from the lengths of outputs that have ended."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.sched.state.output_lengths import BINS_PER_OCTAVE, HALF_LIFE, OutputLengths, Survival
from tests.sched.driver import Drive

NOTHING = np.array([0])


def learned(*lengths: int, cut: tuple[int, ...] = ()) -> OutputLengths:
    made = OutputLengths()
    for length in lengths:
        made.add(length)
    for length in cut:
        made.add(length, cut=True)
    return made


def test_the_mean_of_those_that_are_longer() -> None:
    assert OutputLengths().expected(np.array([0, 5])).tolist() == [1, 6]
    lengths = learned(10, 10, 100, 1000)
    assert lengths.count == 4
    expected = lengths.expected(np.array([0, 7, 10, 90, 100, 900, 1000]))
    assert expected == pytest.approx([280, 280, 550, 550, 1000, 1000, 1001], rel=1e-3)


def test_equal_outputs_are_expected_to_the_token() -> None:
    assert learned(*[11] * 40).expected(NOTHING).tolist() == [11.0]


def test_half_the_weight_after_a_half_life() -> None:
    lengths = learned(*[1000] * HALF_LIFE, *[10] * HALF_LIFE)
    assert lengths.expected(NOTHING) == pytest.approx([(1000 + 2 * 10) / 3])
    assert lengths.expected(np.array([10])).tolist() == [1000.0]


def test_cut_outputs_say_that_one_gets_as_long_and_no_more() -> None:
    """Half of all end at 10, and of those that get further half at 100: those cut at 40 would have
    done as these."""
    lengths = learned(10, 10, 10, 10, 100, 1000, cut=(40, 40))
    assert lengths.expected(NOTHING) == pytest.approx([(10 + 550) / 2], rel=1e-3)
    assert lengths.expected(np.array([10])) == pytest.approx([550], rel=1e-3)


def test_where_nobody_gets_further_the_cut_count_as_ended() -> None:
    lengths = learned(10, cut=(40, 40))
    assert lengths.expected(NOTHING) == pytest.approx([30], rel=1e-3)
    assert learned(cut=(40,)).expected(NOTHING).tolist() == [40.0]


LENGTHS = st.lists(st.integers(1, 5000), min_size=1, max_size=30)


@given(lengths=LENGTHS, generated=st.integers(0, 6000))
def test_as_the_mean_of_all_from_the_bin_above_on(lengths: list[int], generated: int) -> None:
    """But for the little that is forgotten of so few."""
    first = math.ceil(BINS_PER_OCTAVE * math.log2(generated + 1))
    longer = [n for n in lengths if int(BINS_PER_OCTAVE * math.log2(n)) >= first]
    wanted = max(float(np.mean(longer)), generated + 1) if longer else generated + 1
    found = learned(*lengths).expected(np.array([generated]))
    assert found == pytest.approx([wanted], rel=0.01)


@given(lengths=LENGTHS, limit=st.integers(1, 5000))
def test_one_limit_for_all_is_where_they_end(lengths: list[int], limit: int) -> None:
    short, cut = [n for n in lengths if n < limit], [limit for n in lengths if n >= limit]
    found = learned(*short, cut=tuple(cut)).expected(NOTHING)
    assert found == pytest.approx(learned(*short, *cut).expected(NOTHING))


def test_what_is_cancelled_does_not_count() -> None:
    run = Drive("sarathi")
    cancelled, _, stopped = run.add(3, 9), run.add(3, 4), run.add(3, 9)
    for _ in range(4):
        run.step()
    run.scheduler.finish(cancelled, complete=False)
    run.scheduler.finish(run.add(3, 9))  # stopped before it wrote anything
    lengths = run.table.output_lengths
    assert lengths.count == 1 and run.ended == [1]
    run.step()
    run.scheduler.finish(stopped)
    assert lengths.count == 2
    # One was cut at 4, and the other has ended by itself at 5.
    assert lengths.expected(NOTHING).tolist() == [5.0]


def survival(lengths: OutputLengths, *going: int) -> Survival:
    return Survival(*lengths.counted(), np.array(going, np.int64))


def test_survival_is_the_share_that_is_longer() -> None:
    found = survival(learned(10, 10, 100, 1000)).longer(np.array([0, 5, 12, 50, 120, 500, 1200]))
    assert found == pytest.approx([1, 1, 0.5, 0.5, 0.25, 0.25, 0], abs=1e-3)
    cut = survival(learned(10, 10, 100, 1000, cut=(3000,))).longer(np.array([50, 1200, 4000]))
    assert cut == pytest.approx([0.6, 0.2, 0], abs=1e-3)
    assert survival(OutputLengths()).mean == pytest.approx(1, abs=0.1)
    assert survival(learned(*[100] * 40)).mean == pytest.approx(100, rel=0.05)


@given(lengths=st.lists(st.integers(1, 4000), min_size=1, max_size=40))
def test_the_mean_of_the_survival(lengths: list[int]) -> None:
    """To a bin's width the mean of all of them; it is the same curve that `expected` uses."""
    found = survival(learned(*lengths))
    assert found.mean == pytest.approx(learned(*lengths).expected(NOTHING)[0], rel=0.1)


def test_outputs_that_go_on_are_longer_than_they_are() -> None:
    """Short outputs are over first: without the others, everybody would seem to write little."""
    ended = learned(*[10] * 8)
    assert survival(ended).mean == pytest.approx(10, rel=0.1)
    found = survival(ended, *[200] * 8)
    assert found.longer(np.array([20, 150])) == pytest.approx([0.5, 0.5], abs=1e-2)
    assert found.mean > 90


@given(
    ended=st.lists(st.integers(1, 2000), min_size=1, max_size=30),
    limits=st.lists(st.integers(1, 4000), min_size=1, max_size=9),
)
def test_outputs_that_are_cut_are_as_long_as_their_limits_let_them(
    ended: list[int], limits: list[int]
) -> None:
    lengths = OutputLengths()
    for length in ended:
        lengths.add(length)
    found = survival(lengths).within(np.array(limits))
    wanted = np.minimum(np.array(ended), np.array(limits)[:, None]).mean(axis=1)
    np.testing.assert_allclose(found, wanted, rtol=0.15, atol=1.0)
