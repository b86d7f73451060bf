"""Attacks of `bench abuse` over HTTP, on a server without a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.server.access.api_keys import Keys
from jaxserve.server.access.options import Access
from jaxserve.server.http.transport import http_server, protocol
from jaxserve.server.server import Server
from jaxserve_lab.bench.stress import abuse, http_attacks
from jaxserve_lab.bench.stress.attacks import Tried
from tests.server.access.test_keys import key
from tests.server.fake_engine import FakeEngine
from tests.server.http.conftest import SETTINGS

# It is ml_collections that loads config files so.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")

KEY = "mine"


def served(access: Access, name: str | None = None) -> Iterator[Any]:
    with Server(FakeEngine().run(), grace_s=0.0, http=SETTINGS, access=access) as server:
        yield SimpleNamespace(
            http_address=server.http_address,
            key=name,
            memory_mib=lambda: 0.0,
        )


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    yield from served(Access())


@pytest.fixture
def keyed() -> Iterator[Any]:
    yield from served(Access(Keys(fixed=[key(KEY)])), KEY)


@pytest.fixture
def open_to_all() -> Iterator[Any]:
    yield from served(Access(cors_origins=("*",), hosts=("*",)))


def test_strings_and_integers_are_refused_or_served(server: Any) -> None:
    for attack in (http_attacks.strings, http_attacks.integers):
        tried = attack(server)
        assert tried.problems == [] and set(tried.codes) <= {"200", "400"}, tried


def test_bodies_are_refused(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_attacks, "BODY_BYTES", (20_000,))
    tried = http_attacks.bodies(server)
    assert [each for each in tried.problems if "200 for" not in each] == []
    assert tried.codes.keys() <= {"200", "400", "413"} and tried.codes["400"] >= 4


def test_silent_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_attacks, "SILENT", 20)
    monkeypatch.setattr(http_attacks, "_SILENT_S", 0.5)
    monkeypatch.setattr(protocol, "LINGER_S", 0.1)
    monkeypatch.setattr(http_server, "connections_of_a_door", lambda: 8)
    for server in served(Access()):
        tried = http_attacks.silent(server)
        assert tried.problems == [] and tried.codes == {"closed": 20}


def test_two_ends_and_other_sites_are_refused(server: Any, open_to_all: Any) -> None:
    assert http_attacks.framing(server).problems == []
    tried = http_attacks.browsers(server)
    assert tried.problems == [] and tried.codes == {"403": 6}
    assert http_attacks.browsers(open_to_all).problems != []


def test_liars_are_counted(keyed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_attacks, "LIARS", 3)
    monkeypatch.setattr(http_attacks, "HONEST", 2)
    tried = http_attacks.liars(keyed)
    assert tried.codes == Counter({"honest, 200": 2, "liars, 200": 3, "honest, refused": 0})


def test_a_case_says_what_did_not_hold(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    most = {"others_s": 0.2, "health_s": 0.3, "unanswered": 2.0, "memory_mib": 50.0}

    def watched(_: Any) -> Any:
        return abuse.contextlib.nullcontext(most)

    monkeypatch.setattr(abuse, "watched", watched)
    monkeypatch.setattr(abuse, "_kept", lambda _: 40.0)
    server.lines = lambda: 0
    case = abuse.AbuseCase("a", lambda _: Tried(), others_s=1.0, health_s=0.1, kept_mib=30)
    row = abuse.measured(server, case)
    assert row.problems == [
        "2 calls of others had no answer, and 0 is allowed",
        "/health took 300 ms, and 100 is allowed",
        "40 MiB were kept, and 30 is allowed",
    ]
    assert (row.others_s, row.memory_mib) == (0.2, 50.0)


def test_a_hostile_model_has_all_of_its_model(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("kind")
    with abuse.hostile_model([f"--model={tmp_path}"]) as (flag,):
        folder = type(tmp_path)(flag.removeprefix("--model="))
        assert (folder / "config.json").read_text() == "{}"
        assert (folder / "chat_template.jinja").read_text() == http_attacks.HOSTILE_TEMPLATE
    assert (tmp_path / "chat_template.jinja").read_text() == "kind"
    with abuse.hostile_model(["--model=", "--config.model.preset=opt-125m"]) as flags:
        assert flags == []
