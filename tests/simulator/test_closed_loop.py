"""Best-effort batches that follow each other, and runs that are cut off."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.cost.cost_model import Coefficients, LinearCostModel
from jaxserve.sched.cost.host_overhead import HostOverhead
from jaxserve.sched.policy import Limits
from jaxserve.sched.request import SLO, Tier
from jaxserve.sched.slo.classes import with_targets
from jaxserve.sched.slo.slo_columns import SloColumns
from jaxserve.simulator.figures.chrome_trace import write_trace
from jaxserve.simulator.results import SimulationResult
from jaxserve.simulator.simulate import cli as command
from jaxserve.simulator.simulator import SimulationError
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.closed_loop import ClosedLoop, parse_closed_loop
from jaxserve.simulator.workloads.lengths import Uniform
from jaxserve.simulator.workloads.specs import WorkloadSpec
from jaxserve.simulator.workloads.workload import Lengths, Workload, WorkloadError
from tests.simulator.grouped import simulate

SECOND = LinearCostModel(Coefficients(0, 1.0, 0, 0, 0, 0, 0, 0, 0), 1)  # every batch takes 1 s
SEVEN = system("llama-2-7b@a100")
TEXT = "closed:batch=64,input=uniform:512:1024,output=uniform:32:128"
TWO = ClosedLoop(2, Uniform(4, 4), Uniform(3, 3))
VARIED = ClosedLoop(6, Uniform(10, 200), Uniform(1, 30))


def of(arrival: list[float], prompt: list[int], output: list[int], slo: SLO) -> Workload:
    terms = with_targets(SloColumns.none(len(arrival)), slo)
    return Workload.create(
        np.array(arrival), Lengths(np.array(prompt), np.array(output)), terms=terms
    )


def times(result: SimulationResult, request: int) -> list[float]:
    r = result.requests
    first = int(r.offsets[request])
    return r.token_times[first : first + int(r.tokens[request])].tolist()


def test_a_load_in_words() -> None:
    loop = parse_closed_loop(TEXT)
    assert loop == ClosedLoop(64, Uniform(512, 1024), Uniform(32, 128))
    assert str(loop) == TEXT
    drawn = [loop.requests(n, 7.5, seed=3) for n in range(20)]
    prompts = np.concatenate([one.prompt_len for one in drawn])
    outputs = np.concatenate([one.output_len for one in drawn])
    assert (prompts.min(), prompts.max(), outputs.min(), outputs.max()) == (512, 1024, 32, 128)
    assert prompts.mean() == pytest.approx(768, rel=0.02)  # BROS Table 2 has a sample's 784
    assert outputs.mean() == pytest.approx(80, rel=0.03)
    first = drawn[0]
    assert set(first.arrival.tolist()) == {7.5} and set(first.limit.tolist()) == {128}
    assert set(first.tier.tolist()) == {int(Tier.BEST_EFFORT)}
    again, other = loop.requests(0, 9.0, seed=3), loop.requests(0, 7.5, seed=4)
    np.testing.assert_array_equal(again.prompt_len, first.prompt_len)
    assert (other.prompt_len != first.prompt_len).any()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("batch=4", "best-effort load is closed:batch=N,input=uniform:LOW:HIGH"),
        ("closed:", "batch=, input= and output=, got ''"),
        ("closed:batch=4,input=uniform:1:2", "output= is missing"),
        ("closed:batch=4,batch=4", "output=, each once, got 'batch=4'"),
        ("closed:rows=4", "got 'rows=4'"),
        (TEXT.replace("64", "0"), "batch must be 1 to 65536 requests, got '0'"),
        (TEXT.replace("64", "many"), "batch must be"),
        (TEXT.replace("512:1024", "9:8"), "input must be uniform:LOW:HIGH"),
        (TEXT.replace("32:128", "0:8"), "output must be uniform:LOW:HIGH, in tokens, 1 to"),
        (TEXT.replace("uniform:32", "normal:32"), "got 'normal:32:128'"),
        (TEXT.replace("64", "65536").replace("128", "2147483647"), "GB of memory; there are"),
    ],
)
def test_what_is_no_load(text: str, problem: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        parse_closed_loop(text)
    assert problem in str(caught.value) and "\n" not in str(caught.value)


def test_the_next_batch_comes_when_the_last_of_one_has_ended() -> None:
    """Three steps of 1 s each, without overlap; a real-time request takes part in some."""
    workload = of([1.5], [4], [2], SLO())
    result = simulate(
        "vllm", workload, SECOND, kv_tokens=99, overlap=False, best_effort=TWO, until=9.0
    )
    requests = result.requests
    assert requests.arrival.tolist() == [0.0, 0.0, 1.5, 4.0, 4.0, 7.0, 7.0]
    assert requests.workload.tier.tolist() == [1, 1, 0, 1, 1, 1, 1]
    # vllm computes prompts and decodes in different steps, so the prompt at 2 s costs one.
    assert times(result, 0) == times(result, 1) == [1.0, 2.0, 4.0]
    assert times(result, 2) == [3.0, 4.0]
    assert times(result, 3) == [5.0, 6.0, 7.0]
    assert times(result, 5) == [8.0, 9.0]
    assert requests.finished.tolist() == [True] * 5 + [False] * 2
    assert np.isnan(requests.finish[5:]).all() and np.isnan(requests.latency[5:]).all()
    summary = result.summary()
    assert (summary["num_requests"], summary["num_finished"]) == (7, 5)
    assert summary["makespan_s"] == 9.0
    tiers = summary["tiers"]
    assert tiers["best_effort"]["finished_per_s"] == pytest.approx(4 / 9)
    assert tiers["best_effort"]["output_tokens"] == 16
    assert tiers["realtime"]["normalised_latency_ms"]["mean"] == pytest.approx(2500 / 2)
    json.dumps(summary, allow_nan=False)


def test_who_goes_on_is_judged_by_the_time_that_has_passed() -> None:
    """Everybody runs from the first step on, and has 4 tokens in time; at the end, 4.5 s."""

    def shares(slo: SLO) -> tuple[float | None, ...]:
        workload = of([0.0, 4.2], [4, 4], [9, 1], slo)
        result = simulate("vllm", workload, SECOND, kv_tokens=99, overlap=False, until=4.5)
        assert result.requests.tokens.tolist() == [4, 0]
        found = result.summary()
        assert found["goodput_per_s"] == 0.0  # nobody has ended
        return found["ttft_attainment"], found["tbt_attainment"], found["jct_attainment"]

    assert shares(SLO(ttft=1.0)) == (1.0, None, None)  # the second has 0.7 s left
    assert shares(SLO(ttft=0.9)) == (0.5, None, None)
    assert shares(SLO(ttft=0.2)) == (0.0, None, None)
    assert shares(SLO(tbt=1.0)) == (None, 1.0, None)
    assert shares(SLO(tbt=0.9)) == (None, 0.5, None)
    assert shares(SLO(jct=4.4)) == (None, None, 0.5)
    assert shares(SLO(jct=4.6)) == (None, None, 1.0)
    assert shares(SLO(jct=0.1)) == (None, None, 0.0)


@given(
    seed=st.integers(0, 1 << 30),
    policy=st.sampled_from(["vllm", "sarathi", "edf", "priority", "infermax", "fastserve"]),
    replicas=st.sampled_from([1, 1, 2]),
    overlap=st.booleans(),
    until=st.floats(0.5, 6.0),
    kv_tokens=st.integers(400, 4000),
)
@settings(max_examples=5, deadline=None)
def test_steps_together_or_one_by_one_until_the_end(
    seed: int, policy: str, until: float, **options: Any
) -> None:
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(0.2, 15))
    arrival -= arrival[0]
    workload = Workload.create(arrival, Lengths(rng.integers(1, 300, 15), rng.integers(1, 90, 15)))
    place = dataclasses.replace(SEVEN, host=HostOverhead(1e-4, 1e-6, 2e-4, 1e-6, 0.0, 0.0, 1e-4))
    options |= {"limits": Limits(512, 128, 12), "seed": seed, "record_rows": True, "until": until}
    for loop in (VARIED, None):
        one, other = (
            simulate(policy, workload, place, best_effort=loop, coast=coast, **options)
            for coast in (True, False)
        )
        for name in ("token_times", "preemptions", "replica", "tokens", "arrival"):
            mine, theirs = getattr(one.requests, name), getattr(other.requests, name)
            np.testing.assert_allclose(mine, theirs, rtol=1e-9, err_msg=name)
        np.testing.assert_allclose(one.batches.start, other.batches.start, rtol=1e-9)
        check(one, workload, until)


def check(result: SimulationResult, workload: Workload, until: float) -> None:
    """Everybody came in time, is in the batches that say so, and nothing is after the end."""
    r, batches = result.requests, result.batches
    assert (r.arrival < until).all() and (batches.start < until).all()
    assert (r.token_times <= until).all()
    realtime = r.workload.tier == Tier.REALTIME
    mine = workload.arrival[workload.arrival < until]
    np.testing.assert_array_equal(r.arrival[realtime], mine)
    np.testing.assert_array_equal(r.prompt_len[realtime], workload.prompt_len[: len(mine)])
    assert result.rows is not None
    computed = np.zeros(len(r), np.int64)
    for rows in result.rows:
        for row in rows:
            computed[row.requests] += row.tokens
    assert (computed[r.tokens > 0] >= (r.prompt_len + r.tokens - 1)[r.tokens > 0]).all()
    assert sum(len(rows) for rows in result.rows) == len(batches)
    assert sum(len(b.preempted) for rows in result.rows for b in rows) == batches.preemptions.sum()
    # Batches of the loop come whole, each when the last of the one before has ended.
    loop = np.flatnonzero(~realtime)
    for first, behind in zip(range(0, len(loop), 6), range(6, len(loop) + 1, 6), strict=False):
        batch = loop[first:behind]
        assert len(set(r.arrival[batch].tolist())) == 1
        if behind < len(loop):
            assert r.arrival[loop[behind]] == r.finish[batch].max()


def test_every_policy_gets_the_same_requests() -> None:
    workload = of([0.1, 0.9], [50, 50], [20, 20], SLO())
    found = [
        simulate(policy, workload, SEVEN, best_effort=VARIED, until=3.0, seed=5).requests
        for policy in ("vllm", "priority")
    ]
    loops = [np.flatnonzero(r.workload.tier == Tier.BEST_EFFORT) for r in found]
    count = min(map(len, loops))
    assert count >= 12
    for name in ("prompt_len", "output_len"):
        first, second = (getattr(r, name)[i[:count]] for r, i in zip(found, loops, strict=True))
        np.testing.assert_array_equal(first, second)
    other = simulate("vllm", workload, SEVEN, best_effort=VARIED, until=3.0, seed=6).requests
    assert other.prompt_len[:8].tolist() != found[0].prompt_len[:8].tolist()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"best_effort": TWO}, "come again and again: until is needed"),
        ({"until": 0.0}, "until must be a positive time, got 0"),
        ({"until": float("nan")}, "until must be a positive time, got nan"),
        ({"best_effort": TWO, "until": 5.0, "max_queue": 3}, "give no max_queue"),
        (
            {"best_effort": ClosedLoop(2, Uniform(4, 90), Uniform(3, 30)), "until": 5.0},
            "best_effort: request 0 has 90 tokens in and 30 out; the cache holds 96 tokens",
        ),
        ({"until": 1.0}, "no request comes until 1 s"),
        ({"until": 5.0, "compiled": True}, "are not cut off"),
    ],
)
def test_what_cannot_be_simulated(options: dict[str, Any], problem: str) -> None:
    limits = Limits(96, 96, 4)
    with pytest.raises(SimulationError, match=problem):
        simulate("vllm", of([1.0], [4], [3], SLO()), SECOND, kv_tokens=99, limits=limits, **options)


def test_a_workload_for_a_time() -> None:
    spec = WorkloadSpec("sharegpt", rate=20.0, duration=100.0)
    found = spec.make_workload(seed=1)
    assert 1800 < len(found) < 2200 and 99.0 < found.arrival[-1] < 100.0
    assert len(spec.make_workload(seed=1)) == len(found) != len(spec.make_workload(seed=2))
    bursts = WorkloadSpec("sharegpt", arrivals="gamma", cv=20.0, rate=3.0, duration=3000.0)
    assert 2400 < bursts.make_workload(seed=8).arrival[-1] < 3000
    few = WorkloadSpec("sharegpt", num_requests=5, rate=1.0, duration=1000.0)
    assert len(few.make_workload()) == 5
    with pytest.raises(WorkloadError, match=r"no request comes within 1e-09 s"):
        WorkloadSpec("sharegpt", rate=1.0, duration=1e-9).make_workload()
    with pytest.raises(WorkloadError, match="duration must be a positive time"):
        WorkloadSpec("sharegpt", rate=1.0, duration=float("inf"))
    with pytest.raises(WorkloadError, match="duration is needed"):
        WorkloadSpec("sharegpt", rate=1.0, best_effort=TWO)
    assert WorkloadSpec("fixed:4x3x2", duration=5.0, best_effort=TWO).drawn()
    assert not WorkloadSpec("fixed:4x3x2", duration=5.0).drawn()


def test_the_trace_of_a_run_that_was_cut_off(tmp_path: Path) -> None:
    workload = of([0.0, 0.3, 1.95], [50, 50, 900], [400, 20, 5], SLO())
    result = simulate(
        "vllm", workload, SEVEN, kv_tokens=2000, best_effort=VARIED, until=2.0, record_rows=True
    )
    assert not result.requests.finished.all() and (result.requests.tokens == 0).any()
    write_trace(result, tmp_path / "trace.json", {})
    found = json.loads((tmp_path / "trace.json").read_text(), parse_constant=pytest.fail)
    slices = [
        event for event in found["traceEvents"] if event["ph"] == "X" and "ttft_ms" in event["args"]
    ]
    assert len(slices) == len(result.requests)
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(2e6)


RUN = ["--workload=fixed:40x20x5", "--policy=vllm,priority", "--jobs=1", "--seeds=2"]
LOAD = "--best_effort=closed:batch=3,input=uniform:10:20,output=uniform:2:9"


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*RUN, LOAD, "--duration=2", "--json"]) == 0
    out = capsys.readouterr()
    found = json.loads(out.out.splitlines()[-1])["points"]
    assert "ended/s" in out.err and "tier best_effort" in out.err
    for point in found:
        assert len(point["runs"]) == 2
        tiers = point["mean"]["tiers"]
        assert tiers["realtime"]["requests"] == 5
        assert tiers["best_effort"]["finished_per_s"] > 5


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ([LOAD], "--duration is needed"),
        (["--best_effort=open", "--duration=2"], "argument --best_effort: best-effort load is"),
        (["--duration=0"], "argument --duration: must be a positive number of seconds"),
        (
            ["--duration=long"],
            "argument --duration: must be a positive number of seconds, got 'long'",
        ),
        ([LOAD, "--duration=2", "--max_queue=2"], "--max_queue does not go with them"),
        ([LOAD, "--duration=2", "--find=capacity"], "no SLO that --find=capacity could look at"),
    ],
)
def test_flags_that_do_not_go_together(
    flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main([*RUN, *flags])
    assert caught.value.code == 2
    assert problem in (error := capsys.readouterr().err) and error.count("\n") == 2


def test_a_replayed_recording_has_a_time_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in (LOAD, "--duration=2"):
        with pytest.raises(SystemExit):
            command.main(["--replay=x.jsonl", flag])
        assert "does not go with --replay" in capsys.readouterr().err
