"""The trace that a call belongs to (W3C Trace Context, Level 2; keys of tracestate as in Level 1,
which OpenTelemetry follows)."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PARENT, _STATE = "traceparent", "tracestate"
_A_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]{0,200})?")
_STATE_LENGTH, _MEMBERS = 512, 32  # section 3.3.1.5: more may not be passed on
_MEMBER = re.compile(
    r"([a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})="
    r"[ !-+\--<>-~]{0,255}[!-+\--<>-~]"
)


def trace_context(headers: Iterable[tuple[str | bytes, str | bytes]]) -> dict[str, str]:
    """traceparent and tracestate, of HTTP's headers or gRPC's metadata, names in lower case; empty
    without a traceparent or with several (section 3.2). Malformed values are left out, since
    readers may write them to a log."""
    values: dict[str, list[str]] = {_PARENT: [], _STATE: []}
    for name, value in headers:
        plain = _str(name)
        if plain in values:
            values[plain].append(_str(value))
    parents, state = values[_PARENT], ",".join(values[_STATE])
    if len(parents) != 1 or not _A_PARENT.fullmatch(parents[0]):
        return {}
    carrier = {_PARENT: parents[0]}
    if _is_state(state):
        carrier[_STATE] = state
    return carrier


def _is_state(text: str) -> bool:
    members = (
        [member.strip(" \t") for member in text.split(",")] if len(text) <= _STATE_LENGTH else []
    )
    members = [member for member in members if member]
    keys = {member.partition("=")[0] for member in members}
    whole = 0 < len(members) == len(keys) <= _MEMBERS
    return whole and all(map(_MEMBER.fullmatch, members))


def _str(text: str | bytes) -> str:
    return text.decode("latin-1") if isinstance(text, bytes) else text
