"""The engine's contract with its callers."""

from __future__ import annotations

import dataclasses
import random
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.config import Config
from jaxserve.engine.engine import Engine
from jaxserve.engine.errors import QueueFull
from jaxserve.engine.output import FinishReason, Output
from jaxserve.engine.startup.choices.engine_choices import choose
from jaxserve.engine.stats import RequestStats, StepRecorder, StepStats
from jaxserve.sched.request import InvalidRequest, Request, SamplingParams, Tier
from tests.engine.harness import (
    SCARCE,
    TIMEOUT,
    Gate,
    Stream,
    engine,
    generate,
    send,
    wait_until_idle,
)


@pytest.mark.promise(1)
def test_same_seed_same_text_whatever_else_runs(roomy: Engine) -> None:
    sampling = {"max_tokens": 20, "temperature": 0.9, "top_p": 0.9, "seed": 11, "ignore_eos": True}
    alone = generate(roomy, [[5, 6, 7]], **sampling)[0]
    others = [send(roomy, [i + 3], max_tokens=30, temperature=1.0)[1] for i in range(20)]
    crowded = generate(roomy, [[5, 6, 7]], **sampling)[0]
    for other in others:
        other.wait()
    assert crowded == alone
    different = generate(roomy, [[5, 6, 7]], **{**sampling, "seed": 12})[0]
    assert different != alone


def test_n_continuations_use_seed_plus_index(roomy: Engine) -> None:
    sampling = {"max_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    _, stream = send(roomy, [4, 5], n=3, seed=100, **sampling)
    stream.wait()
    for index in range(3):
        assert stream.tokens(index) == generate(roomy, [[4, 5]], seed=100 + index, **sampling)[0]
        assert stream.last(index).finish_reason == FinishReason.LENGTH


def test_a_stop_token_ends_the_text_but_not_before_min_tokens(roomy: Engine) -> None:
    asked: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
    free = generate(roomy, [[3, 4, 5]], **asked)[0]
    stop = send(roomy, [3, 4, 5], **asked, stop_token_ids=(free[6],))[1].wait()
    assert stop.tokens() == free[: free.index(free[6]) + 1]
    assert stop.reason == FinishReason.STOP
    late = send(roomy, [3, 4, 5], **asked, stop_token_ids=(free[2],), min_tokens=15)[1].wait()
    assert len(late.tokens()) > 15 and free[2] not in late.tokens()[:15]


@pytest.mark.promise(8)
def test_logprobs_are_those_of_the_model(roomy: Engine) -> None:
    _, stream = send(roomy, [3, 4, 5], max_tokens=6, logprobs=4, ignore_eos=True)
    stream.wait()
    plain = generate(roomy, [[3, 4, 5]], max_tokens=6, ignore_eos=True)[0]
    assert stream.tokens() == plain
    for output in stream.outputs:
        (entry,) = output.logprobs
        assert entry.token_id == output.token_ids[0]
        assert entry.top[0] == (entry.token_id, pytest.approx(entry.logprob))
        values = [value for _, value in entry.top]
        assert len(values) == 4 and values == sorted(values, reverse=True)
        assert sum(np.exp(values)) < 1


def test_usage_and_timings(roomy: Engine) -> None:
    _, stream = send(roomy, [3, 4, 5], max_tokens=6, ignore_eos=True)
    last = stream.wait().last()
    assert last.usage is not None and last.timings is not None
    assert (last.usage.prompt_tokens, last.usage.output_tokens) == (3, 6)
    assert 0 <= last.timings.queue <= last.timings.ttft <= last.timings.total
    times = [t for o in stream.outputs for t in o.token_times]
    assert len(times) == 6 and times == sorted(times)
    gaps = np.diff(times)
    assert last.timings.tbt_mean == pytest.approx(gaps.mean())
    assert last.timings.tbt_max == pytest.approx(gaps.max())
    assert last.timings.preempted == ()
    _, short = send(roomy, [3, 4, 5], max_tokens=1)
    timings = short.wait().last().timings
    assert timings is not None
    assert (timings.tbt, timings.tbt_mean, timings.tbt_max) == (None, None, None)


@pytest.mark.promise(12)
def test_200_requests_with_random_cancels_leave_nothing_behind(shapes: dict[str, Path]) -> None:
    """The harness checks the pool at the end."""
    rng = random.Random(3)
    with engine(shapes["opt"], scheduler__max_queue=256, **SCARCE) as running:
        streams: list[Stream] = []
        lock = threading.Lock()

        def caller(seed: int) -> None:
            mine = random.Random(seed)
            for _ in range(25):
                prompt = [mine.randrange(3, 96) for _ in range(mine.randint(1, 30))]
                cancel_at = mine.choice([None, 0, 1, 5])
                name = f"{seed}-{len(streams)}-{mine.random()}"

                def on_output(output: Output, name: str = name, at: Any = cancel_at) -> None:
                    if at is not None and len(output.token_ids) and mine.random() < 0.3:
                        running.cancel(name)

                stream = Stream(on_output=on_output)
                params = SamplingParams(
                    max_tokens=mine.randint(1, 30), temperature=mine.choice([0.0, 1.0])
                )
                running.submit(Request(name, tuple(prompt), params), stream)
                if cancel_at == 0:
                    running.cancel(name)
                with lock:
                    streams.append(stream)

        threads = [threading.Thread(target=caller, args=(rng.random(),)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
        reasons = [stream.wait().reason for stream in streams]
    assert len(reasons) == 200
    assert {FinishReason.CANCELLED, FinishReason.LENGTH} <= set(reasons)


@pytest.mark.promise(12)
def test_cancel_frees_blocks_within_one_step(shapes: dict[str, Path]) -> None:
    with engine(shapes["opt"]) as running:
        name, stream = send(running, [3] * 20, gate := Gate(), max_tokens=40, ignore_eos=True)
        gate.reached()
        running.cancel(name)
        gate.open()
        assert stream.wait().reason == FinishReason.CANCELLED
        running.cancel(name)  # idempotent
        running.cancel("nobody")
        # The cancelled one is gone before the next is planned.
        send(running, [4], max_tokens=1)[1].wait()
        stats = running.stats()
        assert stats.blocks_free == stats.blocks_total
        wait_until_idle(running)
        lengths = running._step_loop._scheduler.table.output_lengths
        assert lengths.count == 1, "the cancelled one says nothing of how long outputs get"


def test_a_full_queue_refuses_and_recovers(shapes: dict[str, Path]) -> None:
    with engine(shapes["opt"], scheduler__max_queue=1, **SCARCE) as running:
        # The engine thread waits in the callback, so nothing ends in between.
        streams = [send(running, [3], gate := Gate(), max_tokens=4)[1]]
        gate.reached()
        streams += [send(running, [3], max_tokens=4)[1] for _ in range(8)]
        with pytest.raises(QueueFull, match="max_queue"):
            send(running, [3], max_tokens=4)
        gate.open()
        for stream in streams:
            stream.wait()
        send(running, [3], max_tokens=4)[1].wait()


def test_bad_requests_never_reach_the_queue(roomy: Engine) -> None:
    never = Stream()
    with pytest.raises(InvalidRequest, match="prompt: has 64 tokens; at most 63"):
        roomy.check(Request("long", (3,) * 64))
    with pytest.raises(InvalidRequest, match="token id 96"):
        roomy.check(Request("odd", (96,), SamplingParams(max_tokens=1)))
    name, stream = send(roomy, [3], max_tokens=30, ignore_eos=True)
    with pytest.raises(InvalidRequest, match="request_id"):
        roomy.submit(Request(name, (3,), SamplingParams(max_tokens=1)), never)
    stream.wait()
    assert not never.outputs


def test_cpus_need_no_other_steps_for_the_same_bits(shapes: dict[str, Path]) -> None:
    """Other devices do: test_deterministic.py."""
    with engine(shapes["opt"], engine__deterministic=True, **SCARCE) as running:
        assert not any(layout.deterministic for layout in running.executor.buckets.all())
        assert send(running, [5, 6], max_tokens=2, deterministic=True)[1].wait().reason


def test_who_cannot_have_the_same_bits_is_refused(
    roomy: Engine, shapes: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"model__path": str(shapes["opt"]), "model__load_format": "random"}
    config = Config().with_fields(**fields, engine__attention_backend="xla")
    why = choose(config).kernels.not_deterministic
    assert "kernels xla add up" in why
    info = dataclasses.replace(roomy.info(), not_deterministic=why)
    monkeypatch.setattr(roomy, "_info", info)
    with pytest.raises(InvalidRequest, match="kernels xla add up") as error:
        send(roomy, [5, 6], max_tokens=2, deterministic=True)
    assert error.value.field_name == "deterministic"


class Recorder(StepRecorder):
    def __init__(self) -> None:
        super().__init__()
        self.firsts: list[float] = []
        self.gaps: list[float] = []
        self.ends: list[RequestStats] = []

    def on_first_token(self, ttft: float, tier: Tier) -> None:
        self.firsts.append(ttft)

    def on_inter_token(self, tbt: float, tier: Tier) -> None:
        self.gaps.append(tbt)

    def on_finish(self, stats: RequestStats) -> None:
        self.ends.append(stats)


def test_observers_see_everything(shapes: dict[str, Path]) -> None:
    with engine(shapes["opt"]) as running:
        recorder = Recorder()
        running.add_observer(recorder)
        generate(running, [[3] * 10, [4] * 20, [5]], max_tokens=7, ignore_eos=True)
    assert len(recorder.firsts) == 3 and len(recorder.gaps) == 18
    assert sum(s.num_tokens for s in recorder.steps) == 31 + 3 * 6
    assert all(s.padded_tokens >= s.num_tokens for s in recorder.steps)
    check_the_times(recorder.steps, running)
    assert [e.output_tokens for e in recorder.ends] == [7, 7, 7]


def check_the_times(steps: list[StepStats], running: Engine) -> None:
    """Of three requests that were served without a preemption."""
    assert sum(s.num_admitted for s in steps) == 3
    assert sum(s.num_emitting for s in steps) == 21
    assert sum(s.num_received for s in steps) == 3
    assert steps[0].after_idle and not steps[-1].after_idle
    assert steps[0].wake_time >= 0 and {s.wake_time for s in steps[1:]} == {0.0}
    for s in steps:
        assert s.num_admitted <= s.num_rows <= s.num_live <= 3 and s.num_moves == 0
        times = s.receive_time, s.plan_time, s.launch_time, s.finish_time
        assert min(*times, s.predicted_time) > 0
        assert s.host_time == sum(times)
        assert 0 < s.device_time < s.step_time < 60
    # One thread: from the first plan on nothing counts twice.
    first, last = steps[0], steps[-1]
    awake = last.end + last.finish_time - (first.end - first.step_time)
    assert sum(s.host_time for s in steps) - first.receive_time <= awake + 1e-6
    assert running._cost_model.steps == len(steps) == running.stats().steps
    assert running.stats().step_time_error == running._cost_model.error > 0


def test_a_thread_that_slept_says_how_long_it_took_to_wake_up(shapes: dict[str, Path]) -> None:
    with engine(shapes["opt"]) as running:
        recorder, asleep = StepRecorder(), threading.Event()
        wait_for = running._wake.wait_for

        def waiting(*args: Any, **kwargs: Any) -> bool:
            if running._step_loop.steps == 2:
                asleep.set()  # its lock is free once it sleeps
            return wait_for(*args, **kwargs)

        running._wake.wait_for = waiting  # type: ignore[method-assign, assignment]
        running.add_observer(recorder)
        generate(running, [[3] * 10], max_tokens=2, ignore_eos=True)
        assert asleep.wait(TIMEOUT)
        generate(running, [[4] * 10], max_tokens=2, ignore_eos=True)
    prompt, *later = recorder.steps[2:]
    assert 0 < prompt.wake_time < 60 and prompt.num_received == 1
    assert {s.wake_time for s in later} == {0.0}


def test_an_implicit_transfer_or_a_compilation_is_a_failure(shapes: dict[str, Path]) -> None:
    """What forbid-compile mode is for: a shape that escaped the warm-up must not go unnoticed."""
    for culprit, complaint in (
        (lambda: jax.jit(lambda x: x + 1)(np.ones(3)), "Disallowed host-to-device"),
        (lambda: jax.jit(lambda x: x * 3.0)(jax.device_put(np.ones(5))), "compilation"),
    ):
        with engine(shapes["opt"]) as running:
            executor = running.executor
            submit = executor.submit

            def sloppy(*args: Any, act: Any = culprit, to: Any = submit, **kwargs: Any) -> Any:
                act()
                return to(*args, **kwargs)

            executor.submit = sloppy  # type: ignore[method-assign]
            _, stream = send(running, [3], max_tokens=9)
            last = stream.wait().last()
            assert last.finish_reason == FinishReason.ERROR
            assert complaint in last.error
            running._compiles.start()  # the harness wants none after this
