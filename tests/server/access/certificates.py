"""A CA and certificates of its own, made with the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

OPENSSL = shutil.which("openssl")
needs_openssl = pytest.mark.skipif(OPENSSL is None, reason="needs the openssl command")
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Pair:
    """PEM files."""

    cert: Path
    key: Path


class Authority:
    """A CA in a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self.pair = Pair(folder / f"{name}.pem", folder / f"{name}.key")
        self._openssl(*self._new(self.pair, name), "-days", "2")

    def issue(self, name: str) -> Pair:
        """For localhost."""
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        signed = ("-CA", str(self.pair.cert), "-CAkey", str(self.pair.key))
        names = ("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
        leaf = ("-addext", "basicConstraints=critical,CA:FALSE")
        self._openssl(*self._new(pair, name), *signed, *names, *leaf, "-days", "2")
        return pair

    def expire(self, pair: Pair) -> Pair:
        """Another certificate of that key, which was good until yesterday."""
        asked, cert = pair.key.with_suffix(".csr"), pair.key.with_suffix(".old")
        self._openssl("req", "-new", "-key", str(pair.key), "-out", str(asked), "-subj", "/CN=old")
        signed = ("-CA", str(self.pair.cert), "-CAkey", str(self.pair.key), "-CAcreateserial")
        self._openssl("x509", "-req", "-in", str(asked), "-out", str(cert), *signed, "-days", "-1")
        return Pair(cert, pair.key)

    def encrypt(self, pair: Pair) -> Pair:
        """The same with a password on its key."""
        key = pair.key.with_suffix(".locked")
        password = ("-aes256", "-passout", "pass:secret")
        self._openssl("ec", "-in", str(pair.key), "-out", str(key), *password)
        return Pair(pair.cert, key)

    def _new(self, pair: Pair, name: str) -> tuple[str, ...]:
        out = ("-out", str(pair.cert), "-keyout", str(pair.key))
        return ("req", "-x509", *_KEY, *out, "-subj", f"/CN={name}")

    def _openssl(self, *arguments: str) -> None:
        assert OPENSSL is not None
        subprocess.run([OPENSSL, *arguments], check=True, capture_output=True, timeout=60)
