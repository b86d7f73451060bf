"""Starts and stops the server: from serve.py, a test or a notebook."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jaxserve.engine.errors import ConfigError
from jaxserve.server.batch_service import BatchesService
from jaxserve.server.batches.batches import Batches, BatchSettings
from jaxserve.server.http.door import HttpDoor, HttpSettings
from jaxserve.server.metrics import MetricsServer
from jaxserve.server.proto import (
    batches_pb2,
    batches_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
)
from jaxserve.server.requests.contract import ServedEngine
from jaxserve.server.requests.requests import EngineRequests
from jaxserve.server.service import GenerationService
from jaxserve.server.slo_classes import ServiceLevel, slo_classes

SERVICES = (
    generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name,
    batches_pb2.DESCRIPTOR.services_by_name["Batches"].full_name,
)
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_OPTIONS = (
    # Longer prompts than any model takes still get the message that names the limit; and what one
    # call may add to a batch.
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.so_reuseport", 0),  # else a second server shares the port silently
    # A client that vanished without closing its connection is noticed within 30 s.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
_FLUSH_S = 1.0  # what clients get at least to read their last message once all has finished
_HUNG_S = 60.0  # beyond the grace, what a step that runs may take before it counts as hung
_CLOSE_S = 0.5  # what long-lived calls (health watches) get before they are cut


class Server:
    """A gRPC server over an engine, on an event loop in a thread of its own.

    host, port: where to listen; port 0 takes a free one. metrics_port: -1 is off, 0 a free one.
    grace_s: seconds that running requests get when the server stops; lines of batches wait for the
    next server. batches: None takes none. slo_classes: that requests may name. http: None is off.
    The engine must be started; stopping the server drains and stops it.

    failed: the engine has failed, and every call gets an error. hung: it did not answer when the
    server stopped.

        with Server(engine, port=0) as server:
            print(server.address)
    """

    def __init__(
        self,
        engine: ServedEngine,
        *,
        host: str = "localhost",
        port: int = 0,
        metrics_port: int = -1,
        grace_s: float = 10.0,
        batches: BatchSettings | None = None,
        slo_classes: Mapping[str, ServiceLevel] | None = None,
        http: HttpSettings | None = None,
    ) -> None:
        self._engine = engine
        self._host, self._port = host, port
        self._metrics_port = metrics_port
        self._grace_s = grace_s
        self._batch_settings = batches
        self._slo_classes = slo_classes or {}
        self._batches: Batches | None = None
        self._http_settings = http
        self._http: HttpDoor | None = None
        self._bound: Future[str] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_requested: asyncio.Event
        self._requests: EngineRequests
        self._service: GenerationService
        self._health: health.aio.HealthServicer
        self._metrics: MetricsServer | None = None
        self._thread = threading.Thread(target=self._run, name="jaxserve-grpc", daemon=True)
        self._all_finished = True
        self.failed = False
        self.hung = False

    def start(self) -> str:
        """Listens, and returns "host:port". Raises ConfigError if a port is taken."""
        if self._metrics_port >= 0:
            self._metrics = MetricsServer(self._engine, self._host, self._metrics_port)
        try:
            if self._http_settings is not None:
                self._http = HttpDoor(self._engine, self._host, self._http_settings)
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
        """Where it listens, as "host:port"; waits for `start`."""
        return self._bound.result()

    @property
    def metrics_address(self) -> str | None:
        """Where /metrics is served, as "host:port"; None where it is off."""
        return None if self._metrics is None else self._metrics.address

    @property
    def http_address(self) -> str | None:
        """Where HTTP is served, as "host:port"; None where it is off."""
        return None if self._http is None else self._http.address

    @property
    def batch_path(self) -> Path | None:
        """Where batches are kept; None where they are refused."""
        return None if self._batch_settings is None else self._batch_settings.journal.path

    def request_stop(self) -> None:
        """Begins to stop: no new calls, running ones get the grace period. Returns at once."""
        self._call(lambda: self._stop_requested.set())

    def cancel_running(self) -> None:
        """Cuts the grace period short."""
        self._call(lambda: self._requests.cancel_all())

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
        self._thread.join()
        return self._all_finished

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        self._requests = EngineRequests(self._engine)
        self._service = GenerationService(self._requests, self._slo_classes)
        if self._batch_settings is not None:
            self._batches = Batches(self._requests, self._batch_settings)
        self._health = health.aio.HealthServicer()
        server = grpc.aio.server(options=_OPTIONS)
        generation_pb2_grpc.add_GenerationServicer_to_server(self._service, server)
        batches_pb2_grpc.add_BatchesServicer_to_server(BatchesService(self._batches), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((*SERVICES, _HEALTH), server)
        address = _listen(server, self._host, self._port)
        for service in SERVICES:
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        self._engine.add_failure_listener(self._on_failure)
        await server.start()
        if self._http is not None:
            self._http.start(self._requests, self._batches)
        if self._batches is not None:
            self._batches.start()
        self._bound.set_result(address)
        await self._stop_requested.wait()
        await self._shut_down(server)

    def _on_failure(self, error: BaseException) -> None:
        """On the engine's thread."""
        self.failed = True
        text = f"the engine failed: {str(error) or type(error).__name__}"

        async def tell() -> None:
            self._requests.fail(text)
            if self._batches is not None:
                self._batches.closed()
            for service in ("", *SERVICES):
                await self._health.set(service, health_pb2.HealthCheckResponse.NOT_SERVING)

        assert self._loop is not None
        coroutine = tell()
        try:
            asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop is closed: the server has stopped
            coroutine.close()

    async def _shut_down(self, server: grpc.aio.Server) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._grace_s
        self._requests.stop_admission()
        await self._health.enter_graceful_shutdown()
        if self._batches is not None:
            with contextlib.suppress(TimeoutError):  # a disk that does not answer
                await asyncio.wait_for(self._batches.stop(), self._grace_s + _HUNG_S)
        drained = _in_daemon_thread(lambda: self._engine.drain(self._grace_s))
        try:
            limit = self._grace_s + _HUNG_S
            self._all_finished = await asyncio.wait_for(asyncio.wrap_future(drained), limit)
        except TimeoutError:  # the device does not answer: whoever waits must still be let go
            self.hung = True
            self._requests.fail(f"the engine did not stop within {limit:g} s")
            await asyncio.gather(server.stop(_CLOSE_S), self._stop_http(_CLOSE_S))
            return
        flush = max(deadline - loop.time(), _FLUSH_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._service.wait_idle(), flush)
        await self._stop_http(max(deadline - loop.time(), _FLUSH_S))
        if self._metrics is not None:
            await asyncio.gather(server.stop(_CLOSE_S), asyncio.to_thread(self._metrics.stop))
        else:
            await server.stop(_CLOSE_S)
        await asyncio.to_thread(self._engine.stop)

    async def _stop_http(self, patience: float) -> None:
        if self._http is not None:
            await self._http.stop(patience)


def run_server(
    engine: ServedEngine,
    config: Any,
    on_ready: Callable[[Server], None] | None = None,
    batches: BatchSettings | None = None,
    http: HttpSettings | None = None,
) -> int:
    """Serves until SIGTERM or SIGINT and returns the exit code: 0, or 1 if the engine has failed.

    config: has `config.server` (configs/base.py). on_ready is called once calls are taken. A second
    signal cuts the grace period short. Must run in the main thread.
    """
    server = Server(
        engine,
        host=config.server.host,
        port=config.server.port,
        metrics_port=config.server.metrics_port,
        grace_s=config.server.grace_s,
        batches=batches,
        slo_classes=slo_classes(config),
        http=http,
    )
    signals = 0

    def on_signal(number: int, frame: object) -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            server.request_stop()
        else:
            server.cancel_running()

    server.start()
    before = {
        number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        if on_ready is not None:
            on_ready(server)
        server.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 1 if server.failed or server.hung else 0


def _in_daemon_thread(function: Callable[[], bool]) -> Future[bool]:
    """Unlike those of asyncio.to_thread, such a thread holds up neither the loop nor the exit."""
    future: Future[bool] = Future()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            with contextlib.suppress(InvalidStateError):  # cancelled: nobody waits any more
                future.set_result(result)

    threading.Thread(target=run, name="jaxserve-drain", daemon=True).start()
    return future


def _listen(server: grpc.aio.Server, host: str, port: int) -> str:
    bracketed = f"[{host}]" if ":" in host else host
    try:
        bound = server.add_insecure_port(f"{bracketed}:{port}")
    except RuntimeError:
        problem = f"cannot listen on {bracketed}:{port} (is another server running there?)"
        raise ConfigError(f"server.port: {problem}; 0 takes any free port") from None
    return f"{bracketed}:{bound}"
