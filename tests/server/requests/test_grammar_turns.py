"""Whose grammars are compiled when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial

import pytest

from jaxserve.sched.request import Grammar, InvalidRequest, Thinking
from jaxserve.server.requests.engine_requests import EngineRequests
from tests.server.fake_engine import FakeEngine


class Slow(FakeEngine):
    """Compiles what has "slow" in it only once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may, self.begun = threading.Event(), list[str]()

    def knows_grammar(self, grammar: Grammar) -> bool:
        return grammar.text.startswith("known")

    def check_grammar(self, grammar: Grammar, thinking: Thinking | None = None) -> None:
        self.begun.append(grammar.text)
        if "slow" in grammar.text:
            assert self.may.wait(60)
        super().check_grammar(grammar, thinking)


def waiting(requests: EngineRequests, tenant: str) -> Callable[[Grammar], None]:
    return partial(requests.wait_for_grammar, thinking=None, tenant=tenant)


@pytest.mark.promise(31)
def test_one_tenants_slow_grammars_hold_up_no_other() -> None:
    async def scene() -> None:
        engine = Slow()
        requests = EngineRequests(engine)
        crowd = [
            asyncio.create_task(requests.check_grammar(Grammar.regex(f"slow{n}"), tenant="crowd"))
            for n in range(3)
        ]
        while not engine.begun:
            await asyncio.sleep(0)
        # The second is from a thread, as the lines of batches are checked.
        await requests.check_grammar(Grammar.regex("a"), tenant="quiet")
        await requests.read_lines("quiet", waiting(requests, "quiet"), [Grammar.regex("b")])
        assert engine.begun == ["slow0", "a", "b"]
        engine.may.set()
        await asyncio.gather(*crowd)
        assert engine.begun[3:] == ["slow1", "slow2"]
        requests.close()

    asyncio.run(asyncio.wait_for(scene(), 60))


@pytest.mark.parametrize("tenant", ["", "crowd"])
def test_a_known_grammar_waits_for_no_turn(tenant: str) -> None:
    async def scene() -> None:
        engine = Slow()
        requests = EngineRequests(engine)
        crowd = [
            asyncio.create_task(requests.check_grammar(Grammar.regex(f"slow{n}"), tenant=tenant))
            for n in range(3)
        ]
        while not engine.begun:
            await asyncio.sleep(0)
        await requests.check_grammar(Grammar.regex("known"), tenant=tenant)
        thinking = Thinking(("<think>",), ("</think>",))
        await requests.check_grammar(Grammar.regex("known2"), thinking, tenant)
        with pytest.raises(InvalidRequest, match="is bad"):
            await requests.check_grammar(Grammar.regex("known, and bad"), tenant=tenant)
        assert not any(each.done() for each in crowd)
        engine.may.set()
        await asyncio.gather(*crowd)
        requests.close()

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_without_keys_one_slow_grammar_leaves_a_compiler() -> None:
    async def scene() -> None:
        engine = Slow()
        requests = EngineRequests(engine)
        slow = asyncio.create_task(requests.check_grammar(Grammar.regex("slow")))
        while not engine.begun:
            await asyncio.sleep(0)
        await requests.check_grammar(Grammar.regex("a"))
        assert not slow.done()
        engine.may.set()
        await slow
        requests.close()

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_closing_ends_the_waiting_of_threads() -> None:
    async def scene() -> None:
        engine = Slow()
        requests = EngineRequests(engine)
        asyncio.create_task(
            requests.check_grammar(Grammar.regex("slow"), tenant="a")
        ).add_done_callback(lambda task: task.exception())
        while not engine.begun:
            await asyncio.sleep(0)
        reading = asyncio.create_task(
            requests.read_lines("a", waiting(requests, "a"), [Grammar.regex("a")])
        )
        while not requests._grammars._waiting:
            await asyncio.sleep(0)
        requests.close()
        with pytest.raises(asyncio.CancelledError):
            await reading
        engine.may.set()

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_no_line_is_read_once_nobody_waits_for_them() -> None:
    async def scene() -> None:
        engine = Slow()
        requests = EngineRequests(engine)
        lines = [Grammar.regex(text) for text in ("a", "slow", "b", "c")]
        reading = asyncio.create_task(
            requests.read_lines("crowd", waiting(requests, "crowd"), lines)
        )
        while "slow" not in engine.begun:
            await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        engine.may.set()
        # Its turn comes when that thread has ended.
        (number,) = await requests.read_lines("crowd", len, ["four"])
        assert (number, engine.begun) == (4, ["a", "slow"])
        requests.close()

    asyncio.run(asyncio.wait_for(scene(), 60))
