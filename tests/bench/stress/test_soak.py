"""`bench soak`: a short one, and that it notices what it is there to notice."""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from jaxserve.bench import cli
from jaxserve_lab.bench.stress import soak, soak_clients
from jaxserve_lab.bench.stress.ledger import Ledger
from jaxserve_lab.bench.stress.server_process import Victim
from jaxserve_lab.bench.stress.soak import Outcome
from jaxserve_lab.bench.stress.soak_caller import Caller
from jaxserve_lab.bench.stress.soak_clients import Clients, Patience, ServerLost
from jaxserve_lab.bench.stress.soak_frontends import (
    Asked,
    GrpcDoor,
    HttpDoor,
    Refused,
    completion,
    error_code,
)
from jaxserve_lab.bench.stress.soak_metrics import AT_REST, Page, read_page

# It is ml_collections that loads config files so.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")


@pytest.mark.slow
def test_everything_at_once_leaves_nothing_behind() -> None:
    # So short a run is its own warming up: what memory does says nothing yet.
    outcome = soak.run(soak.parse([]).flags, seconds=10, seed=0, max_growth_mib=256, clients=8)
    assert outcome.problems == []
    assert set(outcome.longest_s) == {"realtime", "best_effort", "a batch"}
    kinds = {kind for kind, _ in outcome.by_kind}
    assert {"whole", "cancelled", "disconnected", "deadline", "batches", "wrong"} <= kinds
    assert ("scored", "ok") in outcome.by_kind
    assert {method for (method, _), n in outcome.endings.items() if n} >= {
        "Generate",
        "GetBatch",
        "http /v1/completions",
        "http /v1/batches",
    }


def at_rest(**values: float) -> Page:
    """What a server says that has nothing left, but for `values`."""
    found = {**dict.fromkeys(AT_REST, 0.0), "compiles_after_warmup_total": 0.0}
    return Page({**found, "num_blocks": 128.0, "num_blocks_free": 128.0, **values})


def test_what_the_server_has_left_is_noticed() -> None:
    outcome = Outcome(preemptions=1)
    assert soak.left_over(at_rest(), Counter(), outcome) == []
    for values, problem in (
        ({"num_blocks_free": 125.0}, "3 blocks are used"),
        ({"num_requests_running": 1.0}, "num_requests_running is 1 at the end"),
        ({"compiles_after_warmup_total": 1.0}, "compiles_after_warmup_total is 1 at the end"),
    ):
        assert soak.left_over(at_rest(**values), Counter(), outcome) == [problem]


def test_files_and_threads_that_are_left_are_noticed() -> None:
    most = soak.MAX_NEW_THREADS
    outcome = Outcome(preemptions=1, threads=(30, 30 + most))
    assert soak.left_over(at_rest(), Counter({"socket": 2}), outcome) == ["2 more open: socket"]
    outcome.threads = (30, 31 + most)
    assert soak.left_over(at_rest(), Counter(), outcome) == [f"{31 + most} threads, 30 before"]


def test_a_pool_that_is_large_enough_says_little() -> None:
    (problem,) = soak.left_over(at_rest(), Counter(), Outcome())
    assert problem.startswith("no request was preempted")


def test_memory_that_grows_after_its_first_third_is_noticed() -> None:
    samples = [100.0, 400.0, 600.0, 605.0, 610.0, 620.0]
    assert soak.grown(Outcome(memory_mib=samples), 20.0) == []
    (problem,) = soak.grown(Outcome(memory_mib=samples), 10.0)
    assert problem == "memory grew by 12.5 MiB, more than 10"


class Process:
    """Of a server, which ends with this code when it is told to; None: not at all."""

    def __init__(self, code: int | None) -> None:
        self._code = code

    def send_signal(self, number: int) -> None:
        assert number == signal.SIGTERM

    def wait(self, timeout: float) -> int:
        if self._code is None:
            raise subprocess.TimeoutExpired("server", timeout)
        return self._code


@pytest.mark.parametrize(
    ("code", "problem"), [(0, ""), (1, "it ended with 1"), (None, "it did not end within")]
)
def test_a_server_that_does_not_end_well_is_noticed(code: int | None, problem: str) -> None:
    server = Victim(cast(Any, Process(code)), "localhost:1", "localhost:2", Path("log"))
    found = soak.stopped(server)
    assert [each.startswith(problem) for each in found] == [True] * bool(problem)


def test_calls_that_ended_alike_on_both_sides_agree() -> None:
    ledger = Ledger()
    ledger.note("whole", "Generate", "ok")
    ledger.note("cancelled", "Generate", "left")
    ledger.note("wrong", "Generate", "INVALID_ARGUMENT")
    for served in (
        {("Generate", "ok"): 2, ("Generate", "invalid"): 1},
        {("Generate", "ok"): 1, ("Generate", "cancelled"): 1, ("Generate", "malformed"): 1},
    ):
        assert ledger.disagreements(served) == []


@pytest.mark.parametrize(
    ("served", "problem"),
    [
        ({"ok": 1}, "1 calls were counted, 2 were made"),
        ({"ok": 1, "cancelled": 2}, "3 calls were counted, 2 were made"),
        ({"cancelled": 2}, "0 are ok to the server, 1 to 2 to the clients"),
        ({"ok": 1, "failed": 1}, "1 are failed to the server, 0 to the clients"),
    ],
)
def test_a_call_that_is_lost_or_ended_otherwise_is_noticed(
    served: dict[str, int], problem: str
) -> None:
    ledger = Ledger()
    ledger.note("whole", "Generate", "ok")
    ledger.note("cancelled", "Generate", "left")
    counts = {("Generate", ending): count for ending, count in served.items()}
    assert f"Generate: {problem}" in ledger.disagreements(counts)


def test_a_method_that_nobody_called_is_noticed() -> None:
    assert Ledger().disagreements({("GetBatch", "ok"): 1})
    assert not Ledger().disagreements({("GetBatch", "ok"): 0})


def test_calls_that_the_server_may_not_have_heard_of_may_be_missing() -> None:
    ledger = Ledger()
    ledger.note("deadline", "Generate", "DEADLINE_EXCEEDED", surely=False)
    assert ledger.disagreements({}) == []
    assert ledger.disagreements({("Generate", "timed_out"): 1}) == []
    assert ledger.disagreements({("Generate", "timed_out"): 2})


def test_an_ending_that_nobody_knows_is_a_problem() -> None:
    ledger = Ledger()
    ledger.note("whole", "Generate", "DATA_LOSS")
    assert ledger.problems == {"whole: a call ended with DATA_LOSS": 1}


def test_the_metrics_are_read() -> None:
    page = read_page(
        'jaxserve:num_blocks{model_name="m"} 8.0\n'
        "# TYPE jaxserve:calls counter\n"
        'jaxserve:calls_total{ending="ok",method="Generate",model_name="m"} 3.0\n'
        'jaxserve:num_blocks_used{kind="kv",tier="shared",model_name="m"} 1.0\n'
    )
    assert page == Page({"num_blocks": 8.0}, {("Generate", "ok"): 3})


def test_what_is_sent_is_a_completion_of_the_http_door() -> None:
    asked = Asked([5, 6], 3, {"ignore_eos": True}, slo={"jct_ms": 5.0})
    assert completion(asked, stream=True) == {
        "prompt": [5, 6],
        "max_tokens": 3,
        "temperature": 0.0,
        "ignore_eos": True,
        "slo": {"jct_ms": 5.0},
        "stream": True,
    }


def test_errors_have_a_name() -> None:
    assert error_code(429, b'{"error": {"code": "queue_full"}}') == "queue_full"
    assert error_code(400, b'{"error": {"code": null}}') == "400"
    assert error_code(502, b"<html>") == "502"
    assert Refused("queue_full").status == "queue_full"


def test_its_table_and_exit_code_say_what_did_not_hold(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = Counter({("whole", "ok"): 2, ("cancelled", "left"): 1})
    for problems, code in (([], 0), (["3 blocks are used"], 1)):
        outcome = Outcome(60.0, kinds, {"realtime": 1.5}, 2.0, {("Generate", "ok"): 3})
        outcome.memory_mib, outcome.problems = [1.0, 2.0, 3.0], problems
        monkeypatch.setattr(soak, "run", lambda *_, outcome=outcome: outcome)
        assert cli.main(["soak", "--json"]) == code
        told = capsys.readouterr()
        last = "soak: 1 did not hold" if problems else "soak: everything held"
        assert told.err.splitlines()[-1] == last
        assert all(f"- {problem}" in told.err for problem in problems)
        assert "realtime 1.5 s" in told.err
        assert '["whole", "ok", 2]' in told.out and "1.0, 2.0, 3.0 MiB" in told.err


@pytest.mark.parametrize(
    ("policy", "reuse", "takes"),
    [("bros:max_age=9", False, True), ("sarathi", False, False), ("sarathi", True, True)],
)
def test_there_is_host_memory_for_what_takes_it(policy: str, reuse: bool, takes: bool) -> None:
    asked = [f"--policy={policy}", f"--config.cache.prefix_caching={str(reuse).lower()}"]
    assert any("host_gib" in flag for flag in soak.parse(asked).flags) == takes


@pytest.mark.parametrize(
    "flag",
    ["--minutes=0", "--max_growth_mib=nan", "--config.scheduler.polcy=x", "--policy=no_such"],
)
def test_wrong_flags_are_found_before_any_server_starts(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(soak, "run", lambda *_: pytest.fail("it ran"))
    assert cli.main(["soak", flag]) == 2
    assert flag.partition("=")[0].removeprefix("--").split(".")[-1][:5] in capsys.readouterr().err


# Clients that wait: for how long is up to the server, but not for good.


class LongProcess:
    """A server's. gone: that it has ended, with `code`."""

    def __init__(self) -> None:
        self.gone, self.code, self.killed = threading.Event(), 0, False

    def poll(self) -> int | None:
        return self.code if self.gone.is_set() else None

    def kill(self) -> None:
        self.killed, self.code = True, -9
        self.gone.set()


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> LongProcess:
    monkeypatch.setattr(soak_clients, "SAMPLE_S", 0.001)
    monkeypatch.setattr(Caller, "learn", lambda _: None)
    return LongProcess()


def clients(process: LongProcess, patience_s: float, ledger: Ledger) -> Clients:
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
    process: LongProcess, monkeypatch: pytest.MonkeyPatch
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
    process: LongProcess, monkeypatch: pytest.MonkeyPatch
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
    process: LongProcess, monkeypatch: pytest.MonkeyPatch
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
