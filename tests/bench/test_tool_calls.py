"""`bench tools`: what it asks for, and what is made of the times."""

from __future__ import annotations

import pytest

from jaxserve.bench import cli
from jaxserve.bench.load_target import BenchError
from jaxserve.server.server import Server
from jaxserve_lab.bench import tool_calls
from tests.server.fake_engine import FakeEngine
from tests.server.http.conftest import SETTINGS


def test_chats_with_tools_and_without() -> None:
    engine = FakeEngine().run()
    with Server(engine, grace_s=0.0, http=SETTINGS) as server:
        assert server.http_address is not None
        tokens, turns = tool_calls.measured(server.http_address, 3, 2)
        with pytest.raises(BenchError, match="4095"):
            tool_calls.measured(server.http_address, 100, 1)
    plain, as_long, *others = tokens.values()
    assert plain < as_long == others[0] and len(set(others)) == 1
    assert all(len(times) == 2 for kinds in turns.values() for times in kinds.values())
    asked = engine.requests[30:60]  # the second turn: each kind, with nothing cached and again
    salts = [request.cache_salt for request in asked]
    assert all(len(set(salts[at : at + 6])) == 1 for at in range(0, 30, 6)) and len(set(salts)) == 5
    held = [request.sampling.grammar is not None for request in asked[::6]]
    assert held == [False, False, False, True, True]


def test_how_much_later() -> None:
    kinds = {
        tool_calls.PLAIN: [10.0, 20.0, 10.0],
        tool_calls.AS_LONG: [20.0, 40.0, 20.0],
        "20 tools": [22.0, 44.0, 200.0],
    }
    turns = {name: {"fresh": times, "cached": times} for name, times in kinds.items()}
    more = tool_calls.later(turns)
    assert set(more) == {"20 tools"}
    assert more["20 tools"]["cached"] == {
        tool_calls.PLAIN: pytest.approx(1.2),
        tool_calls.AS_LONG: pytest.approx(0.1),
    }
    assert "+10.0%" in tool_calls.text(dict.fromkeys(turns, 100), turns)


def test_the_command_line() -> None:
    args = cli.parse(["tools", "--tools=5", "--config.scheduler.max_rows=4"])
    assert (args.tools, args.config.scheduler.max_rows) == (5, 4)
