"""`jaxserve simulate`: its last line, its tables, its figures, its complaints."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.simulator.figures import plots
from jaxserve.simulator.simulate.cli import main
from jaxserve.simulator.simulate.runs import Run
from tests.simulator.grouped import grouped

ROOT = Path(__file__).parents[3]
SMALL = ["--workload=fixed:64x16x12", "--kv_tokens=512", "--max_batch_tokens=256"]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    """The only point of a sweep with one seed, in this process."""
    (point,) = points(capsys, "--jobs=1", "--seeds=1", *argv)
    (own,) = point["runs"]
    assert point["mean"] == {name: value for name, value in own.items() if name != "seed"}
    return {**point, **own}


def points(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, Any]]:
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["points"]
    assert isinstance(found, list)
    return found


def test_several_policies_and_rates_beside_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--policy=vllm,sarathi", "--workload=alpaca", "--num_requests=20", "--rate=5,50"]
    argv += ["--seeds=2"]
    together = points(capsys, *argv, "--jobs=2")
    assert [(r["policy"], r["rate"]) for r in together] == [
        ("vllm", 5.0),
        ("vllm", 50.0),
        ("sarathi", 5.0),
        ("sarathi", 50.0),
    ]
    assert points(capsys, *argv, "--jobs=1") == together


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
    argv = ["--workload=alpaca", "--num_requests=20", "--policy=vllm"]
    argv += ["--rate=5,20", "--jobs=1", "--seeds=2", f"--plots={tmp_path}"]
    assert main([*argv, "--views=attainment,cdf,kv,schedule", "--kv_tokens=4000"]) == 0
    capsys.readouterr()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        "attainment.png",
        "cdf.png",
        "kv.png",
        *(f"schedule-{i}.png" for i in range(2)),
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())


def test_attainment_has_bars_where_it_has_a_spread() -> None:
    summaries = [{"policy": "vllm", "rate": r, "slo_attainment": 1 / r} for r in (1.0, 2.0, 4.0)]
    (plain,) = plots.attainment(summaries).axes[0].containers
    assert not plain.has_yerr
    (bars,) = plots.attainment(summaries, [None, 0.1, 0.05]).axes[0].containers
    line, _, (ends,) = bars.lines
    assert line.get_ydata().tolist() == [100.0, 50.0, 25.0]
    np.testing.assert_allclose(
        [segment[:, 1].tolist() for segment in ends.get_segments()],
        [[100, 100], [40, 60], [20, 30]],
    )


def test_the_schedule_view_draws_every_box() -> None:
    from jaxserve.simulator.simulator import simulate
    from jaxserve.simulator.systems.systems import system
    from jaxserve.simulator.workloads.workload import Workload, all_at_once, fixed_lengths

    workload = Workload.create(all_at_once(4), fixed_lengths(16, 4, 4))
    place = system("llama-2-7b@a100")
    options: dict[str, Any] = {"kv_tokens": 32, "rules": "infermax_paper"}
    result = simulate("vllm", workload, place, **grouped(record_rows=True, **options))
    figure = plots.schedule(result, "vllm")
    top = figure.axes[0]
    boxes = {len(c.get_paths()) for c in top.collections}
    prefills, decodes = result.batches.num_prefills.sum(), result.batches.num_decodes.sum()
    assert boxes == {int(prefills), int(decodes), int(result.batches.preemptions.sum())}
    with pytest.raises(ValueError, match="record_rows"):
        plots.schedule(simulate("vllm", workload, place, **grouped(**options)))


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--policy=nobody"], "there is no policy 'nobody'"),
        (["--policy=sarathi:watermark=x"], "watermark must be a number, got 'x'"),
        (["--system=llama-9b@a100"], "there is no system"),
        (["--workload=nowhere.csv"], "no workload or file"),
        (["--kv_tokens=70"], "the cache holds"),
        (["--plots=x", "--views=moon"], "there is no view 'moon'"),
        (["--max_tokens=15"], "output of 16 tokens, more than its max_tokens of 15"),
        (["--max_tokens=9999"], "16 out, of 9999 asked for; the cache holds 512 tokens"),
        (["--policy=vllm", "--max_prefill_tokens=64"], "--max_prefill_tokens is for policies that"),
        (["--max_prefill_tokens=512"], "max_prefill_tokens (512) must not exceed"),
        (["--summary=no/where.csv"], "--summary: there is no folder no"),
        (["--requests_table=."], "--requests_table: . is a folder"),
        (["--batches_table=no/where.json"], "--batches_table: there is no folder no"),
        (["--chrome_trace=no/where.json"], "--chrome_trace: there is no folder no"),
        (["--plots=README.md/figures"], "README.md is not a folder"),
        (["--summary=a.csv", "--requests_table=./a.csv"], "a.csv is what --requests_table writes"),
        (["--find=capacity"], "--find=capacity needs a target: --slo_ttft_ms"),
    ],
)
def test_mistakes_get_one_line(
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    assert main([*SMALL, *argv]) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1


def test_what_is_read_is_not_written_over(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(content := "prompt_tokens,output_tokens\n3,4\n")
    argv = [f"--workload={path}", "--seeds=1", "--jobs=1"]
    assert main([*argv, f"--chrome_trace={tmp_path / '..' / tmp_path.name / 'trace.csv'}"]) == 2
    assert main([*argv, f"--summary={path}"]) == 2
    assert f"--summary: {path} is what --workload reads" in capsys.readouterr().err
    assert path.read_text() == content


def nothing_runs(self: Run, *more: object) -> None:
    raise AssertionError("something ran")


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--policy="], "--policy: a name is missing in ''"),
        (["--policy=vllm,,edf"], "--policy: a name is missing in 'vllm,,edf'"),
        (["--policy=vllm,edf,vllm"], "--policy: vllm is given twice"),
        (["--rate=1,1"], "--rate: 1.0 is given twice"),
        (["--rate=0"], "--rate: must be from 1e-06 to 1e+09 requests/s, got 0"),
        (["--rate=nan"], "--rate: must be from 1e-06 to 1e+09 requests/s, got nan"),
        (["--rate=2,1e308"], "--rate: must be from 1e-06 to 1e+09 requests/s, got 1e+308"),
        (["--rate="], "--rate: must be numbers, got ''"),
        (["--seeds=0"], "--seeds: must be at least 1, got 0"),
        (["--max_rows=99999999999"], "--max_rows: must be at most 2147483647, got 99999999999"),
        (["--seed=-1"], "--seed: must be from 0 to 2147483647, got '-1'"),
        (["--seed=2147483647"], "--seed and those after it must be at most 2147483647"),
        (["--views=kv"], "--views says which figures; --plots says where they go"),
        (["--summary="], "--summary: needs a path"),
        (["--routing=least_loaded"], "--routing is for more than one of --replicas"),
        (["--attainment=0.9"], "--attainment is for --find=capacity"),
        (["--slo_ttft_ms=-1"], "--slo_ttft_ms: must be a positive number, got '-1'"),
        (["--classes=a:0.5"], "--classes: the shares of the classes must add up to 1, not 0.5"),
        (["--max_tokens=0"], "--max_tokens: must be a positive number or 'length', got '0'"),
        (["--find=capacity", "--attainment=90"], "above 0 and at most 1, got '90'"),
        (["--find=capacity", "--rate=1,2"], "begins its search at one --rate"),
        (["--find=capacity", "--arrivals=all"], "--arrivals=all has none"),
        *(
            (["--find=capacity", f"--{name}=x"], f"--{name} is of single runs")
            for name in ("requests_table", "batches_table", "chrome_trace", "plots")
        ),
    ],
)
def test_a_wrong_command_line_gets_two_lines(
    capsys: pytest.CaptureFixture[str], argv: list[str], problem: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--workload=alpaca", *argv])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 2


@pytest.mark.parametrize("name", ["summary", "requests_table", "batches_table", "chrome_trace"])
def test_outputs_are_tried_before_anything_runs(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "outcome", nothing_runs)
    assert main([*SMALL, "--jobs=1", f"--{name}={tmp_path}/no/x.csv"]) == 2
    assert f"--{name}: there is no folder" in capsys.readouterr().err
    numbered = tmp_path / "x-1.csv"
    numbered.mkdir()
    argv = ["--policy=vllm,sarathi", f"--{name}={tmp_path}/x.csv"]
    if name != "summary":  # it is one file, whatever is run
        assert main([*SMALL, *argv]) == 2
        assert f"--{name}: {numbered} is a folder" in capsys.readouterr().err


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
    assert classes["batch"]["slo"]["tbt_attainment"] is None, "it has no such target"
    strict = run(capsys, *argv[:-1], CLASSES.replace("tbt=20ms", "tbt=20ms:max_tbt=21ms"))
    assert strict["tbt_attainment"] == found["tbt_attainment"]
    assert strict["slo_attainment"] < found["slo_attainment"]
    assert strict["goodput_per_s"] < found["goodput_per_s"]
    assert strict["classes"]["chat"]["slo"]["max_tbt_attainment"] < 1
    assert main([*argv, "--seeds=2", "--jobs=1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all("±" in line for line in lines[-4:])
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
        assert plain["attained"] is None and drawn["attained"] in (True, False)
        assert drawn["slo_jct"] == (2.0 if drawn["class"] == "batch" else None)
        assert drawn["limit"] == drawn["output_len"]
    longest = max(row["prompt_len"] + row["output_len"] for row in tables[0])
    assert {row["prompt_len"] + row["limit"] for row in tables[0]} == {longest}


def test_moves_are_in_the_table_where_there_are_any(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--workload=fixed:90x40x12", "--kv_tokens=600", "--jobs=1", "--max_batch_tokens=256"]
    assert main([*run, "--policy=fastserve", "--host_tokens=2000"]) == 0
    header, row = capsys.readouterr().out.splitlines()[:2]
    assert "slots saved  slots loaded" in header and "shared blocks" not in header
    assert "0" not in row.split()[-3:-1]
    assert main([*run, "--policy=vllm"]) == 0
    assert "slots" not in capsys.readouterr().out


def test_the_help_says_what_the_columns_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL) == 0
    header = re.split(r"  +", capsys.readouterr().out.splitlines()[0].strip())
    with pytest.raises(SystemExit):
        main(["--help"])
    told = capsys.readouterr().out.partition("columns of the table:\n")[2]
    explained = {line.strip().partition("  ")[0] for line in told.splitlines()}
    assert len(header) > 5 and explained >= set(header) - {"policy", "rate"}


def test_requests_that_are_too_long_are_dropped_if_asked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Others may still write as much as the cache holds, not as the longest leaves."""
    path = tmp_path / "trace.csv"
    path.write_text("prompt_tokens,output_tokens\n10,20\n5000,8\n30,40\n")
    argv = ["--policy=sarathi", f"--workload={path}", "--kv_tokens=1024", "--seeds=1"]
    assert main(argv) == 2
    assert "request 1 has 5000 tokens in" in capsys.readouterr().err
    assert main([*argv, "--drop_too_long", "--json"]) == 0
    said = capsys.readouterr()
    (point,) = json.loads(said.out.splitlines()[-1])["points"]
    numbers = point["mean"]
    assert (numbers["num_requests"], numbers["num_dropped"]) == (2, 1)
    assert numbers["output_tokens"] == 60
    assert "dropped" in said.err.splitlines()[0]
    path.write_text("prompt_tokens,output_tokens\n5000,8\n")
    assert main([*argv, "--drop_too_long"]) == 2
    assert "more tokens than the 1024 that fit" in capsys.readouterr().err
