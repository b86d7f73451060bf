"""The deployment that Ray Serve's proxies pass calls to. It estimates the cost of a call, has a
replica of the engine answer it, and relays the answer."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import grpc
from prometheus_client import CONTENT_TYPE_LATEST, Metric
from ray.exceptions import ActorDiedError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import RayServeException
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from jaxserve.deploy.flags import replica_config
from jaxserve.deploy.in_process import OK, Status
from jaxserve.deploy.metrics import metrics_page
from jaxserve.deploy.moves import roster  # not what is in it, which Ray would copy with this class
from jaxserve.deploy.moves.mover import Mover
from jaxserve.deploy.moves.relay import Pieces, Relay, ReplicaLost, Unserved
from jaxserve.deploy.replicas import NOTHING, PAGES, ROUTING_REQUEST, WHERE, Where
from jaxserve.deploy.response_kind import grpc_response_kind, http_response_kind
from jaxserve.deploy.routing_request import RoutingRequestBuilder
from jaxserve.sched.routing.fleet import RoutingRequest
from jaxserve.server.http.admission_middleware import limited_receive
from jaxserve.server.http.errors import ApiError
from jaxserve.server.http.openai.sse import sse_event
from jaxserve.server.moves.resume_point import Handle, ResumePoint
from jaxserve.server.proto import generation_pb2 as pb
from jaxserve.server.requests.admission import retry_s

log = logging.getLogger(__name__)
_SERVICE = pb.DESCRIPTOR.services_by_name["Generation"].full_name
_SCOPE = ("type", "http_version", "method", "scheme", "path", "query_string", "headers", "client")
_GONE = (ReplicaLost, RayServeException, RayError)
_METRICS = "/metrics"
_RESET = "/reset_prefix_cache"
_ALL_S = 5.0  # for all replicas to answer a call of a method


class CallFailed(RuntimeError):
    """A gRPC call failed; its context has the status."""


class Ingress:
    """Routes calls to the replicas of the engine.

    Args:
        engine: the deployment of the replicas.
        flags: flags of serve.py that they run with.
        secret: secret of their keys of prompts; None if routers do not use these.
    """

    def __init__(
        self, engine: DeploymentHandle, flags: Sequence[str] = (), secret: bytes | None = None
    ) -> None:
        self._routing_requests = RoutingRequestBuilder(replica_config(flags), secret)
        self._engine = engine
        self._http = engine.options(stream=True, method_name="http")
        self._grpc = engine.options(stream=True, method_name="grpc")
        self._sizes = engine.options(method_name="sizes")
        self._body_bytes: int | None = None
        self._roster = roster.ROSTER
        self._mover = Mover(lambda: self._roster.replicas, _Asked(engine))
        self._loop: asyncio.AbstractEventLoop | None = None

    # HTTP.

    async def __call__(self, request: Request) -> Response:
        """Takes any call of the HTTP frontend."""
        return _Answer(self)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application. An answer that breaks off ends with an error: as a whole if nothing
        of it was sent, otherwise as an event of the stream."""
        begun = over = False
        try:
            messages = self._messages(scope, receive)
            async with aclosing(messages):
                async for message in messages:
                    begun = True
                    over = message["type"] == "http.response.body" and not message.get("more_body")
                    await send(message)
        except ClientDisconnect:
            log.info("a client has hung up before its call was whole")
        except HTTPException as error:
            problem = ApiError(error.status_code, str(error.detail))
            await problem.response(scope["path"])(scope, receive, send)
        except _GONE as error:
            problem = _problem(error)
            log.warning("%s", problem)
            if not begun:
                await problem.response(scope["path"])(scope, receive, send)
            elif not over:  # a response that had begun is a stream of events
                await send({"type": "http.response.body", "body": _broken_off(problem, scope)})

    async def _messages(self, scope: Scope, receive: Receive) -> AsyncGenerator[Message, None]:
        """The response to a call, as ASGI messages."""
        arrived = time.time()
        body = await self._body(scope, receive)
        plain = {name: scope[name] for name in _SCOPE if name in scope}
        plain["path"] = path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path == _METRICS and scope["method"] == "GET":
            async with aclosing(self._relayed(NOTHING, plain, body, arrived)) as messages:
                head = await anext(messages)
            if head["status"] == 200:  # the replica has admitted the client
                may_see = self._routing_requests.adapters_of(scope["headers"])
                page = metrics_page(await self._metrics(), may_see)
                for message in _whole(page, CONTENT_TYPE_LATEST):
                    yield message
                return
        if path == _RESET and scope["method"] == "POST":
            async with aclosing(self._relayed(NOTHING, plain, body, arrived)) as messages:
                answer = [message async for message in messages]
            if answer[0]["status"] == 200:  # likewise
                await self._of_all("reset_prefix_cache")
            for message in answer:
                yield message
            return
        routing_request = await self._routing_requests.from_http(path, body, scope["headers"])
        async with aclosing(self._relayed(routing_request, plain, body, arrived)) as messages:
            async for message in messages:
                yield message

    async def _relayed(
        self, routing_request: RoutingRequest, scope: Mapping[str, Any], body: bytes, arrived: float
    ) -> AsyncGenerator[Message, None]:
        """The response of a replica."""
        send_to = functools.partial(self._pieces, self._http, routing_request, (scope, body))
        passing = self._passing_on(send_to, http_response_kind, routing_request, arrived)
        async with passing as pieces:
            async for piece in pieces:
                for message in piece:
                    yield message

    async def _metrics(self) -> dict[str, list[Metric]]:
        """Metrics of all running replicas, by name. Raises the errors of `_of_all`."""
        return dict(await self._of_all("metrics"))

    async def _of_all(self, method: str) -> list[Any]:
        """The answers of all running replicas. Raises RayServeException if a replica is late."""
        said = self._engine.broadcast(method).results_async(
            timeout_s=_ALL_S, return_exceptions=True
        )
        try:
            return [one for one in await said if not isinstance(one, Exception)]
        except TimeoutError:
            why = f"a replica has not answered {method} within {_ALL_S:g} s"
            raise RayServeException(why) from None

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """The body of a call. Raises HTTPException if it is too long or too slow;
        ClientDisconnect."""
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return b""
        within = limited_receive(receive, scope, await self._longest())
        body = bytearray()
        while True:
            message = await within()
            if message["type"] != "http.request":
                raise ClientDisconnect
            body += message.get("body", b"")
            if not message.get("more_body", False):
                return bytes(body)

    async def _longest(self) -> int:
        """Most bytes of a body, the same for all replicas. Raises what a call raises."""
        if self._body_bytes is None:
            try:
                sizes = await self._sizes.remote()
            except ActorDiedError:  # another replica may be alive
                sizes = await self._sizes.remote()
            self._body_bytes, block_size = sizes
            self._routing_requests.find_prefixes(block_size)
        return self._body_bytes

    # gRPC. The names are those of the service's methods.

    async def Generate(
        self, message: pb.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """jaxserve.v1.Generation.Generate."""
        arrived = time.time()
        with contextlib.suppress(*_GONE):  # the call itself will report it
            await self._longest()
        metadata = grpc_context.invocation_metadata() or ()
        routing_request = await self._routing_requests.from_grpc(message, metadata)
        async with aclosing(
            self._rpc("Generate", message, grpc_context, routing_request, arrived)
        ) as answers:
            async for raw in answers:
                yield pb.GenerateResponse.FromString(raw)

    async def Embed(
        self, message: pb.EmbedRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[pb.EmbedResponse, None]:
        """jaxserve.v1.Generation.Embed."""
        arrived = time.time()
        with contextlib.suppress(*_GONE):  # as above
            await self._longest()
        metadata = grpc_context.invocation_metadata() or ()
        routing_request = await self._routing_requests.from_grpc(message, metadata)
        async with aclosing(
            self._rpc("Embed", message, grpc_context, routing_request, arrived)
        ) as answers:
            async for raw in answers:
                yield pb.EmbedResponse.FromString(raw)

    async def Score(
        self, message: pb.ScoreRequest, grpc_context: RayServegRPCContext
    ) -> pb.ScoreResponse:
        """jaxserve.v1.Generation.Score, sent to any replica, like /score."""
        call = self._rpc("Score", message, grpc_context, NOTHING, time.time())
        found = [raw async for raw in call]
        return pb.ScoreResponse.FromString(found[0])

    async def GetServerInfo(
        self, message: pb.GetServerInfoRequest, grpc_context: RayServegRPCContext
    ) -> pb.GetServerInfoResponse:
        """jaxserve.v1.Generation.GetServerInfo, answered by any replica, since all are alike."""
        call = self._rpc("GetServerInfo", message, grpc_context, NOTHING, time.time())
        found = [raw async for raw in call]
        return pb.GetServerInfoResponse.FromString(found[0])

    async def _rpc(
        self,
        name: str,
        message: Any,
        context: RayServegRPCContext,
        routing_request: RoutingRequest,
        arrived: float,
    ) -> AsyncGenerator[bytes, None]:
        """The messages of the response. Raises CallFailed, with the status in the context."""
        raw, method = message.SerializeToString(), f"/{_SERVICE}/{name}"
        metadata, peer = list(context.invocation_metadata()), context.peer()
        try:
            given = (method, raw, metadata, peer)
            send_to = functools.partial(self._pieces, self._grpc, routing_request, given)
            passing = self._passing_on(send_to, grpc_response_kind, routing_request, arrived)
            async with passing as pieces:
                async for piece in pieces:
                    for part in piece:
                        if not isinstance(part, Status):
                            yield part
                            continue
                        context.set_trailing_metadata(part.trailing)
                        if part.code != OK:
                            _fail(context, grpc.StatusCode[part.code], part.details)
        except _GONE as error:
            internal = isinstance(error, RayTaskError)
            code = grpc.StatusCode.INTERNAL if internal else grpc.StatusCode.UNAVAILABLE
            _fail(context, code, str(_problem(error)))

    @contextlib.asynccontextmanager
    async def _passing_on(
        self,
        send_to: Callable[[Where, ResumePoint, Any], Pieces],
        tells: Callable[[Any], object],
        routing_request: RoutingRequest,
        arrived: float,
    ) -> AsyncGenerator[Pieces, None]:
        """The pieces of an answer, which may move. Arguments as of `Relay`."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._roster.listen(self._on_news)
        relay = Relay(
            send_to,
            tells,
            ResumePoint(arrived=arrived),
            self._roster.leaves,
            routing_request.sequences,
            self._mover,
        )
        self._mover.add(relay, routing_request)
        try:
            async with aclosing(relay.pieces()) as pieces:
                yield pieces
        finally:
            self._mover.discard(relay)

    def _on_news(self, names: Sequence[str], changed: bool) -> None:
        """On the router's thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._mover.heard, names, changed)

    async def _pieces(
        self,
        method: Any,
        routing_request: RoutingRequest,
        given: Sequence[Any],
        where: Where,
        point: ResumePoint,
        pages: Any,
    ) -> Pieces:
        """The answer of one replica.

        Args:
            method: the replica's method.
            routing_request: for the router.
            given: the call's arguments.
            where: which replica it is for.
            point: where the answer begins or goes on.
            pages: what comes along, as `Cache.pages`.

        Raises:
            ReplicaLost: the replica is lost.
        """
        resume = await point.record()
        tokens = sum(len(one.tokens) for one in point.outputs)
        routing_request = routing_request.after(tokens, point.fingerprint)
        named: dict[str, Any] = {
            ROUTING_REQUEST: routing_request,
            WHERE: where._replace(call=point.key),
        }
        named |= {} if pages is None else {PAGES: pages}
        answer = method.remote(*given, resume, **named)
        try:
            async for piece in answer:
                yield piece
        except Unserved as error:
            said = getattr(error, "cause", error)  # Ray's own error has the same type
            gone, final = said.replica, said.final
            raise ReplicaLost(said.reason, dead=True, replica=gone, final=final) from None
        except (RayTaskError, TaskCancelledError):  # the replica's error; a client that has gone
            raise
        except RayError as error:  # of its actor, its node, or its data
            dead = isinstance(error, ActorDiedError)
            raise ReplicaLost(_first_line(error), dead=dead) from None
        finally:
            answer.cancel()  # a reader that stops wants no more of it


class _Asked:
    """See `mover.Asked`. engine: the deployment of the replicas."""

    def __init__(self, engine: DeploymentHandle) -> None:
        self._offers = engine.options(method_name="offer")
        self._brings = engine.options(method_name="bring")
        self._hands_over = engine.options(method_name="hand_over")

    async def offer(self, name: str, key: str) -> Handle | None:
        handle: Handle | None = await self._offers.remote(key, **_to(name))
        return handle

    async def bring(self, name: str, key: str, handle: Handle) -> bool:
        return bool(await self._brings.remote(key, handle, **_to(name)))

    async def hand_over(self, name: str, key: str, ahead: bool) -> bool:
        return bool(await self._hands_over.remote(key, ahead, **_to(name)))


def _to(name: str) -> dict[str, Where]:
    return {WHERE: Where(to=name)}


class _Answer(Response):
    """An ASGI application that Ray Serve takes for a response and calls."""

    def __init__(self, ingress: Ingress) -> None:
        super().__init__()
        self._ingress = ingress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._ingress.answer(scope, receive, send)


def _whole(content: bytes, content_type: str) -> list[Message]:
    headers = [(b"content-type", content_type.encode())]
    return [
        {"type": "http.response.start", "status": 200, "headers": headers},
        {"type": "http.response.body", "body": content},
    ]


def _broken_off(problem: ApiError, scope: Scope) -> bytes:
    """The end of a stream that breaks off, in the form of its API."""
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    _, body = problem.shaped(path)
    if path.startswith("/api/"):  # Ollama's are lines
        return json.dumps(body).encode() + b"\n"
    named = b"event: error\n" if body.get("type") == "error" else b""
    return named + sse_event(body)


def _problem(error: Exception) -> ApiError:
    """The error for the client. Of an exception in the replica it shows only the type."""
    if isinstance(error, RayTaskError):
        return ApiError(500, f"internal error: {type(error.cause).__name__}", code="internal")
    return ApiError(503, _first_line(error), code="unavailable", retry_s=retry_s())


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _fail(context: RayServegRPCContext, code: grpc.StatusCode, details: str) -> None:
    context.set_code(code)
    context.set_details(details)
    raise CallFailed(f"{code.name}: {details}")
