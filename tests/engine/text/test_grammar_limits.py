"""What a grammar may take: time and memory to be compiled, memory to be kept, time for a token."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxserve.engine.errors import EngineStopped, QueueFull
from jaxserve.engine.text import grammar_process
from jaxserve.engine.text.grammar_process import GrammarLimits
from jaxserve.engine.text.grammars import Grammars
from jaxserve.sched.request import Grammar, InvalidRequest
from tests.engine.harness import BOX

DEFINITION = (BOX / "tokenizer.json").read_text()
FAST = GrammarLimits(compile_s=0.5)


def made(limits: GrammarLimits) -> Grammars:
    return Grammars(DEFINITION, 1536, (2,), limits)


@pytest.fixture(scope="module")
def fast() -> Iterator[Grammars]:
    grammars = made(FAST)
    yield grammars
    grammars.close()


def multiple_of(number: int) -> Grammar:
    return Grammar.json_schema({"type": "integer", "multipleOf": number})


def between(*lengths: int) -> Grammar:
    """Its size is the product of what the lengths need."""
    return Grammar.json_schema(
        {"allOf": [{"type": "string", "pattern": f"a.{{{n}}}b"} for n in lengths]}
    )


def of_lark(grammar: Grammar) -> Grammar:
    """As a tool's arguments are."""
    return Grammar.lark("%llguidance {}\nstart: @s0", {"s0": json.loads(grammar.text)})


ENDLESS: dict[str, Grammar] = {
    "an integer": multiple_of(9_999_991),
    "thirty patterns": between(*range(30)),
    "a tool": of_lark(multiple_of(9_999_991)),
    "within an object": Grammar.json_schema(
        {
            "properties": {"a": {"$ref": "#/$defs/b"}},
            "$defs": {"b": {"multipleOf": 9_999_991, "type": "integer"}},
        }
    ),
}


@pytest.mark.promise(32)
@pytest.mark.parametrize("case", ENDLESS)
def test_what_never_compiles_is_refused_and_holds_up_nobody(case: str, fast: Grammars) -> None:
    with ThreadPoolExecutor(1) as beside:
        slow = beside.submit(fast.compile, ENDLESS[case])
        for n in range(3):
            fast.compile(Grammar.regex(f"[a-z]+{case} {n}"))
        with pytest.raises(InvalidRequest, match=r"more than (0\.5 s|256 MiB)") as error:
            slow.result()
    assert error.value.field_name == ENDLESS[case].field_name


def test_a_refusal_is_remembered(fast: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = multiple_of(9_999_973)
    assert not fast.known(grammar)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"engine\.grammar_compile_s"):
            fast.compile(grammar)
        monkeypatch.setattr(fast, "_processes", None)
        assert fast.known(grammar)


@pytest.mark.promise(32)
def test_memory_to_compile_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_process, "_MEMORY", 8 << 20)
    grammars = made(GrammarLimits(compile_s=60))
    with pytest.raises(InvalidRequest, match="more than 8 MiB of memory"):
        grammars.compile(multiple_of(9_999_991))
    assert grammars.compile(Grammar.regex("a+"))
    grammars.close()


def test_closing_ends_what_is_being_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = made(GrammarLimits(compile_s=600))
    grammars.compile(Grammar.regex("a"))
    processes, begun = grammars._processes, threading.Semaphore(0)
    assert processes is not None
    asked = processes._asked
    monkeypatch.setattr(processes, "_asked", lambda *given: begun.release() or asked(*given))
    with ThreadPoolExecutor(3) as threads:
        endless = [
            threads.submit(grammars.compile, multiple_of(n))
            for n in (9_999_991, 9_999_973, 9_999_971)
        ]
        for _ in range(2):  # the third waits for one of them
            assert begun.acquire(timeout=60)
        grammars.close()
        for each in endless:
            with pytest.raises(EngineStopped):
                each.result()
    with pytest.raises(EngineStopped):
        grammars.compile(Grammar.regex("b"))
    grammars.compile(Grammar.regex("a"))  # which is kept


def test_a_process_that_dies_is_nobodys_failure(fast: Grammars) -> None:
    fast.compile(Grammar.regex("before"))
    assert fast._processes is not None
    for one in fast._processes._idle:
        os.killpg(one.process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, one.process.pid, os.WEXITED | os.WNOWAIT)
    fast.compile(Grammar.regex("after"))


@pytest.mark.parametrize("busy", [False, True])
def test_a_trial_that_the_kernel_kills_is_not_the_grammars_fault(busy: bool) -> None:
    grammars = made(GrammarLimits(compile_s=600))
    grammars.compile(Grammar.regex("before"))
    assert grammars._processes is not None
    (worker,) = (each.process.pid for each in grammars._processes._idle)
    child = int(Path(f"/proc/{worker}/task/{worker}/children").read_text())
    grammar = multiple_of(9_999_991) if busy else Grammar.regex("a+")
    with ThreadPoolExecutor(1) as beside:
        trial = beside.submit(grammars.compile, grammar) if busy else None
        os.kill(child, signal.SIGKILL)
        with pytest.raises(QueueFull, match="was killed; try again"):
            trial.result() if trial else grammars.compile(grammar)
    assert not grammars.known(grammar)
    for text in ("a+", "b+", "c+"):
        assert grammars.compile(Grammar.regex(text))
    with pytest.raises(InvalidRequest):
        grammars.compile(Grammar.regex("(?=a)"))
    grammars.close()


def test_where_there_can_be_no_process_it_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(module: str) -> None:
        raise OSError(24, "Too many open files")

    grammars = made(FAST)
    with monkeypatch.context() as patch:
        patch.setattr(grammar_process, "LimitedProcess", full)
        with pytest.raises(QueueFull, match="no process for grammars"):
            grammars.compile(Grammar.regex("a"))
    assert grammars.compile(Grammar.regex("a"))
    grammars.close()


def test_the_oldest_make_room() -> None:
    grammars = made(GrammarLimits(kept_mib=2))
    first = grammars.compile(Grammar.regex("[a-z]+0"))
    each = grammars.kept_bytes
    assert 4096 < each < 1 << 20
    count = 1
    while True:
        grammars.compile(Grammar.regex(f"[a-z]+{count}"))
        assert grammars.compile(Grammar.regex("[a-z]+0")) is first, "it was wanted last but one"
        if grammars.kept_bytes + each > 2 << 20:
            break
        count += 1
    kept = set(grammars._kept)
    while set(grammars._kept) >= kept:
        count += 1
        grammars.compile(Grammar.regex(f"[a-z]+{count}"))
        assert grammars.kept_bytes <= 2 << 20
    assert Grammar.regex("[a-z]+1") not in grammars._kept
    assert Grammar.regex("[a-z]+0") in grammars._kept
    grammars.close()


@pytest.mark.promise(32)
def test_one_that_keeps_too_much_is_refused() -> None:
    grammars = made(GrammarLimits(kept_mib=64, compile_s=30, mask_ms=100))
    with pytest.raises(
        InvalidRequest, match=r"MiB when compiled; at most 16 are allowed .*grammar_mib"
    ):
        grammars.compile(multiple_of(60_001))
    grammars.close()


SLOW: dict[str, Callable[[], Grammar]] = {
    "an expression": lambda: Grammar.regex("a" * 65_500),
    "a constant": lambda: Grammar.json_schema({"const": "x" * 65_000}),
}


@pytest.mark.promise(32)
@pytest.mark.parametrize("case", SLOW)
def test_one_whose_masks_take_too_long_is_refused(case: str) -> None:
    grammars = made(GrammarLimits(mask_ms=0.2))
    with pytest.raises(
        InvalidRequest, match=r"too long for each token: more than 0\.2 ms .*grammar_mask_ms"
    ):
        grammars.compile(SLOW[case]())
    grammars.close()
