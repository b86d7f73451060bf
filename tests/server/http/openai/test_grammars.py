"""The grammar that each field stands for."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve import Grammar
from jaxserve.engine.text.json_schemas import relaxed
from jaxserve.server.batches.batch_lines import Line
from tests.server.fake_engine import FakeEngine
from tests.server.http.conftest import Plain

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "none": {"const": None}},
    "required": ["name", "none"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}


FIELDS: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
    ({"response_format": NAMED}, Grammar.json_schema(SCHEMA)),
    ({"guided_json": SCHEMA}, Grammar.json_schema(SCHEMA)),
    ({"guided_json": "{}"}, Grammar.json_schema("{}")),
    ({"guided_regex": "a+"}, Grammar.regex("a+")),
    ({"guided_choice": ["a", "b"]}, Grammar.choice(["a", "b"])),
    ({"structured_outputs": {"json": SCHEMA}}, Grammar.json_schema(SCHEMA)),
    ({"structured_outputs": {"json": True}}, Grammar.json_schema(True)),
    ({"structured_outputs": {"regex": "a+"}}, Grammar.regex("a+")),
    ({"structured_outputs": {"choice": ["a"]}}, Grammar.choice(["a"])),
    ({"structured_outputs": {"json_object": True}}, Grammar.json_object()),
]
ASK: Any = [{"role": "user", "content": "a"}]
SAID: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "a", "max_tokens": 1},
    "chat/completions": {"messages": ASK, "max_tokens": 1},
    "responses": {"input": "a", "max_output_tokens": 16},
}


def test_what_each_field_stands_for(plain: Plain, running: FakeEngine) -> None:
    for path in ("completions", "chat/completions"):
        for fields, grammar in FIELDS:
            assert plain.call("POST", f"/v1/{path}", {**SAID[path], **fields})[0] == 200
            assert running.requests[-1].sampling.grammar == grammar, (path, fields)


FORM = {"type": "json_schema"}
LOOSE = {"type": "array", "items": {"enum": ["a"]}, "uniqueItems": True}


def test_what_no_grammar_holds_is_left_out_and_said_so(plain: Plain, running: FakeEngine) -> None:
    """Unless the schema is strict: then the compiler refuses it."""
    schema = {"type": "object", "properties": {"é": LOOSE}}
    named: dict[str, Any] = {"name": "it", "schema": schema}
    kept = {"type": "array", "items": {"enum": ["a"]}}
    left = Grammar.json_schema({"type": "object", "properties": {"é": kept}})
    place = "response_format.json_schema.schema.properties.%C3%A9.uniqueItems"
    for path, said in SAID.items():
        for strict, grammar in ((None, left), (True, Grammar.json_schema(schema))):
            wanted = {**named, "strict": strict}
            form: dict[str, Any] = {"response_format": {**FORM, "json_schema": wanted}}
            if path == "responses":
                form = {"text": {"format": {**FORM, **wanted}}}
            status, _, headers = plain.call("POST", f"/v1/{path}", {**said, **form})
            assert status == 200
            assert running.requests[-1].sampling.grammar == grammar
            assert headers.get("x-schema-not-enforced") == (None if strict else place)


def test_a_schema_is_read_once(
    plain: Plain, running: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []

    def counted(schema: Any) -> Any:
        read.append(schema)
        return relaxed(schema)

    monkeypatch.setattr("jaxserve.server.http.openai.schema.relaxed", counted)
    for path in ("completions", "chat/completions"):
        wanted = {"type": "object", "required": [f"once in {path}"]}
        form = {**FORM, "json_schema": {"name": "it", "schema": wanted}}
        for _ in range(2):
            asked = {**SAID[path], "response_format": form}
            assert plain.call("POST", f"/v1/{path}", asked)[0] == 200
        assert read.pop() == wanted and not read


@pytest.mark.parametrize("error", [MemoryError, RecursionError])
def test_a_schema_that_takes_too_much_to_be_read_is_refused(
    plain: Plain, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(schema: Any) -> Any:
        raise error

    for module in ("http.openai.schema", "tools.rules"):
        monkeypatch.setattr(f"jaxserve.server.{module}.relaxed", fails)
    schema = {"type": "object", "required": [error.__name__]}
    named = {"name": "it", "schema": schema}
    functions = [{"name": name, "parameters": schema} for name in "ab"]
    tools = [{"type": "function", "function": each} for each in functions]
    for fields, param in (
        ({"tools": tools, "tool_choice": "required"}, "tools"),
        ({"response_format": {**FORM, "json_schema": named}}, "response_format.json_schema.schema"),
    ):
        asked = {"messages": ASK, "max_tokens": 1, **fields}
        status, told, _ = plain.call("POST", "/v1/chat/completions", asked)
        assert (status, told["error"]["param"]) == (400, param)
        assert "too much to be read" in told["error"]["message"]


def test_the_journal_keeps_it() -> None:
    line = Line("a", {"max_tokens": 3, "grammar": Grammar.choice(["a", "b"])})
    assert Line.from_json(line.to_json()) == line
