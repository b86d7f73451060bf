"""The runs of `python -m jaxserve_lab.experiments.accelgen`, and what is measured of them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from jaxserve.sched.registry import make_policy
from jaxserve_lab.experiments.accelgen.case import (
    BATCH_TOKENS,
    LONG,
    SloCase,
    jct_targets,
    limits_of,
    run,
    simulated,
    workload_of,
)
from jaxserve_lab.experiments.accelgen.claims import AccelGen, Scale
from jaxserve_lab.experiments.accelgen.places import (
    PLACES,
    budget_of,
    implied_output,
    prefill_seconds,
    saturation,
)
from jaxserve_lab.experiments.accelgen.requests import EXCLUSIVE, READING
from jaxserve_lab.experiments.common.runs import Results

CASE = SloCase("sarathi", "OPT-13B", 1.0, 768, requests=12)


def test_caches_are_as_large_as_the_paper_has_them() -> None:
    # 12 GB of 2 x 2 x 40 x 5120 bytes a token, in blocks of 32.
    assert PLACES["OPT-13B"].kv_tokens == 12_000_000_000 // 819_200 // 32 * 32 == 14_624
    assert PLACES["OPT-13B"].kv_tokens == PLACES["Llama-13B"].kv_tokens
    for place in PLACES.values():
        assert place.longest + 2048 <= place.kv_tokens and place.longest <= 100_000
        assert place.host_tokens > place.kv_tokens


def test_every_rate_has_the_same_requests() -> None:
    slow, fast = workload_of(CASE), workload_of(replace(CASE, rate=8.0, policy="vllm"))
    assert fast.arrival == pytest.approx(slow.arrival / 8)
    for name in ("prompt_len", "output_len", "ttft", "tbt", "limit"):
        assert (getattr(fast, name) == getattr(slow, name)).all()
    other = workload_of(replace(CASE, seed=1))
    assert (other.prompt_len != slow.prompt_len).any()


def test_targets_are_scaled_as_in_the_paper() -> None:
    place, case = PLACES["OPT-13B"], replace(CASE, requests=4000)
    asked = workload_of(case)
    tbt = asked.tbt / READING
    assert tbt.min() >= 0.75 and tbt.max() <= 1.25 and tbt.mean() == pytest.approx(1, abs=0.02)
    alone = prefill_seconds(place, asked.prompt_len)
    group = (asked.prompt_len - 1) // 512
    for number in (0, 1, 3):
        scale = asked.ttft[group == number] / alone[group == number].mean()
        assert scale.min() >= 0.5 and scale.max() <= 1.5
        assert scale.mean() == pytest.approx(1, abs=0.05)
    chosen = workload_of(replace(case, choices=True)).tbt / READING
    assert set(np.unique(chosen)) == {0.25, 0.5, 1.0, 2.0}
    eased = workload_of(replace(case, ease=10.0))
    assert eased.ttft == pytest.approx(10 * asked.ttft) and (eased.tbt == asked.tbt).all()


def test_the_requests_of_figure_6() -> None:
    asked = workload_of(replace(CASE, rate=math.inf, data=EXCLUSIVE))
    assert len(asked) == 22 and (asked.arrival == 0).all()
    assert sorted(asked.prompt_len.tolist())[-2:] == [10_214, 10_252]
    assert (np.sort(asked.prompt_len)[:20] <= 384).all()


@pytest.mark.parametrize(
    ("policy", "batch", "prefill"),
    [
        ("sarathi", BATCH_TOKENS, 256),
        ("fastgen", 256, 256),
        ("infermax", 256, 256),
        ("vllm", 14_624, 14_624),
    ],
)
def test_a_budget_bounds_what_the_paper_says(policy: str, batch: int, prefill: int) -> None:
    limits = limits_of(replace(CASE, policy=policy, budget=256), make_policy(policy))
    assert (limits.max_batch_tokens, limits.max_prefill_tokens) == (batch, prefill)


def test_the_policy_itself_says_how_large_batches_are_without_a_budget() -> None:
    limits = limits_of(replace(CASE, policy="accelgen", budget=0), make_policy("accelgen"))
    assert limits.max_batch_tokens == BATCH_TOKENS


def test_numbers_are_of_the_run_they_say() -> None:
    found, result = run(CASE), simulated(CASE)
    times, asked = result.requests.times, result.requests.workload
    seconds = times.token_times.max() - times.due.min()
    assert found["jct_last"] == pytest.approx(seconds, rel=1e-4)
    assert found["tokens"] == pytest.approx(asked.output_len.sum() / seconds, rel=1e-4)
    assert found["requests"] == pytest.approx(12 / seconds, rel=1e-4)
    assert found["jct"] == pytest.approx(times.e2e.mean(), rel=1e-4)
    long = asked.prompt_len >= LONG
    assert found["jct_long"] == pytest.approx(times.e2e[long].mean(), rel=1e-4)
    assert found["goodput"] == pytest.approx(found["iterations"] * found["tokens"], rel=1e-3)
    assert found["in_jct"] == pytest.approx((times.e2e <= jct_targets(asked)).mean(), rel=1e-3)
    assert found["jobs"] == pytest.approx(found["in_jct"] * found["requests"], rel=1e-3)
    busy = np.minimum(result.batches.num_tokens, 768) / 768
    assert found["compute"] == pytest.approx(busy.mean(), rel=1e-3)
    assert 0 < found["compute"] < 1 and found["steps"] == () and found["plan"] == 0


def test_longer_ttfts_are_met_by_more() -> None:
    tight, loose = run(CASE), run(replace(CASE, ease=10.0, quantiles=True))
    assert loose["ttft"] > tight["ttft"] and loose["reachable"] == 1 > tight["reachable"]
    assert loose["jct"] == tight["jct"]  # Sarathi does not know
    assert list(loose["steps"]) == sorted(loose["steps"]) and len(loose["steps"]) == 51


def test_plans_are_timed_where_that_is_asked_for() -> None:
    plain, timed = (run(replace(CASE, requests=3, timed=timed)) for timed in (False, True))
    assert timed["plan_p99"] >= timed["plan"] > 0
    assert timed | {"plan": 0.0, "plan_p99": 0.0} == plain


@pytest.mark.parametrize(("number", "ease"), [("goodput", 1.0), ("met", 10.0)])
def test_the_best_setting_is_the_one_with_most_in_time(number: str, ease: float) -> None:
    page = AccelGen(Scale(), Results(run, lambda _: dict))
    assert page.best("vllm", "OPT-13B", ease) == ("vllm", 0)
    tried = page.tried("fastgen", "OPT-13B", ease)
    assert {budget for _, budget in tried} >= {128, PLACES["OPT-13B"].pivot, 2048}
    assert {case.ease for case in tried.values()} == {ease}
    wanted = list(tried)[3]
    for at, case in tried.items():
        assert page.best("fastgen", "OPT-13B", ease) is None
        page.results._found[case] = {number: 1e6 if at == wanted else float(case.budget)}
    assert page.best("fastgen", "OPT-13B", ease) == wanted


def test_a_search_finds_no_less_than_the_others_and_no_more_than_its_bound() -> None:
    case = replace(CASE, requests=4, ease=10.0)
    found = run(replace(case, policy="oracle:runs=2:portfolio=quick", budget=0))
    other = run(case)
    assert found["bound"] >= found["met"] >= other["met"] > 0
    assert other["bound"] == 0


def test_one_slo_for_all_is_a_budget() -> None:
    place = PLACES["OPT-13B"]
    for slo in (0.2, 1.0):
        size = budget_of(place, slo)
        before, after = prefill_seconds(place, np.array([size, size + 1]))
        assert before <= slo < after
    assert budget_of(place, 1e-6) == 1


def test_the_pivot_saturates() -> None:
    for place in PLACES.values():
        size = saturation(place)
        sizes = np.array([size - 1, size, *range(1, 2049)])
        rate = sizes / prefill_seconds(place, sizes)
        assert rate[0] < 0.95 * rate[2:].max() <= rate[1]


def test_utilisation_implies_how_long_outputs_are() -> None:
    place = PLACES["OPT-13B"]
    output = implied_output(place, 1800.0)
    rows = 0.83 * place.kv_tokens / (1800 + output / 2)
    assert rows * (1 + 1800 / output) == pytest.approx(0.64 * place.pivot, rel=1e-3)
    assert 10 < output < 50
