"""A simulation as a trace for chrome://tracing and Perfetto."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.sched.policy import Limits
from jaxserve.simulator.figures.chrome_trace import request_phases, trace_events
from jaxserve.simulator.results import SimulationResult
from jaxserve.simulator.simulate.cli import main
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.specs import WorkloadSpec
from tests.simulator.grouped import simulate

REQUIRED = {  # by ph, beside name, pid and tid (Trace Event Format, "Event Descriptions")
    "X": {"ts", "dur", "args"},
    "C": {"ts", "args"},
    "M": {"args"},
    "i": {"ts", "s"},
}
PHASES = {"queued", "prefill", "decode", "preempted"}


def simulated(policy: str = "vllm", replicas: int = 1, **options: Any) -> SimulationResult:
    """With less memory than the requests come to want, so that some are preempted."""
    spec = WorkloadSpec("fixed:64x40x12", arrivals="poisson", rate=200.0)
    place = system("llama-2-7b@a100")
    options = {"kv_tokens": 512, "record_rows": True, **options}
    return simulate(policy, spec.make_workload(), place, replicas=replicas, **options)


def slices(events: list[dict[str, Any]], pid: int) -> dict[int, list[dict[str, Any]]]:
    """Of a process, by track, in order."""
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["pid"] == pid:
            found[event["tid"]].append(event)
    return found


def ends(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


@pytest.mark.parametrize(("policy", "replicas"), [("vllm", 1), ("aptserve", 2)])
def test_events_are_as_the_format_says(policy: str, replicas: int) -> None:
    result = simulated(policy, replicas)
    events = json.loads(json.dumps(list(trace_events(result)), allow_nan=False))
    for event in events:
        assert event.keys() == {"name", "ph", "pid", "tid"} | REQUIRED[event["ph"]]
        assert event.get("dur", 1) > 0
        assert 0 <= event.get("ts", 0) <= 1e6 * result.requests.finish.max() + 1e-3
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"}
    assert names == {(replicas, "requests"), *((i, f"replica {i}") for i in range(replicas))}


@pytest.mark.parametrize("replicas", [1, 2])
def test_steps_are_the_batches(replicas: int) -> None:
    result = simulated("sarathi", replicas)
    events = list(trace_events(result))
    for replica in range(replicas):
        (steps,) = slices(events, replica).values()
        mine = result.batches.replica == replica
        assert [step["args"]["tokens"] for step in steps] == result.batches.num_tokens[
            mine
        ].tolist()
        starts = np.array([step["ts"] for step in steps])
        np.testing.assert_allclose(starts, 1e6 * result.batches.start[mine], atol=1e-3)
        lasting = [step["dur"] for step in steps]
        np.testing.assert_allclose(lasting, 1e6 * result.batches.duration[mine], atol=2e-3)
        assert all(ends(a) <= b["ts"] + 1e-6 for a, b in itertools.pairwise(steps))
        used = [e for e in events if e["ph"] == "C" and e["pid"] == replica]
        peak = max(e["args"]["tokens"] for e in used)
        assert peak == result.batches.kv_used[mine].max()
        assert used[-1]["args"]["tokens"] == 0


@pytest.mark.parametrize(
    ("policy", "rules"),
    [
        ("vllm", "infermax_paper"),
        ("sarathi", "jaxserve"),
        ("edf", "jaxserve"),
        ("aptserve", "jaxserve"),
    ],
)
def test_phases_fill_the_request(policy: str, rules: str) -> None:
    result = simulated(policy, rules=rules)
    tracks = slices(list(trace_events(result)), 1)
    assert sorted(tracks) == list(range(12))
    for number, (request, *phases) in tracks.items():
        assert request["name"] == "request"
        assert request["ts"] == pytest.approx(1e6 * result.requests.arrival[number], abs=1e-3)
        assert ends(request) == pytest.approx(1e6 * result.requests.finish[number], abs=1e-3)
        assert {phase["name"] for phase in phases} <= PHASES
        assert phases[0]["ts"] == request["ts"]
        assert ends(phases[-1]) == pytest.approx(ends(request), abs=1e-6)
        for one, next_one in itertools.pairwise(phases):
            assert ends(one) == pytest.approx(next_one["ts"], abs=1e-6)
            assert one["name"] != next_one["name"]
        assert phases[-1]["name"] == "decode"
        token = 1e6 * result.requests.first_token[number]
        computed = [ends(phase) for phase in phases if phase["name"] == "prefill"]
        assert min(abs(end - token) for end in computed) < 1e-3


def test_preemptions_are_seen() -> None:
    result = simulated("vllm")
    phases = request_phases(result)
    counts = [sum(name == "preempted" for name, _ in each) for each in phases]
    assert counts == result.requests.preemptions.tolist()
    assert max(counts) > 0
    for each in phases:
        names = [name for name, _ in each]
        assert names[:2] == ["queued", "prefill"] and names[-1] == "decode"
        after = [names[i + 1] for i, name in enumerate(names) if name == "preempted"]
        assert set(after) <= {"prefill"}


def test_who_is_refused_has_no_phases() -> None:
    limits = Limits(4096, 512, 2)
    result = simulated("sarathi", limits=limits, max_queue=1)
    refused = np.flatnonzero(result.requests.refused).tolist()
    assert 0 < len(refused) < 12
    events = list(trace_events(result))
    assert [e["tid"] for e in events if e["ph"] == "i"] == refused
    assert sorted([*slices(events, 1), *refused]) == list(range(12))


def test_who_was_there_has_to_be_known() -> None:
    with pytest.raises(ValueError, match="record_rows"):
        trace_events(simulated(record_rows=False))


def test_the_command_writes_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    argv = ["--workload=alpaca", "--num_requests=10", "--rate=20", "--seeds=2", "--jobs=1"]
    assert main([*argv, "--seed=4", f"--chrome_trace={path}"]) == 0
    written = json.loads(path.read_text())
    assert written["displayTimeUnit"] == "ms"
    assert written["otherData"]["policy"] == "goodput" and written["otherData"]["seed"] == 4
    place, spec = system("llama-2-7b@a100"), WorkloadSpec("alpaca", 10, rate=20.0)
    result = simulate("goodput", spec.make_workload(4), place, seed=4, record_rows=True)
    assert written["traceEvents"] == list(trace_events(result))
    assert main([*argv, "--policy=vllm,sarathi", f"--chrome_trace={path}"]) == 0
    for number, policy in enumerate(("vllm", "sarathi")):
        numbered = json.loads(path.with_stem(f"trace-{number}").read_text())
        assert numbered["otherData"]["policy"] == policy
    capsys.readouterr()
