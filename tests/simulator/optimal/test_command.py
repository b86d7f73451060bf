"""`jaxserve optimal`, and the experiment that uses it, at toy size."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from jaxserve.simulator.optimal import cli as optimal
from jaxserve_lab.experiments.infermax.claims import QUICK_AZURE, InferMax

pytest.importorskip("ortools")

SMALL = ["--workload=fixed:4x3x2", "--kv_tokens=8", "--workers=1", "--whole_prompts"]
PNG = b"\x89PNG"


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def test_it_answers_in_json_with_a_picture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "best.png"
    assert optimal.main([*SMALL, "--json", f"--picture={picture}"]) == 0
    found = last_line(capsys)
    assert found["status"] == "optimal" and found["all_batches"] is True
    batches = found["batches"]
    assert isinstance(batches, list) and len(batches) == found["num_batches"]
    assert found["latency_s"] == pytest.approx(sum(batch["duration_s"] for batch in batches))
    assert sum(len(batch["preempted"]) for batch in batches) == found["num_preemptions"]
    assert picture.read_bytes().startswith(PNG)


def test_it_says_in_words_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert optimal.main([*SMALL, "--warm_start=none", "--objective=mean_ttft"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("optimal: mean_ttft ") and "relative error at most" in out


@pytest.mark.parametrize(("seconds", "status"), [(1.0, "feasible"), (1e-3, "infeasible")])
def test_it_says_whether_a_better_one_exists(
    seconds: float, status: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert optimal.main([*SMALL, "--json", f"--better_than={seconds}"]) == 0
    assert last_line(capsys)["status"] == status


def test_without_its_solver_it_names_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert optimal.main(SMALL) == 2
    assert capsys.readouterr().err.endswith("install jaxserve-llm with its extra optimal\n")
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert any(each.startswith("ortools") for each in project["optional-dependencies"]["optimal"])


def test_lengths_and_arrivals_come_from_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("prompt_tokens,output_tokens\n4,2\n2,2\n9,9\n")
    few = [f"--workload={lengths}", "--num_requests=2", "--kv_tokens=8", "--workers=1"]
    assert optimal.main([*few, "--json"]) == 0
    assert last_line(capsys)["status"] == "optimal"
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": ms, "input_length": 4, "output_length": 2} for ms in (0, 500)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert optimal.main([f"--workload={trace}", *SMALL[1:], "--objective=makespan", "--json"]) == 0
    found = last_line(capsys)
    makespan, latency = found["makespan_s"], found["latency_s"]
    assert isinstance(makespan, float) and isinstance(latency, float)
    assert makespan > 0.5 > latency


def test_a_schedule_that_is_not_proven_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    hard = ["--workload=fixed:512x3x3", "--kv_tokens=1024", "--time_limit=0.5", "--workers=1"]
    assert optimal.main(hard) == 0
    told = capsys.readouterr().out
    assert told.startswith("feasible: ") and "not proven to be the best, time ran out: no" in told


def test_a_warm_start_that_does_not_keep_to_the_limits_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cut = ["--workload=fixed:6x2x2", "--kv_tokens=12", "--max_batch_tokens=4", "--workers=1"]
    assert optimal.main([*cut, "--warm_start=vllm", "--json"]) == 0
    note = last_line(capsys)["note"]
    assert isinstance(note, str) and "left out" in note


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload=fixed:4x3x2", "--kv_tokens=5"], "needs 6 tokens of cache, there are 5"),
        (["--workload=nothing", "--kv_tokens=5"], "there is no workload or file"),
        ([*SMALL, "--warm_start=vlm"], "did you mean 'vllm'"),
        ([*SMALL, "--system=abacus"], "there is no system 'abacus'"),
        ([*SMALL, "--picture=no/best.png"], "--picture: there is no folder no"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert optimal.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("flag", ["--better_than=-1", "--time_limit=nan", "--kv_tokens=0"])
def test_wrong_flags_are_refused(flag: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        optimal.main([*SMALL, flag])
    assert stopped.value.code == 2


def azure_trace(count: int) -> str:
    rows = [
        f"2023-11-16 18:{15 + i // 60}:{i % 60:02}.0000000,{50 + i},{9 + i % 7}"
        for i in range(count)
    ]
    return "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n"


@pytest.mark.slow
def test_the_experiment_at_toy_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    arguments = ["--quick", "--jobs=1", f"--out={tmp_path}", f"--azure={trace}"]
    assert InferMax.main(arguments) == 2
    assert capsys.readouterr().err.endswith(f"--azure: there is no {trace}\n")
    trace.write_text(azure_trace(20))
    assert InferMax.main(arguments) == 2  # too short
    trace.write_text(azure_trace(QUICK_AZURE))
    assert InferMax.main(arguments) == 0
    page = (tmp_path / "infermax.md").read_text()
    for number in range(1, 8):
        assert f"\n## {number}. " in page
    named = [line.split("](")[1].rstrip(")") for line in page.splitlines() if line[:2] == "!["]
    assert len(named) == 8
    for name in named:
        assert (tmp_path / name).read_bytes().startswith(PNG)
    runs = json.loads((tmp_path / "figures" / "infermax.json").read_text())
    assert len({json.dumps(run["case"]) for run in runs}) == len(runs)
    numbers = tmp_path / "figures" / "infermax.json"
    again = tmp_path / "again"
    from_numbers = [f"--numbers={numbers}", *arguments[:2], arguments[3], f"--out={again}"]
    assert InferMax.main(from_numbers) == 0
    assert (again / "infermax.md").read_text() == page
    assert "Not run" not in page and str(tmp_path) not in page
