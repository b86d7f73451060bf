"""What a call says of the trace that it belongs to (W3C Trace Context, Level 1)."""

from __future__ import annotations

from collections.abc import Iterable

_PARENT, _STATE = "traceparent", "tracestate"


def trace_context(headers: Iterable[tuple[str | bytes, str | bytes]]) -> dict[str, str]:
    """traceparent and tracestate, of HTTP's headers or gRPC's metadata, names in lower case;
    nothing without a traceparent, or with several (section 3.2). What is in them is not looked
    at."""
    found: dict[str, list[str]] = {_PARENT: [], _STATE: []}
    for name, value in headers:
        plain = _str(name)
        if plain in found:
            found[plain].append(_str(value))
    if len(found[_PARENT]) != 1:
        return {}
    return {name: ",".join(values) for name, values in found.items() if values}


def _str(text: str | bytes) -> str:
    return text.decode("latin-1") if isinstance(text, bytes) else text
