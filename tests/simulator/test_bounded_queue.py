"""The bounded queue: who finds it full is refused, and counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.cost.cost_model import Coefficients, LinearCostModel
from jaxserve.sched.cost.profiles import System
from jaxserve.sched.policy import Limits
from jaxserve.sched.request import SLO
from jaxserve.sched.slo.classes import with_targets
from jaxserve.sched.slo.slo_columns import SloColumns
from jaxserve.simulator import simulator
from jaxserve.simulator.figures import plots
from jaxserve.simulator.results import BatchRecords, RequestRecords, SimulationResult
from jaxserve.simulator.settings import BATCH, REFUSED
from jaxserve.simulator.simulate import cli as command
from jaxserve.simulator.simulator import SimulationError
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.workload import Lengths, Workload, all_at_once, fixed_lengths
from tests.simulator.grouped import simulate

SECOND = LinearCostModel(Coefficients(0, 1.0, 0, 0, 0, 0, 0, 0, 0), 1)  # every batch takes 1 s


def at(*arrival: float) -> Workload:
    """Requests of 4 tokens in and 3 out, with a target that all who are served attain."""
    terms = with_targets(SloColumns.none(len(arrival)), SLO(jct=60.0))
    return Workload.create(np.array(arrival), fixed_lengths(4, 3, len(arrival)), terms=terms)


def test_who_finds_rows_and_queue_full_is_refused() -> None:
    # One row and a queue of one: the first runs until 3 s, the second waits for it. The third comes
    # while both are unfinished; when the fourth comes, the first is over.
    result = simulate(
        "vllm", at(0.0, 0.5, 1.5, 4.5), SECOND, kv_tokens=99, limits=Limits(9, 9, 1), max_queue=1
    )
    requests = result.requests
    assert requests.replica.tolist() == [0, 0, REFUSED, 0]
    assert requests.tokens.tolist() == [3, 3, 0, 3]
    assert np.isnan(requests.first_token).tolist() == [False, False, True, False]
    assert len(requests.token_times) == 9 and np.isfinite(requests.token_times).all()
    summary = result.summary()
    assert (summary["num_requests"], summary["num_refused"]) == (4, 1)
    assert summary["output_tokens"] == 9
    assert summary["slo_attainment"] == summary["jct_attainment"] == 0.75
    assert np.isfinite(summary["mean_ttft_s"]) and np.isfinite(summary["mean_tpot_s"])
    group = summary["classes"]["default"]
    assert (group["requests"], group["finished"]) == (4, 3)
    json.dumps(summary, allow_nan=False)
    table = result.request_table()
    assert table["attained"].tolist() == [True, True, False, True]
    plots.cdfs([("vllm", result)])


def test_each_replica_has_a_queue_of_its_own() -> None:
    workload = Workload.create(all_at_once(4), Lengths(np.full(4, 4), np.array([50, 3, 3, 3])))
    limits = Limits(99, 99, 1)
    result = simulate(
        "sarathi", workload, SECOND, kv_tokens=99, limits=limits, max_queue=0, replicas=2
    )
    assert result.requests.replica.tolist() == [0, 1, REFUSED, REFUSED]


def test_impossible_queues_are_refused() -> None:
    with pytest.raises(SimulationError, match="max_queue must be at least 0, got -1"):
        simulate("vllm", at(0.0), SECOND, kv_tokens=99, limits=Limits(9, 9, 1), max_queue=-1)
    with pytest.raises(SimulationError, match="needs a limit of max_rows"):
        simulate("vllm", at(0.0), SECOND, kv_tokens=99, max_queue=1)


@given(
    seed=st.integers(0, 1 << 30),
    policy=st.sampled_from(["vllm", "sarathi", "aptserve_kv"]),
    rows=st.integers(1, 6),
    queue=st.integers(0, 6),
    rate=st.sampled_from([2.0, 20.0, 1e4]),
)
@settings(max_examples=15, deadline=None)
def test_never_are_more_unfinished_and_the_refused_change_nothing(
    seed: int, policy: str, rows: int, queue: int, rate: float
) -> None:
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / rate, 30))
    workload = Workload.create(arrival, Lengths(rng.integers(1, 300, 30), rng.integers(1, 40, 30)))
    place, limits = system("llama-2-7b@a100"), Limits(400, 128, rows)
    result = simulate(
        policy, workload, place, kv_tokens=900, limits=limits, max_queue=queue, checked=True
    )
    requests = result.requests
    served = ~requests.refused
    for number in range(len(workload)):
        before = served[:number]
        unfinished = int((requests.finish[:number][before] > arrival[number]).sum())
        assert served[number] == (unfinished < rows + queue)
    alone = simulate(policy, workload.select(served), place, kv_tokens=900, limits=limits)
    np.testing.assert_allclose(alone.requests.token_times, requests.token_times, rtol=1e-12)


def test_the_command_counts_refusals(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table = tmp_path / "requests.json"
    argv = ["--policy=vllm", "--workload=fixed:64x8x10", "--max_rows=2", "--max_queue=3", "--json"]
    assert command.main([*argv, f"--requests_table={table}"]) == 0
    found = capsys.readouterr()
    (point,) = json.loads(found.out.strip().splitlines()[-1])["points"]
    summary = point["mean"]
    assert (summary["num_requests"], summary["num_refused"]) == (10, 5)
    assert "refused" in found.err
    rows = json.loads(table.read_text())
    assert [row["first_token"] is None for row in rows] == [False] * 5 + [True] * 5
    assert command.main(["--policy=vllm", "--workload=fixed:64x8x10", "--max_queue=3"]) == 2
    assert "max_queue needs a limit of max_rows" in capsys.readouterr().err
    assert command.main([*argv, "--max_queue=-3"]) == 2


def test_means_of_nothing_are_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_all(policy: str, workload: Workload, place: System, **_: Any) -> SimulationResult:
        nobody = np.full(len(workload), REFUSED)
        none = np.zeros_like(nobody)
        requests = RequestRecords(workload, none, nobody, np.zeros(0), none, none > 0)
        nothing = BatchRecords.from_logs([np.zeros(0, BATCH)])
        return SimulationResult(requests, nothing, None, place.kv_tokens, False)

    monkeypatch.setattr(simulator, "simulate", refuse_all)
    assert command.main(["--policy=vllm", "--workload=fixed:64x8x10", "--json"]) == 0
    found = capsys.readouterr()
    line = found.out.strip().splitlines()[-1]
    (point,) = json.loads(line, parse_constant=pytest.fail)["points"]
    mean = point["mean"]
    assert [name for name, value in mean.items() if value is None] == [
        "tps", "mean_ttft_s", "mean_tpot_s", "slo_attainment",
        "ttft_attainment", "tbt_attainment", "jct_attainment", "max_tbt_attainment",
        "goodput_per_s", "finished_per_s", "ttft_ms",
        "tbt_ms", "e2e_ms", "normalised_latency_ms", "mean_batch_requests", "mean_kv_used",
        "mean_shared_blocks",
    ]  # fmt: skip
    assert (mean["num_refused"], mean["makespan_s"]) == (10, 0.0)
    header, row = found.err.strip().splitlines()[:2]
    assert "TTFT" not in header and "10" in row.split(), "nobody has any"


def test_one_token_each_has_no_time_between_tokens() -> None:
    workload = Workload.create(np.zeros(2), fixed_lengths(4, 1, 2))
    summary = simulate("vllm", workload, SECOND, kv_tokens=99).summary()
    assert (summary["mean_tpot_s"], summary["mean_ttft_s"]) == (None, 1.0)
