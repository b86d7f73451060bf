"""What an engine has served is simulated as it was served."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.sched.cost.cost_model import LinearCostModel
from jaxserve.sched.recording import RecordingError
from jaxserve.simulator import replay
from jaxserve.simulator.replay import Recording
from jaxserve.simulator.results import SimulationResult
from jaxserve.simulator.workloads.workload import Lengths, Workload
from tests.engine.harness import SHAPES
from tests.engine.simulated import engine_on_a_virtual_clock
from tests.engine.simulated.engine_on_a_virtual_clock import Served, configured
from tests.engine.simulated.test_engine_agrees import FIELDS, LARGE, PRIOR, SMALL, TRUE, trace


def recorded(
    folder: Path,
    workload: Workload,
    *,
    true: LinearCostModel = TRUE,
    prior: LinearCostModel | None = None,
    **fields: Any,
) -> tuple[Served, Path]:
    """An engine that has served the workload, and its recording. true: what its steps take; prior:
    what it believes first, if that is something else."""
    path = folder / "recording.jsonl"
    longest = int((workload.prompt_len + workload.limit).max())
    config = configured(
        folder, longest, prior or true, engine__record=str(path), **(FIELDS | fields)
    )
    served = Served(config, workload, true)
    served.engine.stop()
    return served, path


def again(recording: Recording) -> SimulationResult:
    """The recorded traffic, on the system fitted to the steps."""
    place = replay.system_of(recording)
    return replay.again(recording, place, checked=True, record_rows=True)


@pytest.mark.parametrize("policy", ["sarathi", "vllm", "edf", "aptserve"])
@pytest.mark.parametrize(
    ("overlap", "rate", "blocks", "early"), [(True, 100.0, SMALL, True), (False, 6.0, LARGE, False)]
)
def test_a_recording_is_replayed_as_it_was_served(
    policy: str, overlap: bool, rate: float, blocks: int, early: bool, tmp_path: Path
) -> None:
    workload = trace(3, rate, early)
    fields = {"engine__overlap": overlap, "cache__num_blocks": blocks, "scheduler__policy": policy}
    served, path = recorded(tmp_path, workload, **fields)
    replays(served, path)


@pytest.mark.parametrize("policy", ["sarathi", "goodput"])
def test_layers_with_a_window_are_replayed(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as much memory set aside, and given back, as in the engine."""
    windows = {"model_type": "gemma2", "head_dim": 8, "sliding_window": 30}
    shape = SHAPES["llama"] | windows | {"num_hidden_layers": TRUE.num_layers}
    monkeypatch.setattr(engine_on_a_virtual_clock, "MODEL", shape)
    fields = {"scheduler__policy": policy, "cache__num_blocks": 150}
    served, path = recorded(tmp_path, trace(3, 100.0, True), **fields)
    groups = replay.read(path).header.groups
    assert groups is not None and groups.window == 30
    replays(served, path)
    others = dataclasses.replace(replay.read(path).header, groups=None)
    whole = again(dataclasses.replace(replay.read(path), header=others))
    assert whole.rows is not None and len(whole.rows[0]) != len(served.plans)


def replays(served: Served, path: Path) -> None:
    recording = replay.read(path)
    assert not recording.notes
    host = replay.system_of(recording).host.as_dict()
    assert max(host.values()) < 1e-6, "the clock stands still on the host"
    result = again(recording)
    assert result.rows is not None
    assert len(served.plans) == len(result.rows[0])
    for i, (plan, batch) in enumerate(zip(served.plans, result.rows[0], strict=True)):
        assert plan.rows.tolist() == batch.requests.tolist(), i
        assert plan.num_tokens.tolist() == batch.tokens.tolist(), i
        assert plan.preempted.tolist() == batch.preempted.tolist(), i
    ours, theirs = flat(result.summary()), flat(replay.served(recording).summary())
    assert ours == pytest.approx(theirs, rel=1e-3)


def flat(numbers: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(numbers, dict):
        return {} if numbers is None else {name: numbers}
    return {k: v for key, value in numbers.items() for k, v in flat(value, f"{name}.{key}").items()}


def test_requests_that_sample_cost_what_they_cost(tmp_path: Path) -> None:
    workload = trace(3, 20.0, True)
    greedy = np.arange(len(workload)) % 3 > 0
    slow = dataclasses.replace(TRUE.coefficients, sampled_row=2e-3)
    true = dataclasses.replace(TRUE, coefficients=slow)
    _, path = recorded(tmp_path, dataclasses.replace(workload, greedy=greedy), true=true)
    recording = replay.read(path)
    assert replay.traffic_of(recording).workload.greedy.tolist() == greedy.tolist()
    sampled = again(recording).batches.duration.sum()
    assert sampled == pytest.approx(recording.steps.device_time.sum(), rel=1e-3)


def test_what_was_asked_for_is_what_comes_again(tmp_path: Path) -> None:
    workload = trace(3, 20.0, True)
    _, path = recorded(tmp_path, workload)
    found = replay.traffic_of(replay.read(path)).workload
    assert found.arrival == pytest.approx(workload.arrival - workload.arrival[0], abs=1e-8)
    for name in ("prompt_len", "output_len", "limit", "tier", "ttft", "tbt", "jct"):
        assert getattr(found, name).tolist() == getattr(workload, name).tolist(), name


def test_the_model_is_fitted_to_the_steps_whatever_was_believed(tmp_path: Path) -> None:
    _, path = recorded(tmp_path, trace(3, 20.0, True, count=60), prior=PRIOR)
    steps = replay.read(path).steps
    model = replay.system_of(replay.read(path)).cost_model
    assert model.batch_time(steps.features).sum() == pytest.approx(
        steps.device_time.sum(), rel=0.02
    )
    assert PRIOR.batch_time(steps.features).sum() != pytest.approx(steps.device_time.sum(), rel=0.1)


def test_a_server_that_is_mostly_idle_says_what_prompts_take(tmp_path: Path) -> None:
    _, path = recorded(tmp_path, trace(3, 0.01, True), prior=PRIOR, scheduler__policy="vllm")
    recording = replay.read(path)
    prompts = recording.steps.features.num_prefills > 0
    assert recording.steps.after_idle[prompts].mean() > 0.9
    ours, theirs = again(recording), replay.served(recording)
    assert ours.requests.ttft.mean() == pytest.approx(theirs.requests.ttft.mean(), rel=0.05)


def test_a_part_is_what_happened_in_it(tmp_path: Path) -> None:
    first, second = trace(3, 20.0, True), trace(4, 20.0, False)
    pause = 100.0 - second.arrival[0]
    both = Workload.create(
        np.concatenate([first.arrival, second.arrival + pause]),
        Lengths(*(np.concatenate([getattr(w, n) for w in (first, second)]) for n in LENGTHS)),
        limit=np.concatenate([first.limit, second.limit]),
    )
    _, path = recorded(tmp_path, both)
    whole = replay.read(path)
    parts = whole.part(0, len(first)), whole.part(len(first), len(both))
    assert sum(len(part.steps) for part in parts) == len(whole.steps)
    for part, workload in zip(parts, (first, second), strict=True):
        served = replay.served(part)
        assert served.requests.output_len.tolist() == workload.output_len.tolist()
        assert served.batches.duration.sum() == part.steps.device_time.sum()
        late = served.requests.arrival[0] < served.requests.first_token[0] < 1.0
        assert late, "times are from the part's beginning"


LENGTHS = ("prompt_len", "output_len")


def test_too_few_steps_are_said(tmp_path: Path) -> None:
    workload = trace(3, 20.0, True, count=1)
    _, path = recorded(tmp_path, workload)
    recording = replay.read(path)
    few = dataclasses.replace(recording, steps=recording.steps.select(np.arange(3)))
    with pytest.raises(RecordingError, match="at least 10 steps are needed, there are 3"):
        replay.system_of(few)
    with pytest.raises(RecordingError, match="no request in it that wrote a token"):
        replay.traffic_of(dataclasses.replace(recording, arrivals={}))
