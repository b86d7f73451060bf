"""Schemathesis makes calls of the OpenAPI document, right ones and wrong ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error

from jaxserve.server.runner import Server
from tests.server.fake_engine import FakeEngine
from tests.server.http.conftest import SETTINGS

CALLS = 40  # of each path


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    engine = FakeEngine().run()
    with Server(engine, grace_s=0.0, http=SETTINGS) as server:
        yield f"http://{server.http_address}"


PATHS = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/health"),
    ("GET", "/ready"),
]


@pytest.fixture(scope="module")
def document(served: str) -> Any:
    return schemathesis.openapi.from_url(f"{served}/openapi.json")


def test_every_path_is_tried(document: Any) -> None:
    found = {(o.method.upper(), o.path) for o in (r.ok() for r in document.get_all_operations())}
    assert found == set(PATHS)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(("method", "path"), PATHS)
def test_no_call_is_the_servers_fault(
    document: Any, method: str, path: str, mode: GenerationMode
) -> None:
    operation = document[path][method]
    if mode is GenerationMode.NEGATIVE and method == "GET":
        pytest.skip("nothing to get wrong")

    @settings(
        max_examples=CALLS,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Case) -> None:
        response = case.call()
        case.validate_response(response, checks=[not_a_server_error])
        if response.status_code >= 400:
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"]

    check()
