"""`jaxserve advise`: who wins is said where somebody does, and only there."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.config import CacheConfig
from jaxserve.sched.request import Rule
from jaxserve.simulator.advise.cli import main
from jaxserve.simulator.advise.margins import margin, plainness
from jaxserve.simulator.advise.rounds import equals
from jaxserve.simulator.simulate.runs import Outcome, Run
from jaxserve.simulator.simulate.sweep import Point
from jaxserve.simulator.workloads.specs import WorkloadSpec
from tests.engine.simulated.test_engine_agrees import trace
from tests.simulator.test_replay import recorded

PLACE = ["--system=llama-2-7b@a100", "--kv_tokens=12000", "--num_requests=60", "--jobs=1"]
# Documents in the way of chats, more of both than can be served.
MIXED = [
    *("--workload=lilo+siso", "--rate=12"),
    "--classes=chat:0.6:ttft=400ms,late:0.4:jct=60s:tier=best_effort",
]
EASY = ["--workload=fixed:64x16x40", "--slo_ttft_ms=5000"]


def advised(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[dict[str, Any], str]:
    """What it found, and what it said."""
    assert main([*argv, "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out.splitlines()[-1])
    assert isinstance(found, dict)
    return found, said.err


def test_who_keeps_targets_beats_who_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    found, said = advised(capsys, *PLACE, *MIXED, "--policy=vllm,priority,sarathi", "--seeds=3")
    assert found["policy"] == "priority" and found["within_noise"] == ["priority"]
    first, *others = found["ranking"]
    assert first["policy"] == "priority" and first["seeds"] == [0, 1, 2]
    for one in others:
        assert one["less_than_best"] > one["half_width"] > 0
        assert one["attainment"] < first["attainment"]
    assert [rate["rate"] for rate in found["rates"]] == [9.6, 15]
    assert set(found["rates"][0]["attainment"]) == {"vllm", "priority", "sarathi"}
    assert "Take priority." in said and "points more of the requests attain their SLO" in said
    assert found["why"] in said and "most of them of class chat" in found["why"]
    flags = "--policy=priority --config.scheduler.max_batch_tokens=4096"
    flags += " --config.scheduler.max_prefill_tokens=512"
    assert f"    jaxserve serve {flags}" in said.splitlines()
    assert found["flags"] == flags.split()
    assert "too short for an overload" in said, "60 requests of 12/s, and a JCT of a minute"


def test_a_stream_that_stands_still_does_not_attain(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*PLACE, MIXED[0], "--rate=8", "--slo_max_tbt_ms=200", "--policy=vllm,sarathi"]
    found, said = advised(capsys, *argv, "--seeds=1")
    first, other = found["ranking"]
    assert found["policy"] == first["policy"] == "sarathi" and Rule.SERVER.value in said
    assert first["attainment"] > other["attainment"] and other["half_width"] > 0
    assert first["mean"]["slo_attainment"] == first["attainment"]
    assert "more their longest TBT" in found["why"]


def test_it_says_where_it_makes_no_difference(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--system=llama-2-7b@a100", "--jobs=1", *EASY, "--arrivals=poisson", "--rate=2"]
    found, said = advised(capsys, *argv, "--policy=vllm,edf,goodput,infermax", "--seeds=3")
    assert found["policy"] == "goodput"
    assert set(found["within_noise"]) == {"vllm", "edf", "goodput", "infermax"}
    assert "Any of these, which are within noise of each other: " in said
    assert "Take goodput." in said
    assert found["why"].startswith("It makes no difference")
    assert all(one["attainment"] == 1 for one in found["ranking"])


def test_of_all_that_a_server_takes(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--system=llama-2-7b@a100", "--jobs=1", "--workload=fixed:40x4x6"]
    found, _ = advised(capsys, *argv, "--slo_ttft_ms=900", "--max_rows=8", "--max_queue=9")
    names = {one["policy"] for one in found["ranking"]}
    assert {"accelgen", "aptserve", "bros", "fastserve", "orca", "vllm"} < names
    assert not {"rank_o", "oracle"} & names
    assert found["rates"] == [], "all come at once"
    assert found["flags"][-2:] == [
        "--config.scheduler.max_rows=8",
        "--config.scheduler.max_queue=9",
    ]
    assert set(found["within_noise"]) == names


def test_who_cannot_serve_the_traffic_is_not_ranked(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--system=llama-2-7b@a100", "--jobs=1", "--workload=fixed:300x4x6", "--slo_ttft_ms=900"]
    argv += ["--max_batch_tokens=128"]
    found, said = advised(capsys, *argv, "--policy=vllm,sarathi")
    assert [one["policy"] for one in found["ranking"]] == ["sarathi"]
    (problem,) = found["refused"]
    assert (
        problem.startswith("vllm: request 0 has 300 tokens in") and f"compared: {problem}" in said
    )
    assert found["why"] == "There is no other to compare it with."
    assert main([*argv, "--policy=vllm"]) == 2
    assert capsys.readouterr().err == f"jaxserve advise: {problem}\n"


@pytest.mark.slow
def test_a_recording(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """On the system that it was served on, with the policy that served it."""
    fields = {"scheduler__policy": "edf", "scheduler__params": {"watermark": "0.05"}}
    _, path = recorded(tmp_path, trace(3, 30.0, True, 20), **fields)
    argv = [
        f"--replay={path}",
        "--slo_ttft_ms=50",
        "--jobs=1",
        "--policy=vllm,sarathi",
        "--seeds=2",
    ]
    found, said = advised(capsys, *argv)
    names = {one["policy"]: one for one in found["ranking"]}
    assert set(names) == {"vllm", "sarathi", "edf:watermark=0.05"}
    assert any(len(one["seeds"]) > 1 for one in names.values()), "what steps take is drawn"
    assert len(found["rates"]) == 2
    assert found["rates"][1]["rate"] == pytest.approx(found["rates"][0]["rate"] / 0.8 * 1.25, 1e-3)
    assert "fitted to" in said and "on recorded" in said
    assert any(flag.startswith("--config.scheduler.max_rows=") for flag in found["flags"])


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (EASY, "--system is needed without --replay: a profile of this machine"),
        (["--system=llama-2-7b@a100"], "--workload or --replay is needed"),
        ([*PLACE, *MIXED, "--rate=2,3"], "--rate is that of the traffic, one"),
        ([*PLACE, "--workload=lilo+siso"], "nobody has a target that could be missed"),
        ([*PLACE, *MIXED, "--policy=rank_o"], "--policy: rank_o is for simulations only"),
        ([*PLACE, *MIXED, "--policy=oracle"], "--policy: oracle is for simulations only"),
        ([*PLACE, *MIXED, "--policy=sarati"], "did you mean 'sarathi'"),
        (["--replay=/no/such.jsonl"], "/no/such.jsonl"),
        ([*PLACE, *MIXED, "--find=capacity"], "unrecognized arguments: --find=capacity"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert main(argv) == 2
    except SystemExit as end:
        assert end.code == 2
    said = capsys.readouterr().err
    first, *help = said.splitlines()
    assert first.startswith("jaxserve advise: ") and problem in first
    assert help in ([], ["jaxserve advise --help says what there is"])


# What is noise.


def point(
    policy: str, *outcomes: tuple[float, float] | np.ndarray, seed_matters: bool = True
) -> Point:
    """outcomes: attainment and goodput of each seed, or who is met."""
    place = "llama-2-7b@a100"
    none: tuple[None, ...] = (None,) * 3
    spec = WorkloadSpec("lilo+siso")
    run = Run(policy, place, spec, "jaxserve", None, 0, *none, None, 2, "round_robin", 0)
    found = []
    for one in outcomes:
        met = one if isinstance(one, np.ndarray) else np.zeros(1, bool)
        share, goodput = (float(met.mean()), 1.0) if met is one else (float(one[0]), float(one[1]))
        numbers = {"slo_attainment": share, "goodput_per_s": goodput}
        found.append(Outcome(numbers, 1, False, met, math.inf, None))
    return Point(run, tuple(found), seed_matters)


def test_seeds_are_compared_in_pairs() -> None:
    """What both have in common, as a seed with a burst, is not noise."""
    one = point("vllm", (0.9, 2.0), (0.5, 2.0), (0.7, 2.0))
    other = point("sarathi", (0.86, 1.0), (0.45, 1.0), (0.64, 1.0))
    found = margin(one, other)
    assert found.attainment == pytest.approx(0.05)
    assert found.half_width == pytest.approx(4.303 * 0.01 / math.sqrt(3), rel=1e-3)  # Student, 2
    assert found.goodput == pytest.approx(0.5) and found.goodput_half_width == 0
    assert found.matters and margin(other, one).attainment == -found.attainment


def test_only_seeds_that_both_have_count() -> None:
    one = point("vllm", (0.9, 2.0), (0.1, 2.0), (0.1, 2.0))
    assert margin(one, point("edf", (0.9, 2.0))).attainment == 0
    fixed = point("edf", (0.9, 2.0), seed_matters=False)
    assert margin(one, fixed).attainment == pytest.approx(-0.8 * 2 / 3)


def test_one_run_is_compared_over_its_requests() -> None:
    """100 requests: 9 are met by the one only, and 1 by the other."""
    one, other = np.zeros(100, bool), np.zeros(100, bool)
    one[:50] = other[:41] = True
    other[99] = True
    a, b = (point("vllm", met, seed_matters=False) for met in (one, other))
    found = margin(a, b)
    assert found.attainment == pytest.approx(0.08)
    assert found.half_width == pytest.approx(1.96 * math.sqrt(10 - 64 / 100) / 100)
    assert found.matters
    one[45:50] = False
    assert not margin(point("vllm", one, seed_matters=False), b).matters


@pytest.mark.parametrize(
    ("attainment", "goodput", "matters"),
    [(0.004, 0.0, False), (0.006, 0.0, True), (0.0, 0.009, False), (0.0, 0.02, True)],
)
def test_small_differences_make_none(attainment: float, goodput: float, matters: bool) -> None:
    one = point("vllm", *[(0.9, 1.0)] * 3)
    other = point("edf", *[(0.9 - attainment, 1.0 - goodput)] * 3)
    assert margin(one, other).matters == matters
    assert len(equals([one, other])) == 2 - matters


def test_the_plainest_of_equals_is_taken() -> None:
    names = ["accelgen", "accelgen_nochunk", "sarathi_pc", "bros", "goodput", "sarathi", "edf"]
    order = ["goodput", "edf", "sarathi", "sarathi_pc", "bros", "accelgen", "accelgen_nochunk"]
    assert sorted(names, key=plainness) == order


def test_sessions_are_advised_with_reuse(capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--system=llama-3-8b@a100", "--num_requests=60", "--jobs=1", "--seeds=1"]
    sessions = ["--workload=conversation", "--rate=20", "--slo_ttft_ms=150", "--policy=sarathi,edf"]
    share = {}
    for reuse in (True, False):
        flag = "--prefix_caching" if reuse else "--no-prefix_caching"
        found, _ = advised(capsys, *place, *sessions, flag)
        share[reuse] = found["ranking"][0]["attainment"]
        said = f"--config.cache.prefix_caching={str(reuse).lower()}"
        assert (said in found["flags"]) == (reuse != CacheConfig.prefix_caching)
    assert share[True] > share[False]
