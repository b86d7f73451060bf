"""Texts that can be guessed: drawn as the columns say, and carried along with the requests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.simulator.workloads.guessable import KINDS, Chances, Guessable, draw
from jaxserve.simulator.workloads.specs import WorkloadSpec
from jaxserve.simulator.workloads.workload import Lengths, Workload, WorkloadError, all_at_once
from jaxserve_lab.experiments.league import workloads as league

share = st.floats(0.0, 1.0)


@settings(deadline=None)
@given(guessed=share, right=share, count=st.integers(1, 60), seed=st.integers(0, 99))
def test_right_guesses_come_in_runs(guessed: float, right: float, count: int, seed: int) -> None:
    offered, ahead = draw(guessed, right, count, np.random.default_rng(seed))
    assert offered.shape == ahead.shape == (count,)
    assert not ahead[~offered].any()
    assert (ahead <= count - np.arange(count)).all()
    for i in range(count - 1):
        assert ahead[i + 1] == ahead[i] - 1 if ahead[i] > 1 else True
        assert not ahead[i] or offered[i + 1], "who was right has something that comes next"
        assert ahead[i + 1] == 0 if ahead[i] == 1 else True


@pytest.mark.parametrize(("guessed", "right"), [(0.5, 0.62), (0.9, 0.9), (1.0, 0.3), (0.2, 0.0)])
def test_the_shares_are_those_that_were_asked_for(guessed: float, right: float) -> None:
    offered, ahead = draw(guessed, right, 100_000, np.random.default_rng(0))
    assert offered.mean() == pytest.approx(guessed, abs=0.02)
    assert (ahead[offered] > 0).mean() == pytest.approx(right, abs=0.02)


def test_a_text_that_is_always_right_is_one_run() -> None:
    offered, ahead = draw(1.0, 1.0, 5, np.random.default_rng(0))
    assert offered.all() and ahead.tolist() == [5, 4, 3, 2, 1]


def test_requests_keep_their_chances() -> None:
    lengths = Lengths(np.array([3, 4, 5]), np.array([1, 1, 1]))
    columns = Guessable(np.array([0.1, 0.2, 0.3]), np.array([0.4, 0.5, 0.6]))
    made = Workload.create(all_at_once(3), lengths, guessable=columns)
    assert made.select(np.array([0, 2])).guess_share.tolist() == [0.1, 0.3]
    assert made.within(4).guess_right.tolist() == [0.4, 0.5, 0.6]
    merged, _ = Workload.merged([made, made.first(1)])
    assert merged.guess_share.tolist() == [0.1, 0.2, 0.3, 0.1]
    plain = Workload.create(all_at_once(3), lengths)
    assert not plain.guess_share.any() and not plain.guess_right.any()
    with pytest.raises(WorkloadError, match="guess_share must be a share"):
        Workload.create(all_at_once(3), lengths, guessable=Guessable.same(2))


def test_named_workloads_have_those_that_are_known() -> None:
    for name, chances in KINDS.items():
        made = WorkloadSpec(name, 20, rate=1.0).make_workload(0)
        assert set(made.guess_share) == {chances.share}
        assert set(made.guess_right) == {chances.right}
        own = WorkloadSpec(name, 20, rate=1.0, guessable=Chances(0.0, 0.0)).make_workload(0)
        assert not own.guess_share.any()
        if name in league.WORKLOADS:
            entry = league.make_workload(name, league.LLAMA, 1.0, 20, 0)
            assert set(entry.guess_share) == {chances.share}
    assert not WorkloadSpec("sharegpt", 20).make_workload(0).guess_share.any()
    mixed = league.make_workload("code-and-documents", league.LLAMA, 1.0, 20, 0)
    code = mixed.slo_class == mixed.classes.index("humaneval")
    assert (mixed.guess_share[code] == KINDS["humaneval"].share).all()
    assert not mixed.guess_share[~code].any()


def test_chances_are_two_numbers() -> None:
    assert Chances.parse("0.5:1") == Chances(0.5, 1.0)
    for text in ("0.5", "a:b", "0.5:1:1", "", "1.:."):
        with pytest.raises(ValueError):
            Chances.parse(text)
    with pytest.raises(ValueError, match="got 2 and"):
        Chances.parse("2:0.5")
