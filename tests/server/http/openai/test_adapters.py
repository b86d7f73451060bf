"""Adapters by HTTP: as a model in requests, listed, loaded and unloaded by who may."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.client import Client, ServerError
from jaxserve.engine.adapters import Adapter
from jaxserve.server.access.api_keys import Keys
from jaxserve.server.access.options import Access
from jaxserve.server.requests.options import ServerOptions
from jaxserve.server.server import Server
from tests.server.access.test_doors import asked
from tests.server.access.test_keys import key
from tests.server.fake_engine import FakeEngine
from tests.server.http.conftest import SETTINGS

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
KEYS = [key("any"), key("one", adapters="law,sql"), key("none", adapters="-"), key("root", admin=1)]
ROOT = "/srv/adapters"


@pytest.fixture
def engine() -> FakeEngine:
    made = FakeEngine()
    made.loaded = {name: Adapter(name, f"/a/{name}", i) for i, name in enumerate(("law", "med"))}
    made.run()
    return made


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[Server]:
    options, access = ServerOptions(lora_root=ROOT), Access(Keys(fixed=KEYS))
    with Server(engine, grace_s=0.0, http=SETTINGS, options=options, access=access) as server:
        yield server


def call(server: Server, path: str, who: str, body: Any = None) -> tuple[int, Any]:
    method = "GET" if body is None else "POST"
    status, text, _ = asked(server.http_address, method, path, who, body)
    return status, text.decode()


def served(server: Server, who: str, model: str) -> int:
    body = {"model": model, "prompt": "a", "max_tokens": 1}
    status, text = call(server, "/v1/completions", who, body)
    if status == 200:
        assert f'"model":"{model}"' in text
    else:
        assert "model_not_found" in text and "there is no model" in text
    return status


def test_model(server: Server, engine: FakeEngine) -> None:
    assert served(server, "any", "law") == 200 and engine.requests[-1].adapter == "law"
    assert served(server, "any", "fake") == 200 and engine.requests[-1].adapter == ""
    chat = {"model": "med", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    assert call(server, "/v1/chat/completions", "any", chat)[0] == 200
    assert engine.requests[-1].adapter == "med"
    for model in ("nobody", "law/x", "law\0", "x" * 60_000):
        assert served(server, "any", model) == 404
    for model in ("\ud800", "x" * 100_000, 7):
        body = {"model": model, "prompt": "a", "max_tokens": 1}
        assert call(server, "/v1/completions", "any", body)[0] == 400


def test_rights(server: Server) -> None:
    found = {
        who: [served(server, who, model) for model in ("law", "med", "fake")]
        for who in ("any", "one", "none")
    }
    assert found == {"any": [200, 200, 200], "one": [200, 404, 200], "none": [404, 404, 200]}
    for who, names in (("any", ["fake", "law", "med"]), ("one", ["fake", "law"])):
        _, text = call(server, "/v1/models", who)
        assert [name for name in ("fake", "law", "med") if f'"id":"{name}"' in text] == names
    status, text = call(server, "/v1/models/law", "one")
    assert status == 200 and '"root":"/a/law","parent":"fake"' in text
    assert call(server, "/v1/models/med", "one")[0] == 404


def test_grpc(server: Server, engine: FakeEngine) -> None:
    with Client(server.address, api_key="one") as client:
        for model in ("", "fake", "law"):
            assert client.complete("a", max_tokens=1, model=model)
            assert engine.requests[-1].adapter == ("law" if model == "law" else "")
        for model in ("med", "nobody", "a\0b"):
            with pytest.raises(ServerError) as caught:
                client.complete("a", max_tokens=1, model=model)
            assert caught.value.code == "NOT_FOUND"


def test_loading(server: Server, engine: FakeEngine) -> None:
    body = {"lora_name": "sql", "lora_path": "team/sql"}
    for who in ("any", "one"):
        assert call(server, LOAD, who, body)[0] == 403
        assert call(server, UNLOAD, who, {"lora_name": "law"})[0] == 403
    assert call(server, LOAD, "root", body)[0] == 200
    assert engine.loaded["sql"].path == os.path.join(ROOT, "team/sql")
    assert served(server, "one", "sql") == 200
    status, text = call(server, LOAD, "root", {**body, "lora_path": "bad"})
    assert status == 400 and "it is bad" in text and "invalid_adapter" in text
    assert call(server, UNLOAD, "root", {"lora_name": "sql", "lora_int_id": 7})[0] == 200
    assert call(server, UNLOAD, "root", {"lora_name": "sql"})[0] == 404
    assert served(server, "one", "sql") == 404
    for wrong in ({}, {"lora_name": 1, "lora_path": "a"}, {**body, "load_inplace": True}):
        assert call(server, LOAD, "root", wrong)[0] == 400


def test_none_are_loaded_by_default(engine: FakeEngine, tmp_path: Path) -> None:
    with Server(engine, grace_s=0.0, http=SETTINGS) as server:
        status, text, _ = asked(
            server.http_address, "POST", LOAD, None, {"lora_name": "a", "lora_path": str(tmp_path)}
        )
        assert status == 403 and b"lora.root" in text
        assert set(engine.loaded) == {"law", "med"}
