"""Which web pages may call a server that needs no API key. Where keys are needed, a foreign page
has no key, so nothing has to be checked."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

_LOCAL = "localhost"
_AUTHORITY = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(:\d*)?")
_ORIGIN = re.compile(r"https?://([^/?#@]*)")


class NotAllowed(RuntimeError):
    """A web page that is not allowed may have made a browser call. code: error code for
    programs."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Browsers:
    """hosts: names of the server, beside localhost and all addresses; "*.example" matches all
    subdomains, "*" any name. origins: origins of pages that may call, beside the server's own and
    those of localhost; "*" is any."""

    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()

    def check(self, hosts: Sequence[str], origins: Sequence[str]) -> None:
        """Checks the headers Host and Origin of a call. Clients other than browsers need not send
        them. Raises NotAllowed.

        In a DNS rebinding attack, the page's own name resolves to this server, so the browser sends
        that name as the Host. An address as the Host is safe: no foreign page is served from it.
        """
        for host in hosts:
            if not self._is_ours(_name(host)):
                problem = f"Host: {host!r:.80} is not a name of this server, which has no API keys"
                raise NotAllowed(f"{problem}; server.allowed_hosts lists them", "host_not_allowed")
        for origin in origins:
            if not self._may_call(origin, hosts):
                problem = f"Origin: pages of {origin!r:.80} may not call"
                raise NotAllowed(
                    f"{problem}; server.cors_origins lists who may", "origin_not_allowed"
                )

    def _is_ours(self, name: str | None) -> bool:
        if name is None:
            return False
        if "*" in self.hosts or is_local(name) or _address(name) is not None:
            return True
        below = (f"*{name[dot:]}" for dot, letter in enumerate(name) if letter == ".")
        return any(host in self.hosts for host in (name, *below))

    def _may_call(self, origin: str, hosts: Sequence[str]) -> bool:
        if "*" in self.origins or origin in self.origins:
            return True
        match = _ORIGIN.fullmatch(origin)
        if match is None:  # such as "null", from a sandboxed page
            return False
        name = _name(match[1])
        return match[1].lower() in map(str.lower, hosts) or (name is not None and is_local(name))


def _name(authority: str) -> str | None:
    """The host of "host:port", an IPv6 address without its brackets; None if the text has another
    form."""
    match = _AUTHORITY.fullmatch(authority.strip())
    return None if match is None else match[1].strip("[]").lower().removesuffix(".")


def is_local(name: str) -> bool:
    """Whether a host name or address means this machine itself."""
    if name == _LOCAL or name.endswith(f".{_LOCAL}"):
        return True
    address = _address(name)
    return address is not None and address.is_loopback


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
