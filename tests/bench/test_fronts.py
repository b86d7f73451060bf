"""`bench fronts` and `bench tools`: HTTP as a target, and what is made of the figures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jaxserve.bench import cli, runs
from jaxserve.bench.http_target import Address, HttpTarget
from jaxserve.bench.load_target import BenchError
from jaxserve.server.server import Server
from jaxserve_lab.bench import frontends, tool_calls
from tests.server.fake_engine import INFO, FakeEngine
from tests.server.http.conftest import SETTINGS

# It is ml_collections that loads config files so.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")

TURNS = {
    "engine alone": [{"tokens_per_s": 100.0, "cpu_us": 1000.0, "ttft_ms": 10.0}] * 3,
    "gRPC": [{"tokens_per_s": 98.0, "cpu_us": 1030.0, "ttft_ms": 11.0}] * 3,
    "HTTP": [
        {"tokens_per_s": rate, "cpu_us": 1042.0, "ttft_ms": 12.5} for rate in (50.0, 96.0, 97.0)
    ],
}


@pytest.fixture
def target() -> Iterator[HttpTarget]:
    engine = FakeEngine()
    with Server(engine, grace_s=0.0, http=SETTINGS) as server:
        engine.run()
        yield HttpTarget(Address.parse(server.http_address or ""), vars(INFO))


def test_all_tokens_come_through_http(target: HttpTarget) -> None:
    found = runs.throughput(target, 3, 5, 7, repeats=1, seed=0)
    assert found["output_tokens_per_s"]["median"] > 0
    assert runs.latency(target, 2, 5, 7, seed=0)["tpot_ms"] is not None


def test_what_http_refuses_ends_the_measurement(target: HttpTarget) -> None:
    target.info()["max_model_len"] = target.info()["pool_tokens"] = 10**6
    with pytest.raises(BenchError, match=r"a request was failed: .*at most"):
        runs.throughput(target, 1, 50_000, 1, repeats=1, seed=0)


def test_costs_are_medians_over_turns() -> None:
    found = frontends.costs(TURNS)
    assert found["gRPC"] == pytest.approx({"throughput": 0.02, "cpu_us": 30, "ttft_ms": 1.0})
    assert found["HTTP"] == pytest.approx({"throughput": 0.04, "cpu_us": 42, "ttft_ms": 2.5})


def test_the_table_has_a_line_a_door() -> None:
    lines = [" ".join(line.split()) for line in frontends.text(TURNS).splitlines()]
    assert lines[1:] == [
        "engine alone 100 1,000 us 10.0 ms",
        "gRPC 98 2.0% 1,030 us +30 us 11.0 ms +1.0 ms",
        "HTTP 96 4.0% 1,042 us +42 us 12.5 ms +2.5 ms",
    ]


@pytest.mark.parametrize("flag", ["--streams=0", "--seed=-1", "--http_port=1"])
def test_wrong_flags_are_found_before_any_engine_is_built(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(frontends, "run", lambda args: pytest.fail("it ran"))
    assert cli.main(["fronts", flag]) == 2
    assert flag.partition("=")[0] in capsys.readouterr().err


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
