"""Cost models and host terms from served steps."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxserve.sched.cost.cost_model import BatchFeatures, Coefficients, LinearCostModel
from jaxserve.sched.cost.cost_model_fit import FitError
from jaxserve.sched.cost.host_overhead import HostOverhead
from jaxserve.sched.cost.served_steps import (
    LEAST_STEP_S,
    MIN_STEPS,
    ServedSteps,
    fit_device,
    fit_host,
)

TRUE = LinearCostModel(
    Coefficients(
        *(3e-6, 4e-4, 2e-8, 1e-5, 3e-6, 2e-9, 2e-5, 4e-6, 1e-8), hidden_token=5e-8, batch_bias=2e-4
    ),
    4,
)
HOST = HostOverhead(2e-4, 3e-6, 4e-4, 5e-6, 2e-5, 1e-4, 1e-4, 8e-6, 3e-4, 3e-5, 2e-5, 5e-4)


def served(count: int = 400, noise: float = 0.0, seed: int = 0) -> ServedSteps:
    """Steps on a device as TRUE and a host as HOST say; every tenth one after idle."""
    rng = np.random.default_rng(seed)
    decodes = rng.integers(0, 17, count)
    chunk = rng.integers(0, 60, count) * (rng.random(count) < 0.4) + (decodes == 0)
    before = rng.integers(0, 200, count) * (chunk > 0)
    features = BatchFeatures(
        num_tokens=decodes + chunk,
        padded_tokens=np.where(decodes + chunk == 1, 1, (decodes + chunk + 7) // 8 * 8),
        decode_kv=decodes * rng.integers(1, 300, count),
        num_decodes=decodes,
        prefill_quad=chunk * (chunk + 2 * before),
        num_prefills=(chunk > 0).astype(int),
        prefill_m=before,
        **{name: np.zeros(count) for name in NOT_SEEN},
    )
    live, rows = rng.integers(1, 60, count), decodes + features.num_prefills
    admitted, moves = rng.integers(0, 4, count), rng.integers(0, 2, count)
    received = rng.integers(0, 3, count)
    emitting, idle = np.maximum(rows - 1, 0), np.arange(count) % 10 == 0

    def disturbed(seconds: np.ndarray) -> np.ndarray:
        return seconds * (1 + noise * rng.standard_normal(count))

    return ServedSteps(
        features,
        disturbed(TRUE.batch_time(features) + HOST.idle * idle),
        disturbed(HOST.wake * idle),
        disturbed(HOST.receive + HOST.receive_row * received),
        disturbed(HOST.plan + HOST.plan_row * live),
        disturbed(HOST.launch + HOST.launch_row * rows + HOST.admit * admitted + HOST.move * moves),
        disturbed(HOST.finish + HOST.finish_row * emitting),
        live,
        received,
        rows,
        admitted,
        moves,
        emitting,
        idle,
    )


HOST_TIMES = ("wake_time", "receive_time", "plan_time", "launch_time", "finish_time")
NOT_SEEN = (
    "hidden_tokens",
    "projected_tokens",
    "copied_slots",
    "saved_slots",
    "loaded_slots",
    "hidden_prefill",
    "sampled_rows",
    "adapted_tokens",
)


def scaled(model: LinearCostModel, factor: float) -> LinearCostModel:
    values = {name: factor * value for name, value in model.coefficients.as_dict().items()}
    return LinearCostModel(Coefficients(**values), model.num_layers)


def test_what_made_the_steps_is_found_again() -> None:
    steps = served()
    model = fit_device(steps, scaled(TRUE, 3.0))
    for name, value in TRUE.coefficients.as_dict().items():
        assert getattr(model.coefficients, name) == pytest.approx(value, rel=1e-3), name
    host = fit_host(steps, model)
    for name, value in HOST.as_dict().items():
        assert getattr(host, name) == pytest.approx(value, rel=1e-2), name


def test_noise_does_not_pull_the_times_down() -> None:
    steps = served(4000, noise=0.25)
    model = fit_device(steps, TRUE)
    total, measured = model.batch_time(steps.features).sum(), steps.device_time.sum()
    assert total == pytest.approx(measured, rel=0.03)


def test_what_no_step_shows_is_the_priors_times_what_the_others_say() -> None:
    model = fit_device(served(), scaled(TRUE, 2.0))
    assert model.coefficients.hidden_token == pytest.approx(
        TRUE.coefficients.hidden_token, rel=1e-3
    )


def test_a_stopped_process_changes_little() -> None:
    steps = served()
    for name in ("device_time", "receive_time", "plan_time", "launch_time", "finish_time"):
        getattr(steps, name)[[50, 333]] += 60.0
    probe = steps.features
    model, host = fit_device(steps, TRUE), fit_host(steps, TRUE)
    assert model.batch_time(probe) == pytest.approx(TRUE.batch_time(probe), rel=0.04)
    assert host.plan + 30 * host.plan_row == pytest.approx(HOST.plan + 30 * HOST.plan_row, rel=0.05)


def test_without_overlap_every_step_is_after_idle_and_counts() -> None:
    steps = served()
    steps = dataclasses.replace(steps, after_idle=np.ones(len(steps), bool))
    model = fit_device(steps, TRUE)
    assert model.batch_time(steps.features).sum() == pytest.approx(
        steps.device_time.sum(), rel=0.02
    )
    assert fit_host(steps, model).idle == 0.0


def test_prompts_that_only_come_when_nothing_runs_say_what_prompts_take() -> None:
    steps = served(2000, noise=0.1)
    steps = steps.select(steps.after_idle | (steps.features.num_prefills == 0))
    prompts = steps.features.num_prefills > 0
    assert steps.after_idle[prompts].all()
    wrong = dataclasses.replace(TRUE.coefficients, per_token=3e-5, prefill_bias=3e-4)
    model = fit_device(steps, LinearCostModel(wrong, TRUE.num_layers))
    host = fit_host(steps, model)
    found = model.batch_time(steps.features)[prompts].sum() + host.idle * prompts.sum()
    assert found == pytest.approx(steps.device_time[prompts].sum(), rel=0.05)


def test_cold_caches_are_part_of_waking_up() -> None:
    steps = served()
    cold = 4e-4 * (steps.wake_time > 0)
    steps = dataclasses.replace(steps, launch_time=steps.launch_time + cold)
    host = fit_host(steps, TRUE)
    assert host.wake == pytest.approx(HOST.wake + 4e-4, rel=0.15)


def test_who_slept_hardly_ever_says_nothing_of_it() -> None:
    steps = served()
    steps = dataclasses.replace(steps, wake_time=steps.wake_time * (np.arange(len(steps)) < 20))
    assert fit_host(steps, TRUE).wake == 0.0


def test_a_clock_that_stands_still_on_the_host_says_that_it_takes_no_time() -> None:
    steps = served()
    nothing = np.zeros(len(steps))
    still = dict.fromkeys(HOST_TIMES, nothing)
    steps = dataclasses.replace(steps, after_idle=nothing > 0, **still)
    assert fit_host(steps, TRUE) == HostOverhead()
    assert fit_host(steps.select(np.zeros(0, np.int64)), TRUE) == HostOverhead()


def test_a_step_of_a_token_takes_some_time_whatever_the_others_say() -> None:
    """As where a busy machine leaves nothing to what is common to all steps."""
    nothing = Coefficients(*[0.0] * 9, batch_bias=1e-3)
    steps = served()
    steps = steps.select(steps.features.padded_tokens > 1)
    steps = dataclasses.replace(steps, device_time=np.full(len(steps), 4e-3))
    model = fit_device(steps, LinearCostModel(nothing, 4))
    for one in (BatchFeatures(1, 1, 1, 1, 0, 0, 0), BatchFeatures(1, 1, 0, 0, 1, 1, 0)):
        assert model.batch_time(one) == pytest.approx(LEAST_STEP_S)


def test_too_few_steps_are_refused() -> None:
    steps = served().select(np.arange(MIN_STEPS - 1))
    with pytest.raises(FitError, match="at least 10 steps are needed, there are 9"):
        fit_device(steps, TRUE)
