"""Programs over the real engine: verdicts, programs that are found, and texts that stay as is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.engine.engine import Engine
from jaxserve.engine.stats import Observer
from jaxserve.sched.programs.program_table import ProgramCall
from jaxserve.sched.programs.verdict import ProgramEnd, ProgramVerdict
from jaxserve.sched.request import Program
from tests.engine.harness import SCARCE, TIMEOUT, engine, generate, prompts, send, wait_until_idle

SHORT = {"max_tokens": 12, "ignore_eos": True}


class Watch(Observer):
    """Keeps what it hears of programs."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.verdicts: list[ProgramVerdict] = []
        self.pauses: list[ProgramCall] = []

    def on_program(self, verdict: ProgramVerdict) -> None:
        with self.changed:
            self.verdicts.append(verdict)
            self.changed.notify_all()

    def on_program_call(self, number: int, call: ProgramCall) -> None:
        if call.pause is not None:
            self.pauses.append(call)

    def wait(self, count: int) -> list[ProgramVerdict]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.verdicts) >= count, TIMEOUT)
            return self.verdicts


@pytest.fixture(scope="module")
def shared(shapes: dict[str, Path]) -> Iterator[Engine]:
    fields = {"cache__prefix_caching": True, "scheduler__program_silence_s": 1.0}
    with engine(shapes["opt"], **SCARCE, **fields) as made:
        yield made


@pytest.fixture
def on(shared: Engine) -> Iterator[Engine]:
    yield shared
    wait_until_idle(shared)


@pytest.fixture
def watch(on: Engine) -> Watch:
    made = Watch()
    on.add_observer(made)
    return made


@pytest.mark.promise(5)
@pytest.mark.promise(47)
def test_each_program_has_one_verdict_and_texts_are_the_same(on: Engine, watch: Watch) -> None:
    asked = prompts(6)
    plain = generate(on, asked, **SHORT)
    for call, (prompt, text) in enumerate(zip(asked, plain, strict=True)):
        program = Program(f"run {call % 2}", 3600.0 if call % 2 else 1e-9, over=call > 3)
        _, stream = send(on, prompt, program=program, **SHORT)
        assert stream.wait().tokens() == text
    verdicts = watch.wait(2)
    found = {(one.id, one.end, one.calls, one.outcome) for one in verdicts}
    assert found == {
        ("run 0", ProgramEnd.OVER, 3, "missed"),
        ("run 1", ProgramEnd.OVER, 3, "met"),
    }
    assert len(watch.pauses) == 4


def test_a_program_that_is_silent_ends_though_the_engine_sleeps(on: Engine, watch: Watch) -> None:
    send(on, [5, 6, 7], program=Program("silent"), **SHORT)[1].wait()
    (verdict,) = watch.wait(1)
    assert (verdict.id, verdict.end, verdict.outcome) == ("silent", ProgramEnd.SILENT, "ended")
    assert verdict.took < 1.0


def test_a_cancelled_call_gives_its_program_up(on: Engine, watch: Watch) -> None:
    name, stream = send(on, [5, 6, 7], program=Program("a", 3600.0, over=True), max_tokens=24)
    on.cancel(name)
    stream.wait()
    (verdict,) = watch.wait(1)
    assert verdict.given_up and verdict.met is False


def test_a_prompt_that_goes_on_is_a_call_of_the_same_program(on: Engine, watch: Watch) -> None:
    """By the key of the answer's last full block, and only of the same tenant."""
    prompt = [9, 8, 7, 6, 5]
    answer = send(on, prompt, tenant="alice", **SHORT)[1].wait().tokens()
    whole = [*prompt, *answer, 11, 12, 13]
    send(on, whole, tenant="bob", **SHORT)[1].wait()
    send(on, [*prompt, 1, 2, 3, 4, 5, 6, 7, 8], tenant="alice", **SHORT)[1].wait()
    send(on, whole, tenant="alice", **SHORT)[1].wait()
    (verdict,) = watch.wait(1)
    assert (verdict.tenant, verdict.id, verdict.calls) == ("alice", "", 2)
    assert verdict.end is ProgramEnd.SILENT


def test_a_short_answer_is_recognised(on: Engine, watch: Watch) -> None:
    prompt = [3, 1, 4, 1, 5]
    answer = send(on, prompt, max_tokens=3, ignore_eos=True)[1].wait().tokens()
    send(on, [*prompt, answer[0], answer[1] + 1, 6, 7, 8], **SHORT)[1].wait()
    send(on, [*prompt, *answer, 6, 7, 8], **SHORT)[1].wait()
    (verdict,) = watch.wait(1)
    assert verdict.calls == 2 and len(watch.pauses) == 1


def test_tools_of_an_answer_lead_to_its_program(on: Engine, watch: Watch) -> None:
    name, stream = send(on, [5, 6, 7], **SHORT)
    stream.wait()
    on.note_tools(name, {"call_1": "search"})
    send(on, [1, 2, 3], continues=(("tool", "call_1"),), **SHORT)[1].wait()
    assert watch.wait(1)[0].calls == 2
    (call,) = watch.pauses
    assert call.tools == ("search",) and not call.named


def test_continuations_are_one_call(on: Engine, watch: Watch) -> None:
    stream = send(on, [5, 6, 7], program=Program("n", over=True), n=3, **SHORT)[1].wait()
    assert len(stream.tokens(2)) == 12
    (verdict,) = watch.wait(1)
    assert verdict.calls == 1
