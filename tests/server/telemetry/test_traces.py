"""Spans of calls, as OpenTelemetry's own SDK has them."""

from __future__ import annotations

import http.client
import json
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, TraceState
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from jaxserve.client import Client, ServerError
from jaxserve.config import ConfigError, TelemetryConfig
from jaxserve.engine.output import FinishReason, Output, Timings, Usage
from jaxserve.server.grpc.grpc_server import METHODS
from jaxserve.server.http.admission_middleware import METHODS as HTTP_METHODS
from jaxserve.server.proto import generation_pb2 as pb
from jaxserve.server.proto import generation_pb2_grpc
from jaxserve.server.requests.call_outcome import CallRecord, CallSource
from jaxserve.server.requests.options import ServerOptions
from jaxserve.server.server import Server
from jaxserve.server.telemetry import traces
from jaxserve.server.telemetry.trace_context import trace_context
from jaxserve.server.telemetry.trace_options import open_traces
from jaxserve.server.telemetry.traces import Traces
from tests.server.fake_engine import PATIENCE, FakeEngine
from tests.server.http.conftest import SETTINGS

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADER = f"00-{TRACE}-{PARENT}-01"


class Traced:
    """Both frontends, and where spans go."""

    def __init__(self, engine: FakeEngine) -> None:
        self.exporter = InMemorySpanExporter()
        self.traces = Traces(SimpleSpanProcessor(self.exporter), lambda: "fake")
        options = ServerOptions(request_log=True)
        self.server = Server(
            engine, grace_s=0.0, http=SETTINGS, options=options, traces=self.traces
        )

    def spans(self) -> dict[str, ReadableSpan]:
        """By name; ask once the server has stopped."""
        found = self.exporter.get_finished_spans()
        by_name = {span.name: span for span in found}
        assert len(by_name) == len(found)
        return by_name


@pytest.fixture
def traced(engine: FakeEngine) -> Iterator[Traced]:
    engine.run()
    yield Traced(engine)


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def milliseconds(span: ReadableSpan) -> float:
    assert span.start_time is not None and span.end_time is not None
    return (span.end_time - span.start_time) / 1e6


def test_a_call_is_a_span_and_its_phases_are_beneath_it(
    traced: Traced, caplog: pytest.LogCaptureFixture
) -> None:
    with traced.server as server, Client(server.address) as client:
        client.complete("secret", max_tokens=3, request_id="mine", slo={"ttft_ms": 100})
    spans = traced.spans()
    assert list(spans) == ["preprocess", "queue", "prefill", "decode", "Generate"]
    call = spans["Generate"]
    assert (call.kind, call.parent) == (SpanKind.SERVER, None)
    assert call.context is not None
    found = attributes(call)
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "jaxserve",
        "gen_ai.request.model": "fake",
        "gen_ai.usage.input_tokens": 6,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ("length",),
        "jaxserve.request_id": "mine",
        "jaxserve.tier": "realtime",
        "jaxserve.ttft_ms": 200.0,
        "jaxserve.slo_missed": "ttft",
    }
    assert {name: found.get(name) for name in expected} == expected
    assert "secret" not in call.to_json()
    assert (call.status.status_code, found.get("error.type")) == (StatusCode.UNSET, None)
    for name, took in (("queue", 100), ("prefill", 100), ("decode", 100)):
        span = spans[name]
        assert span.parent is not None and span.parent.span_id == call.context.span_id
        assert milliseconds(span) == pytest.approx(took, abs=0.01), name
    assert spans["preprocess"].start_time == call.start_time
    assert spans["preprocess"].end_time == spans["queue"].start_time
    assert spans["queue"].end_time == spans["prefill"].start_time
    assert spans["prefill"].end_time == spans["decode"].start_time
    assert f"trace_id={call.context.trace_id:032x}" in caplog.text


def test_the_operations_are_of_methods_that_there_are() -> None:
    assert {*METHODS, *HTTP_METHODS, "batch line"} >= traces._OPERATIONS.keys()
    chats = [method for method in traces._OPERATIONS if "chat" in method]
    assert {traces._OPERATIONS[method] for method in chats} == {"chat"}


def test_http_goes_on_with_its_clients_trace(traced: Traced) -> None:
    with traced.server as server:
        connection = http.client.HTTPConnection(str(server.http_address), timeout=PATIENCE)
        headers = {"Content-Type": "application/json", "Traceparent": HEADER, "Tracestate": "a=b"}
        body = json.dumps({"prompt": "a", "max_tokens": 2})
        connection.request("POST", "/v1/completions", body, headers)
        assert connection.getresponse().read()
        connection.close()
    span = traced.spans()["http /v1/completions"]
    assert span.context is not None and span.parent is not None
    assert f"{span.context.trace_id:032x}-{span.parent.span_id:016x}" == f"{TRACE}-{PARENT}"
    assert span.context.trace_state.get("a") == "b"


def test_grpc_does_by_its_metadata(traced: Traced) -> None:
    with traced.server as server, grpc.insecure_channel(server.address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        message = pb.GenerateRequest(text="a")
        list(stub.Generate(message, timeout=PATIENCE, metadata=[("traceparent", HEADER)]))
    span = traced.spans()["Generate"]
    assert span.parent is not None
    assert f"{span.parent.trace_id:032x}" == TRACE


def test_a_refused_call_has_its_span_too_and_a_defect_is_an_error(
    engine: FakeEngine, traced: Traced
) -> None:
    with traced.server as server, Client(server.address) as client, pytest.raises(ServerError):
        client.complete("a", top_p=7.0)
    (span,) = traced.spans().values()
    assert attributes(span)["error.type"] == "invalid"
    assert span.status.status_code is StatusCode.UNSET  # the client's mistake, not ours


def test_the_servers_own_fault_is_an_error(engine: FakeEngine) -> None:
    traced = Traced(engine)
    with traced.server as server, Client(server.address) as client:
        call = client.generate("a")
        engine.wait(lambda: engine.live)
        engine.fail(RuntimeError("it broke"))
        with pytest.raises(ServerError):
            list(call)
    assert traced.spans()["Generate"].status.status_code is StatusCode.ERROR


def test_what_a_continuation_went_through_is_that_of_the_longest() -> None:
    exporter = InMemorySpanExporter()
    traces = Traces(SimpleSpanProcessor(exporter), lambda: "fake")
    record = CallRecord("batch line", source=CallSource.BATCH, began=10.0, ended=13.0)
    for total in (1.0, 2.5, 2.0):
        gone = tuple(i / 500 for i in range(300))
        timings = Timings(0.25, total / 2, total, preempted=gone, preprocess=0.5)
        usage = Usage(3, 0 if total == 2.0 else 7, preemptions=300)
        ended = FinishReason.STOP
        record.last.append(Output("r", 0, finish_reason=ended, usage=usage, timings=timings))
    traces(record)
    preprocess, queue, prefill, decode, call = exporter.get_finished_spans()
    assert call.kind is SpanKind.INTERNAL
    took = [round(milliseconds(span)) for span in (preprocess, queue, prefill, decode, call)]
    assert took == [500, 250, 500, 1250, 3000]
    assert len(call.events) == 100 and {event.name for event in call.events} == {"preempted"}
    assert preprocess.start_time is not None
    since = [(event.timestamp - preprocess.start_time) / 1e6 for event in call.events[:3]]
    assert since == pytest.approx([0, 2, 4], abs=0.01)


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ([], {}),
        ([("tracestate", "a=b")], {}),
        ([("traceparent", HEADER), ("traceparent", HEADER)], {}),
        ([(b"traceparent", b"\xff")], {}),
        ([("traceparent", HEADER + "-" + "x" * 500)], {}),
        (
            [("tracestate", "a=b"), ("traceparent", HEADER), ("tracestate", "c=d")],
            {"traceparent": HEADER, "tracestate": "a=b,c=d"},
        ),
    ],
)
def test_of_a_calls_headers_those_of_its_trace(headers: Any, found: dict[str, str]) -> None:
    assert trace_context(headers) == found


@pytest.mark.parametrize(
    "state",
    [
        "a=b\nc=d",
        "a=\x1b[31mred",
        "a=\xfc",
        "a=" + "x" * 257,
        ",".join(f"k{each}=v" for each in range(33)),
        ",".join(f"key-of-some-length-{each}=v" for each in range(32)),
        "",
    ],
)
def test_what_is_no_state_of_a_trace_goes_nowhere(
    state: str, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """OpenTelemetry would write it into the log as it is."""
    assert trace_context([("traceparent", HEADER), ("tracestate", state)]) == {
        "traceparent": HEADER
    }
    TraceContextTextMapPropagator().extract(
        trace_context([("traceparent", HEADER), ("tracestate", state)])
    )
    assert not caplog.records


@example("1=1")
@example("a=b,a=c")
@example(",")
@given(st.text(alphabet="ab1=,@ \t-_A\x1f", max_size=30))
def test_a_state_is_as_opentelemetry_has_it(state: str) -> None:
    found = trace_context([("traceparent", HEADER), ("tracestate", state)]).get("tracestate")
    theirs = TraceState.from_header([state])
    assert bool(found) == bool(theirs), (found, theirs)


def opened(endpoint: str) -> None:
    with open_traces(endpoint, lambda: "fake") as traces:
        assert (traces is None) == (not endpoint)


def test_without_an_endpoint_there_are_none() -> None:
    opened("")


@pytest.mark.parametrize("endpoint", ["localhost:4317", "http://:4317", "ftp://a:1", "http://a:b"])
def test_an_endpoint_that_is_none_is_one_line(endpoint: str) -> None:
    with pytest.raises(ConfigError) as error:
        TelemetryConfig(otlp_endpoint=endpoint)
    problem = f"must be a URL as http://localhost:4317, got {endpoint!r}"
    assert str(error.value) == f"telemetry.otlp_endpoint: {problem}"


def test_without_the_library_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(
        ConfigError, match=r"telemetry\.otlp_endpoint: OpenTelemetry is not installed"
    ):
        opened("http://localhost:4317")
