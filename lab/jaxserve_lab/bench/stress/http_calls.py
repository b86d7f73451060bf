"""Whole calls over HTTP, as `bench abuse` and `bench soak` make them."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Mapping
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
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
    """Makes one call on a connection of its own.

    Args:
        address: host:port.
        path: of the URL.
        body: bytes are sent as they are, all else as JSON; None for no body.
        headers: further ones.
        method: by default POST, or GET without a body.
        key: an API key; None for none.
        patience_s: timeout of the connection; None for none.

    Returns:
        Status and body.

    Raises:
        OSError, http.client.HTTPException: there was no answer.
    """
    raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    given = {} if raw is None else {"Content-Type": "application/json"}
    if key is not None:
        given["Authorization"] = f"Bearer {key}"
    connection = http.client.HTTPConnection(address, timeout=patience_s)
    with contextlib.closing(connection):
        method = method or ("GET" if raw is None else "POST")
        connection.request(method, path, raw, {**given, **(headers or {})})
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
