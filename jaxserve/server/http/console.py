"""The console's page, and its events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import HTMLResponse, StreamingResponse

from jaxserve import __version__
from jaxserve.server.http.front import Front
from jaxserve.server.http.live_feed import LiveFeed
from jaxserve.server.http.sse import event

PAUSE_S = 0.5
PAGE = Path(__file__).parent / "console.html"
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def add_console(app: FastAPI, front: Front, feed: LiveFeed) -> None:
    """At /, and what it asks for below /console."""

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        text = await asyncio.to_thread(PAGE.read_text, encoding="utf-8")
        return HTMLResponse(text, headers={"Content-Security-Policy": _POLICY})

    @app.get("/console/info", include_in_schema=False)
    async def info() -> dict[str, Any]:
        """What does not change."""
        found = front.requests.info()
        return {
            "version": __version__,
            "model": found.model,
            "policy": found.policy,
            "device": found.device,
            "block_size": found.block_size,
            "slo_classes": list(front.requests.slo_classes),
        }

    @app.get("/console/events", include_in_schema=False)
    async def events() -> Response:
        """A snapshot every half second, until the server stops."""
        return StreamingResponse(_snapshots(front, feed), media_type="text/event-stream")


async def _snapshots(front: Front, feed: LiveFeed) -> AsyncGenerator[bytes, None]:
    while True:
        closed = front.requests.closed
        yield event({**feed.snapshot(), "closed": closed})
        if closed is not None:
            return
        await asyncio.sleep(PAUSE_S)
