"""Who may call a server, from the config and the environment."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

from jaxserve.config import ConfigError, ServerConfig
from jaxserve.server.access.api_keys import Keys
from jaxserve.server.access.browser_origins import Browsers
from jaxserve.server.access.key_file import parse_lines
from jaxserve.server.access.tls import Tls

KEYS_VARIABLE = "JAXSERVE_API_KEYS"  # read by servers
KEY_VARIABLE = "JAXSERVE_API_KEY"  # read by clients


@dataclass(frozen=True)
class Access:
    """Who may call a server, and over what. The defaults let everybody in, except browsers that
    reach it by another name than localhost.

    Attributes:
        keys: the API keys.
        tls: TLS of all ports; None serves plain text.
        cors_origins: origins of pages that may call from a browser; "*" is any.
        hosts: names of the server that browsers may use.
    """

    keys: Keys = field(default_factory=Keys)
    tls: Tls | None = None
    cors_origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()

    @property
    def browsers(self) -> Browsers | None:
        """Which browsers may call; None lets all of them, since they need a key."""
        return None if self.keys.needed else Browsers(self.hosts, self.cors_origins)

    @property
    def scheme(self) -> str:
        """Scheme of the HTTP addresses."""
        return "http" if self.tls is None else "https"


def access_settings(server: ServerConfig) -> Access:
    """The access settings of a config, with the keys in the environment's JAXSERVE_API_KEYS: lines
    as in the key file, separated by newlines or semicolons. Raises ConfigError."""
    try:
        text = os.environ.get(KEYS_VARIABLE, "").replace(";", "\n")
        fixed = parse_lines(text, KEYS_VARIABLE)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    path = Path(server.api_keys).expanduser() if server.api_keys else None
    keys = Keys(path, fixed, classes=sorted(server.slo_classes))
    names = (server.host, socket.gethostname(), *server.names)
    hosts = tuple(name.lower() for name in names)
    return Access(keys, _tls(server), server.origins, hosts)


def _tls(server: ServerConfig) -> Tls | None:
    cert, key, client_ca = server.tls_cert, server.tls_key, server.tls_client_ca
    if not cert:
        return None
    ca = Path(client_ca).expanduser() if client_ca else None
    tls = Tls(Path(cert).expanduser(), Path(key).expanduser(), ca)
    tls.check()
    return tls
