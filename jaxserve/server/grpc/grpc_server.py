"""The gRPC server: its services and options, and where it listens."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jaxserve.config import ConfigError
from jaxserve.server.access.api_keys import Keys, Unauthenticated, authorization
from jaxserve.server.access.tls import Tls
from jaxserve.server.grpc.health import Health
from jaxserve.server.proto import batches_pb2, generation_pb2
from jaxserve.server.requests.addresses import ATTEMPTS, addresses_of, bracketed_host
from jaxserve.server.requests.engine_client import EngineClient

GENERATION = generation_pb2.DESCRIPTOR.services_by_name["Generation"]
BATCHES = batches_pb2.DESCRIPTOR.services_by_name["Batches"]
SERVICES = (GENERATION.full_name, BATCHES.full_name)
METHODS = tuple(method.name for service in (GENERATION, BATCHES) for method in service.methods)
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_REFLECTION = "/grpc.reflection."
_MIB = 1 << 20
_BATCH_CALL_BYTES = 8 * _MIB  # one call that adds to a batch; few run at once
MAX_CALL_BYTES = 17 * _MIB
"""Largest request at any frontend, however long prompts may be: parsing a longer string takes more
than 50 ms, and nothing else runs meanwhile."""
_ID_BYTES = 11  # most bytes of a token id on the wire, with framing
_HANDSHAKE_S = 10  # TLS handshake and HTTP/2 preface
_IDLE_S = 300
_AGE_S, _GRACE_S = 3600, 24 * 3600  # an old connection's calls may run on for _GRACE_S
_OPTIONS = (
    ("grpc.so_reuseport", 0),  # otherwise a second server could share the port unnoticed
    # A client that vanished without closing its connection is noticed within 30 s.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A connection without calls is closed, and an old one gets no more calls: clients connect
    # again, and lose nothing. Running calls get _GRACE_S.
    ("grpc.server_handshake_timeout_ms", 1000 * _HANDSHAKE_S),
    ("grpc.max_connection_idle_ms", 1000 * _IDLE_S),
    ("grpc.max_connection_age_ms", 1000 * _AGE_S),
    ("grpc.max_connection_age_grace_ms", 1000 * _GRACE_S),
    # Calls that have come and were not handled yet. Beyond 1,000, gRPC itself cancels calls at
    # random; to refuse a call properly takes us a tenth of a millisecond.
    ("grpc.server.max_pending_requests", 50_000),
    ("grpc.server.max_pending_requests_hard_limit", 50_000),
    ("grpc.server_max_unrequested_time_in_server", 600),  # s, then gRPC cancels them, too
    ("grpc.max_concurrent_streams", 20_000),  # for each connection
)


def make_server(
    handlers: Sequence[grpc.GenericRpcHandler],
    health: Health,
    keys: Keys,
    *,
    message_bytes: int,
    max_connections: int,
    reflects: bool,
) -> grpc.aio.Server:
    """A server with all services, which does not listen yet.

    Args:
        handlers: handlers of our own services.
        health: the Health service.
        keys: the API keys, one of which reflection needs if there are any.
        message_bytes: longest request.
        max_connections: connections to each address; gRPC closes further ones.
        reflects: whether to offer server reflection.
    """
    options = (
        *_OPTIONS,
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_allowed_incoming_connections", max_connections),
    )
    asking = (_KeyForReflection(keys),) if reflects and keys.needed else ()
    server = grpc.aio.server(options=options, interceptors=asking)
    server.add_generic_rpc_handlers(handlers)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    if reflects:
        reflection.enable_server_reflection((*SERVICES, _HEALTH), server)
    return server


def longest_message(engine: EngineClient, *, batches: bool) -> int:
    """Bytes of the longest request to accept. It leaves room for a prompt that is a little too
    long, so that its client gets an error that says so."""
    info = engine.info()
    tokens = min(info.max_model_len, info.pool_tokens)
    text = engine.max_text_bytes()
    prompt = max(MAX_CALL_BYTES if text is None else text, _ID_BYTES * tokens)
    return max(_BATCH_CALL_BYTES if batches else 0, min(prompt + _MIB, MAX_CALL_BYTES))


class _KeyForReflection(grpc.aio.ServerInterceptor):
    """Asks for an API key for reflection: our own services ask for keys themselves, and health
    needs none."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """As grpc.aio has it."""
        if details.method.startswith(_REFLECTION):
            try:
                self._keys.caller(authorization(details.invocation_metadata or ()))
            except Unauthenticated as error:
                return _refusing(str(error))
        return await continuation(details)


def _refusing(details: str) -> grpc.RpcMethodHandler:
    async def refuse(_: Any, context: grpc.aio.ServicerContext) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, details)

    return grpc.stream_stream_rpc_method_handler(refuse)


def listen_grpc(server: grpc.aio.Server, host: str, port: int, tls: Tls | None = None) -> str:
    """Listens, and returns "host:port". All addresses of the host get the same port; otherwise some
    clients could reach another program.

    Args:
        server: the server.
        host: a name or an address.
        port: 0 takes a free one.
        tls: None listens in the clear.

    Raises:
        ConfigError: If the port is taken, or the host is unknown.
    """
    name = bracketed_host(host)
    addresses = addresses_of(host, port)
    credentials = None if tls is None else _credentials(tls)
    for _ in range(1 if port else ATTEMPTS):
        bound = port
        with contextlib.suppress(RuntimeError):
            for _, address in addresses:
                where = f"{bracketed_host(str(address[0]))}:{bound}"
                if credentials is None:
                    bound = server.add_insecure_port(where)
                else:
                    bound = server.add_secure_port(where, credentials)
            return f"{name}:{bound}"
    problem = f"cannot listen on {name}:{port} (is another server running there?)"
    raise ConfigError(f"server.port: {problem}; 0 takes any free port")


def _credentials(tls: Tls) -> grpc.ServerCredentials:
    ca = None if tls.client_ca is None else tls.client_ca.read_bytes()
    pair = (tls.key.read_bytes(), tls.cert.read_bytes())
    return grpc.ssl_server_credentials([pair], ca, require_client_auth=ca is not None)
