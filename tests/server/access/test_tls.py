"""TLS on all ports."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve import client as api
from jaxserve.client import Client, ServerError, Unreachable
from jaxserve.client.cli import complete
from jaxserve.config import ConfigError, ServerConfig
from jaxserve.server.access.api_keys import Keys
from jaxserve.server.access.options import Access, access_settings
from jaxserve.server.access.tls import Tls
from jaxserve.server.http.transport import http_server
from jaxserve.server.server import Server
from tests.server.access.certificates import Authority, Pair, needs_openssl
from tests.server.access.test_keys import key
from tests.server.fake_engine import PATIENCE, FakeEngine
from tests.server.http.conftest import SETTINGS

pytestmark = needs_openssl


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "ca")


@pytest.fixture(scope="module")
def pair(authority: Authority) -> Pair:
    return authority.issue("server")


@contextlib.contextmanager
def serving(tls: Tls, keys: Keys | None = None) -> Iterator[Server]:
    engine = FakeEngine()
    access = Access(keys or Keys(), tls)
    with Server(engine, grace_s=0.0, metrics_port=0, http=SETTINGS, access=access) as server:
        engine.run()
        yield server


@pytest.fixture(scope="module")
def one_way(pair: Pair) -> Iterator[Server]:
    with serving(Tls(pair.cert, pair.key), Keys(fixed=[key("alice")])) as server:
        yield server


@pytest.fixture(scope="module")
def mutual(pair: Pair, authority: Authority) -> Iterator[Server]:
    with serving(Tls(pair.cert, pair.key, authority.pair.cert)) as server:
        yield server


def get(address: str | None, path: str, trust: ssl.SSLContext, name: str = "alice") -> int:
    assert address is not None
    connection = http.client.HTTPSConnection(address, timeout=PATIENCE, context=trust)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {name}"})
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def trusting(ca: Path, own: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(ca))
    if own is not None:
        context.load_cert_chain(own.cert, own.key)
    return context


def test_http_and_metrics_are_encrypted(one_way: Server, authority: Authority) -> None:
    trust = trusting(authority.pair.cert)
    for address, path in (
        (one_way.http_address, "/v1/models"),
        (one_way.http_address, "/metrics"),
        (one_way.metrics_address, "/metrics"),
    ):
        assert get(address, path, trust) == 200
        assert get(address, path, trust, "mallory") == 401
        with pytest.raises(ssl.SSLCertVerificationError):
            get(address, path, ssl.create_default_context())
        assert address is not None
        plain = http.client.HTTPConnection(address, timeout=PATIENCE)
        plain.request("GET", path)
        with pytest.raises((http.client.HTTPException, OSError)):
            plain.getresponse()
        plain.close()


def test_silent_handshakes_make_room(
    pair: Pair, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "connections_of_a_door", lambda: 4)
    with serving(Tls(pair.cert, pair.key)) as server, contextlib.ExitStack() as stack:
        assert server.http_address is not None
        host, port = server.http_address.split(":")
        silent = [
            stack.enter_context(socket.create_connection((host, int(port)), PATIENCE))
            for _ in range(12)
        ]
        assert get(server.http_address, "/health", trusting(authority.pair.cert)) == 200
        for each in silent[:8]:
            with contextlib.suppress(ConnectionError):
                assert each.recv(1) == b""


def test_grpc_is_encrypted(one_way: Server, authority: Authority) -> None:
    tls = api.Tls(ca=authority.pair.cert)
    with Client(one_way.address, api_key="alice", tls=tls) as client:
        assert client.complete("a", max_tokens=2, timeout=PATIENCE)[0].text == " w0 w1"
    for other, says in ((None, r"does it speak TLS\? \(--tls\)"), (api.Tls(), "no TLS with ")):
        with (
            Client(one_way.address, api_key="alice", tls=other) as client,
            pytest.raises(Unreachable, match=says),
        ):
            client.info(timeout=PATIENCE)


def test_mutual_tls_wants_a_certificate_of_the_ca(
    mutual: Server, authority: Authority, tmp_path: Path
) -> None:
    mine = authority.issue("client")
    other = Authority(tmp_path, "other").issue("stranger")
    ca = authority.pair.cert
    places = (mutual.http_address, "/v1/models"), (mutual.metrics_address, "/metrics")
    for address, path in places:
        assert get(address, path, trusting(ca, mine)) == 200
    with Client(mutual.address, tls=api.Tls(ca, mine.cert, mine.key)) as client:
        assert client.info(timeout=PATIENCE).model == "fake"
    for whose in (None, other):
        for address, path in places:
            with pytest.raises(OSError):  # an alert, or a connection that is gone
                get(address, path, trusting(ca, whose))
        tls = api.Tls(ca, *((whose.cert, whose.key) if whose else ()))
        with Client(mutual.address, tls=tls) as client, pytest.raises(ServerError) as error:
            client.info(timeout=PATIENCE)
        assert error.value.code == "UNAVAILABLE"


def test_the_command_has_flags_for_it(
    one_way: Server,
    mutual: Server,
    authority: Authority,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("JAXSERVE_API_KEY", raising=False)
    ca, mine = f"--tls_ca={authority.pair.cert}", authority.issue("commander")
    where = [f"--address={one_way.address}", ca, "--info"]
    (tmp_path / "key").write_text("alice\n")
    assert complete([*where, "--api_key=alice"]) == 0
    assert complete([*where, f"--api_key_file={tmp_path / 'key'}"]) == 0
    monkeypatch.setenv("JAXSERVE_API_KEY", "alice")
    assert complete(where) == 0
    monkeypatch.setenv("JAXSERVE_API_KEY", "mallory")
    assert complete(where) == 1
    assert "the API key is not one of ours" in capsys.readouterr().err
    assert complete([where[0], "--tls", "--info"]) == 1
    assert f"no TLS with {one_way.address}: " in capsys.readouterr().err
    own = [f"--tls_cert={mine.cert}", f"--tls_key={mine.key}"]
    assert complete([f"--address={mutual.address}", ca, *own, "--info"]) == 0
    for wrong in (own[:1], ["--tls_ca=/nowhere"], ["--api_key="]):
        capsys.readouterr()
        with contextlib.suppress(SystemExit):
            assert complete([*where[:1], *wrong, "--info"]) == 1
        assert capsys.readouterr().err.startswith("jaxserve complete: ")


def settings(**fields: str) -> Access:
    given = {f"tls_{name}": value for name, value in fields.items()}
    return access_settings(ServerConfig(**given))


def test_what_cannot_be_served_is_one_line(
    authority: Authority, pair: Pair, tmp_path: Path
) -> None:
    cert, own = str(pair.cert), str(pair.key)
    other, locked = str(authority.pair.key), str(authority.encrypt(pair).key)
    nothing = tmp_path / "nothing"
    nothing.write_text("nothing")
    none = str(tmp_path / "none")
    for fields, words in (
        ({"cert": cert}, "server.tls_key: is missing"),
        ({"key": own}, "server.tls_cert: is missing"),
        ({"client_ca": cert}, "server.tls_cert: is missing"),
        ({"cert": none, "key": own}, f"server.tls_cert: {none}: No such file"),
        ({"cert": cert, "key": none}, f"server.tls_key: {none}: No such file"),
        ({"cert": cert, "key": str(tmp_path)}, "server.tls_key: .*: Is a directory"),
        ({"cert": cert, "key": own, "client_ca": none}, "server.tls_client_ca: .*: No such file"),
        ({"cert": cert, "key": other}, "server.tls_key: .* is not the key of the certificate"),
        ({"cert": str(nothing), "key": own}, "server.tls_cert: .* has no certificate in PEM"),
        ({"cert": cert, "key": str(nothing)}, "server.tls_key: .* has no private key in PEM"),
        ({"cert": cert, "key": locked}, "server.tls_key: the key has a password"),
        (
            {"cert": cert, "key": own, "client_ca": str(nothing)},
            "server.tls_client_ca: .* has no certificate in PEM",
        ),
    ):
        with pytest.raises(ConfigError, match=f"^{words}") as error:
            settings(**fields)
        assert "\n" not in str(error.value)
    assert settings().tls is None
    tls = settings(cert=cert, key=own, client_ca=str(authority.pair.cert)).tls
    assert tls == Tls(pair.cert, pair.key, authority.pair.cert)


def test_a_certificate_that_has_expired_is_a_warning(
    authority: Authority, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    settings(cert=str(pair.cert), key=str(pair.key))
    assert caplog.messages == []
    old = authority.expire(pair)
    settings(cert=str(old.cert), key=str(old.key))
    (line,) = caplog.messages
    assert line == f"server.tls_cert: the certificate in {old.cert} has expired"
