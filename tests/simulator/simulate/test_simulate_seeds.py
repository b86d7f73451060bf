"""Several seeds in `jaxserve simulate`: means, intervals, ratios, the summary."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from jaxserve.sched import registry
from jaxserve.sched.slo.classes import parse_classes
from jaxserve.simulator.simulate.cli import main
from jaxserve.simulator.simulate.spread import flat, half_width, mean, ratios
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.specs import WorkloadSpec
from tests.simulator.grouped import simulate

DRAWN = ["--workload=alpaca", "--num_requests=30", "--rate=20", "--jobs=1"]
FIXED = ["--workload=fixed:64x16x12", "--kv_tokens=256", "--jobs=1"]
SLO = ["--slo_ttft_ms=20", "--slo_tbt_ms=10"]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def test_five_seeds_are_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    (point,) = run(capsys, *DRAWN, *SLO, "--seed=3")["points"]
    assert [own["seed"] for own in point["runs"]] == [3, 4, 5, 6, 7]
    assert point["seed_matters"] is True
    for seed, own in zip(range(3, 8), point["runs"], strict=True):
        (alone,) = run(capsys, *DRAWN, *SLO, f"--seed={seed}", "--seeds=1")["points"]
        assert alone["runs"] == [own]
        assert alone["half_width"]["tps"] is None
    for name, middle in flat(point["mean"]).items():
        values = [flat(own)[name] for own in point["runs"]]
        if middle is None:  # of a target that nobody has
            assert set(values) == {None}
            continue
        assert middle == pytest.approx(np.mean(values))
        if np.ptp(values) > 1e-12:
            low, high = stats.t.interval(0.95, 4, np.mean(values), stats.sem(values))
            assert flat(point["half_width"])[name] == pytest.approx((high - low) / 2)
    assert 0 < point["half_width"]["slo_attainment"] < 1


def test_one_run_where_a_seed_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, *FIXED, "--policy=vllm,random,sarathi", "--seeds=3")
    matters = {point["policy"]: point["seed_matters"] for point in found["points"]}
    assert matters == {"vllm": False, "random": True, "sarathi": False}
    assert [len(point["runs"]) for point in found["points"]] == [1, 3, 1]
    # The one run counts for each of the other's seeds.
    vllm, lots, _ = found["points"]
    (over, _) = found["ratios"]
    assert [own["seed"] for own in over["runs"]] == [0, 1, 2]
    for own, ours in zip(over["runs"], lots["runs"], strict=True):
        assert own["tps"] == ours["tps"] / vllm["mean"]["tps"]


def test_the_report_says_what_the_intervals_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FIXED, "--policy=vllm,sarathi"]) == 0
    said = capsys.readouterr().out
    assert "one run each: nothing is drawn" in said and "±" not in said
    assert "over vllm\n" in said
    assert main([*FIXED, "--policy=vllm,random", "--seeds=2"]) == 0
    said = capsys.readouterr().out
    assert "one run each of vllm: nothing is drawn" in said
    assert "±: half of the 95% confidence interval of the mean over 2 seeds, 0 to 1" in said
    assert "over vllm, seed by seed\n" in said
    assert main([*DRAWN, "--seeds=1"]) == 0
    said = capsys.readouterr().out
    assert "±" not in said and "nothing is drawn" not in said and "over" not in said


def test_ratios_are_paired(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--policy=vllm,sarathi,edf", "--rate=20,200", "--seeds=3"]
    found = run(capsys, *DRAWN, *argv)
    points = {(point["policy"], point["rate"]): point for point in found["points"]}
    assert [(one["policy"], one["rate"], one["to"]) for one in found["ratios"]] == [
        (policy, rate, "vllm") for policy in ("sarathi", "edf") for rate in (20.0, 200.0)
    ]
    for one in found["ratios"]:
        ours, base = points[one["policy"], one["rate"]], points["vllm", one["rate"]]
        values = [
            mine["mean_ttft_s"] / theirs["mean_ttft_s"]
            for mine, theirs in zip(ours["runs"], base["runs"], strict=True)
        ]
        assert [own["mean_ttft_s"] for own in one["runs"]] == values
        assert one["mean"]["mean_ttft_s"] == pytest.approx(np.mean(values))
        low, high = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
        assert one["half_width"]["mean_ttft_s"] == pytest.approx((high - low) / 2)
        assert one["mean"]["num_preemptions"] is None  # over none


def test_the_summary_has_a_row_a_run_and_their_means(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "summary.csv"
    argv = [*DRAWN, "--policy=vllm,sarathi", "--rate=20,200", "--seeds=2", f"--summary={path}"]
    points = run(capsys, *argv, "--classes=a:0.5:ttft=20ms,b:0.5")["points"]
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 * (2 + 2)
    assert [row["statistic"] for row in rows[:4]] == ["run", "run", "mean", "half_width"]
    assert [row["seed"] for row in rows[:4]] == ["0", "1", "", ""]
    for i, point in enumerate(points):
        expected = [*point["runs"], point["mean"], point["half_width"]]
        for row, values in zip(rows[4 * i : 4 * i + 4], expected, strict=True):
            assert (row["policy"], float(row["rate"])) == (point["policy"], point["rate"])
            for name in ("tps", "ttft_ms.p99", "classes.a.slo.attainment"):
                assert float(row[name]) == flat(values)[name]
            assert "tiers.realtime.requests" not in row  # there is one tier


def test_tables_are_of_the_first_seed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = []
    for seeds in (1, 3):
        path = tmp_path / f"{seeds}.csv"
        run(capsys, *DRAWN, f"--seeds={seeds}", f"--requests_table={path}")
        found.append(path.read_text())
    assert found[0] == found[1]
    assert len(list(tmp_path.iterdir())) == 2


DIES = """
import os
from jaxserve.sched.policy import Policy
from jaxserve.sched.registry import register

@register("dies", summary="takes its process with it", source="test")
class Dies(Policy):
    def plan(self, view, now):
        os._exit(1)
"""


def test_a_process_that_dies_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    path = tmp_path / "dies.py"
    path.write_text(DIES)
    argv = ["--workload=alpaca", "--num_requests=300", "--jobs=2", "--seeds=2"]
    assert main([*argv, f"--policy={path}:dies"]) == 1
    error = capsys.readouterr().err
    assert "a process of --jobs died" in error and error.count("\n") == 1


numbers = st.floats(-1e6, 1e6).map(lambda x: round(x, 3))


@given(st.lists(numbers, min_size=2, max_size=9))
def test_the_half_width_is_students(values: list[float]) -> None:
    low, high = stats.t.interval(0.95, len(values) - 1, 0, max(stats.sem(values), 1e-300))
    assert half_width(values) == pytest.approx((high - low) / 2, abs=1e-6)
    assert mean(values) == pytest.approx(np.mean(values), abs=1e-6)


def test_numbers_that_are_missing() -> None:
    values = [{"a": 1, "b": {"c": 2.0}}, {"a": 3, "b": None}, {"a": None, "d": None}]
    assert mean(values) == {"a": 2.0, "b": {"c": 2.0}, "d": None}
    assert half_width(values) == {
        "a": pytest.approx(stats.t.ppf(0.975, 1) * math.sqrt(2) / math.sqrt(2)),
        "b": {"c": None},
        "d": None,
    }
    assert ratios(values, [{"a": 2, "b": {"c": 0}}] * 3) == [
        {"a": 0.5, "b": {"c": None}},
        {"a": 1.5, "b": None},
        {"a": None},
    ]
    assert flat(values[0]) == {"a": 1, "b.c": 2.0}


# Whether a seed changes anything is found out from what is used of it.

TRACE = "arrival_s,prompt_tokens,output_tokens\n0,64,8\n0.1,32,8\n0.3,16,4\n"
ARRAYS = ("arrival", "prompt_len", "output_len", "limit", "slo_class")


@pytest.mark.parametrize(
    ("options", "drawn"),
    [
        ({}, False),
        ({"rate": 2.0}, False),  # the trace's own arrivals, stretched
        ({"arrivals": "all"}, False),
        ({"arrivals": "poisson", "rate": 2.0}, True),
        ({"classes": parse_classes("a:0.5,b:0.5")}, True),
        ({"lengths": "fixed:64x8x3"}, False),
        ({"lengths": "fixed:64x8x3", "rate": 2.0}, True),
        ({"lengths": "alpaca"}, True),
        ({"lengths": "lilo+siso"}, True),
    ],
)
def test_a_workload_knows_whether_it_is_drawn(
    tmp_path: Path, options: dict[str, Any], drawn: bool
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    spec = WorkloadSpec(**{"lengths": str(path), **options})
    assert spec.drawn() is drawn
    one, other = spec.make_workload(0), spec.make_workload(1)
    same = [(getattr(one, name) == getattr(other, name)).all() for name in ARRAYS]
    assert all(same) is not drawn


@pytest.mark.parametrize(
    ("policy", "read"), [("sarathi", False), ("vllm", False), ("random", True)]
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_simulation_knows_whether_its_policy_drew_lots(
    policy: str, read: bool, replicas: int
) -> None:
    workload = WorkloadSpec("fixed:64x16x12").make_workload()
    place = system("llama-2-7b@a100")
    found = simulate(policy, workload, place, kv_tokens=256, replicas=replicas)
    assert found.seed_read is read
    times = [
        simulate(policy, workload, place, kv_tokens=256, replicas=replicas, seed=seed)
        for seed in range(4)
    ]
    differ = {one.requests.token_times.tobytes() for one in times}
    assert (len(differ) > 1) is read
