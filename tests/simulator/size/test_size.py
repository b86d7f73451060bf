"""`jaxserve size`: the smallest number of replicas that is enough, and how sure that is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.simulator.size.cli import main
from jaxserve.simulator.workloads.specs import WorkloadSpec
from tests.simulator.test_replay import recorded

PLACE = ["--system=llama-2-7b@a100", "--jobs=1", "--seeds=1", "--policy=sarathi"]
CHATS = ["--workload=fixed:500x40x150", "--arrivals=poisson", "--slo_ttft_ms=600"]


def sized(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> tuple[Any, str]:
    """What it found, and what it said."""
    assert main([*argv, "--json"]) == code
    said = capsys.readouterr()
    return json.loads(said.out.splitlines()[-1]), said.err


def test_one_less_is_not_enough(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "size.svg"
    argv = [*PLACE, *CHATS, "--rate=60", "--error=0.2", f"--plot={picture}"]
    found, said = sized(capsys, *argv)
    need, points = found["replicas"], {one["replicas"]: one["mean"] for one in found["points"]}
    assert need > 2 and points[need]["slo_attainment"] >= 0.95
    assert points[need - 1]["slo_attainment"] < 0.95
    assert found["least"] <= need <= found["most"] and found["least"] < found["most"]
    assert f"{need} replicas, or {found['least']} to {found['most']}" in said
    assert "<svg" in picture.read_text()


def test_more_traffic_needs_more(capsys: pytest.CaptureFixture[str]) -> None:
    few, many = (
        sized(capsys, *PLACE, *CHATS, f"--rate={rate}", "--error=0")[0] for rate in (15, 80)
    )
    assert few["replicas"] < many["replicas"] and few["least"] == few["most"] == few["replicas"]


def test_percentiles_alone(capsys: pytest.CaptureFixture[str]) -> None:
    chats = ["--workload=fixed:500x40x150", "--arrivals=poisson", "--rate=80", "--error=0"]
    found, _ = sized(capsys, *PLACE, *chats, "--ttft_p99_ms=500")
    points = {one["replicas"]: one["mean"]["ttft_ms"]["p99"] for one in found["points"]}
    assert points[found["replicas"]] <= 500 < points[found["replicas"] - 1]


def test_too_few_to_try(capsys: pytest.CaptureFixture[str]) -> None:
    found, said = sized(capsys, *PLACE, *CHATS, "--rate=80", "--most=2", "--error=0", code=1)
    assert found["replicas"] is None and "2 replicas are not enough" in said


def test_a_recording_at_another_rate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    chats = WorkloadSpec("fixed:30x8x60", None, "poisson", 20.0, max_tokens="length")
    _, path = recorded(tmp_path, chats.make_workload(0))
    argv = [f"--replay={path}", "--rate=80", "--slo_ttft_ms=2000", "--seeds=1", "--jobs=1"]
    found, said = sized(capsys, *argv, "--num_requests=200", "--most=8")
    assert found["points"][0]["mean"]["num_requests"] == 200
    assert found["error"] >= 0.02 and "fitted to" in said


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([*PLACE, *CHATS], "--rate is needed"),
        ([*PLACE, *CHATS, "--rate=1,2"], "--rate is needed, one"),
        ([*PLACE, *CHATS, "--rate=1", "--replicas=3"], "--replicas is the answer"),
        ([*CHATS, "--rate=1"], "--replay or --system"),
        ([*PLACE, *CHATS, "--rate=1", "--policy=edf,vllm"], "one at a time"),
        ([*PLACE, *CHATS, "--rate=1", "--share=1.5"], "must be above 0"),
        ([*PLACE, "--workload=sharegpt", "--rate=1"], "targets are needed"),
    ],
)
def test_what_is_wrong_is_one_line(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(argv)
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 2 and says in capsys.readouterr().err
