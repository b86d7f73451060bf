"""The cost model that learns from steps: how close it comes, how soon, and what leaves it cold."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.cost.cost_model import BatchFeatures, Coefficients, LinearCostModel
from jaxserve.sched.cost.online_cost_model import CLIP, OnlineCostModel
from jaxserve.sched.cost.padding import Padding

LAYERS = 4
PRIOR = LinearCostModel(
    Coefficients(2e-6, 1e-4, 1e-8, 2e-5, 1e-6, 3e-10, 5e-5, 2e-6, 1e-8, hidden_token=3e-8), LAYERS
)
PADDING = Padding((1, 8, 64), (64, 512, 4096), decode_group=8)


def times(factor: float, **others: float) -> LinearCostModel:
    """The prior with all coefficients, or these, times a factor."""
    values = {name: factor * value for name, value in PRIOR.coefficients.as_dict().items()}
    values |= {name: PRIOR.coefficients.as_dict()[name] * other for name, other in others.items()}
    return LinearCostModel(Coefficients(**values), LAYERS)


def batch(rng: np.random.Generator, mixed: bool = True) -> BatchFeatures:
    decodes = int(rng.integers(1, 60))
    chunks = int(rng.integers(0, 3)) if mixed else 0
    counts = np.concatenate([np.ones(decodes, int), rng.integers(2, 300, chunks)])
    contexts = rng.integers(0, 2000, decodes + chunks)
    return BatchFeatures.from_rows(
        counts, contexts, np.arange(decodes + chunks) < decodes, padding=PADDING
    )


def serve(
    model: OnlineCostModel, true: LinearCostModel, steps: int, noise: float = 0.0, seed: int = 0
) -> float:
    """Total predicted over total taken, in the second half of the steps."""
    rng = np.random.default_rng(seed)
    predicted = taken = 0.0
    for i in range(steps):
        features = batch(rng)
        seconds = float(true.batch_time(features) * np.exp(noise * rng.normal()))
        if i >= steps // 2:
            predicted += float(model.batch_time(features))
            taken += seconds
        model.observe(features, seconds)
    return predicted / taken


@pytest.mark.parametrize("factor", [0.1, 0.6, 1.0, 3.0, 20.0])
def test_it_finds_a_device_of_another_speed(factor: float) -> None:
    model = OnlineCostModel(PRIOR)
    assert serve(model, times(factor), 400) == pytest.approx(1.0, abs=0.03)
    assert model.error < 0.05 and model.steps == 400


def test_noise_does_not_pull_it_to_either_side() -> None:
    model = OnlineCostModel(PRIOR)
    assert serve(model, times(1.5, decode_kv=3.0, per_token=0.5), 2000, noise=0.2) == pytest.approx(
        np.exp(-0.02), abs=0.03
    )
    assert model.error == pytest.approx(0.16, abs=0.05)  # as much as the noise


def test_what_no_step_has_shown_stays_in_proportion() -> None:
    model = OnlineCostModel(PRIOR)
    serve(model, times(2.0), 200)
    was = PRIOR.coefficients.hidden_token
    assert model.model.coefficients.hidden_token == pytest.approx(2 * was, rel=0.05)
    # Only decodes from here: prefills are not unlearned for all that.
    before = model.model.coefficients.prefill_quad
    rng = np.random.default_rng(5)
    for _ in range(300):
        features = batch(rng, mixed=False)
        model.observe(features, float(times(2.0).batch_time(features)))
    assert model.model.coefficients.prefill_quad == pytest.approx(before, rel=0.3)


def test_a_stopped_process_hardly_shows() -> None:
    model, other = OnlineCostModel(PRIOR), OnlineCostModel(PRIOR)
    for one in (model, other):
        serve(one, PRIOR, 330, seed=1)
    rng = np.random.default_rng(2)
    probe = batch(rng)
    model.observe(probe, 1e4)
    other.observe(probe, CLIP * float(other.batch_time(probe)))
    for one in (model, other):
        serve(one, PRIOR, 22, seed=3)
    assert model.batch_time(probe) == pytest.approx(other.batch_time(probe))
    assert model.batch_time(probe) == pytest.approx(PRIOR.batch_time(probe), rel=0.03)


def test_it_follows_a_device_that_slows_down() -> None:
    model = OnlineCostModel(PRIOR)
    serve(model, PRIOR, 1000)
    assert serve(model, times(1.8), 6000, seed=4) == pytest.approx(1.0, abs=0.06)


def test_copies_beside_the_batch_teach_what_they_cost() -> None:
    true = dataclasses.replace(times(1.5), overlapped=True)
    prices = dataclasses.replace(true.coefficients, swapped_slot=2e-6)
    true = dataclasses.replace(true, coefficients=prices)
    prior = dataclasses.replace(PRIOR, overlapped=True)
    known = dataclasses.replace(prior.coefficients, swapped_slot=1e-6)
    model = OnlineCostModel(dataclasses.replace(prior, coefficients=known))
    rng = np.random.default_rng(0)
    for i in range(600):
        slots = int(rng.integers(3000, 9000)) if i % 3 == 0 else int(rng.integers(0, 40))
        features = batch(rng)._replace(loaded_slots=slots, saved_slots=slots // 2)
        model.observe(features, float(true.batch_time(features)))
    assert model.model.overlapped
    assert model.model.coefficients.swapped_slot == pytest.approx(2e-6, rel=0.02)
    probe = batch(rng)
    assert model.batch_time(probe) == pytest.approx(true.batch_time(probe), rel=0.02)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), spread=st.floats(0, 3), steps=st.integers(1, 120))
def test_no_prediction_is_negative_or_infinite(seed: int, spread: float, steps: int) -> None:
    rng = np.random.default_rng(seed)
    model = OnlineCostModel(PRIOR)
    for _ in range(steps):
        model.observe(batch(rng), float(1e-3 * np.exp(spread * rng.normal())))
    found = float(model.batch_time(batch(rng)))
    assert np.isfinite(found) and found >= 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_step_takes_a_positive_time(seconds: float) -> None:
    with pytest.raises(ValueError, match="positive time"):
        OnlineCostModel(PRIOR).observe(batch(np.random.default_rng(0)), seconds)


def test_a_view_predicts_batches_as_they_will_be_padded() -> None:
    from tests.sched.driver import Drive

    view = dataclasses.replace(Drive("sarathi", cost_model=PRIOR).scheduler.view, padding=PADDING)
    counts, contexts = np.array([1, 5]), np.array([40, 0])
    plain = BatchFeatures.from_rows(counts, contexts, np.array([True, False]))
    padded = plain._replace(padded_tokens=64)
    assert view.step_time(plain) == PRIOR.batch_time(padded) > PRIOR.batch_time(plain)
    decodes = BatchFeatures.of_decodes(np.array([1, 5, 64]), np.array([10, 10, 10]))
    expected = [
        float(PRIOR.batch_time(BatchFeatures(n, size, 10, n, 0, 0, 0)))
        for n, size in ((1, 1), (5, 8), (64, 64))
    ]
    assert view.step_time(decodes).tolist() == pytest.approx(expected)
