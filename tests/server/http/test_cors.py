"""Pages of other sites."""

from __future__ import annotations

import http.client

import pytest

from jaxserve.config import ConfigError, ServerConfig
from jaxserve.server.access.api_keys import Keys
from jaxserve.server.access.options import Access, access_settings
from jaxserve.server.server import Server
from tests.server.access.test_keys import key
from tests.server.fake_engine import PATIENCE, FakeEngine
from tests.server.http.conftest import SETTINGS

MINE, OTHER = "https://mine.example", "https://other.example"


def told(server: Server, method: str, origin: str, **headers: str) -> tuple[int, dict[str, str]]:
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
    return told(server, "OPTIONS", origin, Access_Control_Request_Method="POST", **asked)


def test_nobody_s_may_call_unless_asked_for(engine: FakeEngine) -> None:
    with Server(engine, grace_s=0.0, http=SETTINGS) as server:
        assert preflight(server, MINE) == (403, {})
        assert told(server, "GET", MINE) == (403, {})


def test_pages_of_a_named_origin_may(engine: FakeEngine) -> None:
    access = Access(Keys(fixed=[key("alice")]), cors_origins=(MINE,))
    with Server(engine, grace_s=0.0, http=SETTINGS, access=access) as server:
        status, headers = preflight(server, MINE)  # browsers send no key with it
        assert status == 200 and headers["access-control-allow-origin"] == MINE
        assert headers["access-control-allow-headers"] == "authorization,x-stainless-os"
        assert "access-control-allow-credentials" not in headers
        status, headers = told(server, "GET", MINE, Authorization="Bearer alice")
        assert status == 200 and headers["access-control-allow-origin"] == MINE
        readable = headers["access-control-expose-headers"].lower().split(", ")
        assert {"retry-after", "retry-after-ms", "endpoint-load-metrics"} < set(readable)
        assert {"x-request-id", "x-slo-class", "x-slo-ttft-ms", "x-slo-met", "server-timing"} < {
            *readable
        }
        status, headers = told(server, "GET", MINE)  # which the page may read, too
        assert status == 401 and headers["access-control-allow-origin"] == MINE
        status, headers = preflight(server, OTHER)
        assert status == 400 and "access-control-allow-origin" not in headers
        _, headers = told(server, "GET", OTHER, Authorization="Bearer alice")
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
