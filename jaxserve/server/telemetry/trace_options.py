"""What the config says of traces."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from jaxserve.engine.errors import ConfigError
from jaxserve.server.requests.call_outcome import Sink


@contextlib.contextmanager
def open_traces(config: Any, model: Callable[[], str]) -> Iterator[Sink | None]:
    """Sends them meanwhile, from a thread of its own; None where the config names no endpoint.
    model: what is served, asked once there are calls. Raises ConfigError for an endpoint that is
    none, and without OpenTelemetry."""
    endpoint = config.telemetry.otlp_endpoint
    if not endpoint:
        yield None
        return
    _check(endpoint)
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from jaxserve.server.telemetry.traces import Traces
    except ImportError:
        problem = "OpenTelemetry is not installed: pip install 'jaxserve[otel]'"
        raise ConfigError(f"telemetry.otlp_endpoint: {problem}") from None
    exporter = OTLPSpanExporter(endpoint, insecure=endpoint.startswith("http://"))
    traces = Traces(BatchSpanProcessor(exporter), model)
    try:
        yield traces
    finally:
        traces.close()


def _check(endpoint: str) -> None:
    try:
        parts = urlsplit(endpoint)
        fine = parts.scheme in ("http", "https") and parts.hostname and parts.port
    except ValueError:
        fine = False
    if not fine:
        problem = f"must be a URL as http://localhost:4317, got {endpoint!r}"
        raise ConfigError(f"telemetry.otlp_endpoint: {problem}")
