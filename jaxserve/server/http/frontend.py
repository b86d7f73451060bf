"""The door as a whole: an application, and a server for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.config import Config, SchedulerConfig
from jaxserve.server.access.options import Access
from jaxserve.server.batches.batch_operations import Batches
from jaxserve.server.http.admission_middleware import AdmissionMiddleware
from jaxserve.server.http.app import build_app
from jaxserve.server.http.live_feed import LiveFeed
from jaxserve.server.http.openai.files import FileStore
from jaxserve.server.http.openai.route_context import RouteContext
from jaxserve.server.http.transport.http_server import HttpServer
from jaxserve.server.requests.engine_client import EngineClient
from jaxserve.server.requests.engine_requests import EngineRequests
from jaxserve.server.requests.templates.chat_template import ChatTemplate, load_chat_template


@dataclass(frozen=True)
class HttpSettings:
    """port: 0 takes a free one. template: how chats become prompts. limits: of a batch."""

    port: int
    template: ChatTemplate
    limits: SchedulerConfig


def http_settings(config: Config) -> HttpSettings | None:
    """What the config says; None: no HTTP. Raises ConfigError for a chat template that cannot be
    read."""
    if config.server.http_port < 0:
        return None
    template = load_chat_template(config.model.path)
    return HttpSettings(config.server.http_port, template, config.scheduler)


class HttpFrontend:
    """HTTP for an engine, on the event loop that `start` is called on. metrics: the page for
    Prometheus. access: over what, and from whose pages. Raises ConfigError if the port is taken."""

    def __init__(
        self,
        engine: EngineClient,
        host: str,
        settings: HttpSettings,
        metrics: Callable[[], bytes],
        access: Access,
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._feed = LiveFeed(engine, settings.limits)
        engine.add_observer(self._feed)
        self._settings = settings
        self._server = HttpServer(host, settings.port, access.tls)

    @property
    def address(self) -> str:
        """Where it listens, as "host:port"."""
        return self._server.address

    def start(
        self, requests: EngineRequests, batches: Batches | None, middleware: AdmissionMiddleware
    ) -> None:
        """Takes calls from now on, as many as `middleware` lets in, and hands them to `requests`
        and `batches`."""
        context = RouteContext(self._engine, requests, self._settings.template)
        store = None
        if batches is not None:
            store = FileStore(batches.directory / "files", batches.max_bytes, batches.keep_s)
        app = build_app(context, batches, store, self._metrics, self._feed)
        self._server.start(middleware.around(app), middleware.writes.limit_s)

    def close(self) -> None:
        """Frees the port of a door that was never started."""
        self._server.close()

    async def stop(self, patience: float) -> None:
        """Takes no more calls; those that run get `patience` seconds for their last words."""
        self._settings.template.close()  # the engine serves no more chats
        await self._server.stop(patience)
