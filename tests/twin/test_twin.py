"""A twin of a server that is seen from outside: what can be worked out from the times of tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from jaxserve.sched.policy import Limits
from jaxserve.sched.recording import RecordingError
from jaxserve.simulator import replay
from jaxserve.simulator.results import SimulationResult
from jaxserve.simulator.settings import EngineOptions, RunOptions
from jaxserve.simulator.simulator import simulate
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.specs import WorkloadSpec
from jaxserve.twin.recordings import ServerFacts, make_twin
from jaxserve.twin.steps import SeenRequest, seen_steps

FACTS = ServerFacts("somebody's", "sarathi_pc")
RATE, CHUNK, ROWS = 8.0, 512, 24


def served(
    rows: int = ROWS, *, overlap: bool = True, rate: float = RATE, count: int = 150
) -> SimulationResult:
    """Chats on a server whose steps are known."""
    workload = WorkloadSpec("sharegpt", count, "poisson", rate, max_tokens="length").make_workload(
        0
    )
    return simulate(
        "sarathi_pc",
        workload,
        system("llama-3-8b@a100"),
        engine=EngineOptions(limits=Limits(CHUNK, CHUNK, rows), overlap=overlap),
        run=RunOptions(record_rows=True),
    )


def seen(result: SimulationResult, late: np.ndarray | None = None) -> list[SeenRequest]:
    """What its clients see. late: seconds that each token takes to them, [tokens]."""
    made = result.requests
    times = made.token_times if late is None else made.token_times + late
    ends = made.offsets + made.tokens
    return [
        SeenRequest(float(arrival), int(prompt), np.sort(times[first:end]), int(end - first))
        for arrival, prompt, first, end in zip(
            made.arrival, made.workload.prompt_len, made.offsets, ends, strict=True
        )
    ]


@pytest.fixture(scope="module")
def result() -> SimulationResult:
    return served()


@pytest.mark.parametrize("overlap", [True, False])
def test_the_steps_are_what_they_were(overlap: bool) -> None:
    result = served(256, overlap=overlap)
    steps = seen_steps(seen(result), CHUNK, overlap=overlap)
    batches, rows = result.batches, result.rows
    assert rows is not None
    assert [step.tokens for step in steps] == batches.num_tokens.tolist()
    assert [len(step.decodes) for step in steps] == batches.num_decodes.tolist()
    assert [step.end for step in steps] == pytest.approx(batches.start + batches.duration)
    starts = np.array([step.start for step in steps])
    assert (starts[1:] <= batches.start[1:] + 1e-9).all()
    for step, row in zip(steps, rows[0], strict=True):
        there = [number for number, _ in step.decodes] + [number for number, _, _ in step.chunks]
        assert sorted(there) == sorted(row.requests.tolist())


def test_a_twin_is_like_the_server_on_what_it_has_not_seen(
    result: SimulationResult, tmp_path: Path
) -> None:
    twin = make_twin(seen(result), FACTS)
    assert twin.header.max_batch_tokens == CHUNK and twin.header.overlap
    assert [one.name for one in twin.errors] == ["TTFT", "time between tokens", "total time"]
    for one in twin.errors:
        assert abs(one.mean_off) < 0.05 and abs(one.p99_off) < 0.1, one
    path = tmp_path / "seen.jsonl"
    twin.write(path)
    again = replay.served(replay.read(path)).requests
    assert again.ttft == pytest.approx(result.requests.ttft)
    assert again.latency == pytest.approx(result.requests.latency)


@pytest.mark.parametrize("overlap", [True, False])
def test_the_way_to_the_server_and_back(overlap: bool, tmp_path: Path) -> None:
    way = 0.014
    result = served(256, overlap=overlap, count=100)
    requests = [dataclasses.replace(one, times=one.times + way) for one in seen(result)]
    known = dataclasses.replace(FACTS, max_batch_tokens=CHUNK, max_rows=256, kv_tokens=100_000)
    twin = make_twin(requests, known)
    assert twin.header.overlap == overlap
    assert twin.header.transport == pytest.approx(way, abs=0.004)
    assert abs(twin.errors[0].mean_off) < 0.1
    assert any("ms between clients and steps" in line for line in twin.guessed)
    path = tmp_path / "seen.jsonl"
    twin.write(path)
    recording = replay.read(path)
    assert replay.served(recording).requests.ttft == pytest.approx(result.requests.ttft + way)
    system = replay.system_of(recording)
    without = replay.again(recording, dataclasses.replace(system, transport=0.0)).requests
    made = replay.again(recording, system).requests
    assert made.ttft == pytest.approx(without.ttft + twin.header.transport)
    assert made.tbt[0] == pytest.approx(without.tbt[0])


@pytest.mark.slow
def test_a_server_that_plans_one_step_after_the_other() -> None:
    """Its device is idle before each step: what the first step of a pause takes longer is no part
    of the others."""
    way = 0.003  # of a request that comes to an idle server
    result = served(256, overlap=False, rate=0.3, count=50)
    requests = [dataclasses.replace(one, arrival=one.arrival - way) for one in seen(result)]
    twin = make_twin(requests, FACTS)
    assert not twin.header.overlap
    gaps, total = twin.errors[1:]
    assert abs(gaps.mean_off) < 0.03 and abs(total.mean_off) < 0.03


def test_rows_that_run_out_are_seen() -> None:
    twin = make_twin(seen(served(rows=6, count=80)), FACTS)
    assert twin.header.max_rows == 6 and "6 requests at a time" in twin.guessed


def test_what_is_known_is_not_guessed(result: SimulationResult) -> None:
    known = ServerFacts("x", "sarathi_pc", CHUNK, ROWS, 50_000, source="vLLM")
    twin = make_twin(seen(result), known)
    assert (twin.header.max_batch_tokens, twin.header.max_rows) == (CHUNK, ROWS)
    assert twin.header.num_blocks * twin.header.block_size // 2 == 50_000
    assert twin.guessed == ("steps planned ahead",)


def test_tokens_that_are_late_on_their_way(result: SimulationResult) -> None:
    """A server with steps of 12 ms, and milliseconds on the way."""
    late = 0.004 + np.random.default_rng(0).exponential(0.001, len(result.requests.token_times))
    for one in make_twin(seen(result, late), FACTS).errors:
        assert abs(one.mean_off) < 0.15, one


def test_whoever_had_nothing_is_left_out_and_two_are_needed() -> None:
    nobody = SeenRequest(0.0, 5, np.zeros(0), 5)
    one = SeenRequest(0.1, 5, np.array([0.2, 0.3]), 2)
    with pytest.raises(RecordingError, match="at least 2 requests"):
        make_twin([nobody, one], FACTS)
    steps = seen_steps([one], CHUNK)
    assert [(step.start, step.end, step.tokens) for step in steps] == [(0.1, 0.2, 5), (0.2, 0.3, 1)]


def test_a_long_prompt_alone_takes_several_steps() -> None:
    alone = SeenRequest(1.0, 1200, np.array([1.3]), 1)
    steps = seen_steps([alone], CHUNK)
    assert [step.chunks for step in steps] == [[(0, 512, 0)], [(0, 512, 512)], [(0, 176, 1024)]]
    assert [step.received for step in steps] == [[], [], [0]]
    assert [step.after_idle for step in steps] == [True, False, False]
    assert [step.end for step in steps] == pytest.approx([1.1, 1.2, 1.3])
