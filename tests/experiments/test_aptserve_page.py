"""What docs/aptserve.md is made of: its cases, their numbers, and the times of plans."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxserve.simulator.systems.systems import system
from jaxserve_lab.experiments.aptserve import claims as aptserve
from jaxserve_lab.experiments.aptserve.case import OnlineCase, place_of, run, workload_of
from jaxserve_lab.experiments.aptserve.claims import MODELS, SLOS, AptServe, Scale
from jaxserve_lab.experiments.common.runs import Results


def test_a_case_is_the_papers_setting() -> None:
    page = AptServe(Scale(), Results(run, lambda _: dict))
    (case,) = page.cases("aptserve, absorbed", "30B", "humaneval", 7.0)
    assert (case.ttft, case.tbt) == SLOS["humaneval"]["30B"] == (1.0, 0.5)
    assert place_of(case) == system(MODELS["30B"], "absorbed")
    assert (case.policy, case.requests, case.rate) == ("aptserve", 1000, 7.0)


def test_every_system_gets_the_same_requests_at_every_rate() -> None:
    slow, fast = (
        workload_of(OnlineCase("vllm", MODELS["13B"], "sharegpt", rate, 1, 1)) for rate in (1, 4)
    )
    np.testing.assert_array_equal(slow.prompt_len, fast.prompt_len)
    np.testing.assert_array_equal(slow.output_len, fast.output_len)
    np.testing.assert_allclose(slow.arrival, 4 * fast.arrival)
    assert (slow.prompt_len + slow.output_len).max() == 2048


def test_a_hidden_token_can_be_made_cheaper() -> None:
    usual = OnlineCase("aptserve", MODELS["13B"], "sharegpt", 1, 1, 1, hidden_read="projected")
    cheap = OnlineCase(
        "aptserve", MODELS["13B"], "sharegpt", 1, 1, 1, hidden_read="projected", hidden_cost=0.25
    )
    costs = [place_of(case).cost_model.coefficients for case in (usual, cheap)]
    assert costs[1].hidden_token == pytest.approx(costs[0].hidden_token / 4)
    place = place_of(cheap)
    assert place.rho == pytest.approx(40 * (costs[1].hidden_token - costs[1].decode_kv))
    assert cheap.named() == {**usual.named(), "hidden_cost": 0.25}


def test_numbers_of_a_run() -> None:
    case = OnlineCase("vllm", MODELS["13B"], "humaneval", 2, 5.0, 0.5, requests=20, quantiles=True)
    found = run(case)
    shares = ("attainment", "ttft_attainment", "tbt_attainment")
    assert [found[name] for name in shares] == [1.0, 1.0, 1.0]
    assert found["hidden"] == 0.0 and found["preemptions"] == 0
    ttft, tbt = found["ttft_quantiles"], found["tbt_quantiles"]
    assert ttft[0] <= found["ttft_p50"] <= found["ttft_p99"] <= ttft[-1]
    assert 0 < tbt[0] <= tbt[-1] < 0.5
    late = run(OnlineCase("vllm", MODELS["13B"], "humaneval", 2, 1e-6, 0.5, requests=20))
    assert [late[name] for name in shares] == [0.0, 0.0, 1.0]


def test_plan_times_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    assert aptserve.load_times(path, (50,)) is None
    aptserve.dump_times({"decode": {"50": 0.1}}, path)
    assert aptserve.load_times(path, (50,)) == {"decode": {"50": 0.1}}
    assert aptserve.load_times(path, (50, 100)) is None
    path.write_text("[]")
    with pytest.raises(ValueError, match="not the times"):
        aptserve.load_times(path, (50,))
