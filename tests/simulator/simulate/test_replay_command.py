"""`jaxserve simulate --replay`."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.simulator import replay
from jaxserve.simulator.advise.cli import main as advise
from jaxserve.simulator.simulate.cli import main
from tests.engine.simulated.test_engine_agrees import trace
from tests.simulator.test_replay import recorded

COUNT = 24


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recording of an engine with 800 blocks of 8 tokens that served `sarathi`."""
    _, path = recorded(tmp_path_factory.mktemp("served"), trace(3, 30.0, True, COUNT))
    return path


def found(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main([*argv, "--jobs=1", "--seeds=1", "--json"]) == 0
    last = json.loads(capsys.readouterr().out)
    assert isinstance(last, dict)
    return last


def test_policies_are_compared_with_what_was_served(
    served: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    summary, table = tmp_path / "summary.csv", tmp_path / "requests.csv"
    argv = [f"--replay={served}", "--policy=sarathi,vllm"]
    result = found(capsys, *argv, f"--summary={summary}", f"--requests_table={table}")
    names = [point["policy"] for point in result["points"]]
    assert names == ["served: sarathi", "sarathi", "vllm"]
    then, same, other = (point["mean"] for point in result["points"])
    assert same["makespan_s"] == pytest.approx(then["makespan_s"], rel=0.01)
    assert same["mean_ttft_s"] == pytest.approx(then["mean_ttft_s"], rel=0.05)
    assert other["mean_ttft_s"] < same["mean_ttft_s"], "prompts come first"
    assert {point["kv_tokens"] for point in result["points"]} == {3200}
    ratios = {one["policy"]: one["mean"] for one in result["ratios"]}
    assert ratios["sarathi"]["makespan_s"] == pytest.approx(1.0, rel=0.01)
    about = result["recording"]
    assert about["policy"] == "sarathi" and about["steps"] == then["num_batches"]
    (fit,) = about["notes"]
    assert fit.startswith(
        f"fitted to {about['steps']} steps of {about['system']['model']} on cpu; "
    )
    assert fit.endswith("mean error of one: 0.0%, drawn by the seed")
    with open(summary, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["policy"] for row in rows if row["statistic"] == "run"] == names
    for number, name in enumerate(("requests-0.csv", "requests-1.csv")):
        with open(tmp_path / name, newline="") as file:
            assert len(list(csv.DictReader(file))) == COUNT, number


def test_the_same_requests_at_other_rates(served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [f"--replay={served}", "--policy=sarathi,vllm", "--rate=10,60"]
    result = found(capsys, *argv)
    points = {(point["policy"], point["rate"]): point["mean"] for point in result["points"]}
    assert list(points) == [(p, rate) for p in ("sarathi", "vllm") for rate in (10, 60)]
    slow, fast = points["sarathi", 10], points["sarathi", 60]
    assert slow["num_requests"] == fast["num_requests"] == COUNT
    assert slow["makespan_s"] > COUNT / 11 and slow["mean_ttft_s"] < fast["mean_ttft_s"]


def test_the_seed_is_the_servers(
    served: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first, *rest = served.read_text().splitlines(keepends=True)
    header = json.loads(first)
    assert header["seed"] == 5
    other = tmp_path / "other.jsonl"
    other.write_text("".join([json.dumps(header | {"seed": 2**31 - 1}) + "\n", *rest]))
    argv = ["--policy=random", "--max_rows=2"]

    def seed_and_run(path: Path, *more: str) -> tuple[int, dict[str, Any]]:
        (run,) = found(capsys, f"--replay={path}", *argv, *more)["points"][1]["runs"]
        return run.pop("seed"), run

    its_seed, as_served = seed_and_run(other)
    assert its_seed == 2**31 - 1
    assert seed_and_run(other, f"--seed={2**31 - 1}") == (its_seed, as_served)
    assert seed_and_run(other, "--seed=5") == seed_and_run(served)
    assert seed_and_run(served)[1] != as_served, "the policy draws other lots"


def test_flags_may_say_otherwise(served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [f"--replay={served}", "--policy=sarathi"]
    small = found(capsys, *argv, "--kv_tokens=320", "--slo_ttft_ms=1", "--max_rows=2")
    then, now = small["points"]
    assert now["kv_tokens"] == 320
    assert now["mean"]["mean_batch_requests"] <= 2
    # Half of the requests have targets of their own, wider ones.
    mine = replay.traffic_of(replay.read(served)).workload
    others = (mine.ttft == float("inf")).mean()
    assert then["mean"]["ttft_attainment"] == 1 - others
    large = found(capsys, *argv, "--block_size=16")["points"][1]
    assert large["kv_tokens"] == 3200, "the pool is as large, in larger blocks"
    fast = found(capsys, *argv, "--system=llama-2-7b@a100", "--max_batch_tokens=512")
    assert fast["points"][1]["system"] == "llama-2-7b@a100"
    assert fast["points"][1]["kv_tokens"] > 3200
    assert fast["points"][0]["mean"] == found(capsys, *argv)["points"][0]["mean"]


@pytest.mark.parametrize("end", ["", ".1"])
def test_the_recording_is_not_written_over(
    end: str, served: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"--replay={served}", f"--summary={served}{end}"]) == 2
    assert f"--summary: {served}{end} is what --replay reads" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "problem"),
    [
        ("--workload=sharegpt", "--workload does not go with --replay"),
        ("--cv=2", "--cv does not go with --replay"),
        ("--find=capacity", "--find does not go with --replay"),
        ("--classes=a:1", "--classes does not go with --replay"),
        ("--rules=infermax_paper", "--replay is of an engine"),
        ("--hidden_read=absorbed", "the recording has a system of its own"),
    ],
)
def test_what_the_recording_says_already_is_refused(
    flag: str, problem: str, served: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([f"--replay={served}", flag])
    assert stopped.value.code == 2
    assert problem in capsys.readouterr().err


def test_what_is_no_recording_is_one_line(
    tmp_path: Path, served: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"--replay={tmp_path / 'none'}"]) == 2
    assert capsys.readouterr().err.endswith("none: No such file or directory\n")
    few = tmp_path / "few"
    few.write_text("".join(served.read_text().splitlines(keepends=True)[:6]))
    assert main([f"--replay={few}"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "at least 10 steps are needed, there are" in lines[0]
    with pytest.raises(SystemExit):
        main(["--policy=sarathi"])
    assert "--workload or --replay is needed" in capsys.readouterr().err


@pytest.mark.parametrize(("factor", "doubtful"), [(1.0, False), (8.0, True)])
def test_a_poor_fit_is_said_before_any_ranking(
    served: Path,
    factor: float,
    doubtful: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """factor: that every other step takes longer."""
    recording = replay.read(served)
    times = recording.steps.device_time.copy()
    times[::2] *= factor
    steps = dataclasses.replace(recording.steps, device_time=times)
    monkeypatch.setattr(replay, "read", lambda path: dataclasses.replace(recording, steps=steps))
    error = replay.system_of(replay.read(served)).about["mean_error"]
    assert (error > 0.5) is doubtful
    few = ["--policy=sarathi,vllm", "--jobs=1", "--seeds=1"]
    argv = [f"--replay={served}", "--slo_ttft_ms=500", *few]
    for command, ranking in ((main, "policy"), (advise, "")):
        assert command(argv) == 0
        first, second, *_ = capsys.readouterr().out.splitlines()
        if doubtful:
            assert first.startswith("doubtful: the simulated system is off by ")
            assert f"by {error:.0%} of" in first and second.startswith(ranking)
        else:
            assert "doubtful" not in first + second
    assert main([*argv, "--system=llama-2-7b@a100"]) == 0
    assert "doubtful" not in capsys.readouterr().out, "nothing is simulated on what was fitted"
