"""Clients of `bench soak` that wait: for how long is up to the server, but not for good."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from jaxserve_lab.bench.stress import soak, soak_clients
from jaxserve_lab.bench.stress.ledger import Ledger
from jaxserve_lab.bench.stress.server_process import Victim
from jaxserve_lab.bench.stress.soak_caller import Caller
from jaxserve_lab.bench.stress.soak_clients import Clients, Patience, ServerLost
from jaxserve_lab.bench.stress.soak_frontends import Asked, GrpcDoor, HttpDoor, Refused

pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")


class Process:
    """A server's. gone: that it has ended, with `code`."""

    def __init__(self) -> None:
        self.gone, self.code, self.killed = threading.Event(), 0, False

    def poll(self) -> int | None:
        return self.code if self.gone.is_set() else None

    def kill(self) -> None:
        self.killed, self.code = True, -9
        self.gone.set()


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    monkeypatch.setattr(soak_clients, "SAMPLE_S", 0.001)
    monkeypatch.setattr(Caller, "learn", lambda _: None)
    return Process()


def clients(process: Process, patience_s: float, ledger: Ledger) -> Clients:
    server = Victim(cast(Any, process), "localhost:1", "localhost:2", Path("log"))
    return Clients(server, ledger, seed=0, count=2, patience_s=patience_s)


def test_patience_lasts_as_long_as_tokens_come() -> None:
    patience = Patience(10.0)
    assert not patience.over(5.0, 0.0) and not patience.over(5.0, 10.0)
    assert not patience.over(6.0, 11.0) and not patience.over(6.0, 21.0)
    assert patience.over(6.0, 21.5)


def test_a_server_that_says_nothing_brings_nothing() -> None:
    patience = Patience(10.0)
    assert not patience.over(None, 0.0) and not patience.over(None, 10.0)
    assert patience.over(None, 10.5)
    assert not patience.over(3.0, 11.0), "it was busy"


def test_a_request_that_the_server_has_forgotten_is_noticed(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server has nothing to do, and one client waits."""

    def whole(_: Caller) -> None:
        process.gone.wait(60.0)

    monkeypatch.setattr(soak_clients, "KINDS", {whole: 1.0, lambda _: None: 1.0})
    monkeypatch.setattr(soak_clients, "tokens", lambda _: 7.0)
    with pytest.raises(ServerLost, match=r"wait for good \(1 whole\), no token for 0.01 s"):
        clients(process, 0.01, Ledger()).each_kind()
    assert process.killed


def test_a_request_that_waits_while_others_are_served_is_not_forgotten(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Patience is none, but with each look there are more tokens."""
    served, done = itertools.count(), threading.Event()

    def tokens(_: Victim) -> float:
        count = next(served)
        if count == 50:
            done.set()
        return float(count)

    monkeypatch.setattr(soak_clients, "KINDS", {lambda _: done.wait(60.0): 1.0})
    monkeypatch.setattr(soak_clients, "tokens", tokens)
    clients(process, 0.0, Ledger()).each_kind()
    assert next(served) > 50 and not process.killed


def test_a_server_that_ends_by_itself_is_noticed(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    def whole(_: Caller) -> None:
        process.code = 3
        process.gone.set()
        raise ConnectionRefusedError("nobody is there")

    ledger = Ledger()
    monkeypatch.setattr(soak_clients, "KINDS", {whole: 1.0})
    with pytest.raises(ServerLost, match="ended by itself, with 3"):
        clients(process, 60.0, ledger).call_for(60.0)
    assert "nobody is there" in next(iter(ledger.problems))


class Pieces:
    """A stream that is refused behind its last piece."""

    def __init__(self, *pieces: str) -> None:
        self._pieces = pieces

    def texts(self) -> Iterator[str]:
        yield from self._pieces
        raise Refused("queue_full")

    def leave(self, *, vanish: bool) -> None:
        """Nothing is open."""


def test_waits_are_noted_by_the_tier_that_is_served() -> None:
    ledger = Ledger()
    caller = Caller(random.Random(0), GrpcDoor("localhost:1"), HttpDoor("localhost:2"), ledger)
    for asked, who in (
        (Asked([5], 1), "realtime"),
        (Asked([5], 1, slo_class="offline"), "best_effort"),
        (Asked([5], 1, slo_class="offline", tier="realtime"), "realtime"),
    ):
        ledger.longest_s.clear()
        with pytest.raises(Refused):
            list(caller.texts(Pieces("a", "b"), asked))
        assert list(ledger.longest_s) == [who]
    ledger.waited("realtime", 9.0)
    ledger.waited("realtime", 3.0)
    assert ledger.longest_s["realtime"] == 9.0


def test_a_lost_server_is_what_did_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any) -> None:
        raise ServerLost("clients wait for good")

    monkeypatch.setattr(soak, "victim", lambda *_, batches: contextlib.nullcontext(None))
    monkeypatch.setattr(soak, "_soaked", lost)
    outcome = soak.run((), 1.0, 0)
    assert outcome.problems == ["clients wait for good"]
    assert soak.text(outcome).splitlines()[-1] == "soak: 1 did not hold"
