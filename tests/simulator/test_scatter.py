"""How far steps are from their cost model: what is kept of it, and what is drawn."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxserve.sched.cost.cost_model import BatchFeatures
from jaxserve.sched.cost.host_overhead import HostOverhead
from jaxserve.sched.cost.profiles import System
from jaxserve.sched.cost.served_steps import ServedSteps
from jaxserve.sched.cost.step_residuals import LOTS, RUN, Draws, Scatter, first_lot, fit_scatter
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.workload import Lengths, Workload, all_at_once, poisson_arrivals
from tests.simulator.grouped import simulate

STEPS = 4000
SEVEN = system("llama-2-7b@a100").cost_model
DECODES = np.array([SEVEN.batch_time(BatchFeatures(1, 1, kv, 1, 0, 0, 0)) for kv in range(1, 301)])


def noise(seed: int = 0) -> np.ndarray:
    """Factors of mean 1 of which a slow one is followed by slow ones, float64 [STEPS]."""
    rng, found = np.random.default_rng(seed), np.zeros(STEPS)
    for place in range(1, STEPS):
        found[place] = 0.8 * found[place - 1] + rng.normal(scale=0.2)
    factors = np.exp(found)
    return factors / factors.mean()


def steps(prompts: np.ndarray, factors: np.ndarray) -> ServedSteps:
    """Of one request each; prompts: which of them compute one; factors: of the predicted time."""
    count, zero = len(prompts), np.zeros(len(prompts), np.int64)
    kv = np.arange(count) % 300 + 1
    features = BatchFeatures(
        num_tokens=np.where(prompts, 16, 1),
        padded_tokens=np.where(prompts, 16, 1),
        decode_kv=np.where(prompts, 0, kv),
        num_decodes=np.where(prompts, 0, 1),
        prefill_quad=np.where(prompts, 256, 0),
        num_prefills=np.where(prompts, 1, 0),
        prefill_m=zero,
    )
    features = BatchFeatures(*(np.broadcast_to(feature, count) for feature in features))
    others = {f.name: zero for f in dataclasses.fields(ServedSteps)}
    times = SEVEN.batch_time(features) * factors
    others |= {"features": features, "device_time": times, "after_idle": zero > 0}
    return ServedSteps(**others)


def fitted(prompts: np.ndarray, factors: np.ndarray) -> Scatter:
    found = fit_scatter(steps(prompts, factors), SEVEN, HostOverhead())
    assert found is not None
    return found


def test_each_kind_has_its_own_residuals_and_they_follow_each_other() -> None:
    prompts, factors = np.arange(STEPS) % 4 == 0, noise()
    factors[prompts] = 1.5  # always the same
    found = fitted(prompts, factors)
    assert found.factors[-1] == pytest.approx(1.5)
    levels = (50, 90, 99)
    want = np.percentile(factors[~prompts], levels)
    draws, decodes = Draws(found, 0, 0), DECODES[np.arange(LOTS) % 300]
    drawn = draws.residuals(0, decodes, prompts=False)
    assert np.percentile(drawn, levels) == pytest.approx(want, rel=0.1)
    served = np.log(factors[~prompts])
    like, found_like = (np.corrcoef(x[:-1], x[1:])[0, 1] for x in (served, np.log(drawn)))
    assert found_like > 0.5 * like > 0.3, "a slow step is followed by slow ones"
    long = np.full(9, 1.0)
    assert draws.residuals(0, long, prompts=True) == pytest.approx(1.5)
    assert (draws.residuals(7, decodes[7:9], prompts=False) == drawn[7:9]).all()
    assert (draws.residuals(LOTS + 7, decodes[7:9], prompts=False) == drawn[7:9]).all()


def test_all_steps_together_take_as_long_as_they_did() -> None:
    factors = noise() * np.linspace(2.0, 0.5, 300)[np.arange(STEPS) % 300]  # by their size
    prompts = np.zeros(STEPS, bool)
    served, found = steps(prompts, factors), fitted(prompts, factors)
    expected = SEVEN.batch_time(served.features)
    total = float(np.minimum(served.device_time, 5 * expected).sum())
    drawn = Draws(found, 0, 0).residuals(0, np.resize(expected, LOTS), prompts=False)
    drawn_total = float((np.resize(expected, LOTS) * drawn).sum()) * STEPS / LOTS
    assert drawn_total == pytest.approx(total, rel=0.03)


def test_a_kind_that_hardly_came_varies_as_all_do() -> None:
    prompts = np.arange(STEPS) == 5
    found = fitted(prompts, noise())
    want = np.percentile(noise(), (50, 90, 99))
    assert np.percentile(found.factors[-1], (50, 90, 99)) == pytest.approx(want, rel=0.05)
    assert fit_scatter(steps(prompts[:9], noise()[:9]), SEVEN, HostOverhead()) is None


def test_the_seed_says_what_is_drawn_and_replicas_are_apart() -> None:
    found = fitted(np.zeros(STEPS, bool), noise())
    assert (found.lots(3) == found.lots(3)).all() and (found.lots(3) != found.lots(4)).any()
    assert found.lots(0).shape == (2, LOTS) and LOTS > 100 * RUN
    some = DECODES[:9]
    one, two = (Draws(found, 3, replica).residuals(0, some, prompts=False) for replica in (0, 1))
    assert (one != two).any()
    assert (two == Draws(found, 3, 0).residuals(first_lot(1), some, prompts=False)).all()


def run(policy: str, workload: Workload, scatter: Scatter | None, **how: Any) -> Any:
    place = System("noisy", SEVEN, kv_tokens=4000, max_batch_tokens=256, scatter=scatter)
    return simulate(policy, workload, place, **how)


@pytest.mark.parametrize(("policy", "replicas"), [("sarathi", 1), ("vllm", 2)])
def test_all_ways_to_simulate_draw_the_same(policy: str, replicas: int) -> None:
    rng = np.random.default_rng(1)
    lengths = Lengths(rng.integers(1, 200, 60), rng.integers(2, 40, 60))
    workload = Workload.create(poisson_arrivals(3.0, 60, rng), lengths)
    scatter = fitted(np.arange(STEPS) % 4 == 0, noise())
    how = {"replicas": replicas, "seed": 3}
    ways = [
        run(policy, workload, scatter, **how, **way)
        for way in ({"compiled": True}, {"compiled": False}, {"compiled": False, "coast": False})
    ]
    for other in ways[1:]:
        assert (other.requests.token_times == ways[0].requests.token_times).all()
        assert (other.batches.duration == ways[0].batches.duration).all()
    assert all(way.seed_read for way in ways), "another seed is another run"
    again = run(policy, workload, scatter, **(how | {"seed": 4}))
    assert (again.requests.token_times != ways[0].requests.token_times).any()
    assert not run(policy, workload, None, **how).seed_read


def test_tails_are_predicted() -> None:
    """Of one request, whose steps take what the model says, times what is drawn."""
    lengths = Lengths(np.array([4]), np.array([3000]))
    workload, factors = Workload.create(all_at_once(1), lengths), noise()
    found = run("sarathi", workload, fitted(np.zeros(STEPS, bool), factors))
    plain = run("sarathi", workload, None)
    ratio = found.batches.duration / plain.batches.duration
    assert np.percentile(ratio, 99) == pytest.approx(np.percentile(factors, 99), rel=0.15)
    assert ratio.mean() == pytest.approx(1.0, rel=0.1)
