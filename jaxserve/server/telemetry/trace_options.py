"""What the config says of traces."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from jaxserve.config import ConfigError
from jaxserve.server.requests.call_outcome import Sink


@contextlib.contextmanager
def open_traces(endpoint: str, model: Callable[[], str]) -> Iterator[Sink | None]:
    """Sends them meanwhile, from a thread of its own.

    Args:
        endpoint: As `telemetry.otlp_endpoint` has it.
        model: What is served, asked once there are calls.

    Yields:
        Who takes calls that have ended; None without an endpoint.

    Raises:
        ConfigError: OpenTelemetry is not installed.
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
