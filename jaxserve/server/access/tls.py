"""TLS of all ports: the server's certificate, and the CA of clients' certificates."""

from __future__ import annotations

import contextlib
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

from jaxserve.config import ConfigError

log = logging.getLogger(__name__)
_OTHER_TIME = {9: "is not valid yet", 10: "has expired"}  # OpenSSL's X509_V_ERR_CERT_*


@dataclass(frozen=True)
class Tls:
    """PEM files for TLS.

    Attributes:
        cert: the server's certificate chain, without the CA.
        key: its private key.
        client_ca: CA of the certificates that clients must have (mTLS); None asks for none.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None

    def context(self) -> ssl.SSLContext:
        """The context for Python's servers, TLS 1.2 and later. Raises ConfigError, naming the
        config's field, for a file that cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        for name, path in (("cert", self.cert), ("key", self.key), ("client_ca", self.client_ca)):
            try:
                if path is not None:
                    path.read_bytes()
            except OSError as error:
                raise ConfigError(f"server.tls_{name}: {path}: {error.strerror}") from None
        try:
            context.load_cert_chain(self.cert, self.key, password=_encrypted)
        except ConfigError:
            raise
        except ssl.SSLError as error:
            raise ConfigError(_pair_problem(error, self)) from None
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except ssl.SSLError:
                problem = f"{self.client_ca} has no certificate in PEM"
                raise ConfigError(f"server.tls_client_ca: {problem}") from None
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def check(self) -> None:
        """Raises ConfigError as `context` does. A certificate that clients would refuse now is only
        logged, since clocks and certificates change while a server runs."""
        self.context()
        problem = _seen_by_a_client(self)
        if problem is not None:
            log.warning("server.tls_cert: the certificate in %s %s", self.cert, problem)


def _encrypted() -> str:
    raise ConfigError("server.tls_key: the key has a password, which a server cannot ask for")


def _pair_problem(error: ssl.SSLError, tls: Tls) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"server.tls_key: {tls.key} is not the key of the certificate in {tls.cert}"
    with contextlib.suppress(ssl.SSLError):
        ssl.create_default_context(cafile=str(tls.cert))
        return f"server.tls_key: {tls.key} has no private key in PEM"
    return f"server.tls_cert: {tls.cert} has no certificate in PEM"


def _seen_by_a_client(tls: Tls) -> str | None:
    """Checks the certificate's validity period by a handshake in memory, with a client that trusts
    the certificate itself. Returns what is wrong with it, if anything."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tls.cert, tls.key)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(tls.cert)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True)
    try:
        for end in (*ends, *ends):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        return _OTHER_TIME.get(error.verify_code)
    except ssl.SSLError:  # another error, which real handshakes will report
        return None
    return None
