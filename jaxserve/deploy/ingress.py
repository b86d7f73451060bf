"""The deployment that Ray Serve's proxies hand calls to: it asks what a call will cost, has a
replica of the engine answer it, and passes the answer on."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import grpc
from ray.exceptions import ActorDiedError, RayActorError
from ray.serve.exceptions import RayServeException
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.deploy.asks import Asks
from jaxserve.deploy.flags import replica_config
from jaxserve.deploy.in_process import Status
from jaxserve.deploy.relay import Pieces, ReplicaLost, relay
from jaxserve.deploy.replicas import ASK, NOTHING
from jaxserve.sched.routing.fleet import Ask
from jaxserve.server.http.doorkeeper import limited
from jaxserve.server.http.errors import ApiError, retry_after
from jaxserve.server.http.sse import event
from jaxserve.server.proto import generation_pb2 as pb

log = logging.getLogger(__name__)
_SERVICE = pb.DESCRIPTOR.services_by_name["Generation"].full_name
_SCOPE = ("type", "http_version", "method", "scheme", "path", "query_string", "headers", "client")
_GONE = (ReplicaLost, RayActorError, RayServeException)


class CallFailed(RuntimeError):
    """A gRPC call ends with the status that its context has."""


class Ingress:
    """engine: the deployment of the engines. flags: theirs."""

    def __init__(self, engine: DeploymentHandle, flags: Sequence[str] = ()) -> None:
        self._asks = Asks(replica_config(flags))
        self._http = engine.options(stream=True, method_name="http")
        self._grpc = engine.options(stream=True, method_name="grpc")
        self._limit = engine.options(method_name="body_bytes")
        self._body_bytes: int | None = None

    # HTTP.

    async def __call__(self, request: Request) -> Response:
        """Any call of the HTTP door."""
        return _Answer(self)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application. An answer that breaks off ends with an error: as a whole where
        nothing of it was sent, else as an event of a stream."""
        begun = over = False
        try:
            body = await self._body(scope, receive)
            ask = await self._asks.of_http(scope["path"], body)
            plain = {name: scope[name] for name in _SCOPE if name in scope}
            pieces = relay(lambda: self._pieces(self._http, ask, plain, body), _has_body)
            async with aclosing(pieces):
                async for piece in pieces:
                    for message in piece:
                        begun, over = True, _is_last(message)
                        await send(message)
        except HTTPException as error:
            await ApiError(error.status_code, str(error.detail)).response()(scope, receive, send)
        except _GONE as error:
            problem = _unavailable(error)
            log.warning("%s", problem)
            if not begun:
                await problem.response()(scope, receive, send)
            elif not over:  # what has begun before it was whole is a stream of events
                await send({"type": "http.response.body", "body": event(problem.body())})

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """Raises HTTPException for one that is too long, or comes too slowly."""
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return b""
        if self._body_bytes is None:
            self._body_bytes = await self._limit.remote()
        within = limited(receive, scope, self._body_bytes)
        body = bytearray()
        while True:
            message = await within()
            body += message.get("body", b"")
            if message["type"] != "http.request" or not message.get("more_body", False):
                return bytes(body)

    # gRPC. The names are those of the service's methods.

    async def Generate(
        self, message: pb.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """jaxserve.v1.Generation.Generate."""
        ask = await self._asks.of_grpc(message)
        async with aclosing(self._rpc("Generate", message, grpc_context, ask)) as answers:
            async for raw in answers:
                yield pb.GenerateResponse.FromString(raw)

    async def GetServerInfo(
        self, message: pb.GetServerInfoRequest, grpc_context: RayServegRPCContext
    ) -> pb.GetServerInfoResponse:
        """jaxserve.v1.Generation.GetServerInfo: of one of the replicas, which are all alike."""
        found = [raw async for raw in self._rpc("GetServerInfo", message, grpc_context, NOTHING)]
        return pb.GetServerInfoResponse.FromString(found[0])

    async def _rpc(
        self, name: str, message: Any, context: RayServegRPCContext, ask: Ask
    ) -> AsyncGenerator[bytes, None]:
        """Its messages. Raises CallFailed, with the status in the context."""
        raw, method = message.SerializeToString(), f"/{_SERVICE}/{name}"
        metadata, peer = list(context.invocation_metadata()), context.peer()
        try:
            pieces = relay(
                lambda: self._pieces(self._grpc, ask, method, raw, metadata, peer), _is_message
            )
            async with aclosing(pieces):
                async for piece in pieces:
                    for part in piece:
                        if isinstance(part, Status):
                            _fail(context, grpc.StatusCode[part.code], part.details)
                        yield part
        except _GONE as error:
            _fail(context, grpc.StatusCode.UNAVAILABLE, str(_unavailable(error)))

    async def _pieces(self, method: Any, ask: Ask, *arguments: Any) -> Pieces:
        """What one replica answers. Raises ReplicaLost where it is gone."""
        answer = method.remote(*arguments, **{ASK: ask})
        try:
            async for piece in answer:
                yield piece
        except RayActorError as error:
            dead = isinstance(error, ActorDiedError)
            raise ReplicaLost(_first_line(error), dead=dead) from None
        finally:
            answer.cancel()  # whoever does not read on wants no more of it


class _Answer(Response):
    """What Ray Serve takes for a response, and calls as an ASGI application."""

    def __init__(self, ingress: Ingress) -> None:
        super().__init__()
        self._ingress = ingress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._ingress.answer(scope, receive, send)


def _is_last(message: Mapping[str, Any]) -> bool:
    return message["type"] == "http.response.body" and not message.get("more_body", False)


def _has_body(message: Mapping[str, Any]) -> bool:
    return message["type"] == "http.response.body" and bool(message.get("body"))


def _is_message(part: Any) -> bool:
    return isinstance(part, bytes)


def _unavailable(error: Exception) -> ApiError:
    return ApiError(503, _first_line(error), code="unavailable", headers=retry_after())


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _fail(context: RayServegRPCContext, code: grpc.StatusCode, details: str) -> None:
    context.set_code(code)
    context.set_details(details)
    raise CallFailed(f"{code.name}: {details}")
