"""The HTTP frontend: an application, and a server for it."""

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
    """Settings of the HTTP frontend.

    Attributes:
        port: 0 takes a free one.
        template: makes prompts of chats.
        limits: limits of a step, which the console shows.
    """

    port: int
    template: ChatTemplate
    limits: SchedulerConfig


def http_settings(config: Config) -> HttpSettings | None:
    """The settings in a config; None if HTTP is off. Raises ConfigError if the chat template cannot
    be read."""
    if config.server.http_port < 0:
        return None
    template = load_chat_template(config.model.path)
    return HttpSettings(config.server.http_port, template, config.scheduler)


class HttpFrontend:
    """HTTP for an engine, on the event loop that `start` is called on.

    Args:
        engine: the engine.
        host: where to listen.
        settings: port, chat template and limits.
        metrics: renders the page for Prometheus.
        access: TLS and browser origins.

    Raises:
        ConfigError: the port is taken.
    """

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
        """Starts to take calls, as many as `middleware` admits, and passes them to `requests` and
        `batches`."""
        context = RouteContext(self._engine, requests, self._settings.template)
        store = None
        if batches is not None:
            store = FileStore(batches.directory / "files", batches.max_bytes, batches.keep_s)
        app = build_app(context, batches, store, self._metrics, self._feed)
        self._server.start(middleware.around(app), middleware.writes.limit_s)

    def close(self) -> None:
        """Frees the port of a frontend that was never started."""
        self._server.close()

    async def stop(self, patience: float) -> None:
        """Takes no more calls. Running ones get `patience` seconds to finish."""
        self._settings.template.close()  # the engine serves no more chats
        await self._server.stop(patience)
