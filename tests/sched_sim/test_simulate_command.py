"""`python -m jaxserve.simulate`: its last line, its tables, its figures, its complaints."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.figures import plots
from jaxserve.sched.metrics import RequestTimes, attained, meets_tbt, meets_ttft
from jaxserve.sched.request import SLO
from jaxserve.simulate import main

SMALL = ["--workload=fixed:64x16x12", "--kv_tokens=512", "--max_batch_tokens=256"]
KEYS = {
    "latency_s",
    "makespan_s",
    "tps",
    "mean_ttft_s",
    "mean_tpot_s",
    "num_batches",
    "num_preemptions",
    "slo_attainment",
}


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def test_the_command_of_the_issue(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(
        capsys,
        "--policy=vllm",
        "--system=llama-2-7b@a100",
        "--workload=fixed:1024x128x32",
        "--kv_tokens=100000",
        "--max_batch_tokens=4096",
    )
    assert found.keys() >= KEYS
    assert found["num_batches"] == 135
    assert found["output_tokens"] == 32 * 128


def test_several_policies_and_rates_beside_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--policy=vllm,sarathi", "--workload=alpaca", "--num_requests=30", "--rate=5,50"]
    together = run(capsys, *argv, "--jobs=2")["runs"]
    assert [(r["policy"], r["rate"]) for r in together] == [
        ("vllm", 5.0),
        ("vllm", 50.0),
        ("sarathi", 5.0),
        ("sarathi", 50.0),
    ]
    assert run(capsys, *argv, "--jobs=1")["runs"] == together


def test_rules_and_replicas_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    own = run(capsys, *SMALL)
    paper = run(capsys, *SMALL, "--rules=infermax_paper")
    assert own["latency_s"] != paper["latency_s"]
    two = run(capsys, *SMALL, "--replicas=2", "--routing=least_loaded")
    assert two["makespan_s"] < own["makespan_s"]


def test_the_tables(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    requests, batches = tmp_path / "requests.csv", tmp_path / "batches.json"
    found = run(capsys, *SMALL, f"--requests_table={requests}", f"--batches_table={batches}")
    with open(requests, newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12
    assert max(float(row["finish"]) for row in rows) == pytest.approx(found["makespan_s"])
    steps = json.loads(batches.read_text())
    assert len(steps) == found["num_batches"]
    assert sum(step["duration"] for step in steps) == pytest.approx(found["latency_s"])
    assert sum(step["preemptions"] for step in steps) == found["num_preemptions"]


def test_the_figures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = [*SMALL[1:], "--workload=alpaca", "--num_requests=20", "--policy=vllm,sarathi"]
    argv += ["--rate=5,20", "--jobs=1", f"--plots={tmp_path}"]
    assert main([*argv, "--views=attainment,cdf,kv,schedule", "--kv_tokens=4000"]) == 0
    capsys.readouterr()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        "attainment.png",
        "cdf.png",
        "kv.png",
        *(f"schedule-{i}.png" for i in range(4)),
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())


def test_the_schedule_view_draws_every_box() -> None:
    from jaxserve.sched.simulation.simulator import simulate
    from jaxserve.sched.simulation.systems import system
    from jaxserve.sched.workloads.workload import Workload, all_at_once, fixed_lengths

    workload = Workload.of(all_at_once(4), fixed_lengths(16, 4, 4))
    place = system("llama-2-7b@a100")
    options: dict[str, Any] = {"kv_tokens": 32, "rules": "infermax_paper"}
    result = simulate("vllm", workload, place, record_rows=True, **options)
    figure = plots.schedule(result, "vllm")
    top = figure.axes[0]
    boxes = {len(c.get_paths()) for c in top.collections}
    prefills, decodes = result.batches.num_prefills.sum(), result.batches.num_decodes.sum()
    assert boxes == {int(prefills), int(decodes), int(result.batches.preemptions.sum())}
    with pytest.raises(ValueError, match="record_rows"):
        plots.schedule(simulate("vllm", workload, place, **options))


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--policy=nobody"], "there is no policy 'nobody'"),
        (["--system=llama-9b@a100"], "there is no system"),
        (["--workload=nowhere.csv"], "no workload or file"),
        (["--kv_tokens=70"], "the cache holds"),
        (["--plots=x", "--views=moon"], "there is no view 'moon'"),
        (["--slo_ttft_ms=-1"], "slo.ttft"),
    ],
)
def test_mistakes_get_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], problem: str
) -> None:
    assert main([*SMALL, *argv]) == 1
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1


@given(st.integers(0, 1 << 30), st.floats(0.01, 3.0), st.floats(0.01, 3.0))
@settings(max_examples=60, deadline=None)
def test_attainment_of_many_is_that_of_each(seed: int, ttft: float, tbt: float) -> None:
    rng = np.random.default_rng(seed)
    slo = SLO(ttft=ttft, tbt=tbt)
    requests = []
    for _ in range(12):
        count = int(rng.choice([1, 2, 5, 101, 250]))
        gaps = rng.choice([0.001, 0.9 * tbt, tbt, 1.3 * tbt], count, p=[0.4, 0.3, 0.29, 0.01])
        requests.append(RequestTimes(0.0, np.cumsum(np.append(rng.exponential(1.0), gaps[1:]))))
    found = attained(
        np.array([r.ttft for r in requests]),
        np.concatenate([r.tbt for r in requests]),
        np.array([len(r.tbt) for r in requests]),
        slo,
    )
    # Differences of sums are not exactly the gaps: both sides see the same ones.
    assert found.tolist() == [meets_ttft(r, slo) and meets_tbt(r, slo) for r in requests]
