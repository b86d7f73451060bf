"""Whose grammars are compiled when."""

from __future__ import annotations

import asyncio
import threading

import pytest

from jaxserve.sched.request import Grammar, Thinking
from jaxserve.server.requests.engine_requests import EngineRequests
from tests.server.fake_engine import FakeEngine


class Slow(FakeEngine):
    """Compiles what has "slow" in it only once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may, self.begun = threading.Event(), list[str]()

    def check_grammar(self, grammar: Grammar, thinking: Thinking | None = None) -> None:
        self.begun.append(grammar.text)
        if "slow" in grammar.text:
            assert self.may.wait(60)


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
        await requests.read_lines(
            "quiet", requests.wait_for_grammar, Grammar.regex("b"), None, "quiet"
        )
        assert engine.begun == ["slow0", "a", "b"]
        engine.may.set()
        await asyncio.gather(*crowd)
        assert engine.begun[3:] == ["slow1", "slow2"]
        requests.close()

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_closing_ends_the_waiting_of_threads() -> None:
    async def scene() -> None:
        engine = Slow()
        requests = EngineRequests(engine)
        asyncio.create_task(requests.check_grammar(Grammar.regex("slow"))).add_done_callback(
            lambda task: task.exception()
        )
        while not engine.begun:
            await asyncio.sleep(0)
        reading = asyncio.create_task(
            requests.read_lines("", requests.wait_for_grammar, Grammar.regex("a"), None, "")
        )
        while not requests._grammars._waiting:
            await asyncio.sleep(0)
        requests.close()
        with pytest.raises(asyncio.CancelledError):
            await reading
        engine.may.set()

    asyncio.run(asyncio.wait_for(scene(), 60))
