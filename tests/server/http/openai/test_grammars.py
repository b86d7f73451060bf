"""The grammar that each field stands for, and text under one, over all frontends."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from jaxserve import LLM, Grammar, SamplingParams
from jaxserve.client import Client, ServerError
from jaxserve.engine.engine import Engine
from jaxserve.engine.text.json_schemas import relaxed
from jaxserve.server.batches.batch_lines import Line
from jaxserve.server.requests.templates.chat_template import ChatTemplate
from jaxserve.server.server import Server
from tests.engine.harness import engine as small_engine
from tests.server.fake_engine import FakeEngine
from tests.server.http.conftest import SETTINGS, Plain

BOX = Path(__file__).parents[4] / "jaxserve" / "assets" / "tiny-stories"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "none": {"const": None}},
    "required": ["name", "none"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
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
    ],
)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_what_each_field_stands_for(
    plain: Plain, engine: FakeEngine, fields: dict[str, Any], grammar: Grammar | None, path: str
) -> None:
    engine.run()
    asked = {"prompt": "a"}
    if path.startswith("chat"):
        asked = {"messages": [{"role": "user", "content": "a"}]}  # type: ignore[dict-item]
    status, _, _ = plain.call("POST", f"/v1/{path}", {**asked, "max_tokens": 1, **fields})
    assert status == 200
    assert [request.sampling.grammar for request in engine.requests] == [grammar]
    engine.stop()


LOOSE = {"type": "array", "items": {"enum": ["a"]}, "uniqueItems": True}


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
def test_what_no_grammar_holds_is_left_out_and_said_so(
    plain: Plain, engine: FakeEngine, path: str
) -> None:
    """Unless the schema is strict: then the compiler refuses it."""
    engine.run()
    schema = {"type": "object", "properties": {"é": LOOSE}}
    named: dict[str, Any] = {"name": "it", "schema": schema}
    kept = {"type": "array", "items": {"enum": ["a"]}}
    left = Grammar.json_schema({"type": "object", "properties": {"é": kept}})
    asked: dict[str, Any] = {"prompt": "a", "max_tokens": 1}
    if path == "responses":
        asked = {"input": "a", "max_output_tokens": 16}
    elif path.startswith("chat"):
        asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    for strict, grammar in ((None, left), (True, Grammar.json_schema(schema))):
        if path == "responses":
            form = {"type": "json_schema", **named, "strict": strict}
            asked["text"] = {"format": form}
        else:
            form = {"type": "json_schema", "json_schema": {**named, "strict": strict}}
            asked["response_format"] = form
        status, _, headers = plain.call("POST", f"/v1/{path}", asked)
        assert status == 200
        assert engine.requests[-1].sampling.grammar == grammar
        place = "response_format.json_schema.schema.properties.%C3%A9.uniqueItems"
        assert headers.get("x-schema-not-enforced") == (None if strict else place)
    engine.stop()


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_schema_is_read_once(
    plain: Plain, engine: FakeEngine, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.run()
    read: list[Any] = []
    wanted: dict[str, Any] = {"type": "object", "required": [f"once in {path}"]}

    def counted(schema: Any) -> Any:
        read.append(schema)
        return relaxed(schema)

    monkeypatch.setattr("jaxserve.server.http.openai.schema.relaxed", counted)
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": wanted}}
    message = [{"role": "user", "content": "a"}]
    said = {"messages": message} if path.startswith("chat") else {"prompt": "a"}
    for _ in range(2):
        asked = {**said, "max_tokens": 1, "response_format": form}
        status, _, _ = plain.call("POST", f"/v1/{path}", asked)
        assert status == 200
    assert read == [wanted]
    engine.stop()


@pytest.mark.parametrize("error", [MemoryError, RecursionError])
@pytest.mark.parametrize("of_tools", [False, True])
def test_a_schema_that_takes_too_much_to_be_read_is_refused(
    plain: Plain,
    engine: FakeEngine,
    error: type[Exception],
    of_tools: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(schema: Any) -> Any:
        raise error

    for module in ("http.openai.schema", "tools.rules"):
        monkeypatch.setattr(f"jaxserve.server.{module}.relaxed", fails)
    schema = {"type": "object", "required": [error.__name__]}
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    if of_tools:
        functions = [{"name": name, "parameters": schema} for name in "ab"]
        asked["tools"] = [{"type": "function", "function": each} for each in functions]
        asked["tool_choice"] = "required"
    else:
        named = {"name": "it", "schema": schema}
        asked["response_format"] = {"type": "json_schema", "json_schema": named}
    status, told, _ = plain.call("POST", "/v1/chat/completions", asked)
    assert status == 400
    field = "tools" if of_tools else "response_format.json_schema.schema"
    assert told["error"]["param"] == field
    assert "too much to be read" in told["error"]["message"]


def test_the_journal_keeps_it() -> None:
    line = Line("a", {"max_tokens": 3, "grammar": Grammar.choice(["a", "b"])})
    assert Line.from_json(line.to_json()) == line


@pytest.fixture(scope="module")
def real() -> Iterator[Engine]:
    with small_engine(BOX, model__load_format="auto") as running:
        yield running


@pytest.fixture(scope="module")
def frontends(real: Engine) -> Iterator[Server]:
    with Server(real, grace_s=0.0, http=SETTINGS) as server:
        yield server


@pytest.fixture(scope="module")
def client(frontends: Server) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"http://{frontends.http_address}/v1", api_key="none", max_retries=0
    )


def check(text: str | None) -> None:
    found = json.loads(text or "")
    assert set(found) == {"name", "none"}
    assert found["none"] is None
    assert len(found["name"]) <= 5


def test_openais_client(client: openai.OpenAI) -> None:
    name = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=name,
        messages=[{"role": "user", "content": "Tell me."}],
        response_format=NAMED,  # type: ignore[call-overload]
        seed=1,
        n=3,
        max_tokens=90,
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        check(choice.message.content)
    pieces = client.completions.create(
        model=name,
        prompt="Once",
        max_tokens=90,
        stream=True,
        extra_body={"guided_regex": "(ha){2,3}!"},
    )
    assert re.fullmatch("(ha){2,3}!", "".join(piece.choices[0].text for piece in pieces))


TOOL: Any = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}


def test_forced_calls_are_valid(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": "",
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "look_up"}},
        "temperature": 0,
        "max_tokens": 120,
    }
    (choice,) = client.chat.completions.create(**asked).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function" and call.function.name == "look_up"
    check(call.function.arguments)
    # With others in its batch, streamed.
    several = {**asked, "n": 3, "tool_choice": "required", "parallel_tool_calls": False}
    with client.chat.completions.stream(**several) as stream:
        whole = stream.get_final_completion()
    for each in whole.choices:
        (same,) = each.message.tool_calls or ()
        assert same.function.arguments == call.function.arguments
    # What the choice costs nobody else: the text is free, and what it was.
    free = {**asked, "tool_choice": "none"}
    (alone,) = client.chat.completions.create(**free).choices
    assert alone.message.tool_calls is None


def test_the_tool_whose_schema_is_no_grammar_is_named(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    function = {"name": "bad", "parameters": schema, "strict": True}
    bad: Any = {"type": "function", "function": function}
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as error:
        client.chat.completions.create(
            model="",
            messages=[{"role": "user", "content": "Hi"}],
            tools=[TOOL, bad],
            tool_choice="required",
        )
    assert error.value.param == "tools.1.function.parameters"


def test_what_is_wrong_with_it_is_said(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"guided_regex: .*unclosed group") as error:
        client.completions.create(model="", prompt="a", extra_body={"guided_regex": "(a"})
    assert error.value.param == "guided_regex"


def test_over_grpc(frontends: Server) -> None:
    with Client(frontends.address) as client:

        def said(grammar: dict[str, Any]) -> str:
            (found,) = client.complete("Once", grammar=grammar, max_tokens=90)
            return str(found.text)

        check(said({"json_schema": json.dumps(SCHEMA)}))
        assert re.fullmatch("(ha){2,3}!", said({"regex": "(ha){2,3}!"}))
        assert said({"choice": {"texts": ["yes", "no"]}}) in ("yes", "no")
        assert said({"json_object": {}}).startswith("{")
        for bad, problem in (({}, "grammar: is empty"), ({"regex": "("}, "grammar.regex: .*uncl")):
            with pytest.raises(ServerError, match=problem) as error:
                said(bad)
            assert error.value.code == "INVALID_ARGUMENT"


def test_without_a_server(real: Engine) -> None:
    llm = LLM.over(real, ChatTemplate())
    sampling = SamplingParams(grammar=Grammar.json_schema(SCHEMA), temperature=1.0, n=2)
    (found,) = llm.generate(["Once upon a time"], sampling, progress=False)
    for output in found.outputs:
        check(output.text)


@pytest.fixture(scope="module")
def thinking(real: Engine) -> Iterator[Plain]:
    template = ChatTemplate(reasoning_format="think")
    settings = dataclasses.replace(SETTINGS, template=template)
    with Server(real, grace_s=0.0, http=settings) as server:
        assert server.http_address is not None
        yield Plain(server.http_address, server)


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 3}])
def test_behind_a_thought(thinking: Plain, real: Engine, fields: dict[str, Any]) -> None:
    """Whose budget ends it. The model in the box would not think by itself."""
    begin = real.encode("<think>", special=False)[0]
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "response_format": NAMED,
        "logit_bias": {str(begin): 100.0},
        "thinking_token_budget": 6,
        "max_tokens": 120,
        **fields,
    }
    status, answer, _ = thinking.call("POST", "/v1/chat/completions", body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "stop", choice
    jsonschema.validate(json.loads(message["content"]), SCHEMA)
    assert message["reasoning_content"] == "<" * 6
    usage = answer["usage"]
    close = len(real.encode("\n</think>\n\n", special=False))
    thought = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 1 + 6 + close <= thought <= len("<think>") + 6 + close
    assert thought < usage["completion_tokens"]
