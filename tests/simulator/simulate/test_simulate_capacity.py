"""`jaxserve simulate --find=capacity`."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.sched.request import Rule
from jaxserve.simulator.capacity import FINE
from jaxserve.simulator.simulate.cli import main

WORKLOAD = ["--workload=alpaca", "--num_requests=50", "--jobs=1", "--seeds=2"]
SLO = ["--slo_ttft_ms=200", "--slo_tbt_ms=10"]
FIND = [*WORKLOAD, "--find=capacity", "--policy=sarathi"]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def attainment(capsys: pytest.CaptureFixture[str], policy: str, rate: float) -> float:
    (point,) = run(capsys, *WORKLOAD, *SLO, f"--policy={policy}", f"--rate={rate}")["points"]
    return float(point["mean"]["slo_attainment"])


def test_the_rate_attains_and_the_next_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    policies, level = ["vllm", "sarathi"], 0.8
    argv = [f"--policy={','.join(policies)}", f"--attainment={level}", "--rate=30"]
    found = run(capsys, *FIND, *SLO, *argv)
    assert [one["policy"] for one in found["capacity"]] == policies
    assert [one["bound"] for one in found["capacity"]] == ["", ""]
    for one in found["capacity"]:
        rate = one["rate"]
        above = FINE.rate(FINE.nearest(rate) + 1)
        assert attainment(capsys, one["policy"], rate) >= level
        assert attainment(capsys, one["policy"], above) < level
        tried = {p["rate"] for p in found["points"] if p["policy"] == one["policy"]}
        assert {FINE.rate(FINE.nearest(30)), rate, above} <= tried
        assert len(tried) < 16


def test_the_table_and_the_summary(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "summary.csv"
    argv = [*FIND, *SLO, "--policy=vllm,sarathi", "--rate=30", f"--summary={path}"]
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    first = "the highest rate at which 90% of the requests with targets attain their SLO"
    assert lines[0] == f"{first}, {Rule.SERVER.value}"
    capacities = {line.split()[0]: float(line.split()[1]) for line in lines[2:]}
    with open(path, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["statistic"] == "mean"]
    for policy, capacity in capacities.items():
        tried = {
            float(row["rate"]): float(row["slo_attainment"])
            for row in rows
            if row["policy"] == policy
        }
        assert capacity == max(rate for rate, share in tried.items() if share >= 0.9)


def test_the_longest_gap_counts(capsys: pytest.CaptureFixture[str]) -> None:
    """Even where it is all that is asked for."""
    loose, strict, alone = (
        run(capsys, *FIND, *more)["capacity"][0]["rate"]
        for more in (SLO, [*SLO, "--slo_max_tbt_ms=11"], ["--slo_max_tbt_ms=11"])
    )
    assert strict < loose and strict <= alone


@pytest.mark.promise(40)
def test_those_without_targets_attain_none(capsys: pytest.CaptureFixture[str]) -> None:
    """However many they are beside: nine of ten would otherwise be enough."""
    argv = [*FIND, "--classes=chat:0.1:ttft=200ms:tbt=10ms,free:0.9", "--num_requests=200"]
    found = run(capsys, *argv, "--seeds=1", "--rate=30")
    (one,) = found["capacity"]
    assert one["bound"] == ""
    (there,) = (p["mean"] for p in found["points"] if p["rate"] == one["rate"])
    chats, free = there["classes"]["chat"], there["classes"]["free"]
    assert there["slo_attainment"] == chats["slo"]["attainment"] >= 0.9
    assert there["goodput_per_s"] == chats["slo"]["goodput_per_s"] < there["finished_per_s"] / 5
    assert free["slo"] is None and there["jct_attainment"] is None
    above = (p["mean"] for p in found["points"] if p["rate"] > one["rate"])
    assert min(mean["classes"]["chat"]["slo"]["attainment"] for mean in above) < 0.9
    assert main([*argv, "--seeds=1", "--rate=30"]) == 0
    assert "class chat" in capsys.readouterr().out


def test_a_run_shorter_than_its_targets_cannot_tell(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--policy=sarathi", "--max_rows=4", "--seeds=1", "--jobs=1", "--slo_jct_ms=3500"]
    find = [*argv, "--find=capacity", "--rate=8"]
    assert main([*find, "--workload=fixed:50x100x50", "--json"]) == 1
    said = capsys.readouterr()
    (few,) = json.loads(said.out.splitlines()[-1])["capacity"]
    assert few["bound"] == "?"
    assert "it cannot be told whether they attain their SLO; they come for" in said.err
    assert "(--num_requests) would come for 5 times" in said.err
    (many,) = run(capsys, *find, "--workload=fixed:50x100x600")["capacity"]
    assert many["bound"] == "" and many["rate"] < few["rate"] / 2
    assert main([*argv, "--workload=fixed:50x100x50", "--arrivals=poisson", "--rate=16"]) == 0
    assert "at 16/s they come for" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "bound", "problem"),
    [
        (
            ["--slo_ttft_ms=0.1"],
            "<",
            "sarathi: at 0.000977 requests/s, the lowest rate tried, 0.0%",
        ),
        (["--slo_ttft_ms=1e6"], ">", "sarathi: at 1020 requests/s, the highest rate tried, 100.0%"),
    ],
)
def test_where_there_is_none(
    capsys: pytest.CaptureFixture[str], argv: list[str], bound: str, problem: str
) -> None:
    small = [*FIND, "--num_requests=5", "--seeds=1"]
    assert main([*small, *argv, "--json"]) == 1
    said = capsys.readouterr()
    (found,) = json.loads(said.out.splitlines()[-1])["capacity"]
    assert found["bound"] == bound
    assert f"jaxserve simulate: {problem}" in said.err.splitlines()[-1]


def test_where_nobody_has_a_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(FIND) == 2
    error = capsys.readouterr().err
    assert "--find=capacity needs a target: --slo_ttft_ms" in error and error.count("\n") == 1
