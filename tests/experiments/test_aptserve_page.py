"""`python -m jaxserve.experiments.aptserve` at toy size, and the page in docs/."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jaxserve.experiments.aptserve import page as aptserve
from jaxserve.experiments.aptserve.case import (
    OnlineCase,
    OnlineNumbers,
    place_of,
    run,
    workload_of,
)
from jaxserve.experiments.aptserve.page import MODELS, SLOS, AptServe, Scale, cheapest
from jaxserve.experiments.common.runs import Results
from jaxserve.sched.simulation.systems.systems import system
from jaxserve.sched.workloads.workload import Lengths

DOCS = Path(__file__).parents[2] / "docs"
PNG = b"\x89PNG"


def refuse(case: OnlineCase) -> OnlineNumbers:
    raise AssertionError(f"{case} was simulated")


def figures_of(page: str) -> list[str]:
    return [line.split("](")[1].rstrip(")") for line in page.splitlines() if line[:2] == "!["]


@pytest.mark.slow
def test_the_experiment_at_toy_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--quick", "--jobs=1"]
    assert aptserve.main([*arguments, f"--out={tmp_path}"]) == 0
    page = (tmp_path / "aptserve.md").read_text()
    for number in range(1, 12):
        assert f"\n## {number}. " in page
    assert "Toy sizes" in page and str(tmp_path) not in page
    named = figures_of(page)
    assert len(named) == 6
    for name in named:
        assert (tmp_path / name).read_bytes().startswith(PNG)
    numbers = tmp_path / "figures" / "aptserve.json"
    runs = json.loads(numbers.read_text())
    assert len({json.dumps(run["case"]) for run in runs}) == len(runs)
    # The same numbers give the same page, and nothing is simulated or timed again.
    monkeypatch.setattr(aptserve, "run", refuse)
    again = tmp_path / "again"
    assert aptserve.main([*arguments, f"--out={again}", f"--numbers={numbers}"]) == 0
    assert (again / "aptserve.md").read_text() == page
    numbers.write_text("[1]")
    assert aptserve.main([*arguments, f"--out={again}", f"--numbers={numbers}"]) == 2


@pytest.mark.slow
def test_the_page_is_what_its_numbers_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aptserve, "run", refuse)
    numbers = DOCS / "figures" / "aptserve.json"
    assert aptserve.main(["--jobs=1", f"--out={tmp_path}", f"--numbers={numbers}"]) == 0
    page = (DOCS / "aptserve.md").read_text()
    assert (tmp_path / "aptserve.md").read_text() == page
    for name in figures_of(page):
        assert (DOCS / name).read_bytes().startswith(PNG)


def test_a_case_is_the_papers_setting() -> None:
    page = AptServe(Scale(requests=50), Results(run, lambda _: OnlineNumbers), Path())
    case = page.case("aptserve, absorbed", "30B", "humaneval", 7.0)
    assert (case.ttft, case.tbt) == SLOS["30B", "humaneval"] == (1.0, 0.5)
    assert place_of(case) == system(MODELS["30B"], "absorbed")
    assert (case.policy, case.requests, case.rate) == ("aptserve", 50, 7.0)


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
    assert found.attainment == found.ttft_attainment == found.tbt_attainment == 1.0
    assert found.hidden == 0.0 and found.preemptions == 0
    assert found.ttft_quantiles[0] <= found.ttft_p50 <= found.ttft_p99 <= found.ttft_quantiles[-1]
    assert 0 < found.tbt_quantiles[0] <= found.tbt_quantiles[-1] < 0.5
    late = run(OnlineCase("vllm", MODELS["13B"], "humaneval", 2, 1e-6, 0.5, requests=20))
    assert (late.attainment, late.ttft_attainment, late.tbt_attainment) == (0.0, 0.0, 1.0)


def test_plan_times_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    assert aptserve.load_times(path, (50,)) is None
    aptserve.dump_times({"decode": {"50": 0.1}}, path)
    assert aptserve.load_times(path, (50,)) == {"decode": {"50": 0.1}}
    assert aptserve.load_times(path, (50, 100)) is None
    path.write_text("[]")
    with pytest.raises(ValueError, match="not the times"):
        aptserve.load_times(path, (50,))


def test_what_the_cheapest_requests_take() -> None:
    same = Lengths(np.full(10, 30), np.full(10, 20))
    assert cheapest(same, 0.6) == pytest.approx(0.6)
    # 2 x (9 + 1) = 20 and 10 x (3 + 5) = 80 of 100: the shorter prompt is the dearer request.
    assert cheapest(Lengths(np.array([9, 3]), np.array([2, 10])), 0.5) == pytest.approx(0.2)
