"""Schemathesis makes calls of the OpenAPI document, right ones and wrong ones. `make fuzz` has ten
times as many."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    response_schema_conformance,
    status_code_conformance,
)

from tests.server.batches.serving import serving
from tests.server.fake_engine import FakeEngine
from tests.server.http.conftest import SETTINGS

LONG = "JAXSERVE_FUZZ_MINUTES" in os.environ
CALLS = 150 if LONG else 10  # of each path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(FakeEngine().run(), tmp_path_factory.mktemp("b"), http=SETTINGS) as server:
        yield f"http://{server.http_address}"


PATHS = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/{response_id}"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("POST", "/v1/responses/{response_id}/cancel"),
    ("GET", "/v1/responses/{response_id}/input_items"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/api/chat"),
    ("POST", "/api/generate"),
    ("POST", "/api/embed"),
    ("POST", "/api/show"),
    ("GET", "/api/tags"),
    ("GET", "/api/ps"),
    ("GET", "/api/version"),
    ("POST", "/v1/embeddings"),
    ("POST", "/pooling"),
    ("POST", "/score"),
    ("POST", "/v1/score"),
    ("POST", "/rerank"),
    ("POST", "/v1/rerank"),
    ("POST", "/v2/rerank"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/files"),
    ("GET", "/v1/files"),
    ("GET", "/v1/files/{file_id}"),
    ("GET", "/v1/files/{file_id}/content"),
    ("DELETE", "/v1/files/{file_id}"),
    ("POST", "/v1/batches"),
    ("GET", "/v1/batches"),
    ("GET", "/v1/batches/{batch_id}"),
    ("DELETE", "/v1/batches/{batch_id}"),
    ("POST", "/v1/batches/{batch_id}/cancel"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/version"),
    ("POST", "/reset_prefix_cache"),
]
NOTHING = (
    "/v1/batches/{batch_id}/cancel",
    "/v1/responses/{response_id}/cancel",
    "/reset_prefix_cache",
)
CASES = [
    (method, path, mode)
    for method, path in PATHS
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    # A path that takes nothing has nothing to get wrong.
    if mode is GenerationMode.POSITIVE or (method == "POST" and path not in NOTHING)
]


@pytest.fixture(scope="module")
def document(served: str) -> Any:
    return schemathesis.openapi.from_url(f"{served}/openapi.json")


def test_every_path_is_tried(document: Any) -> None:
    found = {(o.method.upper(), o.path) for o in (r.ok() for r in document.get_all_operations())}
    assert found == set(PATHS)


@pytest.mark.promise(17)
@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_no_call_is_the_servers_fault(
    document: Any, method: str, path: str, mode: GenerationMode
) -> None:
    calls(document[path][method], mode)


FEW = ("tools", "tool_choice", "parallel_tool_calls", "response_format", "stream", "n")
FEW += ("system", "thinking", "output_config", "cache_control")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_chats_that_may_be_served(document: Any, path: str) -> None:
    """Of all fields at once, one is always wrong."""

    def few(body: dict[str, Any]) -> dict[str, Any]:
        asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        return asked | {name: body[name] for name in FEW if name in body}

    assert calls(document[path]["POST"], GenerationMode.POSITIVE, few)[200]


def calls(
    operation: Any,
    mode: GenerationMode,
    changed: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> Counter[int]:
    """Makes them; how many have been answered with each status. changed: what becomes of a body."""
    found: Counter[int] = Counter()

    @settings(
        max_examples=CALLS,
        deadline=None,
        derandomize=not LONG,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Case) -> None:
        if changed is not None:
            case.body = changed(case.body)
        response = case.call()
        documented = [status_code_conformance, response_schema_conformance]
        case.validate_response(response, checks=[not_a_server_error, *documented])
        found[response.status_code] += 1
        if response.status_code >= 400:
            error = response.json()["error"]
            if operation.path.startswith("/api/"):
                assert error and isinstance(error, str)
                return
            anthropics = operation.path.startswith("/v1/messages")
            fields = {"message", "type"} if anthropics else {"message", "type", "param", "code"}
            assert set(error) == fields
            assert error["message"]

    check()
    return found
