"""Warnings at start about what other machines can reach."""

from __future__ import annotations

import ipaddress
import socket

from jaxserve.server.access.options import Access


def exposure_warnings(
    host: str, access: Access, *, http: bool, metrics: bool, batches: bool
) -> list[str]:
    """One warning for each thing to know before exposing the server; none if only this machine can
    reach it.

    Args:
        host: where the server listens.
        access: who may call.
        http: whether HTTP is on.
        metrics: whether the metrics port is on.
        batches: whether the server takes batches.
    """
    lines = []
    if "*" in access.cors_origins:
        whose = "whoever has a key" if access.keys.needed else "everybody who can reach the server"
        lines.append(f"server.cors_origins is *: pages of any site may call for {whose}")
    if not _is_reachable(host):
        return lines
    tls = access.tls
    known = tls is not None and tls.client_ca is not None  # clients are known by their certificates
    if access.keys.needed and tls is None:
        lines.append(
            f"server.host is {host}: API keys and all that is said go over the network in the "
            "clear; server.tls_cert encrypts them"
        )
    elif tls is None:
        lines.append(f"server.host is {host}: {_open(http, metrics, batches)}, in the clear")
    elif not (access.keys.needed or known):
        lines.append(f"server.host is {host}: {_open(http, metrics, batches)}")
    return lines


def _open(http: bool, metrics: bool, batches: bool) -> str:
    may = ["generate"]
    if batches:
        may.append("submit, read and delete batches")
    if http:
        may.append("watch the console")
    if metrics or http:
        may.append("read the metrics")
    return f"whoever reaches this machine can {', '.join(may)}: there are no API keys"


def _is_reachable(host: str) -> bool:
    """Whether other machines can reach the address."""
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False  # listening there will fail and say so
    addresses = (ipaddress.ip_address(str(info[4][0]).partition("%")[0]) for info in infos)
    return not all(address.is_loopback for address in addresses)
