"""How a client connects to its server: with or without TLS and an API key."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import grpc

from jaxserve.server.access.browser_origins import is_local

log = logging.getLogger(__name__)
NO_PROXY = ("grpc.enable_http_proxy", 0)
"""Channel option for connections to this machine: otherwise gRPC uses http_proxy even for
localhost, unless no_proxy lists it."""
KEY_VARIABLE = "JAXSERVE_API_KEY"
_CHANNEL = (
    ("grpc.max_receive_message_length", -1),  # a slow reader's merged messages
    # A server that vanished without closing the connection is noticed within 30 s, and a server
    # that is back within some seconds.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_reconnect_backoff_ms", 5_000),
)


@dataclass(frozen=True)
class Tls:
    """TLS settings of a client.

    Attributes:
        ca: PEM file of the CAs to trust; None for the public CAs.
        cert: PEM file of the client's certificate, for servers that ask for one (mTLS).
        key: PEM file of its private key.
    """

    ca: str | Path | None = None
    cert: str | Path | None = None
    key: str | Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Credentials for gRPC. Raises OSError, and ValueError if only one of a certificate and its
        key is given."""
        if (self.cert is None) != (self.key is None):
            raise ValueError("a certificate and its key go together")
        ca, key, cert = (
            None if path is None else Path(path).read_bytes()
            for path in (self.ca, self.key, self.cert)
        )
        return grpc.ssl_channel_credentials(ca, key, cert)


def open_channel(address: str, tls: Tls | None) -> grpc.Channel:
    """A channel to "host:port". tls: None connects in the clear. Raises what `Tls.credentials`
    raises."""
    options = (*_CHANNEL, NO_PROXY) if _is_here(address) else _CHANNEL
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, tls.credentials(), options=options)


def key_metadata(api_key: str | None, address: str, tls: Tls | None) -> tuple[tuple[str, str], ...]:
    """The metadata with which a call authenticates itself; empty without a key. Logs a warning if
    the key would leave this machine unencrypted.

    Args:
        api_key: the key; None takes the environment's JAXSERVE_API_KEY, if set.
        address: the server's "host:port".
        tls: TLS settings; None for a connection in the clear.

    Raises:
        ValueError: If the key is malformed.
    """
    key = (os.environ.get(KEY_VARIABLE, "") if api_key is None else api_key).strip()
    if not key:
        return ()
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ValueError("the API key: must be printable ASCII without spaces")
    if tls is None and not _is_here(address):
        log.warning("the API key goes to %s in the clear: there is no TLS", address)
    return (("authorization", f"Bearer {key}"),)


def _is_here(address: str) -> bool:
    """Whether an address is this machine's own."""
    return address.startswith("unix:") or is_local(address.rpartition(":")[0].strip("[]"))
