"""Predicted waits against what became of the requests, and what it is worth to refuse by them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from jaxserve.sched.policy import Limits
from jaxserve.sched.request import SLO, Tier
from jaxserve.sched.slo.classes import with_targets
from jaxserve.sched.slo.slo_columns import SloColumns
from jaxserve.simulator.results import SimulationResult
from jaxserve.simulator.settings import REFUSED, EngineOptions, RunOptions
from jaxserve.simulator.simulate import cli as command
from jaxserve.simulator.simulator import SimulationError, simulate
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.lengths import sampler
from jaxserve.simulator.workloads.workload import Workload, poisson_arrivals
from tests.simulator.grouped import grouped

TTFT, ROWS = 2.0, 32
PLACE = "llama-3-8b@a100"
CHUNKS, WHOLE = Limits(2048, 512, ROWS), Limits(4096, 4096, ROWS)


def load(rate: float, count: int = 500, slo: SLO | None = None) -> Workload:
    """ShareGPT's lengths; this place serves about ten a second."""
    rng = np.random.default_rng(1)
    arrival, lengths = poisson_arrivals(rate, count, rng), sampler("sharegpt")(count, rng)
    terms = with_targets(SloColumns.none(count), slo or SLO(ttft=TTFT))
    return Workload.create(arrival, lengths, terms=terms)


def served(
    policy: str, workload: Workload, share: float | None, kv_tokens: int | None = None
) -> SimulationResult:
    limits = WHOLE if policy in ("vllm", "bros") else CHUNKS
    how = {"limits": limits, "kv_tokens": kv_tokens, "compiled": False}
    return simulate(policy, workload, system(PLACE), **grouped(refuse_late=share, **how))


def ratios(result: SimulationResult) -> np.ndarray:
    """Actual over predicted, of those served once outputs are known."""
    assert result.expected is not None
    found = result.requests.ttft / result.expected
    return np.asarray(found[len(found) // 3 :][~result.requests.refused[len(found) // 3 :]])


@pytest.mark.parametrize("policy", ["sarathi", "vllm"])
def test_without_a_queue_it_is_right_to_the_step(policy: str) -> None:
    found = ratios(served(policy, load(4.0, 200), math.inf))
    assert np.median(found) == pytest.approx(1.0, abs=0.02)
    assert np.quantile(np.abs(np.log(found)), 0.9) < 0.35


def test_rows_that_are_waited_for() -> None:
    """Those who are taken wait for up to two seconds, and know it to within a third."""
    result = served("sarathi", load(15.0), 1.0)
    assert result.requests.refused.sum() > 100
    found = ratios(result)
    assert 0.9 < np.median(found) < 1.15
    assert np.quantile(np.abs(np.log(found)), 0.8) < math.log(4 / 3)


def test_blocks_that_are_waited_for() -> None:
    """It errs to the short side, for caches grow and are preempted; and not by half."""
    result = served("vllm", load(15.0), 1.0, kv_tokens=8000)
    assert result.summary()["num_preemptions"] > 50
    assert result.requests.refused.sum() > 100
    assert 0.6 < np.median(ratios(result)) < 2.0


@pytest.mark.parametrize(("policy", "count", "times"), [("sarathi", 300, 2), ("edf", 180, 1)])
def test_who_refuses_serves_more_in_time(policy: str, count: int, times: float) -> None:
    """In order of arrival it is worth a lot."""
    workload = load(15.0, count)
    all_of_them, some = (served(policy, workload, share).summary() for share in (math.inf, 0.75))
    assert all_of_them["num_refused"] == 0 < some["num_refused"]
    assert some["goodput_per_s"] >= times * all_of_them["goodput_per_s"]


def test_a_target_for_the_whole_job_bounds_its_first_token() -> None:
    some = [SLO(ttft=0.5), SLO(jct=0.5), SLO(ttft=9.0, jct=0.5)]
    refused = [served("sarathi", load(15.0, 200, slo), 0.5).requests.refused for slo in some]
    assert refused[0].any() and all((one == refused[0]).all() for one in refused)


@pytest.mark.parametrize("slo", [SLO(), SLO(tbt=0.01)])
def test_without_a_target_for_the_first_token_nobody_is_refused(slo: SLO) -> None:
    assert not served("sarathi", load(15.0, 200, slo), 0.5).requests.refused.any()


def test_best_effort_requests_wait() -> None:
    mine = load(15.0, 300)
    mine.tier[1::2] = Tier.BEST_EFFORT
    result = served("priority", mine, 0.5)
    assert (result.requests.replica[1::2] != REFUSED).all()
    assert result.requests.finished[1::2].all()


def test_predicting_changes_nothing() -> None:
    workload = load(12.0, 200)
    plain, told = served("sarathi", workload, None), served("sarathi", workload, math.inf)
    assert plain.expected is None and told.expected is not None
    assert np.array_equal(plain.requests.token_times, told.requests.token_times)


def test_the_command_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--policy=sarathi", "--workload=fixed:512x64x200", "--rate=60", "--slo_ttft_ms=500"]
    argv += ["--max_rows=8", "--json", "--seeds=1", "--refuse_late=0.75"]
    assert command.main(argv) == 0
    (point,) = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["points"]
    assert 0 < point["mean"]["num_refused"] < 200
    with pytest.raises(SystemExit):
        command.main([*argv, "--refuse_late=-1"])
    assert "--refuse_late: must be at least 0" in capsys.readouterr().err
    with pytest.raises(SimulationError, match="refuse_late must be at least 0, got nan"):
        simulate("vllm", load(4.0, 10), system(PLACE), engine=EngineOptions(refuse_late=math.nan))


def test_compiled_simulations_do_not_predict() -> None:
    with pytest.raises(SimulationError, match="predict"):
        simulate(
            "vllm",
            load(4.0, 10),
            system(PLACE),
            engine=EngineOptions(refuse_late=1.0),
            run=RunOptions(compiled=True),
        )
