"""One line a call in the log, whichever door it came through, and what is in it."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.client import Client, ServerError, make_line
from jaxserve.engine.output import FinishReason, Output, Timings, Usage
from jaxserve.sched.request import SLO, Program, Request, SamplingParams, Tier
from jaxserve.sched.slo.verdict import Verdict
from jaxserve.server.access.api_keys import Caller, Keys
from jaxserve.server.access.options import Access
from jaxserve.server.requests.call_outcome import CallOutcome, CallRecord, CallSource, CallTracker
from jaxserve.server.requests.options import ServerOptions
from jaxserve.server.requests.slo_classes import ServiceLevel
from jaxserve.server.server import Server
from jaxserve.server.telemetry.request_log import Fields, RequestLog, log_fields
from tests.server.access.test_keys import key
from tests.server.batches.serving import serving
from tests.server.fake_engine import PATIENCE, FakeEngine
from tests.server.http.conftest import SETTINGS

LOGGED = ServerOptions(request_log=True)
SAYING_ALL = ServerOptions(request_log=True, log_prompts=True)
CLASSES = {"chat": ServiceLevel(SLO(ttft=0.1, tbt=0.5, jct=9.0), Tier.REALTIME, "chat")}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[Fields]]:
    """Of the calls so far. Ask once the server has stopped: a call ends after its client knows."""

    def found() -> list[Fields]:
        messages: list[Any] = [one.msg for one in caplog.records if one.name == "jaxserve.calls"]
        return [each for each in messages if isinstance(each, Fields)]

    return found


Lines = Callable[[], list[Fields]]


def without(line: Fields, *names: str) -> dict[str, Any]:
    """For what differs each time: it must be there."""
    for name in names:
        assert line.pop(name)
    return dict(line)


def test_a_line_says_who_asked_for_what_and_what_came_of_it(
    engine: FakeEngine, lines: Lines
) -> None:
    engine.cached_tokens = 4
    engine.drafts = 2, 0
    with Server(engine, grace_s=0.0, options=LOGGED, slo_classes=CLASSES) as server:
        engine.run()
        with Client(server.address) as client:
            client.complete(
                "secret", max_tokens=3, request_id="mine", slo_class="chat", program={"id": "run"}
            )
    (line,) = lines()
    assert without(line, "peer", "open_ms") == {
        "message": "call ended",
        "door": "grpc",
        "method": "Generate",
        "request_id": "mine",
        "ending": "ok",
        "tier": "realtime",
        "slo_class": "chat",
        "program": "run",
        "prompt_tokens": 6,
        "output_tokens": 3,
        "slo_ttft_ms": 100.0,
        "slo_tbt_ms": 500.0,
        "slo_jct_ms": 9000.0,
        "slo_max_tbt_ms": 5000.0,
        "cached_tokens": 4,
        "preemptions": 1,
        "accepted_draft_tokens": 2,
        "finish_reason": "length",
        "preprocess_ms": 0.0,
        "queue_ms": 100.0,
        "ttft_ms": 200.0,
        "tbt_mean_ms": 50.0,
        "tbt_p99_ms": pytest.approx(80.0, abs=1.0),
        "tbt_max_ms": 80.0,
        "jct_ms": 300.0,
        "slo_met": False,
        "slo_missed": "ttft",
    }


def test_a_line_says_of_how_many_the_targets_were_given_up(
    engine: FakeEngine, lines: Lines
) -> None:
    engine.gives_up = True
    with Server(engine, grace_s=0.0, options=LOGGED) as server, Client(server.address) as client:
        engine.run()
        client.complete("hi", max_tokens=3, n=2, slo={"jct_ms": 1e6})
    (line,) = lines()
    assert line["slo_given_up"] == 2


def test_no_lines_unless_asked_for(engine: FakeEngine, lines: Lines) -> None:
    with Server(engine, grace_s=0.0) as server, Client(server.address) as client:
        engine.run()
        client.complete("secret", max_tokens=3)
    assert lines() == []


def test_a_call_that_is_refused_has_one_line_and_no_other(
    engine: FakeEngine, lines: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    engine.max_requests = 0
    access = Access(Keys(fixed=[key("alice")]))
    with Server(engine, grace_s=0.0, options=LOGGED, access=access) as server:
        for api_key, options in (("alice", {"top_p": 7.0}), ("alice", {}), ("mallory", {})):
            with Client(server.address, api_key=api_key) as client, pytest.raises(ServerError):
                client.complete("secret", tier="best_effort", **options)
    invalid, full, unknown = lines()
    assert len(caplog.records) == 3, caplog.messages
    assert (invalid["ending"], invalid["key"]) == ("invalid", "alice")
    assert "reason" not in invalid  # it may quote
    assert (full["ending"], full["tier"], full["prompt_tokens"]) == ("queue_full", "best_effort", 6)
    assert full["reason"] == "0 requests are queued; try again later"
    assert (unknown["ending"], unknown.get("key")) == ("unauthenticated", None)
    assert "secret" not in caplog.text


def test_a_call_that_ends_early_has_its_times_once_the_engine_has_let_go(
    engine: FakeEngine, lines: Lines
) -> None:
    with Server(engine, grace_s=0.0, options=LOGGED) as server, Client(server.address) as client:
        stream = client.generate("hi", max_tokens=9, slo={"jct_ms": 1e6})
        engine.wait(lambda: engine.live)
        engine.step(2)
        next(iter(stream))
        stream.cancel()
        engine.wait(lambda: not engine.live)
    (line,) = lines()
    assert (line["ending"], line["finish_reason"]) == ("cancelled", "cancelled")
    assert (line["output_tokens"], line["ttft_ms"], line["slo_met"]) == (2, 200.0, True)


def test_nor_is_a_line_missing_where_the_engine_never_says_a_last_word(
    engine: FakeEngine, lines: Lines
) -> None:
    with Server(engine, grace_s=0.0, options=LOGGED) as server, Client(server.address) as client:
        call = client.generate("hi", max_tokens=9)
        engine.wait(lambda: engine.live)
        engine.fail_silently(RuntimeError("nothing works"))
        with pytest.raises(ServerError):
            list(call)
    (line,) = lines()
    assert (line["ending"], line["reason"]) == ("engine_failed", "the engine failed: nothing works")
    assert "jct_ms" not in line


def posted(server: Server, body: object) -> int:
    assert server.http_address is not None
    connection = http.client.HTTPConnection(server.http_address, timeout=PATIENCE)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


def test_several_prompts_of_a_call_are_one_line(engine: FakeEngine, lines: Lines) -> None:
    with Server(engine, grace_s=0.0, options=SAYING_ALL, http=SETTINGS) as server:
        engine.run()
        body = {"prompt": ["ab", "cde"], "n": 2, "max_tokens": 2, "tier": "best_effort"}
        assert posted(server, body) == 200
    (line,) = lines()
    assert (line["door"], line["method"]) == ("http", "http /v1/completions")
    assert (line["continuations"], line["prompt_tokens"], line["output_tokens"]) == (4, 5, 8)
    assert (line["preemptions"], line["tier"]) == (4, "best_effort")
    assert (line["prompt"], line["text"]) == (["ab", "cde"], [" w0 w1"] * 4)


def test_what_was_said_is_there_if_asked_for(engine: FakeEngine, lines: Lines) -> None:
    with (
        Server(engine, grace_s=0.0, options=SAYING_ALL) as server,
        Client(server.address) as client,
    ):
        engine.run()
        client.complete("hello", max_tokens=2)
        with pytest.raises(ServerError):
            client.complete("hello", top_p=7.0)
    told, refused = lines()
    assert (told["prompt"], told["text"]) == ("hello", " w0 w1")
    assert refused["reason"].startswith("top_p: must be")


def test_lines_of_batches_have_theirs(engine: FakeEngine, tmp_path: Path, lines: Lines) -> None:
    access = Access(Keys(fixed=[key("alice")]))
    with (
        serving(engine, tmp_path, options=LOGGED, access=access) as server,
        Client(server.address, api_key="alice") as client,
    ):
        client.submit_batch("mine", [make_line("abc", max_tokens=2), make_line("de")])
        engine.wait(lambda: len(engine.live) == 2)
        engine.step(2)
        client.cancel_batch("mine")
        engine.wait(lambda: not engine.live)
    found = {line["line"]: line for line in lines() if line["door"] == "batch"}
    assert sorted(found) == [0, 1]
    about = [found[0][name] for name in ("method", "batch", "key", "ending", "tier")]
    assert about == ["batch line", "mine", "alice", "ok", "best_effort"]
    assert (found[0]["prompt_tokens"], found[0]["output_tokens"]) == (3, 2)
    assert (found[1]["ending"], found[1]["finish_reason"]) == ("cancelled", "cancelled")
    assert len([line for line in lines() if line["method"] == "SubmitBatch"]) == 1
    counted = server._tracker.lines
    assert (counted[CallOutcome.OK], counted[CallOutcome.CANCELLED], sum(counted.values())) == (
        1,
        1,
        2,
    )


def test_lines_that_wait_for_the_next_server_say_so(
    engine: FakeEngine, tmp_path: Path, lines: Lines
) -> None:
    with (
        serving(engine, tmp_path, options=LOGGED) as server,
        Client(server.address) as client,
    ):
        client.submit_batch("mine", [make_line("abc"), make_line("de")])
        engine.wait(lambda: len(engine.live) == 2)
        engine.step()
    served = [line for line in lines() if line["door"] == "batch"]
    assert [line["ending"] for line in served] == ["shutting_down"] * 2
    assert [line["output_tokens"] for line in served] == [1, 1]


WORD = re.compile(r' (\w+)=("(?:[^"\\]|\\.)*"|[^" ]+)')


@given(st.text(min_size=1), st.text(min_size=1))
def test_as_text_a_line_is_one_line_of_words_whatever_a_client_has_put_into_it(
    name: str, batch: str
) -> None:
    line = str(Fields(message="call ended", request_id=name, batch=batch, slo_met=True, n=1.5))
    assert line.isprintable() and line.isascii()
    assert line.startswith("call ended ")
    words = dict(WORD.findall(line))
    assert WORD.sub("", line) == "call ended"
    for field, value in (("request_id", name), ("batch", batch)):
        word = words[field]
        assert (json.loads(word) if word.startswith('"') else word) == value
    assert (words["slo_met"], words["n"]) == ("true", "1.5")


def test_a_sink_that_fails_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    told = []

    def fails(record: CallRecord) -> None:
        raise RuntimeError("no")

    tracker = CallTracker(("Generate",), (fails, told.append))
    record = tracker.begin(CallSource.GRPC, "Generate")
    tracker.ended(record)
    assert told == [record]
    assert "the end of a call of Generate is not told" in caplog.text


def test_the_request_log_is_shown_whatever_the_other_loggers_show(
    caplog: pytest.LogCaptureFixture,
) -> None:
    RequestLog(lambda _: "")(CallRecord("Generate"))
    assert [one.levelname for one in caplog.records] == ["INFO"]


def test_the_page_lists_the_fields() -> None:
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()
    logs = page.partition("\n## Logs\n")[2]
    rows = [line.split("|")[1] for line in logs.splitlines() if line.startswith("| `")]
    listed = {name for cell in rows for name in re.findall(r"`(\w+)`", cell)}
    slo = SLO(ttft=1e-9, tbt=1.0, jct=1.0)
    request = Request("r", (1,), SamplingParams(n=2), slo, adapter="a", program=Program("p"))
    verdict = Verdict(slo, "c", Tier.REALTIME, ttft=False, tbt=True, jct=True, max_tbt=True)
    timings = Timings(0.1, 0.2, 0.3, 0.1, 0.1, 0.1)
    stop = FinishReason.STOP
    record = CallRecord(
        "m", "p", "r", Caller(name="k"), batch="b", line=0, reason="x", trace_id="t"
    )
    record.outcome, record.requests = CallOutcome.SLOW_READER, (request,)
    record.x_request_id, record.given_up = "x", 1
    record.last = [
        Output("r", 0, (), "", (), stop, Usage(1, 2, 3, 0, 4, 5), timings, verdict=verdict)
    ]
    assert listed == {*log_fields(record), "prompt", "text"} - {"message"}
