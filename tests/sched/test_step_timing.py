"""What a cost model is told of a step: its features with all that held it up, and its seconds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxserve.sched.cost.cost_model import BatchFeatures
from jaxserve.sched.cost.online_cost_model import OnlineCostModel
from jaxserve.sched.cost.padding import Padding
from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.step import CopySlots, Save, Step
from jaxserve.sched.step_timing import RECENT, StepWatch
from tests.cost_models import FLAT

PADDING = Padding((4, 8), (16, 64))
NOBODY = np.zeros(0, np.int64)


class Heard(OnlineCostModel):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(FLAT)
        self.told: list[tuple[BatchFeatures, float]] = []

    def observe(self, features: BatchFeatures, seconds: float) -> None:
        self.told.append((features, seconds))
        super().observe(features, seconds)


def step(rows: int) -> Step:
    """So many decodes, each over nine cached tokens."""
    ones = np.ones(rows, np.int64)
    yes = ones > 0
    return Step(
        BatchPlan(np.arange(rows), ones, 10 * ones, 0 * ones),
        start=9 * ones,
        end=10 * ones,
        emits=yes,
        decodes=yes,
        feeds_back=yes,
        generated=2 * ones,
        hidden=None,
        moves=(),
        preempted=NOBODY,
    )


def test_a_step_has_the_device_when_the_one_before_it_is_done() -> None:
    model = Heard()
    watch = StepWatch(model, PADDING)
    one = watch.launched(step(3), 10.0)
    two = watch.launched(step(4), 10.5)
    assert watch.finished(one, 11.0) == 1.0
    assert watch.finished(two, 13.0) == 2.0
    late = watch.launched(step(1), 20.0)
    assert watch.finished(late, 20.25) == 0.25
    assert [seconds for _, seconds in model.told] == [1.0, 2.0, 0.25]
    assert [f.num_decodes for f, _ in model.told] == [3, 4, 1]
    assert model.steps == 3


def test_it_is_predicted_as_it_is_padded_when_it_is_launched() -> None:
    watch = StepWatch(Heard(), PADDING)
    watched = watch.launched(step(5), 1.0)
    assert watched.features == step(5).features(PADDING)
    assert watched.features.padded_tokens == 8
    assert watched.predicted == pytest.approx(float(FLAT.batch_time(watched.features)))
    assert watched.predicted > float(FLAT.batch_time(step(5).features()))


def test_operations_without_a_batch_count_among_those_of_the_next_one() -> None:
    places, slots = np.zeros((8, 4), np.int32), np.zeros((7, 2), np.int32)
    nothing = dataclasses.replace(step(0), moves=(CopySlots(places),))
    watch = StepWatch(Heard(), PADDING)
    watch.moved(nothing)
    watch.moved(nothing)
    first = watch.launched(dataclasses.replace(step(1), moves=(Save((0, 1), (4, 3), slots),)), 0.0)
    assert (first.features.copied_slots, first.features.saved_slots) == (16, 7)
    assert watch.launched(step(1), 0.0).features == step(1).features(PADDING)


def test_the_device_is_free_when_what_was_launched_is_predicted_to_end() -> None:
    watch = StepWatch(FLAT, None)
    assert watch.free_at() == -np.inf
    one, two = watch.launched(step(3), 10.0), watch.launched(step(1), 10.001)
    took = [float(FLAT.batch_time(step(rows).features())) for rows in (3, 1)]
    assert watch.free_at(one, two) == 10.0 + took[0] + took[1], "one after the other"
    assert watch.finished(one, 11.0) == 1.0, "it took longer"
    assert watch.free_at(two) == 11.0 + took[1]
    watch.finished(two, 12.0)
    assert watch.free_at() == 12.0
    assert watch.free_at(watch.launched(step(1), 13.0)) == 13.0 + took[1]


def test_how_much_longer_than_predicted_most_steps_take() -> None:
    watch, now = StepWatch(FLAT, None), 0.0
    took = float(FLAT.batch_time(step(3).features()))
    for i in range(10 * RECENT):
        now += took * (1.0 + i % 10 / 10)
        watch.finished(watch.launched(step(3), now - took * (1.0 + i % 10 / 10)), now)
        assert i >= 15 or watch.overrun == 1.0, "nothing is known yet"
    assert watch.overrun == pytest.approx(1.8), "of ten, eight took less"
    for _ in range(RECENT):
        now += took / 2
        watch.finished(watch.launched(step(3), now - took / 2), now)
    assert watch.overrun == 1.0, "never sooner than predicted"


def test_a_step_is_predicted_from_what_is_known_of_it() -> None:
    watch, known = StepWatch(FLAT, None), step(3).features()
    assert watch.launched(step(3), 0.0) == watch.launched(step(3), 0.0, features=known)
    watch.moved(dataclasses.replace(step(0), moves=(CopySlots(np.zeros((8, 4), np.int32)),)))
    assert watch.launched(step(3), 0.0, features=known).features.copied_slots == 8


def test_a_clock_that_stands_still_says_nothing() -> None:
    model = Heard()
    watch = StepWatch(model, None)
    assert watch.finished(watch.launched(step(1), 3.0), 3.0) == 0.0
    assert not model.told
