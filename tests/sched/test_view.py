"""What a policy may ask: what a swap takes, and what a refill."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxserve.sched.cache.block_pool import BlockPool
from jaxserve.sched.cache.cache_kinds import CacheKind
from jaxserve.sched.cost.cost_model import BatchFeatures, CostModel, LinearCostModel
from jaxserve.sched.cost.padding import Padding
from jaxserve.sched.cost.reachability import Alone
from jaxserve.sched.policy import Limits, View
from jaxserve.sched.request import SLO, Request
from jaxserve.sched.state.request_table import RequestTable
from jaxserve.simulator.systems.systems import system
from tests.cost_models import FLAT

SWAPS = dataclasses.replace(
    FLAT, coefficients=dataclasses.replace(FLAT.coefficients, swapped_slot=1e-5)
)
PADDING = Padding((4, 8), (16, 64))


def view(cost_model: CostModel, padding: Padding | None = None) -> View:
    return View(RequestTable(2), BlockPool(8, 4, 2, 8), Limits(64, 32, 2), cost_model, padding)


@pytest.mark.parametrize("padding", [None, PADDING])
@pytest.mark.parametrize("overlapped", [False, True])
def test_a_swap_copies_each_slot_there_and_back(overlapped: bool, padding: Padding | None) -> None:
    place = view(dataclasses.replace(SWAPS, overlapped=overlapped), padding)
    tokens, kinds = np.array([0, 1, 1000]), np.array([0, CacheKind.HIDDEN, CacheKind.KV])
    np.testing.assert_allclose(place.swap_time(tokens, kinds), [0, 2e-5, 4000 * 1e-5], rtol=1e-6)
    np.testing.assert_allclose(place.swap_time(tokens), [0, 4e-5, 4000 * 1e-5], rtol=1e-6)


def test_a_swap_is_what_a_step_takes_longer() -> None:
    model = system("opt-13b@a100-40g").cost_model
    assert isinstance(model, LinearCostModel)
    place = view(dataclasses.replace(model, overlapped=False))
    step = BatchFeatures(1, 1, 100, 1, 0, 0, 0)
    moved = step._replace(saved_slots=2 * 700, loaded_slots=2 * 700)
    longer = place.step_time(moved) - place.step_time(step)
    assert place.swap_time(np.array([700]))[0] == pytest.approx(longer, rel=1e-6)


def test_copies_that_have_no_price_take_no_time() -> None:
    class Bare:
        def batch_time(self, features: BatchFeatures) -> float:
            return 1.0

    for model in (FLAT, Bare()):
        assert view(model).swap_time(np.array([5, 9])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("padding", [None, PADDING])
def test_a_refill_takes_what_the_prompt_would_on_an_idle_engine(padding: Padding | None) -> None:
    place = view(system("opt-13b@a100-40g").cost_model, padding)
    lengths = np.array([1, 32, 33, 200])
    found = place.refill_time(lengths)
    for length, seconds in zip(lengths.tolist(), found.tolist(), strict=True):
        alone = Alone.from_request(Request("a", (1,) * length, slo=SLO(1.0)), place.step_time, 32)
        assert seconds == pytest.approx(alone.ttft)
    assert place.refill_time(np.array([0, 7]))[0] == 0.0
    whole = place.refill_time(lengths, chunk=200)
    assert whole[-1] < found[-1] and whole[0] == found[0]


@pytest.mark.parametrize("padding", [None, PADDING])
def test_steps_are_priced_with_adapters_while_somebody_has_one(padding: Padding | None) -> None:
    coefficients = dataclasses.replace(FLAT.coefficients, adapted_token=1e-3)
    place = view(dataclasses.replace(FLAT, coefficients=coefficients), padding)
    step = BatchFeatures.of_decodes(np.array([1, 3]), np.array([10, 30]))
    plain = place.step_time(step)
    row = place.table.add(Request("r", (1,)))
    np.testing.assert_array_equal(place.step_time(step), plain)
    place.table.adapt(row, 2)
    tokens = np.array([1, 3]) if padding is None else 4
    np.testing.assert_allclose(place.step_time(step) - plain, tokens * 1e-3 * FLAT.num_layers)
    place.table.remove(row)
    np.testing.assert_array_equal(place.step_time(step), plain)
