"""Complete calls over HTTP, for `bench abuse` and `bench soak`."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Mapping
from typing import Any

COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
OLLAMA = "/api/chat"
_PATIENCE_S = 120.0
_MARK = "a mark of parts"


def call(
    address: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    *,
    method: str = "",
    key: str | None = None,
    patience_s: float | None = _PATIENCE_S,
) -> tuple[int, bytes]:
    """Makes a call on a new connection.

    Args:
        address: host:port.
        path: The URL's path.
        body: Bytes are sent as they are, other values as JSON; None for no body.
        headers: Further headers.
        method: By default POST, or GET without a body.
        key: An API key; None for none.
        patience_s: The connection's timeout; None for none.

    Returns:
        Status and body.

    Raises:
        OSError, http.client.HTTPException: There was no answer.
    """
    raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    sent_headers = {} if raw is None else {"Content-Type": "application/json"}
    if key is not None:
        sent_headers["Authorization"] = f"Bearer {key}"
    connection = http.client.HTTPConnection(address, timeout=patience_s)
    with contextlib.closing(connection):
        method = method or ("GET" if raw is None else "POST")
        connection.request(method, path, raw, {**sent_headers, **(headers or {})})
        answer = connection.getresponse()
        return answer.status, answer.read()


def form(content: str | None = None) -> tuple[bytes, dict[str, str]]:
    """Body and headers of a call that uploads a batch's file; None for a form without a file."""
    disposition = "Content-Disposition: form-data; name="
    parts = [f'{disposition}"purpose"\r\n\r\nbatch']
    if content is not None:
        parts.append(f'{disposition}"file"; filename="a.jsonl"\r\n\r\n{content}')
    body = "".join(f"--{_MARK}\r\n{part}\r\n" for part in parts) + f"--{_MARK}--\r\n"
    return body.encode(), {"Content-Type": f'multipart/form-data; boundary="{_MARK}"'}
