"""The console's page and its events."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import StreamingResponse

from jaxserve import __version__
from jaxserve.sched.request import SamplingParams
from jaxserve.server.http.live_feed import LiveFeed
from jaxserve.server.http.openai.request_options import sampling_fields
from jaxserve.server.http.openai.route_context import RouteContext
from jaxserve.server.http.openai.schema import CompletionRequest, Generation
from jaxserve.server.http.openai.sse import sse_event
from jaxserve.server.requests.engine_requests import EngineRequests
from jaxserve.server.requests.milliseconds import targets_ms
from jaxserve.server.telemetry.metrics import READER

PAUSE_S = 0.5
FOLDER = Path(__file__).parent / "console"
_TYPES = {".html": "text/html", ".css": "text/css", ".mjs": "text/javascript"}
PAGE = {
    "/": FOLDER / "index.html",
    **{
        f"/console/{path.name}": path
        for path in FOLDER.iterdir()
        if path.suffix in (".css", ".mjs")
    },
}
"""The static files of the page, by their paths. They contain no data."""
# Allows nothing from other origins, no inline scripts or styles, and no markup made of text.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # after an upgrade all files are of the same version
}


def add_console(app: FastAPI, context: RouteContext, feed: LiveFeed) -> None:
    """Adds the page at /, and its data below /console."""

    async def file(path: Path) -> Response:
        body = await asyncio.to_thread(path.read_bytes)
        return Response(body, media_type=_TYPES[path.suffix], headers=_HEADERS)

    for where, path in PAGE.items():
        app.add_api_route(where, functools.partial(file, path), include_in_schema=False)

    @app.get("/console/info", include_in_schema=False)
    async def info() -> dict[str, Any]:
        """Which options a request has here, and their defaults."""
        engine_info = context.requests.info()
        fields = {name: getattr(engine_info, name) for name in ("model", "policy", "device")}
        usual = SamplingParams(**sampling_fields(Generation(), context.sampling_defaults))
        chat, most = context.template.own, min(engine_info.max_model_len, engine_info.pool_tokens)
        return {
            **fields,
            "version": __version__,
            "chat": chat,
            "causal": engine_info.causal,
            "max_model_len": most,
            "adapters": [adapter.name for adapter in context.requests.adapters(READER.get())],
            "slo_classes": {
                name: {"targets": targets_ms(level.slo), "tier": level.tier.name.lower()}
                for name, level in context.requests.slo_classes.items()
            },
            "defaults": {
                "temperature": usual.temperature,
                "top_p": usual.top_p,
                "max_tokens": None if chat else CompletionRequest(prompt="").max_tokens,
            },
        }

    events = Events(context.requests, feed)

    @app.get("/console/events", include_in_schema=False)
    async def stream() -> Response:
        """A snapshot every half second, until the server stops."""
        return StreamingResponse(events.stream(), media_type="text/event-stream")


class Events:
    """The same snapshots for all viewers. They are made once per pause and off the event loop,
    since they go through the last tens of thousands of tokens."""

    def __init__(self, requests: EngineRequests, feed: LiveFeed) -> None:
        self._requests, self._feed = requests, feed
        self._last = b""
        self._until = -math.inf  # loop time
        self._closed: str | None = None
        self._lock = asyncio.Lock()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The events for one viewer."""
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
                    "",  # shared by all viewers
                    lambda: sse_event({**self._feed.snapshot(), "closed": closed}),
                )
                self._until, self._closed = now + PAUSE_S / 2, closed
            return self._last
