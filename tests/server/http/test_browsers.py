"""Pages that have their visitor's browser call a server: its own, and those of other sites."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve import __version__
from jaxserve.config import ConfigError, ServerConfig
from jaxserve.server.access.api_keys import Keys
from jaxserve.server.access.browser_origins import Browsers, NotAllowed
from jaxserve.server.access.options import Access, access_settings
from jaxserve.server.server import Server
from tests.server.access.test_keys import key
from tests.server.fake_engine import INFO, PATIENCE, FakeEngine
from tests.server.http.conftest import SETTINGS, Plain

ACCESS = Access(hosts=("gpu1", "*.lan"), cors_origins=("https://app.example",))
ALLOWED = [
    ("localhost:8000", None),
    ("localhost.", None),
    ("api.localhost:1", None),
    ("127.0.0.2:8000", None),
    ("192.168.0.7:8000", None),
    ("[::1]:8000", None),
    ("[2001:db8::1]", None),
    ("gpu1:8000", None),
    ("GPU1", None),
    ("gpu2.rack.lan", None),
    ("localhost:8000", "http://LocalHost:3000"),
    ("localhost:8000", "http://[::1]:5173"),
    ("gpu1:8000", "http://gpu1:8000"),
    ("192.168.0.7:8000", "http://192.168.0.7:8000"),
    ("localhost:8000", "https://app.example"),
]
REFUSED = [
    ("evil.example:8000", "http://evil.example:8000"),
    ("localhost.evil.example", None),
    ("127.0.0.1.evil.example", None),
    ("evil-localhost", None),
    ("lan", None),
    ("", None),
    ("localhost:8000:9000", None),
    ("[::1", None),
    ("localhost/evil.example", None),
    ("evil.example@localhost", None),
    ("localhost:8000", "http://evil.example"),
    ("localhost:8000", "http://localhost.evil.example"),
    ("localhost:8000", "http://gpu2.rack.lan"),
    ("localhost:8000", "https://app.example.evil.example"),
    ("localhost:8000", "http://app.example"),
    ("localhost:8000", "null"),
    ("localhost:8000", "file://"),
    ("localhost:8000", "http://localhost:8000@evil.example"),
]


@pytest.fixture(scope="module")
def door() -> Iterator[Plain]:
    with Server(FakeEngine(), grace_s=0.0, http=SETTINGS, access=ACCESS) as server:
        yield Plain(server)


def told(plain: Plain, path: str, host: str, origin: str | None = None, method: str = "GET") -> str:
    """The status, and the code of its error if there is one."""
    connection = plain.connect()
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host)
    if origin is not None:
        connection.putheader("Origin", origin)
    connection.putheader("Content-Length", "0")
    connection.endheaders()
    response = connection.getresponse()
    text = response.read()
    connection.close()
    error = json.loads(text).get("error", {}) if text.startswith(b"{") else {}
    return f"{response.status} {error.get('code') or ''}".strip()


def test_its_own_pages_and_names_may_call_and_others_may_not(door: Plain) -> None:
    for host, origin in ALLOWED:
        assert told(door, "/v1/models", host, origin) == "200", (host, origin)
    for host, origin in REFUSED:
        other = origin is None or "8000" not in host or "evil.example:8000" in host
        code = "host_not_allowed" if other else "origin_not_allowed"
        assert told(door, "/v1/models", host, origin) == f"403 {code}", (host, origin)


def test_whatever_they_ask_for(door: Plain) -> None:
    gets, posts = ("/", "/console/info", "/console/events", "/metrics"), ("/v1/files", "/tokenize")
    for method, path in (*(("GET", path) for path in gets), *(("POST", path) for path in posts)):
        there = told(door, path, "evil.example", None, method)
        assert there == "403 host_not_allowed"
        page = told(door, path, "localhost", "http://evil.example", method)
        assert page == "403 origin_not_allowed"
    assert told(door, "/health", "evil.example") == "200"  # of balancers, by any name


def test_a_file_of_another_site_s_form_is_not_taken(door: Plain) -> None:
    """Browsers send forms, and text, wherever a page says, and ask nobody."""
    connection = door.connect()
    form = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'
    kind = {"Content-Type": "multipart/form-data; boundary=b", "Origin": "http://evil.example"}
    connection.request("POST", "/v1/files", form, kind)
    response = connection.getresponse()
    error = json.loads(response.read())["error"]
    connection.close()
    assert response.status == 403 and error["type"] == "permission_error"
    assert "'http://evil.example'" in error["message"]
    assert "server.cors_origins" in error["message"]


def test_its_version_is_told(door: Plain) -> None:
    told = {"version": __version__, "system_fingerprint": INFO.system_fingerprint}
    assert door.call("GET", "/version")[1] == told


def test_where_keys_are_needed_names_are_not(engine: FakeEngine) -> None:
    """A Service's, a gateway's: nobody's page has a key."""
    access = Access(Keys(fixed=[key("alice")]))
    with Server(engine, grace_s=0.0, http=SETTINGS, access=access) as server:
        plain = Plain(server)
        origin = "http://evil.example"
        assert told(plain, "/v1/models", "evil.example", origin) == "401 invalid_api_key"


def test_a_path_with_a_slash_more_is_another_one(door: Plain) -> None:
    """To be led to the one without, to whatever Host was named, is no help."""
    assert told(door, "/console/info/", "localhost") == "404"


@given(st.text(), st.text())
def test_whatever_is_said_there_is_an_answer(host: str, origin: str) -> None:
    try:
        Browsers().check([host], [origin])
    except NotAllowed as error:
        assert str(error).isprintable() and len(str(error)) < 250


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ()),
        ("*", ("*",)),
        ("GPU1, *.example.org", ("gpu1", "*.example.org")),
        ("gpu1:8000", None),
        ("http://gpu1", None),
        ("a.*", None),
        ("a b", None),
    ],
)
def test_names_are_names(text: str, names: tuple[str, ...] | None) -> None:
    if names is not None:
        hosts = access_settings(ServerConfig(allowed_hosts=text, host="Box.example")).hosts
        assert hosts[0] == "box.example" and hosts[2:] == names
        return
    with pytest.raises(ConfigError, match=r"^server\.allowed_hosts: must be a name ") as error:
        ServerConfig(allowed_hosts=text)
    assert "\n" not in str(error.value)


MINE, OTHER = "https://mine.example", "https://other.example"


def cors(server: Server, method: str, origin: str, **headers: str) -> tuple[int, dict[str, str]]:
    assert server.http_address is not None
    connection = http.client.HTTPConnection(server.http_address, timeout=PATIENCE)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, "/v1/models", headers={"Origin": origin, **given})
    response = connection.getresponse()
    response.read()
    connection.close()
    found = {name.lower(): value for name, value in response.getheaders()}
    return response.status, {n: v for n, v in found.items() if n.startswith("access-control")}


def preflight(server: Server, origin: str) -> tuple[int, dict[str, str]]:
    asked = {"Access_Control_Request_Headers": "authorization,x-stainless-os"}
    return cors(server, "OPTIONS", origin, Access_Control_Request_Method="POST", **asked)


def test_nobody_s_may_call_unless_asked_for(engine: FakeEngine) -> None:
    with Server(engine, grace_s=0.0, http=SETTINGS) as server:
        assert preflight(server, MINE) == (403, {})
        assert cors(server, "GET", MINE) == (403, {})


def test_pages_of_a_named_origin_may(engine: FakeEngine) -> None:
    access = Access(Keys(fixed=[key("alice")]), cors_origins=(MINE,))
    with Server(engine, grace_s=0.0, http=SETTINGS, access=access) as server:
        status, headers = preflight(server, MINE)  # browsers send no key with it
        assert status == 200 and headers["access-control-allow-origin"] == MINE
        assert headers["access-control-allow-headers"] == "authorization,x-stainless-os"
        assert "access-control-allow-credentials" not in headers
        status, headers = cors(server, "GET", MINE, Authorization="Bearer alice")
        assert status == 200 and headers["access-control-allow-origin"] == MINE
        readable = headers["access-control-expose-headers"].lower().split(", ")
        assert {"retry-after", "retry-after-ms", "endpoint-load-metrics"} < set(readable)
        assert {"x-request-id", "x-slo-class", "x-slo-ttft-ms", "x-slo-met", "server-timing"} < {
            *readable
        }
        status, headers = cors(server, "GET", MINE)  # which the page may read, too
        assert status == 401 and headers["access-control-allow-origin"] == MINE
        status, headers = preflight(server, OTHER)
        assert status == 400 and "access-control-allow-origin" not in headers
        _, headers = cors(server, "GET", OTHER, Authorization="Bearer alice")
        assert "access-control-allow-origin" not in headers


def test_or_of_any(engine: FakeEngine) -> None:
    access = Access(cors_origins=("*",))
    with Server(engine, grace_s=0.0, http=SETTINGS, access=access) as server:
        assert preflight(server, OTHER)[1]["access-control-allow-origin"] == "*"


@pytest.mark.parametrize(
    ("text", "origins"),
    [
        ("", ()),
        ("*", ("*",)),
        (f"{MINE}, http://localhost:3000", (MINE, "http://localhost:3000")),
        ("mine.example", None),
        (f"{MINE}/", None),
        (f"{MINE}/page", None),
        ("https://*.example", None),
    ],
)
def test_origins_are_exact(text: str, origins: tuple[str, ...] | None) -> None:
    if origins is not None:
        assert access_settings(ServerConfig(cors_origins=text)).cors_origins == origins
        return
    with pytest.raises(ConfigError, match=r"^server\.cors_origins: must be like https://") as error:
        ServerConfig(cors_origins=text)
    assert "\n" not in str(error.value)
