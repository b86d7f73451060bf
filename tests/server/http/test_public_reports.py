"""Bug reports of other engines, tried here: docs/public-reports.md has them by the same numbers.
And text under a grammar, at every door."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from jaxserve import LLM, Grammar, SamplingParams
from jaxserve.client import Client, ServerError
from jaxserve.engine.engine import Engine
from jaxserve.server.requests.templates.chat_template import ChatTemplate
from jaxserve.server.server import Server
from tests.engine.harness import engine as small_engine
from tests.server.http.conftest import SETTINGS, Plain

BOX = Path(__file__).parents[3] / "jaxserve" / "assets" / "tiny-stories"
PAGE = Path(__file__).parents[3] / "docs" / "public-reports.md"
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


@pytest.fixture(scope="module")
def real() -> Iterator[Engine]:
    with small_engine(BOX, model__load_format="auto") as running:
        yield running


@pytest.fixture(scope="module")
def frontends(real: Engine) -> Iterator[Server]:
    with Server(real, grace_s=0.0, http=SETTINGS) as server:
        yield server


@pytest.fixture(scope="module")
def door(frontends: Server) -> Plain:
    return Plain(frontends)


@pytest.fixture(scope="module")
def client(door: Plain) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{door.address}/v1", api_key="none", max_retries=0)


def asked(path: str, **fields: Any) -> dict[str, Any]:
    said: dict[str, Any] = {"prompt": "Once upon a time"}
    if path == CHAT:
        said = {"messages": [{"role": "user", "content": "Once upon a time"}]}
    return {**said, "max_tokens": 24, "temperature": 0, **fields}


def answer(door: Plain, path: str = COMPLETIONS, **fields: Any) -> dict[str, Any]:
    status, body, _ = door.call("POST", path, asked(path, **fields))
    assert status == 200, body
    return body


def texts(door: Plain, path: str = COMPLETIONS, **fields: Any) -> list[str]:
    choices = answer(door, path, **fields)["choices"]
    return [each["text"] if "text" in each else each["message"]["content"] for each in choices]


def refusal(door: Plain, path: str = COMPLETIONS, **fields: Any) -> dict[str, Any]:
    """And the next one is served."""
    status, body, _ = door.call("POST", path, asked(path, **fields))
    assert status == 400
    assert texts(door, max_tokens=1)
    error: dict[str, Any] = body["error"]
    return error


def events(door: Plain, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    connection = door.connect()
    data = json.dumps({**body, "stream": True}).encode()
    connection.request("POST", path, data, {"Content-Type": "application/json"})
    lines = connection.getresponse().read().decode().split("\n")
    connection.close()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def said(chunks: list[dict[str, Any]]) -> str:
    choices = [each for chunk in chunks for each in chunk["choices"]]
    return "".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in choices)


@pytest.mark.parametrize(
    ("options", "counts"), [({"include_usage": True}, 1), ({}, 0), (None, 0)], ids=["1", "2", "2b"]
)
def test_usage_comes_once_and_if_asked_for(
    door: Plain, options: dict[str, bool] | None, counts: int
) -> None:
    chunks = events(door, CHAT, asked(CHAT, stream_options=options))
    told = [chunk for chunk in chunks if chunk.get("usage")]
    assert len(told) == counts
    assert all(chunk is chunks[-1] and chunk["choices"] == [] for chunk in told)


def test_a_stop_string_across_tokens_is_no_part_of_the_text(door: Plain) -> None:
    """3; and 4: no chunk is empty while one may be near."""
    (whole,) = texts(door, CHAT)
    for start in range(2, len(whole) - 8, 5):
        stop = whole[start : start + 6]
        chunks = events(door, CHAT, asked(CHAT, stop=[stop, "never"]))
        assert said(chunks) == whole[: whole.index(stop)]
        assert texts(door, CHAT, stop=stop) == [whole[: whole.index(stop)]]
        first, *rest = (each["choices"][0] for each in chunks if each["choices"])
        assert first["delta"]["role"] == "assistant" and rest[-1]["finish_reason"] == "stop"
        assert all(one["delta"].get("content") for one in rest if one["finish_reason"] is None)


def test_each_choice_ends_once(door: Plain) -> None:
    """5."""
    for path in (CHAT, COMPLETIONS):
        chunks = events(door, path, asked(path, n=3, temperature=1, seed=1, max_tokens=4))
        ends = [(c["index"], c["finish_reason"]) for each in chunks for c in each["choices"]]
        assert sorted(end for end in ends if end[1]) == [(k, "length") for k in range(3)]


def schema(kind: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": kind}}


ONE = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
CLOSED = {**ONE, "additionalProperties": False}


def test_a_call_that_its_length_cuts_says_so(door: Plain) -> None:
    """6."""
    tool = {"type": "function", "function": {"name": "look_up", "parameters": ONE}}
    for most in (3, 12):
        choice = answer(door, CHAT, tools=[tool], tool_choice="required", max_tokens=most)
        assert choice["choices"][0]["finish_reason"] == "length"


def test_streamed_calls_have_their_index_and_their_id_once(door: Plain) -> None:
    """7, 8."""
    tools = [
        {"type": "function", "function": {"name": name, "parameters": CLOSED, "strict": True}}
        for name in ("look_up", "put_down")
    ]
    body = asked(CHAT, tools=tools, tool_choice="required", max_tokens=120)
    deltas = [
        call
        for chunk in events(door, CHAT, body)
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls") or ()
    ]
    begun = [call for call in deltas if "id" in call]
    assert [call["index"] for call in begun] == list(range(len(begun))) and begun
    assert len({call["id"] for call in begun}) == len(begun)
    for call in begun:
        assert call["type"] == "function" and call["function"]["name"] in ("look_up", "put_down")
        own = [each["function"] for each in deltas if each["index"] == call["index"]]
        assert all("name" not in each for each in own[1:])
        assert json.loads("".join(each.get("arguments", "") for each in own)).keys() == {"a"}


def test_what_is_no_schema_is_refused(door: Plain) -> None:
    """9."""
    error = refusal(door, CHAT, response_format=schema({"type": "string", "pattern": "^(a$"}))
    assert error["param"] == "response_format.json_schema.schema"


def test_an_object_is_an_object(door: Plain) -> None:
    """10, 11, 12."""
    (text,) = texts(door, CHAT, response_format={"type": "json_object"}, max_tokens=40)
    assert text.startswith("{")
    event = {
        "title": "CalendarEvent",
        "type": "object",
        "properties": {
            "name": {"title": "Name", "type": "string", "maxLength": 4},
            "participants": {"items": {"const": "Al"}, "maxItems": 2, "type": "array"},
        },
        "required": ["name", "participants"],
        "additionalProperties": False,
    }
    (text,) = texts(door, CHAT, response_format=schema(event), tools=[], max_tokens=80)
    assert json.loads(text).keys() == {"name", "participants"}


def test_keys_come_in_the_order_of_the_schema(door: Plain) -> None:
    """13; and 14: definitions may come in any order."""
    boolean = {"type": "boolean"}
    names = ("zeta", "alpha", "mid")
    kind = {"type": "object", "properties": dict.fromkeys(names, boolean), "required": [*names]}
    kind["additionalProperties"] = False
    (text,) = texts(door, response_format=schema(kind), max_tokens=90)
    assert list(json.loads(text)) == [*names]
    parts = {
        "C": {"type": "object", "properties": {"p": {"$ref": "#/$defs/A"}}, "required": ["p"]},
        "A": {"type": "object", "properties": {"p": {"$ref": "#/$defs/E"}}, "required": ["p"]},
        "E": boolean,
    }
    for part in ("C", "A"):
        parts[part]["additionalProperties"] = False  # type: ignore[assignment]
    for order in ("CAE", "ACE"):
        defined = {"$defs": {name: parts[name] for name in order}, "$ref": "#/$defs/C"}
        (text,) = texts(door, response_format=schema(defined), max_tokens=240)
        assert json.loads(text)["p"]["p"] in (True, False)


def test_no_end_is_forced_on_an_object_that_is_complete(door: Plain) -> None:
    """15: what it may still hold is white space."""
    (text,) = texts(door, response_format=schema(CLOSED), max_tokens=60, min_tokens=40)
    assert json.loads(text).keys() == {"a"}


def test_logprobs_of_a_prompt_do_not_depend_on_what_was_found(door: Plain) -> None:
    """16, 17, 18."""
    prompts = [list(range(100 + k, 140 + k)) for k in (0, 1)]
    fields: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 1}

    def read(prompt: Any) -> Any:
        return answer(door, prompt=prompt, **fields)["choices"][0]["logprobs"]["token_logprobs"]

    fresh = [read(prompt) for prompt in prompts]
    both = answer(door, prompt=[*reversed(prompts)], **fields)["choices"]
    again = [each["logprobs"]["token_logprobs"] for each in reversed(both)]
    for first, second in zip(fresh, again, strict=True):
        assert len(first) == 41 and first[0] is second[0] is None
        assert first == second, "not to the last bit"
    assert answer(door, **fields | {"max_tokens": 0})["choices"][0]["text"] == "Once upon a time"


def test_biases_are_of_tokens_that_there_are(door: Plain) -> None:
    """19, 20, 21."""
    assert "outside" in refusal(door, logit_bias={"99999999": 5})["message"]
    assert "'AI' is not a token id" in refusal(door, CHAT, logit_bias={"AI": -100})["message"]
    (first,) = texts(door, max_tokens=1)
    tokens = door.call("POST", "/tokenize", {"prompt": first, "add_special_tokens": False})[1]
    assert len(tokens["tokens"]) == 1
    bias = {str(tokens["tokens"][0]): -100}
    assert first not in texts(door, n=6, temperature=1, seed=2, max_tokens=1, logit_bias=bias)


def test_an_empty_prompt_is_the_token_that_begins_texts_or_refused(door: Plain) -> None:
    """22. This model has such a token."""
    assert texts(door, prompt="") == texts(door, prompt=[""])
    for prompt in ([], [[]]):
        assert refusal(door, prompt=prompt)["param"] == "prompt"


@pytest.mark.parametrize("field", ["bad_words", "allowed_token_ids"])
def test_fields_that_are_not_here_are_refused(door: Plain, field: str) -> None:
    """23, 24."""
    assert refusal(door, **{field: [1]})["code"] == "unknown_field"


def test_seeds_are_of_a_choice(door: Plain) -> None:
    """25, 26."""
    warm: dict[str, Any] = {"temperature": 1.0, "n": 3}
    assert texts(door, seed=123, **warm) == texts(door, seed=123, **warm)
    assert len(set(texts(door, seed=123, **warm))) == 3
    assert texts(door, **warm) != texts(door, **warm)


def test_penalties_of_what_was_written_leave_the_first_token(door: Plain) -> None:
    """27: repetition looks at the prompt, too."""
    prompt = "Once there was a cat. Once there was a dog. Once there was a"
    (first,) = texts(door, prompt=prompt, max_tokens=1)
    for name in ("presence_penalty", "frequency_penalty"):
        assert texts(door, prompt=prompt, max_tokens=1, **{name: 2.0}) == [first]
    plain = texts(door, prompt=prompt)
    assert texts(door, prompt=prompt, repetition_penalty=2.0, logprobs=2) != plain


def test_a_conversation_that_is_too_long_has_openais_code(door: Plain) -> None:
    """28, 29."""
    error = refusal(door, CHAT, messages=[{"role": "user", "content": "word " * 5000}])
    assert error["code"] == "context_length_exceeded" and error["param"] == "messages"
    assert refusal(door, CHAT, stream=True, max_tokens=100_000)["code"] == error["code"]


def test_events_of_a_response_are_numbered(door: Plain) -> None:
    """30."""
    found = events(door, RESPONSES, {"input": "Once", "max_output_tokens": 6})
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    named = {each.get("item_id") or each.get("item", {}).get("id") for each in found} - {None}
    assert len(named) == 1


def test_vectors_in_base64_are_those_in_numbers(door: Plain) -> None:
    """31, 32."""
    body = {"input": "Once upon a time"}
    plain = door.call("POST", "/v1/embeddings", body)[1]["data"][0]["embedding"]
    packed = door.call("POST", "/v1/embeddings", {**body, "encoding_format": "base64"})[1]
    raw = base64.b64decode(packed["data"][0]["embedding"])
    assert struct.unpack(f"<{len(raw) // 4}f", raw) == pytest.approx(plain, abs=1e-6)
    assert door.call("POST", "/v1/embeddings", {**body, "encoding_format": "b64"})[0] == 400


def test_ranks_are_sorted_and_few(door: Plain) -> None:
    """33, 34."""
    body = {"query": "a cat", "documents": ["a dog ran", "the cat", "once upon a time"]}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        found = door.call("POST", path, {**body, "top_n": None})[1]["results"]
        scores = [each["relevance_score"] for each in found]
        assert len(found) == 3 and scores == sorted(scores, reverse=True)
        assert door.call("POST", path, {**body, "top_n": 1})[1]["results"] == found[:1]


def test_the_page_has_each_of_them() -> None:
    """By its number."""
    rows = [line for line in PAGE.read_text().splitlines() if line[:3].strip("| ").isdecimal()]
    numbers = [int(row.split("|")[1]) for row in rows]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) >= 30
    assert all("https://github.com/" in row for row in rows)


# Grammars at every door, which take the same engine.

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "none": {"const": None}},
    "required": ["name", "none"],
    "additionalProperties": False,
}
NAMED: Any = schema(SCHEMA)
TOOL: Any = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}


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
        response_format=NAMED,
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
        yield Plain(server)


def test_behind_a_thought(thinking: Plain, real: Engine) -> None:
    """Whose budget ends it. The model in the box would not think by itself."""
    begin = real.encode("<think>", special=False)[0]
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "response_format": NAMED,
        "logit_bias": {str(begin): 100.0},
        "thinking_token_budget": 6,
        "max_tokens": 120,
        "temperature": 1.0,
        "seed": 3,
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
