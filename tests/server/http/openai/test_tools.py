"""Chats with tools over HTTP, with OpenAI's client and without."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from jaxserve.sched.request import GrammarKind, InvalidRequest
from jaxserve.server.http.openai import tool_options
from jaxserve.server.http.openai.schema import MAX_TOOLS_TEXT
from jaxserve.server.requests.templates.chat_template import ChatTemplate
from jaxserve.server.server import Server
from tests.server.fake_engine import FakeEngine
from tests.server.http.conftest import SETTINGS, Plain

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str = "weather", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": CITY, **fields}}


def tool_named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


TOOLS: Any = [tool(), {"type": "function", "function": {"name": "now"}}]
ASK: Any = [{"role": "user", "content": "How is it in Rome?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def says(engine: FakeEngine, *texts: str) -> None:
    """From now on, these pieces, and that is all."""
    engine.text, engine.ends_at = lambda k: texts[k], len(texts)


def pieces(text: str, size: int = 5) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def test_a_call(client: openai.OpenAI, running: FakeEngine) -> None:
    says(running, *pieces(f"Let me see.\n{CALL}\n{CALL}"))
    made = client.chat.completions.create(model="fake", messages=ASK, tools=TOOLS, logprobs=True)
    (choice,) = made.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert choice.message.tool_calls is not None
    first, second = choice.message.tool_calls
    assert first.type == "function" and first.function.name == "weather"
    assert json.loads(first.function.arguments) == {"city": "Rome"}
    assert first.id.startswith("call_") and first.id != second.id
    assert choice.logprobs is not None and choice.logprobs.content
    assert made.usage is not None
    assert len(choice.logprobs.content) == made.usage.completion_tokens
    (asked,) = running.requests
    assert asked.sampling.grammar is None
    said = "".join(map(chr, asked.prompt))
    assert said.startswith("system: You can call these functions:\n")
    assert '{"name": "weather", "description": "", "parameters": {"type": "object"' in said
    assert "<tool_call>" in said and said.endswith("user: How is it in Rome?\nassistant:")


def test_content_is_null_beside_calls(client: openai.OpenAI, running: FakeEngine) -> None:
    says(running, CALL)
    made = client.chat.completions.create(model="fake", messages=ASK, tools=TOOLS)
    assert made.choices[0].message.content is None
    says(running, "It is ", "fine.")
    made = client.chat.completions.create(model="fake", messages=ASK, tools=TOOLS)
    (choice,) = made.choices
    assert (choice.finish_reason, choice.message.content) == ("stop", "It is fine.")
    assert choice.message.tool_calls is None
    says(running, CALL)
    made = client.chat.completions.create(model="fake", messages=ASK, tools=TOOLS, max_tokens=1)
    assert made.choices[0].finish_reason == "tool_calls"  # it has ended with its last token
    running.ends_at = None
    made = client.chat.completions.create(model="fake", messages=ASK, tools=TOOLS, max_tokens=1)
    assert made.choices[0].finish_reason == "length"


def test_a_forced_call_that_is_cut_off_is_no_content(
    client: openai.OpenAI, running: FakeEngine
) -> None:
    says(running, *pieces('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'))
    running.ends_at = None
    ask: Any = {"model": "fake", "messages": ASK, "tools": TOOLS, "tool_choice": tool_named("now")}
    for most in (2, 5):  # within the tag, and within the name
        (made,) = client.chat.completions.create(**ask, max_tokens=most).choices
        assert (made.finish_reason, made.message.content) == ("length", None)
        assert made.message.tool_calls is None
        stream = client.chat.completions.create(**ask, max_tokens=most, stream=True)
        chunks = [chunk.choices[0] for chunk in stream]
        assert chunks[-1].finish_reason == "length"
        assert not any(chunk.delta.content or chunk.delta.tool_calls for chunk in chunks)


@pytest.mark.parametrize("size", [1, 500])
def test_streamed(client: openai.OpenAI, running: FakeEngine, size: int) -> None:
    says(running, *pieces(f"Hm. {CALL}\n{CALL} ", size))
    with client.chat.completions.stream(model="fake", messages=ASK, tools=TOOLS, n=2) as stream:
        for _ in stream:
            pass
        whole = stream.get_final_completion()
    assert len(whole.choices) == 2
    for choice in whole.choices:
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Hm.")
        assert choice.message.tool_calls is not None
        assert [call.function.name for call in choice.message.tool_calls] == ["weather"] * 2
        for call in choice.message.tool_calls:
            assert json.loads(call.function.arguments) == {"city": "Rome"}
    ids = {c.id for choice in whole.choices for c in choice.message.tool_calls or ()}
    assert len(ids) == 4


def test_deltas_as_openai_has_them(client: openai.OpenAI, engine: FakeEngine) -> None:
    says(engine, *pieces(CALL))
    every: Any = {"continuous_usage_stats": True}  # a chunk a step, also where there is no news
    stream = client.chat.completions.create(
        model="fake", messages=ASK, tools=TOOLS, stream=True, stream_options=every
    )
    deltas = [next(stream).choices[0].delta]
    for _ in pieces(CALL):
        engine.step()
        deltas.append(next(stream).choices[0].delta)
    assert deltas[0].role == "assistant" and deltas[0].content is None
    (first, *others) = [call for delta in deltas for call in delta.tool_calls or ()]
    assert first.index == 0 and first.type == "function"
    assert first.id and first.function and first.function.name == "weather"
    assert len(others) > 1
    for other in others:
        assert other.index == 0 and other.id is None and other.type is None
        assert other.function is not None and other.function.name is None
    assert not any(delta.content for delta in deltas)


FORCED: list[tuple[dict[str, Any], str, str]] = [
    ({"tool_choice": "required"}, "start: tag ", "0,15"),
    ({"tool_choice": "required", "parallel_tool_calls": False}, "start: tag", "weather"),
    ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, "start: tag", "now"),
    ({"tools": [tool(strict=True)]}, "start: tagged* TEXT", "weather"),
    ({"tools": [tool(strict=True)], "parallel_tool_calls": False}, "start: tagged | TEXT", "wea"),
]


def test_what_is_held_to_a_grammar(plain: Plain, running: FakeEngine) -> None:
    says(running, CALL)
    for fields, start, has in FORCED:
        body = {"messages": ASK, "tools": TOOLS, **fields}
        assert plain.call("POST", "/v1/chat/completions", body)[0] == 200
        grammar = running.requests[-1].sampling.grammar
        assert grammar is not None and grammar.kind is GrammarKind.LARK
        lark = json.loads(grammar.text)["lark"]
        assert start in lark and has in lark
        if "tool_choice" in fields and fields["tool_choice"] != "required":
            assert "weather" not in lark


OF_SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}


@pytest.mark.parametrize(
    ("fields", "held"),
    [
        ({"response_format": OF_SCHEMA}, '"city"'),
        ({"response_format": {"type": "json_object"}}, "@s"),
        ({"guided_choice": ["yes", "no"]}, 'start: tag ("\\n" tag){0,15} | "yes" | "no"'),
    ],
)
def test_calls_or_else_what_the_text_is_to_be(
    client: openai.OpenAI, plain: Plain, running: FakeEngine, fields: dict[str, Any], held: str
) -> None:
    """Content that shows how a call looks is content."""
    text = f'{{"city": "as in {CALL}"}}'
    for said, calls in ((CALL, 1), (text, 0)):
        says(running, *pieces(said))
        body = {"messages": ASK, "tools": TOOLS, **fields}
        _, found, _ = plain.call("POST", "/v1/chat/completions", body)
        (choice,) = found["choices"]
        assert len(choice["message"].get("tool_calls", ())) == calls
        assert choice["message"]["content"] == (None if calls else text)
        assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
        grammar = running.requests[-1].sampling.grammar
        assert grammar is not None and grammar.kind is GrammarKind.LARK
        lark = json.loads(grammar.text)
        assert held in lark["lark"] + json.dumps(lark["schemas"])
    says(running, *pieces(text))
    stream = client.chat.completions.create(
        model="fake", messages=ASK, tools=TOOLS, stream=True, extra_body=fields
    )
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert "".join(delta.content or "" for delta in deltas) == text
    assert not any(delta.tool_calls for delta in deltas)
    # A call that is forced has no other form.
    body = {"messages": ASK, "tools": TOOLS, "tool_choice": "required"}
    for more in (fields, {}):
        assert plain.call("POST", "/v1/chat/completions", {**body, **more})[0] == 200
    first, second = (request.sampling.grammar for request in running.requests[-2:])
    assert first == second


def deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def named(parameters: Any) -> dict[str, Any]:
    return {"tools": [tool(), tool("f", parameters=parameters)]}


def asked(arguments: str) -> dict[str, Any]:
    """The turn of a model that calls."""
    called = {"name": "weather", "arguments": arguments}
    call = {"id": "call_1", "type": "function", "function": called}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


AT = "tools.1.function.parameters"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [tool(f"f{i}") for i in range(1000)]}, "tools", "at most 128"),
    ({"tools": [tool(), tool()]}, "tools.1.function.name", "two tools are named 'weather'"),
    ({"tools": [tool("a b")]}, "tools.0.function.name", "pattern"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type", "function"),
    ({"tools": [tool(description="a" * 20_000)]}, "tools.0.function.description", "16384"),
    ({"tools": [tool(strict="yes")]}, "tools.0.function.strict", "true or false"),
    ({"tools": [tool(other=1)]}, "tools.0.function.other", "no such field"),
    (named([]), AT, "object"),
    (named({"type": "string"}), AT, "type: must be 'object'"),
    (named({"properties": {"a": 1}}), AT, "properties.a: must be a JSON Schema"),
    (named({"properties": []}), AT, "properties: must be an object"),
    (named({"properties": {"a": {"type": "text"}}}), AT, "properties.a.type: must be one of"),
    (named({"required": "a"}), AT, "required: must be a list"),
    (named({"anyOf": [{}, {"required": [1]}]}), AT, "anyOf.1.required: must be a list of strings"),
    (named(deep(40)), AT, "nested more than 32"),
    (named({"description": "a" * 70_000}), AT, "more than 65536 characters"),
    (
        {"tools": [tool(f"f{i}", description="a" * 16_000) for i in range(20)]},
        "tools",
        f"{MAX_TOOLS_TEXT:,} are allowed",
    ),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tool_choice": "always"}, "tool_choice", "must be none, auto, required"),
    ({"tool_choice": {"type": "custom"}}, "tool_choice.type", "function"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function", "required"),
    ({"tool_choice": tool_named("fly")}, "tool_choice.function.name", "there is no tool 'fly'"),
    ({"guided_regex": "a"}, "guided_regex", "cannot stand beside tools"),
    ({"guided_json": {"bad": 1}}, "guided_json", "is bad"),
    ({"guided_json": "{"}, "guided_json", "must be a JSON Schema"),
    ({"guided_json": "[" * 60_000}, "guided_json", "must be a JSON Schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
    (
        {"tool_choice": "required", "response_format": OF_SCHEMA | {"type": "json_object"}},
        "response_format.json_schema",
        "is not for type json_object",
    ),
    ({"function_call": "auto"}, "function_call", "no such field"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools", "field of the call"),
    ({"messages": [*ASK, asked("1" * (1 << 20))]}, "messages", "tokens; at most"),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED)
def test_what_is_refused(
    refusing: tuple[Plain, FakeEngine], fields: dict[str, Any], param: str, message: str
) -> None:
    (plain, engine), body = refusing, {"messages": ASK, "tools": TOOLS, **fields}
    status, found, _ = plain.call("POST", "/v1/chat/completions", body)
    error = found["error"]
    assert (status, error["param"]) == (400, param), error
    assert message in error["message"], error
    assert not engine.requests


def test_a_tool_that_no_grammar_holds_does_not_fail_a_call_of_another(
    plain: Plain, running: FakeEngine
) -> None:
    """It is held to what can be held, and the answer says so, unless it is strict or alone."""
    loose = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    good, other = tool("good"), tool("other", parameters=loose)
    strict = tool("strict", strict=True, parameters=loose)
    place = "tools.1.function.parameters.properties.a.uniqueItems"
    for tools, told in (([good, other], place), ([other], None), ([good, strict], None)):
        body = {"messages": ASK, "tools": tools, "tool_choice": "required", "max_tokens": 1}
        status, _, headers = plain.call("POST", "/v1/chat/completions", body)
        assert status == 200  # a fake engine compiles nothing
        assert headers.get("x-schema-not-enforced") == told
        grammar = running.requests[-1].sampling.grammar
        assert grammar is not None
        assert ("uniqueItems" in grammar.text) is (told is None)
    named = {"type": "function", "function": {"name": "good"}}
    body = {"messages": ASK, "tools": [good, other], "tool_choice": named, "max_tokens": 1}
    _, _, headers = plain.call("POST", "/v1/chat/completions", body)
    assert "x-schema-not-enforced" not in headers


def test_stop_strings_do_not_cut_calls_that_are_forced(plain: Plain, running: FakeEngine) -> None:
    for choice, known in (("auto", (("Rome",), (7,))), ("required", ((), ()))):
        stops = {"stop": ["Rome"], "stop_token_ids": [7], "tool_choice": choice}
        body = {"messages": ASK, "tools": TOOLS, "max_tokens": 1, **stops}
        assert plain.call("POST", "/v1/chat/completions", body)[0] == 200
        sampling = running.requests[-1].sampling
        assert (sampling.stop, sampling.stop_token_ids) == known


def test_many_tools_hold_up_nobody_else(
    plain: Plain, running: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To write them down as a grammar and for the template may take a tenth of a second."""
    threads: list[str] = []

    def noting(function: Any) -> Any:
        def noted(*given: Any, **how: Any) -> Any:
            threads.append(threading.current_thread().name)
            return function(*given, **how)

        return noted

    monkeypatch.setattr(tool_options, "call_grammar", noting(tool_options.call_grammar))
    monkeypatch.setattr(ChatTemplate, "submit", noting(ChatTemplate.submit))
    body = {"messages": ASK, "tools": TOOLS, "tool_choice": "required", "max_tokens": 1}
    assert plain.call("POST", "/v1/chat/completions", body)[0] == 200
    assert plain.call("POST", "/tokenize", {"messages": ASK, "tools": TOOLS})[0] == 200
    assert len(threads) == 3
    assert all(name.startswith("jaxserve-beside") for name in threads), threads


def test_a_schema_that_no_grammar_takes(
    plain: Plain, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(grammar: Any, thinking: Any = None) -> None:
        if "uniqueItems" in grammar.text:
            raise InvalidRequest(grammar.field_name, "unimplemented keys: uniqueItems")

    monkeypatch.setattr(engine, "check_grammar", check)
    bad = {"properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools = [tool(), tool("f", parameters=bad, strict=True)]
    body = {"messages": ASK, "tool_choice": "required", "tools": tools}
    status, found, _ = plain.call("POST", "/v1/chat/completions", body)
    assert (status, found["error"]["param"]) == (400, AT)
    assert "unimplemented keys: uniqueItems" in found["error"]["message"]
    # Together they may be too much, even where each is not.
    many = [tool(f"f{i}", parameters=deep(30)) for i in range(128)]
    status, found, _ = plain.call("POST", "/v1/chat/completions", {**body, "tools": many})
    assert (status, found["error"]["param"]) == (400, "tools")
    assert "at most 65536" in found["error"]["message"]


READS = (
    "{% for tool in tools or [] %}T:{{ tool.function.name }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.city }}{% endfor %};"
    "{% endfor %}"
)
HISTORY: Any = [
    *ASK,
    asked('{"city": "Rome"}'),
    {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
]


@pytest.fixture
def reading(engine: FakeEngine) -> Iterator[Plain]:
    """A server whose template reads tools."""
    settings = dataclasses.replace(SETTINGS, template=ChatTemplate(READS))
    with Server(engine.run(), grace_s=0.0, http=settings) as server:
        yield Plain(server)


def prompt(engine: FakeEngine) -> str:
    return "".join(map(chr, engine.requests[-1].prompt))


def test_the_template_gets_them(reading: Plain, engine: FakeEngine) -> None:
    body = {"messages": HISTORY, "tools": TOOLS, "max_tokens": 1}
    assert reading.call("POST", "/v1/chat/completions", body)[0] == 200
    turns = "user:How is it in Rome?;assistant:<tool_call>Rome;tool:Sunny.;"
    assert prompt(engine) == f"T:weather\nT:now\n{turns}"
    status, _, _ = reading.call("POST", "/v1/chat/completions", {**body, "tool_choice": "none"})
    assert status == 200 and prompt(engine) == turns
    asked = {"messages": HISTORY, "tools": TOOLS}
    _, found, _ = reading.call("POST", "/tokenize", asked)
    assert "".join(map(chr, found["tokens"])) == f"T:weather\nT:now\n{turns}"


def test_openais_client_may_send_back_what_it_got(
    client: openai.OpenAI, running: FakeEngine
) -> None:
    """Beside our fields it has its own: places and parsed arguments."""
    says(running, *pieces(CALL))
    strict: Any = [tool(strict=True)]
    with client.chat.completions.stream(model="fake", messages=ASK, tools=strict) as stream:
        message: Any = stream.get_final_completion().choices[0].message
    assert message.tool_calls[0].function.parsed_arguments == {"city": "Rome"}
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sunny."}
    history = [*ASK, message, result]
    client.chat.completions.create(model="fake", messages=history, tools=strict)
    said = f"\nassistant: {CALL}\nuser: The function weather returned:\nSunny.\n"
    assert said in prompt(running)


def test_other_templates_get_words(plain: Plain, running: FakeEngine) -> None:
    system = {"role": "system", "content": "Be brief."}
    body = {"messages": [system, *HISTORY], "tools": TOOLS, "max_tokens": 1}
    assert plain.call("POST", "/v1/chat/completions", body)[0] == 200
    said = prompt(running)
    assert said.startswith("system: Be brief.\n\nYou can call these functions:\n")
    assert f"\nassistant: {CALL}\nuser: The function weather returned:\nSunny.\n" in said
