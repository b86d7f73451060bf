"""How a client reaches its server: over TLS or not, with a key or without."""

from __future__ import annotations

import ipaddress
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import grpc

log = logging.getLogger(__name__)
NO_PROXY = ("grpc.enable_http_proxy", 0)
"""A channel's option, to this machine itself: else gRPC goes by way of http_proxy, wherever that
leads, unless no_proxy lists localhost."""
KEY_VARIABLE = "JAXSERVE_API_KEY"
_CHANNEL = (
    ("grpc.max_receive_message_length", -1),  # a slow reader's merged messages
    # A server that vanished without closing the connection is noticed within 30 s, one that is
    # back within some.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_reconnect_backoff_ms", 5_000),
)


@dataclass(frozen=True)
class Tls:
    """TLS with a server. ca: PEM file of the CAs that its certificate may be from; None: the usual
    public ones. cert, key: PEM files of one's own certificate, for servers that want one (mTLS)."""

    ca: str | Path | None = None
    cert: str | Path | None = None
    key: str | Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises ValueError for half of a pair, OSError."""
        if (self.cert is None) != (self.key is None):
            raise ValueError("a certificate and its key go together")
        ca, key, cert = (
            None if path is None else Path(path).read_bytes()
            for path in (self.ca, self.key, self.cert)
        )
        return grpc.ssl_channel_credentials(ca, key, cert)


def open_channel(address: str, tls: Tls | None) -> grpc.Channel:
    """A channel to "host:port"; tls: None is in the clear. Raises what `Tls.credentials` raises."""
    options = (*_CHANNEL, NO_PROXY) if _is_here(address) else _CHANNEL
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, tls.credentials(), options=options)


def key_metadata(api_key: str | None, address: str, tls: Tls | None) -> tuple[tuple[str, str], ...]:
    """What each call says of who calls. api_key: None is what JAXSERVE_API_KEY has. A key that
    leaves this machine in the clear is a line in the log. Raises ValueError for what no key is."""
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
    host = address.rpartition(":")[0].strip("[]")
    if address.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
