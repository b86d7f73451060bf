"""What fails for one request ends it alone; what fails for a step ends its requests, and nobody
who comes after them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxserve.engine import sequence, step_loop
from jaxserve.engine.engine import Engine
from jaxserve.engine.errors import EngineStopped
from jaxserve.engine.failures import IN_VAIN, MAX_MESSAGE, describe
from jaxserve.engine.output import FinishReason, Output
from jaxserve.engine.prompt_logprobs import PromptLogprobs
from jaxserve.engine.sequence import Continuation
from jaxserve.engine.stats import Observer
from jaxserve.engine.text.stop_conditions import ContinuationText
from jaxserve.sched.cache.block_pool import BlockPool
from jaxserve.sched.cache.kv_offload import HostMemory
from jaxserve.sched.request import InvalidRequest, Request, SamplingParams
from jaxserve.sched.scheduler import Scheduler
from jaxserve.sched.step_timing import StepWatch
from tests.engine.harness import TIMEOUT, Gate, Stream, prompts, send, wait_until_idle
from tests.engine.test_abandoned import Running
from tests.sched.cache.invariants import check_pool

GREEDY = {"max_tokens": 24, "ignore_eos": True}
SEEDED = {**GREEDY, "temperature": 1.0, "seed": 5, "logprobs": 1}
VICTIM_TOKENS = 23  # by which hooks know it who know nothing else
VICTIM = {
    "max_tokens": VICTIM_TOKENS,
    "ignore_eos": True,
    "logprobs": 19,
    "prompt_logprobs": 3,
    "temperature": 0.5,
}


class Panic(BaseException):
    """As a library in Rust raises it."""


def neighbours(on: Engine) -> list[Stream]:
    few = prompts()[:6]
    return [send(on, p, **(SEEDED if i % 2 else GREEDY))[1] for i, p in enumerate(few)]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[list[int]]]:
    return {}


@pytest.fixture
def texts(roomy: Engine, expected: dict[str, list[list[int]]]) -> list[list[int]]:
    """Of the neighbours, with nothing that fails beside them."""
    if not expected:
        expected["alone"] = [stream.wait().tokens() for stream in neighbours(roomy)]
        wait_until_idle(roomy)
    return expected["alone"]


def check_whole(on: Engine) -> None:
    """Nothing is left of anybody."""
    wait_until_idle(on)
    stats = on.stats()
    assert stats.blocks_free == stats.blocks_total
    assert stats.waiting == stats.running == 0
    check_pool(on._scheduler.pool)
    limits = on._scheduler.view.limits
    assert sorted(on._step_loop._free_slots) == list(range(limits.max_rows))
    assert not on._places and not on._step_loop._by_id and not on._step_loop._failed
    on.expected_wait(Request("", (3,), SamplingParams()))
    assert not on._ttft_estimator._since, "somebody is waited for who is not there"


Break = Callable[[pytest.MonkeyPatch, Callable[..., Any]], None]


def method(owner: Any, name: str, mine: Callable[..., bool]) -> Break:
    """Has a method or function raise where mine(*args) says that it is about the victim."""

    def broken(monkeypatch: pytest.MonkeyPatch, note: Callable[..., Any]) -> None:
        whole = getattr(owner, name)

        def failing(*args: Any, **kwargs: Any) -> Any:
            if mine(*args, **kwargs):
                note()
                raise Panic("\ud800 out of order")
            return whole(*args, **kwargs)

        monkeypatch.setattr(owner, name, failing)

    return broken


def _is_victim(one: Continuation, *_: Any, **__: Any) -> bool:
    return one.request.sampling.max_tokens == VICTIM_TOKENS


def _asks(_: Any, request: Request, *__: Any, **___: Any) -> bool:
    return request.sampling.max_tokens == VICTIM_TOKENS


def _text(text: ContinuationText, *_: Any) -> bool:
    return text._max_tokens == VICTIM_TOKENS


def _fifth(text: ContinuationText, *_: Any) -> bool:
    return _text(text) and text._num_tokens == 5


HOOKS: dict[str, Break] = {
    "admission": method(Scheduler, "add", _asks),
    "slot": method(Continuation, "slot_params", _is_victim),
    "tokens of the batch": method(Continuation, "tokens", _is_victim),
    "prompt log-probabilities": method(Continuation, "tell_prompt", _is_victim),
    "log-probabilities": method(step_loop, "entries", lambda *args: args[3] == 19),
    "first token": method(ContinuationText, "feed", _text),
    "a later token": method(ContinuationText, "feed", _fifth),
    "verdict": method(sequence, "judge", lambda *args, **more: _asks(None, *args, **more)),
}


@pytest.mark.promise(11)
@pytest.mark.parametrize("hook", HOOKS)
def test_a_request_that_fails_ends_alone(
    hook: str, roomy: Engine, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, hits = roomy.stats().request_failures, list[int]()
    HOOKS[hook](monkeypatch, lambda: hits.append(1))
    others = neighbours(roomy)
    _, victim = send(roomy, [5] * 9, **VICTIM)
    assert [stream.wait().tokens() for stream in others] == texts
    last = victim.wait().last()
    assert hits
    assert last.finish_reason is FinishReason.ERROR
    assert last.error == "Panic: \\ud800 out of order", "and it can be sent"
    assert sum(output.finish_reason is not None for output in victim.outputs) == 1
    check_whole(roomy)
    assert roomy.stats().request_failures == before + 1
    assert roomy.stats().step_failures == 0


@pytest.mark.parametrize("when", ["at the first", "at the last", "whatever comes"])
def test_a_caller_that_raises_is_alone(when: str, roomy: Engine, texts: list[list[int]]) -> None:
    told: list[Output] = []

    def callback(output: Output) -> None:
        told.append(output)
        last = output.finish_reason is not None
        if when == "whatever comes" or (last if when == "at the last" else len(told) == 1):
            raise RuntimeError("no loop to call back to")

    others = neighbours(roomy)
    params = SamplingParams(max_tokens=9, ignore_eos=True, n=2)
    roomy.submit(Request("raises", (3, 4), params), callback)
    assert [stream.wait().tokens() for stream in others] == texts
    check_whole(roomy)
    ended = [output.index for output in told if output.finish_reason is not None]
    assert sorted(ended) == [0, 1], "each is told once that it has ended"


def test_an_end_that_cannot_be_reported_is_one_all_the_same(
    roomy: Engine, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = roomy.stats().request_failures
    method(Continuation, "stats", _is_victim)(monkeypatch, lambda: None)
    others = neighbours(roomy)
    _, victim = send(roomy, [5] * 9, **VICTIM)
    assert [stream.wait().tokens() for stream in others] == texts
    assert victim.wait().reason is FinishReason.LENGTH
    check_whole(roomy)
    assert roomy.stats().request_failures == before + 1


def test_a_cancel_that_fails_frees_what_there_is(
    roomy: Engine, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    method(ContinuationText, "flush", _text)(monkeypatch, lambda: None)
    name, victim = send(roomy, [5], gate := Gate(), **GREEDY | {"max_tokens": VICTIM_TOKENS})
    gate.reached()
    roomy.cancel(name)
    others = neighbours(roomy)
    gate.open()
    assert victim.wait().reason is FinishReason.ERROR
    assert [stream.wait().tokens() for stream in others] == texts
    check_whole(roomy)


def test_all_continuations_of_a_request_that_is_half_taken_in_are_told(
    roomy: Engine, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[int] = []

    def third(_: Any, request: Request, **__: Any) -> bool:
        if request.sampling.n == 3:
            added.append(1)
        return request.sampling.n == 3 and len(added) == 3

    method(Scheduler, "add", third)(monkeypatch, lambda: None)
    others = neighbours(roomy)
    name, victim = send(roomy, [5], n=3, **GREEDY)
    victim.wait()
    assert [victim.last(index).finish_reason for index in range(3)] == [FinishReason.ERROR] * 3
    assert [stream.wait().tokens() for stream in others] == texts
    check_whole(roomy)
    roomy.submit(Request(name, (3,), SamplingParams(max_tokens=1)), again := Stream())
    assert again.wait().reason is not FinishReason.ERROR, "its id is free again"
    arrived, submitted = roomy._step_loop.arrivals, roomy._ttft_estimator._submitted
    assert arrived == submitted, "what is submitted later counts for expected waits"


@pytest.mark.parametrize("name", ["\ud800", "", "\U0010ffff" * 1000])
def test_no_id_harms_anybody(name: str, roomy: Engine) -> None:
    """The thread that it once ended draws without a seed: there its key was made of the id."""
    params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=1.0)
    roomy.submit(Request(name, (3,), params), stream := Stream())
    assert stream.wait().reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    "field, prompt, sampling",
    [
        ("prompt", (3, 4.5), {}),
        ("prompt", ("3",), {}),
        ("stop_token_ids", (3,), {"stop_token_ids": (1.0,)}),
        ("logit_bias", (3,), {"logit_bias": ((None, 1.0),)}),
    ],
)
def test_tokens_that_are_none_are_refused_where_they_come_from(
    field: str, prompt: Any, sampling: dict[str, Any], roomy: Engine
) -> None:
    with pytest.raises(InvalidRequest, match=f"{field}: token ids are integers, got"):
        roomy.check(Request("odd", prompt, SamplingParams(4, **sampling)))
    with pytest.raises(TypeError):
        roomy.submit(Request("odd", (3,), SamplingParams(4, seed=0.5)), Stream())  # type: ignore[arg-type]
    roomy.submit(Request("odd", (3,), SamplingParams(max_tokens=1)), stream := Stream())
    assert stream.wait().reason is not FinishReason.ERROR


class Raising(Observer):
    """Whatever it is told."""

    def __init__(self) -> None:
        self.told = 0

    def _fail(self, *_: Any) -> None:
        self.told += 1
        raise Panic("not interested")

    on_arrival = on_step = on_first_token = on_inter_token = on_finish = _fail


def test_an_observer_that_raises_harms_nobody_and_goes_on_being_told(
    roomy: Engine, texts: list[list[int]]
) -> None:
    before, observer = roomy.stats(), Raising()
    everybody = roomy._step_loop.observers._all
    roomy.add_observer(observer)
    try:
        assert [stream.wait().tokens() for stream in neighbours(roomy)] == texts
        check_whole(roomy)
    finally:
        roomy._step_loop.observers._all = everybody
    after = roomy.stats()
    assert after.observer_failures - before.observer_failures == observer.told > 6 * 24
    assert after.request_failures == before.request_failures


# What nobody knows the culprit of.


def once(owner: Any, name: str) -> Break:
    """Has it raise the first time."""
    left = [True]

    def first(*_: Any, **__: Any) -> bool:
        return left.pop() if left else False

    return method(owner, name, first)


STEPS: dict[str, Callable[[Engine], Break]] = {
    "booking": lambda _: once(BlockPool, "grow_all"),
    "after booking": lambda _: once(Scheduler, "_note_batch"),
    "batch": lambda _: once(step_loop, "build_batch"),
    "slots": lambda on: once(on.executor, "admit"),
    "launch": lambda on: once(on.executor, "submit"),
    "behind the launch": lambda _: once(StepWatch, "launched"),
    "result": lambda _: once(StepWatch, "finished"),
    "its tokens": lambda _: once(Scheduler, "receive"),
}


@pytest.mark.promise(11)
@pytest.mark.parametrize("where", STEPS)
def test_a_step_that_fails_ends_its_requests_and_no_others(
    where: str, roomy: Engine, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = roomy.stats().step_failures
    STEPS[where](roomy)(monkeypatch, lambda: None)
    for stream in (first := neighbours(roomy)):
        stream.wait()
    reasons = [stream.last().finish_reason for stream in first]
    assert FinishReason.ERROR in reasons
    for stream, text in zip(first, texts, strict=True):
        assert stream.reason is FinishReason.ERROR or stream.tokens() == text
    check_whole(roomy)
    assert [stream.wait().tokens() for stream in neighbours(roomy)] == texts
    check_whole(roomy)
    assert roomy.stats().step_failures == failed + 1


def test_a_step_that_fails_leaves_no_gap_in_what_prompts_are_told(
    roomy: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is in the middle of a prompt samples nothing in it, and so was not one of its own.
    Which of the two are in it is for the policy, by what it expects steps to take."""
    once(PromptLogprobs, "deliver")(monkeypatch, lambda: None)
    _, beside = send(roomy, [9], gate := Gate(), **GREEDY)
    gate.reached()
    asked = {"max_tokens": 3, "prompt_logprobs": 0}
    long = [send(roomy, [token] * 40, **asked)[1] for token in (4, 5)]  # a step has 64 tokens
    gate.open()
    reasons = [stream.wait().reason for stream in long]
    assert FinishReason.ERROR in reasons
    for stream, reason in zip(long, reasons, strict=True):
        told = sum(len(output.prompt_logprobs) for output in stream.outputs)
        assert reason is FinishReason.ERROR or told == 39, "the first token has none"
    beside.wait()
    check_whole(roomy)


def test_a_plan_that_fails_as_somebody_comes_ends_the_newcomer_first(
    roomy: Engine, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = roomy._scheduler

    def poisoned(*_: Any) -> bool:
        table = scheduler.table
        return bool((table.max_tokens[table.state > 0] == VICTIM_TOKENS).any())

    method(type(scheduler.policy), "plan", poisoned)(monkeypatch, lambda: None)
    _, first = send(roomy, [9], gate := Gate(), **GREEDY | {"max_tokens": 3})
    gate.reached()
    others = neighbours(roomy)  # who go on after it
    gate.open()
    first.wait()
    _, victim = send(roomy, [5], **GREEDY | {"max_tokens": VICTIM_TOKENS})
    assert victim.wait().reason is FinishReason.ERROR
    assert [stream.wait().tokens() for stream in others] == texts
    check_whole(roomy)


def test_newcomers_do_not_answer_for_somebody_else_until_the_engine_ends(
    roomy: Engine, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as ever come while no plan can be made for one who was there before them."""
    streams: list[Stream] = []

    def another(output: Output) -> None:
        if output.finish_reason is FinishReason.ERROR and len(streams) < 4 * IN_VAIN:
            streams.append(send(roomy, [7], another, **GREEDY)[1])

    _, old = send(roomy, [9], gate := Gate(), **GREEDY | {"max_tokens": VICTIM_TOKENS})
    gate.reached()
    method(type(roomy._scheduler.policy), "plan", lambda *_: not old.ended.is_set())(
        monkeypatch, lambda: None
    )
    streams.append(send(roomy, [7], another, **GREEDY)[1])
    gate.open()
    assert old.wait().reason is FinishReason.ERROR
    while (last := streams[-1].wait()).reason is FinishReason.ERROR:
        assert last is not streams[-1], "whoever comes next is asked for in its callback"
    assert last.reason is FinishReason.LENGTH and len(streams) < IN_VAIN
    assert [stream.wait().tokens() for stream in neighbours(roomy)] == texts
    check_whole(roomy)


def test_nothing_but_failures_end_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = Running(tmp_path, busy=False)
    policy = type(idle.engine._scheduler.policy)
    method(policy, "plan", lambda *_: True)(monkeypatch, lambda: None)
    ended = 0
    for _ in range(2 * IN_VAIN):
        try:
            _, stream = send(idle.engine, [3], max_tokens=3)
        except EngineStopped:
            break
        assert stream.wait().reason is FinishReason.ERROR
        ended += 1
    assert ended == IN_VAIN + 1
    assert isinstance(idle.told.get(timeout=TIMEOUT), Panic)
    idle.end()


def test_a_device_that_fails_ends_the_engine(tmp_path: Path) -> None:
    stuck = Running(tmp_path)
    stuck.stuck.error = jax.errors.JaxRuntimeError("INTERNAL: no such luck")
    stuck.end()
    assert stuck.told.get(timeout=TIMEOUT) is stuck.stuck.error
    assert stuck.outputs[-1].finish_reason is FinishReason.ERROR


def test_an_executor_that_has_lost_what_it_held_is_of_no_use(roomy: Engine) -> None:
    executor = roomy.executor
    assert executor.intact
    whole = executor.pool  # type: ignore[attr-defined]
    gone = jax.device_put(whole[:1])
    gone.delete()
    executor.pool = gone  # type: ignore[attr-defined]
    try:
        assert not executor.intact
    finally:
        executor.pool = whole  # type: ignore[attr-defined]


def test_what_was_dropped_is_said_again_where_booking_failed() -> None:
    host = HostMemory(8, 1)
    host._dropped = [3]
    host.drop_again((1, 2))
    assert host.take_dropped() == (3, 1, 2) and host.take_dropped() == ()


def test_errors_are_told_in_a_line_of_text() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert describe(Mute()) == "Mute: "
    assert describe(ValueError("\udfff")) == "ValueError: \\udfff"
    assert len(describe(ValueError("x" * 10_000))) == MAX_MESSAGE
