"""The trace settings of a config."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from jaxserve.config import ConfigError
from jaxserve.server.requests.call_outcome import Sink


@contextlib.contextmanager
def open_traces(endpoint: str, model: Callable[[], str]) -> Iterator[Sink | None]:
    """Sends traces from a thread of its own while the context is open.

    Args:
        endpoint: as `telemetry.otlp_endpoint`.
        model: returns the model's name; called once there are calls.

    Yields:
        A sink for calls that have ended; None without an endpoint.

    Raises:
        ConfigError: If OpenTelemetry is not installed.
    """
    if not endpoint:
        yield None
        return
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from jaxserve.server.telemetry.traces import Traces
    except ImportError:
        problem = "OpenTelemetry is not installed: install the extra otel"
        raise ConfigError(f"telemetry.otlp_endpoint: {problem}") from None
    exporter = OTLPSpanExporter(endpoint, insecure=endpoint.startswith("http://"))
    traces = Traces(BatchSpanProcessor(exporter), model)
    try:
        yield traces
    finally:
        traces.close()
