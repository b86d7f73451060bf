"""The runs of `python -m jaxserve_lab.experiments.bros`, and what is measured of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from jaxserve.sched.cost.cost_model import Coefficients, LinearCostModel
from jaxserve.sched.policy import Policy
from jaxserve.sched.registry import make_policy
from jaxserve.sched.slo.metrics import Times
from jaxserve.simulator.settings import EngineOptions, TrafficOptions
from jaxserve.simulator.simulator import simulate
from jaxserve.simulator.workloads.workload import Lengths, Workload
from jaxserve_lab.experiments.bros import case as mixed
from jaxserve_lab.experiments.bros.case import MixedCase, latency_of, run, within_tpot
from jaxserve_lab.experiments.bros.claims import MODELS, Bros, Scale
from jaxserve_lab.experiments.claims.cases import Numbers, Timed
from jaxserve_lab.experiments.common.figures import Panel, chart
from jaxserve_lab.experiments.common.runs import Results

SECOND = LinearCostModel(Coefficients(0, 1.0, 0, 0, 0, 0, 0, 0, 0), 1)  # every batch takes 1 s
CASE = MixedCase("priority", MODELS["OPT-13B"], "sharegpt", 4.0, duration=10.0, batch=3)


def test_who_has_not_ended_counts_with_its_time_so_far() -> None:
    workload = Workload.create(np.array([0.0, 2.0]), Lengths(np.array([4, 4]), np.array([2, 20])))
    result = simulate(
        "vllm",
        workload,
        SECOND,
        engine=EngineOptions(kv_tokens=99, overlap=False),
        traffic=TrafficOptions(until=7.0),
    )
    everybody = np.ones(2, bool)
    assert latency_of(result, everybody, 7.0) == pytest.approx((2 / 2 + 5 / 20) / 2)
    assert latency_of(result, np.array([False, True]), 7.0) == pytest.approx(5 / 20)


def test_time_per_output_token_is_a_mean_of_each_request() -> None:
    """0.2 s is the target: a mean of 0.2, one of 0.25, one token alone, and one that goes on."""
    due = np.zeros(4)
    tokens = [[1.0, 1.1, 1.4], [1.0, 1.25], [1.0], [2.0, 2.1]]
    times = Times.from_tokens(due, tokens, [True, True, True, False])
    assert within_tpot(times) == pytest.approx(2 / 3)
    going = np.array([False, False, False, True])
    for end, share in ((2.3, 2 / 3), (2.5, 1 / 3)):
        cut = dataclasses.replace(times, going=going, end=end)
        assert within_tpot(cut) == pytest.approx(share)
    assert within_tpot(times.select(np.array([False, False, True, False]))) == 1.0


def test_numbers_of_a_run() -> None:
    found = run(dataclasses.replace(CASE, timed=True))
    assert found["ttft"] == found["tpot"] == found["tbt"] == 1.0
    assert 0.01 < found["latency"] < 0.1 and 0.5 < found["ended"] < 1.0
    assert found["best_effort"] > 1.0 and 80 < found["tokens"] / found["best_effort"] < 120
    assert found["saved"] == found["loaded"] == found["shared"] == found["recomputed"] == 0
    assert 0 < found["plan"] < 1 and found["plan_p99"] > 0
    plain = run(CASE)
    assert found | {"plan": 0.0, "plan_p99": 0.0} == plain
    assert run(dataclasses.replace(CASE, seed=1)) != plain


def test_timing_a_policy_leaves_what_it_says_of_itself() -> None:
    for name in ("priority", "aptserve", "orca"):
        policy = make_policy(name)
        said = [key for key, value in vars(Policy).items() if isinstance(value, bool)]
        assert len(said) >= 5
        timed = Timed(policy)
        assert [getattr(timed, n) for n in said] == [getattr(policy, n) for n in said]


def page_of(scale: Scale) -> Bros:
    return Bros(scale, Results(run, lambda _: dict))


def test_a_case_is_the_papers_setting() -> None:
    part = page_of(Scale())
    points = [tuple(at.values()) for at in part.where["all"].values()]
    assert {("sharegpt", "OPT-30B", 10.0), ("lmsys", "Llama-3-70B", 15.0)} <= set(points)
    first, *_, last = part.cases("vllm", "OPT-13B", "sharegpt", 4.0)
    assert (first.duration, first.batch, first.timed) == (600.0, 256, True)
    assert (first.seed, last.seed, last.system) == (0, 2, "opt-13b@2xa100-40g")
    (alone,) = part.cases("vllm", "OPT-13B", "lmsys", 4.0)
    assert not alone.timed
    assert first.named() == {
        "policy": "vllm",
        "system": "opt-13b@2xa100-40g",
        "workload": "sharegpt",
        "rate": 4.0,
        "batch": 256,
        "timed": True,
    }
    assert (mixed.TTFT, mixed.TPOT) == (0.4, 0.2)


def worth(latency: float, best_effort: float, ttft: float, tbt: float) -> Numbers:
    found = {"latency": latency, "best_effort": best_effort, "ttft": ttft, "tbt": tbt}
    return {**found, "tpot": 0.9, "step": 0.05}


def test_what_is_said_of_numbers() -> None:
    scale = Scale()
    scale.seeds, scale.models, scale.data_sets, scale.steps = (
        (1,),
        ("OPT-13B",),
        ("sharegpt",),
        (1,),
    )
    numbers = {
        "bros": worth(0.05, 4.0, 0.9, 0.80),
        "round_robin": worth(0.10, 5.0, 0.3, 0.50),
        "vllm": worth(0.20, 4.0, 0.0, 0.81),
        "priority": worth(0.0505, 4.5, 0.89, 0.80),
        "edf": worth(0.04, 1.0, 0.9, 0.80),
    }
    page = page_of(scale)
    for policy, found in numbers.items():
        for case in page.cases(policy, "OPT-13B", "sharegpt", 10.0):
            page.results._found[case] = found
    # Latency and throughput relative to the other's; attainments as differences.
    for other, said in {
        "vllm": ["-75.0%", "+0.0%", "+90.0", "-1.0"],
        "round_robin": ["-50.0%", "-20.0%", "+60.0", "+30.0"],
        "priority": ["-1.0%", "-11.1%", "+1.0", "+0.0"],
        "edf": ["+25.0%", "+300.0%", "+0.0", "+0.0"],
    }.items():
        assert [page.of[f"{number}, {other}"].mean for number in page.counted] == said
    assert [page.as_good("bros", other) for other in page.others] == [0, 1, 0, 0]
    assert [page.as_good(other, "bros") for other in page.others] == [0, 0, 1, 0]
    assert page.of["latency, priority"].at_least(0) == 0
    assert page.of["best_effort, priority"].ahead == 0
    assert page.of["ttft, vllm, sharegpt"].shares == "more (90.0% for 0.0%)"
    assert page.of["ttft, round_robin, sharegpt"].shares == "3.00x (90.0% for 30.0%)"
    assert page.of["ttft, edf"].at_most(0.02) == 1 and page.results.complete


def test_means_over_seeds_have_intervals() -> None:
    page = page_of(Scale())
    cases = [dataclasses.replace(CASE, seed=seed) for seed in range(3)]
    for case, step in zip(cases, (0.01, 0.02, 0.03), strict=True):
        page.results._found[case] = {"step": step}
    # Student's t, two degrees of freedom: 4.303 * 10 / 3**0.5.
    assert page.cells(cases, [("step", ".1f", 1e3)]) == ["20.0 ±24.8"]
    assert page.cells(cases[:1], [("step", ".1f", 1e3)]) == ["10.0"]


def test_the_same_numbers_give_the_same_svg(tmp_path: Path) -> None:
    panel = Panel("one", "share", {"vllm": ((1.0, 2.0), (0.1, 0.4))}, log_y=False)
    for name in ("a", "b"):
        chart(tmp_path / name / "x.svg", [[panel]], "rate", log_x=False)
    first, second = ((tmp_path / name / "x.svg").read_text() for name in ("a", "b"))
    assert first == second and "<svg" in first and "<dc:date>" not in first
