"""Where a server can listen."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

from jaxserve.config import ConfigError

Address = tuple[socket.AddressFamily, Any]
ATTEMPTS = 20
"""Tries to find a port that is free on all addresses."""
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def addresses_of(host: str, port: int) -> list[Address]:
    """The host's addresses that this machine has, as `bind` takes them. Without IPv6, as in many
    containers, "localhost" may still resolve to an IPv6 address, which is left out. Raises
    ConfigError for an unknown host, or another machine's."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"server.host: {host!r}: {error.strerror}") from None
    local: list[Address] = list(
        dict.fromkeys((info[0], info[4]) for info in infos if _is_here(info[0], info[4]))
    )
    if not local:
        raise ConfigError(f"server.host: {host!r}: this machine has no such address")
    return local


def bind_sockets(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Sockets that listen on the same port on all of the host's addresses. port: 0 takes one that
    is free on all of them. Raises ConfigError for the host, OSError if the port is taken."""
    addresses = addresses_of(host, port)
    for left in reversed(range(1 if port else ATTEMPTS)):
        bound = port
        listeners: list[socket.socket] = []
        try:
            for family, address in addresses:
                where = (address[0], bound, *address[2:])
                listeners.append(
                    socket.create_server(
                        where, family=family, backlog=backlog, dualstack_ipv6=_is_all(address)
                    )
                )
                bound = listeners[0].getsockname()[1]
            return listeners
        except OSError as error:
            for listener in listeners:
                listener.close()
            if not left:
                raise OSError(error.errno, os.strerror(error.errno or 0)) from None
    raise AssertionError("unreachable")


def reached(address: str) -> str:
    """The address by which the listening machine itself reaches "host:port"."""
    host, _, port = address.rpartition(":")
    return f"{'localhost' if host in ('0.0.0.0', '[::]') else host}:{port}"


def _is_all(address: Any) -> bool:
    """Whether the address is `::`: all addresses of both families, also for gRPC."""
    return bool(address[0] == "::") and socket.has_dualstack_ipv6()


def bracketed_host(host: str) -> str:
    """The host as it is written before a port: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def _is_here(family: socket.AddressFamily, address: Any) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address[0], 0, *address[2:]))
    except OSError as error:
        return error.errno not in _NOT_HERE
    return True
