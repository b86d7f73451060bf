"""Starts and stops the server: from serve.py, a test or a notebook."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

import grpc

from jaxserve.engine.errors import EngineStopped, HostLost
from jaxserve.server.access.options import Access
from jaxserve.server.batches.batch_operations import BatchSettings
from jaxserve.server.daemon_thread import in_daemon_thread
from jaxserve.server.exposure import exposure_warnings
from jaxserve.server.frontends import Frontends, make_call_tracker
from jaxserve.server.grpc.grpc_server import SERVICES, listen_grpc, make_server
from jaxserve.server.grpc.health import Health
from jaxserve.server.http.live_feed import LiveFeed
from jaxserve.server.http.metrics_server import MetricsServer
from jaxserve.server.http.options import HttpSettings
from jaxserve.server.http.transport.http_server import HttpServer
from jaxserve.server.open_files import connections_of_a_door
from jaxserve.server.requests.addresses import addresses_of
from jaxserve.server.requests.call_outcome import Sink
from jaxserve.server.requests.engine_client import EngineClient
from jaxserve.server.requests.options import ServerOptions
from jaxserve.server.requests.output_streams import StreamFailed
from jaxserve.server.requests.slo_classes import ServiceLevel
from jaxserve.server.requests.watchdog import watch_for_stalls
from jaxserve.server.telemetry.metrics import MetricsRegistry

log = logging.getLogger(__name__)

# Seconds that clients get to read pending output once all requests have finished.
_FLUSH_S, _MAX_FLUSH_S = 1.0, 5.0
_HUNG_S = 60.0  # a step counts as hung if it runs this long beyond the grace
_WATCHING = 4  # one in four of gRPC's connections may watch health
_SIGNALS_LOOKED_FOR_S = 0.5
_CLOSE_S = 0.5  # grace of long-lived calls (health watches)


class Server:
    """A gRPC server over an engine, on an event loop in a thread of its own, with HTTP and metrics
    if configured. The engine must have been started; stopping the server drains and stops it.

    with Server(engine, port=0) as server: print(server.address)

    Args:
        engine: the engine.
        host: where all ports listen.
        port: port of gRPC; 0 takes a free one.
        metrics_port: port for Prometheus; -1 is off, 0 takes a free one.
        grace_s: seconds that running requests get when the server stops. Lines of batches wait for
            the next server.
        batches: the batch journal and its limits; None takes no batches.
        slo_classes: SLO classes that requests may name.
        http: the HTTP frontend; None is off.
        options: how calls are treated; None for the defaults.
        access: API keys, TLS and browser origins; None lets everybody in.
        traces: called with each finished call, to export traces.

    Attributes:
        access: as given.
        failed: whether the engine has failed. Every call then gets an error.
        hung: whether the engine does not answer. The server then stops without waiting for it.
    """

    def __init__(
        self,
        engine: EngineClient,
        *,
        host: str = "localhost",
        port: int = 0,
        metrics_port: int = -1,
        grace_s: float = 10.0,
        batches: BatchSettings | None = None,
        slo_classes: Mapping[str, ServiceLevel] | None = None,
        http: HttpSettings | None = None,
        options: ServerOptions | None = None,
        access: Access | None = None,
        traces: Sink | None = None,
    ) -> None:
        self.access = access or Access()
        self._options = options or ServerOptions()
        self._engine = engine
        self._host, self._port = host, port
        self._metrics_port = metrics_port
        self._grace_s = grace_s
        self._batch_settings = batches
        self._slo_classes = slo_classes or {}
        self._http_settings = http
        self._http: HttpServer | None = None
        self._feed = None if http is None else LiveFeed(engine, http.limits)
        self._registry: MetricsRegistry
        self._bound: Future[str] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_requested: asyncio.Event
        watching = None if self._feed is None else self._feed.on_call
        self._tracker = make_call_tracker(engine, self._options, traces, watching)
        self._frontends: Frontends
        self._health: Health
        self._metrics: MetricsServer | None = None
        self._thread = threading.Thread(target=self._run, name="jaxserve-grpc", daemon=True)
        self._all_finished = True
        self.failed = False
        self.hung = False

    def start(self) -> str:
        """Listens, and returns "host:port". Raises ConfigError if a port is taken."""
        http, batches = self._http_settings, self._batch_settings is not None
        scraped, asked = self._metrics_port >= 0, http is not None
        for line in exposure_warnings(
            self._host, self.access, http=asked, metrics=scraped, batches=batches
        ):
            log.warning("%s", line)
        if scraped or asked:
            self._registry = MetricsRegistry(self._engine, self._tracker)
        try:
            if scraped:
                self._metrics = MetricsServer(
                    self._registry.registry, self._host, self._metrics_port, self.access
                )
            if http is not None and self._feed is not None:
                self._engine.add_observer(self._feed)
                self._http = HttpServer(self._host, http.port, self.access.tls)
            self._thread.start()
            return self._bound.result()
        except BaseException:
            if self._metrics is not None:
                self._metrics.stop()
            if self._http is not None:
                self._http.close()
            raise

    @property
    def address(self) -> str:
        """The address of gRPC, as "host:port"; waits for `start`."""
        return self._bound.result()

    @property
    def metrics_address(self) -> str | None:
        """The address of /metrics, as "host:port"; None if it is off."""
        return None if self._metrics is None else self._metrics.address

    @property
    def http_address(self) -> str | None:
        """The address of HTTP, as "host:port"; None if it is off."""
        return None if self._http is None else self._http.address

    @property
    def batch_path(self) -> Path | None:
        """The directory of batches; None if they are refused."""
        return None if self._batch_settings is None else self._batch_settings.journal.path

    def request_stop(self, say: Callable[[str], None] = log.info) -> None:
        """Starts to stop: refuses new calls, and gives running ones the grace period. Returns at
        once; `say` is told on the server's thread what the server waits for."""

        def stop() -> None:
            if not self._stop_requested.is_set():
                say(self._stopping_text())
            self._stop_requested.set()

        self._call(stop)

    def _stopping_text(self) -> str:
        running = self._frontends.requests.running
        if not running:
            return "stopping: nothing runs"
        requests = "1 request" if running == 1 else f"{running} requests"
        grace = f"up to {self._grace_s:g} s for {requests}; a second signal cancels them"
        return f"stopping: {grace}"

    def cancel_running(self) -> None:
        """Cuts the grace period short."""
        self._call(lambda: self._frontends.requests.cancel_all())

    def stop(self, timeout: float | None = None) -> bool:
        """Stops server and engine. True if all requests finished by themselves.

        timeout: seconds to wait at most; TimeoutError if it takes longer.
        """
        self.request_stop()
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the server did not stop within {timeout} s")
        return self._all_finished

    def wait(self) -> bool:
        """Blocks until someone has stopped the server. True if all requests finished."""
        while self._thread.is_alive():
            # A signal between two bytecodes, or to another thread, does not wake this thread: its
            # handler runs in the next iteration.
            self._thread.join(_SIGNALS_LOOKED_FOR_S)
        return self._all_finished

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _call(self, function: Callable[[], object]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # closed: already stopped
                self._loop.call_soon_threadsafe(function)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if self._bound.done():
                raise
            self._bound.set_exception(error)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop_requested = asyncio.Event()
        options, batches = self._options, self._batch_settings
        frontends = self._frontends = Frontends(
            self._engine, options, self._tracker, self.access, self._slo_classes, batches
        )
        connections = connections_of_a_door() // len(addresses_of(self._host, self._port))
        self._health = Health(SERVICES, connections // _WATCHING, frontends.writes)
        server = make_server(
            (frontends.generation_handler(), frontends.batches_handler()),
            self._health,
            self.access.keys,
            message_bytes=frontends.body_bytes,
            max_connections=connections,
            reflects=options.reflection,
        )
        address = listen_grpc(server, self._host, self._port, self.access.tls)
        self._health.set(serving=True)
        self._engine.add_failure_listener(self._on_failure)
        await server.start()
        if self._http is not None and self._http_settings is not None:
            app = frontends.application(self._http_settings.template, self._registry, self._feed)
            self._http.start(app, options.write_timeout_s)
        if frontends.batches is not None:
            frontends.batches.start()
        watching = asyncio.create_task(
            watch_for_stalls(self._engine, options.stall_s, self._on_stall)
        )
        self._bound.set_result(address)
        await self._stop_requested.wait()
        watching.cancel()
        await self._shut_down(server)
        self._frontends.requests.close()

    async def _on_stall(self, why: str | None) -> None:
        """The engine has stalled, for the reason given, or goes on (None)."""
        self._frontends.requests.stalled = why
        self._health.set(serving=why is None)
        if why is not None and self._frontends.batches is not None:
            self._frontends.batches.closed()
        if why is not None and self._options.exit_on_failure:
            self.hung = True
            self._frontends.requests.fail(why)
            self._stop_requested.set()

    def _on_failure(self, error: BaseException) -> None:
        """Called on any thread. If a host was lost, the engine's thread may wait for it for ever,
        while other servers can take over."""
        lost = isinstance(error, HostLost)
        self.failed, self.hung = True, lost
        text = f"the engine failed: {str(error) or type(error).__name__}"

        def tell() -> None:
            self._frontends.requests.fail(text, EngineStopped if lost else StreamFailed)
            if self._frontends.batches is not None:
                self._frontends.batches.closed()
            self._health.set(serving=False)
            if self._options.exit_on_failure or lost:
                log.error("the server stops: %s", text)
                self._stop_requested.set()

        self._call(tell)

    async def _shut_down(self, server: grpc.aio.Server) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._grace_s
        self._frontends.requests.stop_admission()
        self._health.set(serving=False)
        if self._frontends.batches is not None:
            with contextlib.suppress(TimeoutError):  # the disk may not answer
                await asyncio.wait_for(self._frontends.batches.stop(), self._grace_s + _HUNG_S)
        if not self.hung:
            await self._drain()
        # A reader that does not read must not hold up the stop.
        flush = min(max(deadline - loop.time(), _FLUSH_S), _MAX_FLUSH_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._frontends.admission.wait_idle(), flush)
        if self.hung:
            await asyncio.gather(server.stop(_CLOSE_S), self._stop_http(_CLOSE_S))
            return
        await self._stop_http(max(min(deadline - loop.time(), _MAX_FLUSH_S), _FLUSH_S))
        await server.stop(_CLOSE_S)
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.stop)
        await asyncio.to_thread(self._engine.stop)

    async def _stop_http(self, patience: float) -> None:
        if self._http is not None and self._http_settings is not None:
            self._http_settings.template.close()  # the engine serves no more chats
            await self._http.stop(patience)

    async def _drain(self) -> None:
        drained = in_daemon_thread(lambda: self._engine.drain(self._grace_s))
        limit = self._grace_s + _HUNG_S
        try:
            self._all_finished = await asyncio.wait_for(asyncio.wrap_future(drained), limit)
        except TimeoutError:  # the device does not answer: still release all waiters
            self.hung = True
            self._frontends.requests.fail(f"the engine did not stop within {limit:g} s")
