"""The console's page, and its events."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import HTMLResponse, StreamingResponse

from jaxserve import __version__
from jaxserve.server.http.live_feed import LiveFeed
from jaxserve.server.http.openai.route_context import RouteContext
from jaxserve.server.http.openai.sse import sse_event
from jaxserve.server.requests.engine_requests import EngineRequests

PAUSE_S = 0.5
PAGE = Path(__file__).parent / "console.html"
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def add_console(app: FastAPI, context: RouteContext, feed: LiveFeed) -> None:
    """At /, and what it asks for below /console."""

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        text = await asyncio.to_thread(PAGE.read_text, encoding="utf-8")
        return HTMLResponse(text, headers={"Content-Security-Policy": _POLICY})

    @app.get("/console/info", include_in_schema=False)
    async def info() -> dict[str, Any]:
        """What does not change."""
        found = context.requests.info()
        told = {name: getattr(found, name) for name in ("model", "policy", "device", "block_size")}
        told |= {"version": __version__, "slo_classes": list(context.requests.slo_classes)}
        told["sampling_defaults"] = dict(found.sampling_defaults)
        return {**told, "chat": context.template.own}

    events = Events(context.requests, feed)

    @app.get("/console/events", include_in_schema=False)
    async def stream() -> Response:
        """A snapshot every half second, until the server stops."""
        return StreamingResponse(events.stream(), media_type="text/event-stream")


class Events:
    """The same snapshots for all who look: they are put together once a pause, beside the event
    loop, since they look at the last tens of thousands of tokens."""

    def __init__(self, requests: EngineRequests, feed: LiveFeed) -> None:
        self._requests, self._feed = requests, feed
        self._last = b""
        self._until = -math.inf  # loop time
        self._closed: str | None = None
        self._lock = asyncio.Lock()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """For one."""
        while True:
            closed = self._requests.closed
            yield await self._latest(closed)
            if closed is not None:
                return
            await asyncio.sleep(PAUSE_S)

    async def _latest(self, closed: str | None) -> bytes:
        async with self._lock:
            now = asyncio.get_running_loop().time()
            if now >= self._until or closed != self._closed:
                self._last = await self._requests.run_beside(
                    "",  # for all who look
                    lambda: sse_event({**self._feed.snapshot(), "closed": closed}),
                )
                self._until, self._closed = now + PAUSE_S / 2, closed
            return self._last
