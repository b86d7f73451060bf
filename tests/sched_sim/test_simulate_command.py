"""`python -m jaxserve.simulate`: its last line, its tables, its figures, its complaints."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.figures import plots
from jaxserve.simulate.cli import main

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


def test_policies_take_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    plain, tuned = (
        run(capsys, *SMALL, f"--policy={name}") for name in ("sarathi", "sarathi:max_rows=1")
    )
    assert tuned["policy"] == "sarathi:max_rows=1"
    assert tuned["mean_batch_requests"] == 1 < plain["mean_batch_requests"]


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
        (["--policy=sarathi:watermark=x"], "watermark must be a number, got 'x'"),
        (["--system=llama-9b@a100"], "there is no system"),
        (["--workload=nowhere.csv"], "no workload or file"),
        (["--kv_tokens=70"], "the cache holds"),
        (["--plots=x", "--views=moon"], "there is no view 'moon'"),
        (["--slo_ttft_ms=-1"], "--slo_ttft_ms must be a positive number"),
        (["--classes=a:0.5"], "--classes: the shares of the classes must add up to 1, not 0.5"),
        (["--max_tokens=0"], "--max_tokens must be a positive number or 'length', got '0'"),
        (["--max_tokens=15"], "output of 16 tokens, more than its max_tokens of 15"),
        (["--max_tokens=9999"], "16 out, of 9999 asked for; the cache holds 512 tokens"),
    ],
)
def test_mistakes_get_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], problem: str
) -> None:
    assert main([*SMALL, *argv]) == 1
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1


CLASSES = "--classes=chat:0.6:ttft=150ms:tbt=20ms,batch:0.4:tier=best_effort:jct=2s"


def test_tiers_and_classes_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--policy=vllm", "--workload=alpaca", "--num_requests=60", "--rate=100", CLASSES]
    found = run(capsys, *argv)
    classes, tiers = found["classes"], found["tiers"]
    assert list(classes) == ["chat", "batch"] and list(tiers) == ["realtime", "best_effort"]
    assert classes["chat"] == tiers["realtime"] and classes["batch"] == tiers["best_effort"]
    for groups in (classes, tiers):
        assert sum(group["requests"] for group in groups.values()) == 60
        goodput = sum(group["slo"]["goodput_per_s"] for group in groups.values())
        assert goodput == pytest.approx(found["goodput_per_s"], rel=0.01)
    assert 0 < classes["chat"]["slo"]["tbt_attainment"] < 1
    assert classes["batch"]["slo"]["tbt_attainment"] == 1  # it has no such target
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()[:2]) for line in lines[-4:]] == [
        "tier realtime",
        "tier best_effort",
        "class chat",
        "class batch",
    ]


def test_classes_change_neither_arrivals_nor_lengths(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tables = []
    for more in ([], [CLASSES, "--max_tokens=length"]):
        path = tmp_path / f"{len(more)}.json"
        argv = ["--workload=sharegpt", "--num_requests=30", "--rate=2", f"--requests_table={path}"]
        run(capsys, *argv, *more)
        tables.append(json.loads(path.read_text()))
    for plain, drawn in zip(*tables, strict=True):
        for name in ("arrival", "prompt_len", "output_len"):
            assert plain[name] == drawn[name]
        assert (plain["class"], plain["slo_ttft"]) == ("default", None)
        assert drawn["slo_jct"] == (2.0 if drawn["class"] == "batch" else None)
        assert drawn["limit"] == drawn["output_len"]
    longest = max(row["prompt_len"] + row["output_len"] for row in tables[0])
    assert {row["prompt_len"] + row["limit"] for row in tables[0]} == {longest}
