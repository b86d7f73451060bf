"""Spans of calls for OpenTelemetry, made once a call is over: while it runs they cost nothing.

A call is one span. Each phase of its longest continuation (preprocess, queue, prefill, decode) is a
child span, and preemptions are events. Attributes are those of OpenTelemetry's conventions for
generative AI where there are any, and the fields of the request log, as `jaxserve.NAME`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from opentelemetry import trace
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from jaxserve import __version__
from jaxserve.engine.output import Output
from jaxserve.server.requests.call_outcome import CallOutcome, CallRecord, CallSource
from jaxserve.server.telemetry.request_log import log_fields

_FLUSH_S = 5.0
_OWN_FAULT = (CallOutcome.ENGINE_FAILED, CallOutcome.FAILED)
_NOT_OURS = (
    *("message", "method", "trace_id"),
    *("prompt_tokens", "cached_tokens", "output_tokens", "finish_reason"),
)
_MAX_EVENTS = 100
_PROVIDER = "jaxserve"
_OPERATIONS = {  # by method: its name in the conventions
    "Generate": "text_completion",
    "Embed": "embeddings",
    "http /v1/embeddings": "embeddings",
    "http /v1/completions": "text_completion",
    "http /v1/chat/completions": "chat",
    "http /v1/responses": "chat",
    "http /v1/messages": "chat",
    "http /api/chat": "chat",
    "http /api/generate": "text_completion",
    "http /api/embed": "embeddings",
    "batch line": "text_completion",
}


class Traces:
    """A sink of `CallTracker`. processor: takes spans, on the event loop, and must not block.
    model: returns the model's name; called once per call."""

    def __init__(self, processor: SpanProcessor, model: Callable[[], str]) -> None:
        name = os.environ.get("OTEL_SERVICE_NAME", "jaxserve")
        resource = Resource.create({SERVICE_NAME: name, "service.version": __version__})
        # The sampler comes from the environment: OTEL_TRACES_SAMPLER.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("jaxserve", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    def __call__(self, record: CallRecord) -> None:
        """Makes the spans, and gives the record their trace's id."""
        epoch = time.time() - time.monotonic()

        def at(when: float) -> int:
            return round(1e9 * (epoch + when))

        kind = (
            trace.SpanKind.INTERNAL if record.source is CallSource.BATCH else trace.SpanKind.SERVER
        )
        parent, attributes = self._propagator.extract(record.carrier), self._attributes(record)
        span = self._tracer.start_span(
            record.method, parent, kind, attributes, start_time=at(record.began)
        )
        record.trace_id = trace.format_trace_id(span.get_span_context().trace_id)
        if record.outcome in _OWN_FAULT:
            span.set_status(trace.StatusCode.ERROR, record.outcome)
        longest = record.longest
        if longest is not None and span.is_recording():
            self._phases(span, longest, lambda since: at(record.began + since))
        span.end(at(record.ended))

    def _attributes(self, record: CallRecord) -> dict[str, AttributeValue]:
        attributes: dict[str, AttributeValue] = {
            f"jaxserve.{name}": value
            for name, value in log_fields(record).items()
            if name not in _NOT_OURS
        }
        operation = _OPERATIONS.get(record.method)
        if operation is not None:
            attributes["gen_ai.operation.name"] = operation
            attributes["gen_ai.provider.name"] = _PROVIDER
        if record.outcome is not CallOutcome.OK:
            attributes["error.type"] = str(record.outcome)
        if record.requests:
            attributes["gen_ai.request.model"] = record.requests[0].adapter or self._model()
            attributes["gen_ai.usage.input_tokens"] = record.prompt_tokens
            attributes["gen_ai.usage.cache_read.input_tokens"] = record.cached_tokens
            attributes["gen_ai.usage.output_tokens"] = record.output_tokens
            reasons = [str(last.finish_reason) for last in record.last]
            attributes["gen_ai.response.finish_reasons"] = reasons
        return attributes

    def _phases(self, span: trace.Span, last: Output, at: Callable[[float], int]) -> None:
        """at: converts seconds since the call's arrival to a time."""
        timings = last.timings
        assert timings is not None
        written = last.usage is not None and last.usage.output_tokens > 0
        first = timings.ttft if written else timings.total
        scheduled = timings.preprocess + timings.queue
        phases = [
            ("preprocess", 0.0, timings.preprocess),
            ("queue", timings.preprocess, scheduled),
            ("prefill", scheduled, first),
        ]
        if written:
            phases.append(("decode", first, timings.total))
        under = trace.set_span_in_context(span)
        for name, begin, end in phases:
            child = self._tracer.start_span(name, under, start_time=at(begin))
            child.end(at(end))
        for when in timings.preempted[:_MAX_EVENTS]:
            span.add_event("preempted", timestamp=at(when))

    def close(self) -> None:
        """Sends the remaining spans, if that takes only some seconds."""
        closing = threading.Thread(target=self._provider.shutdown, name="jaxserve-otel")
        closing.daemon = True
        closing.start()
        closing.join(_FLUSH_S)
