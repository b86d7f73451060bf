"""grpc.health.v1.Health: all services are serving, or none.

Not grpc_health's own servicer, which holds one lock while it writes to a watcher and while it
changes the status. With that, a client that does not read could keep a failed server from stopping.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest as _Request
from grpc_health.v1.health_pb2 import HealthCheckResponse as _Reply

from jaxserve.server.requests.admission import Admission, Overloaded
from jaxserve.server.requests.output_streams import SlowReader
from jaxserve.server.requests.write_timeout import WriteTimeout

_FULL = grpc.StatusCode.RESOURCE_EXHAUSTED


class Health(health_pb2_grpc.HealthServicer):
    """The Health service, on the event loop's thread. It needs no API key.

    Args:
        services: names of services that clients may ask about, besides "", the server.
        watchers: most open Watch calls; each keeps a connection open.
        writes: limits how long a watcher may take to read a change.

    Attributes:
        serving: whether the server is serving.
    """

    def __init__(self, services: Sequence[str], watchers: int, writes: WriteTimeout) -> None:
        self._services = ("", *services)
        self._watchers = Admission(max(watchers, 1), "this server takes of Watch")
        self._writes = writes
        self._changed = asyncio.Event()
        self.serving = False

    def set(self, *, serving: bool) -> None:
        """Sets the status and tells the watchers."""
        self.serving = serving
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(self, request: _Request, context: grpc.aio.ServicerContext) -> _Reply:
        """The RPC: the status now."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return _Reply(status=self._status(request.service))

    async def Watch(self, request: _Request, context: grpc.aio.ServicerContext) -> None:
        """The RPC: the status, and every change of it."""
        try:
            self._watchers.enter()
        except Overloaded as error:
            await context.abort(_FULL, str(error))
        leave: Callable[[], None] = self._watchers.leave
        try:
            sent = None
            while True:
                changed, status = self._changed, self._status(request.service)
                if status != sent:
                    await self._writes.wait(context.write(_Reply(status=status)))
                sent = status
                await changed.wait()
        except SlowReader as error:
            self._watchers.give_up()
            leave = self._watchers.unstick
            await context.abort(_FULL, str(error))
        finally:
            leave()

    def _status(self, service: str) -> _Reply.ServingStatus:
        if service not in self._services:
            return _Reply.SERVICE_UNKNOWN
        return _Reply.SERVING if self.serving else _Reply.NOT_SERVING
