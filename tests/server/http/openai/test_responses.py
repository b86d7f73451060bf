"""/v1/responses, with OpenAI's client and without."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from jaxserve.config import Config, ConfigError, ServerConfig
from jaxserve.sched.request import GrammarKind, Tier
from jaxserve.server.access.api_keys import Keys
from jaxserve.server.access.options import Access
from jaxserve.server.http.openai.responses.output_items import JsonList
from jaxserve.server.requests.options import ResponseLimits, ServerOptions, server_options
from jaxserve.server.requests.templates.chat_template import ChatTemplate
from jaxserve.server.server import Server
from tests.server.access.test_doors import asked
from tests.server.access.test_keys import key
from tests.server.fake_engine import FakeEngine
from tests.server.http.conftest import SETTINGS, Plain
from tests.server.http.openai.test_reasoning import QWEN
from tests.server.http.openai.test_reasoning import says as thinks
from tests.server.http.openai.test_tools import CALL, CITY, pieces, says

PATH = "/v1/responses"
TOOL: Any = {"type": "function", "name": "weather", "parameters": CITY}
NOW: Any = {"type": "function", "name": "now", "strict": False}
LOGPROBS: Any = ["message.output_text.logprobs"]


def prompt(engine: FakeEngine, which: int = -1) -> str:
    return "".join(map(chr, engine.requests[which].prompt))


def test_text(client: openai.OpenAI, running: FakeEngine) -> None:
    says(running, " Hi", " there")
    running.cached_tokens = 30
    made = client.responses.create(
        model="fake",
        instructions="Be kind.",
        input="Hello",
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=9,
        metadata={"a": "b"},
        user="me",
    )
    assert prompt(running) == "system: Be kind.\nuser: Hello\nassistant:"
    sampling = running.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.9, 9)
    assert (made.object, made.status, made.output_text) == ("response", "completed", " Hi there")
    (item,) = made.output
    assert item.type == "message" and (item.role, item.status) == ("assistant", "completed")
    assert item.id.startswith("msg_") and made.id.startswith("resp_")
    (part,) = item.content
    assert part.type == "output_text" and (part.annotations, part.logprobs) == ([], [])
    assert made.error is None and made.incomplete_details is None
    assert made.completed_at is not None and made.completed_at >= made.created_at
    assert (made.instructions, made.metadata, made.user) == ("Be kind.", {"a": "b"}, "me")
    assert (made.temperature, made.top_p, made.max_output_tokens) == (0.5, 0.9, 9)
    assert (made.model, made.service_tier, made.truncation) == ("fake", "default", "disabled")
    assert (made.tools, made.tool_choice, made.parallel_tool_calls) == ([], "auto", True)
    assert made.usage is not None
    usage = made.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (39, 2, 41)
    assert usage.input_tokens_details.cached_tokens == 30
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert made.model_extra is not None and made.model_extra["timings"]["ttft_ms"] == 200


def test_what_is_cut_off_is_incomplete(client: openai.OpenAI, running: FakeEngine) -> None:
    made = client.responses.create(model="fake", input="a", max_output_tokens=2)
    assert (made.status, made.output_text, made.completed_at) == ("incomplete", " w0 w1", None)
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    assert made.output[0].status == "incomplete"  # type: ignore[union-attr]
    *_, last = client.responses.create(model="fake", input="a", max_output_tokens=2, stream=True)
    assert last.type == "response.incomplete" and last.response.status == "incomplete"


def test_streamed_text(client: openai.OpenAI, running: FakeEngine) -> None:
    says(running, "Hi", " there")
    events = list(client.responses.create(model="fake", input="Hello", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * deltas,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    begun, whole = events[0], events[-1]
    assert begun.type == "response.created" and whole.type == "response.completed"
    assert (begun.response.status, begun.response.output) == ("in_progress", [])
    assert begun.response.usage is None and begun.response.id == whole.response.id
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.response.output_text == "Hi there"
    (done,) = (e for e in events if e.type == "response.output_item.done")
    assert [done.item] == whole.response.output
    assert client.responses.retrieve(whole.response.id) == whole.response


def test_a_stream_is_events_by_name(plain: Plain, running: FakeEngine) -> None:
    says(running, "Hi")
    connection = plain.connect()
    body = json.dumps({"input": "a", "stream": True})
    connection.request("POST", PATH, body, {"Content-Type": "application/json"})
    text = connection.getresponse().read().decode()
    connection.close()
    for event in text.strip().split("\n\n"):
        name, data = event.split("\n")
        assert name == "event: " + json.loads(data.removeprefix("data: "))["type"]
    assert "[DONE]" not in text


@pytest.mark.parametrize("size", [1, 500])
def test_tools(client: openai.OpenAI, running: FakeEngine, size: int) -> None:
    says(running, *pieces(f"Hm. {CALL}\n{CALL} ", size))
    asked_for: Any = {"model": "fake", "input": "How is it in Rome?", "tools": [TOOL, NOW]}
    whole = client.responses.create(**asked_for)
    with client.responses.stream(**asked_for) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    for made in (whole, streamed):
        said, first, second = made.output
        assert said.type == "message" and made.output_text == "Hm."
        for call in (first, second):
            assert call.type == "function_call" and call.name == "weather"
            assert call.status == "completed" and json.loads(call.arguments) == {"city": "Rome"}
            assert call.call_id.startswith("call_") and call.id and call.id.startswith("fc_")
        assert first.call_id != second.call_id  # type: ignore[union-attr]
    assert whole.tools[0].strict and not whole.tools[1].strict  # type: ignore[union-attr]
    told = "".join(
        event.delta
        for event in events
        if event.type == "response.function_call_arguments.delta" and event.output_index == 1
    )
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert told == done[0].arguments == '{"city": "Rome"}'
    added = [e.item for e in events if e.type == "response.output_item.added"]
    assert [(e.type, e.status) for e in added[1:]] == [("function_call", "in_progress")] * 2  # type: ignore[union-attr]
    assert added[1].arguments == ""  # type: ignore[union-attr]


def test_an_agent(client: openai.OpenAI, running: FakeEngine) -> None:
    """Both ways to go on: by the id of the response before, and with all that was said."""
    asked_for: Any = {"model": "fake", "tools": [TOOL], "instructions": "Help."}
    question = {"role": "user", "content": [{"type": "input_text", "text": "Rome?"}]}
    says(running, f"Hm. {CALL}")
    first = client.responses.create(input=[question], **asked_for)
    call = first.output[1]
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    says(running, "It is sunny.")
    by_id = client.responses.create(input=[result], previous_response_id=first.id, **asked_for)
    after_id = prompt(running)
    parts = {**result, "output": [{"type": "input_text", "text": "sunny"}]}
    given: Any = [question, *first.output, parts]
    by_hand = client.responses.create(input=given, store=False, **asked_for)
    assert prompt(running) == after_id
    assert after_id.endswith(
        f"user: Rome?\nassistant: Hm.\n{CALL}\n"
        "user: The function weather returned:\nsunny\nassistant:"
    )
    assert by_id.output_text == by_hand.output_text == "It is sunny."
    assert by_id.previous_response_id == first.id
    parsed = client.responses.parse(input=[question], **{**asked_for, "tools": []})
    again: Any = [question, *parsed.output, {"role": "user", "content": "And?"}]
    client.responses.create(input=again, **asked_for)
    assert "assistant: It is sunny.\nuser: And?\n" in prompt(running)


def test_turns_go_before_but_instructions_do_not(
    client: openai.OpenAI, running: FakeEngine
) -> None:
    says(running, "Yes")
    first = client.responses.create(model="fake", input="a", instructions="Be kind.")
    second = client.responses.create(model="fake", input="b", previous_response_id=first.id)
    client.responses.create(model="fake", input="c", previous_response_id=second.id)
    turns = "user: a\nassistant: Yes\nuser: b\nassistant: Yes\nuser: c\nassistant:"
    assert prompt(running) == turns
    client.responses.delete(first.id)
    client.responses.create(model="fake", input="c", previous_response_id=second.id)
    assert prompt(running) == turns, "the second has it"
    client.responses.create(model="fake", input="x", previous_response_id=second.id)
    assert prompt(running).startswith(prompt(running, -2)[: turns.index("user: c")])


class Fox(pydantic.BaseModel):
    age: int


def test_structured(client: openai.OpenAI, running: FakeEngine) -> None:
    says(running, '{"age"', ": 3}")
    made = client.responses.parse(model="fake", input="How old?", text_format=Fox)
    assert made.output_parsed == Fox(age=3)
    grammar = running.requests[-1].sampling.grammar
    assert grammar is not None and grammar.kind is GrammarKind.JSON_SCHEMA
    assert '"age"' in grammar.text
    with client.responses.stream(model="fake", input="How old?", text_format=Fox) as stream:
        assert stream.get_final_response().output_parsed == Fox(age=3)
    form: Any = {"format": {"type": "json_object"}, "verbosity": "low"}
    client.responses.create(model="fake", input="How old?", text=form)
    assert running.requests[-1].sampling.grammar is not None
    form = {"format": {"type": "text"}}
    client.responses.create(model="fake", input="How old?", text=form)
    assert running.requests[-1].sampling.grammar is None


def test_forced_tools_are_held_to_a_grammar(client: openai.OpenAI, running: FakeEngine) -> None:
    says(running, CALL)
    choices: tuple[Any, ...] = ("required", {"type": "function", "name": "weather"})
    for choice in choices:
        made = client.responses.create(
            model="fake", input="a", tools=[TOOL, NOW], tool_choice=choice
        )
        grammar = running.requests[-1].sampling.grammar
        assert grammar is not None and "start: tag" in json.loads(grammar.text)["lark"]
        assert made.output[0].type == "function_call"
    assert made.tool_choice.name == "weather"  # type: ignore[union-attr]
    assert "now" not in json.loads(grammar.text)["lark"]
    says(running, CALL)
    made = client.responses.create(model="fake", input="a", tools=[TOOL], tool_choice="none")
    assert made.output_text == CALL


def test_tools_are_strict_where_they_can_be(client: openai.OpenAI, running: FakeEngine) -> None:
    says(running, CALL)
    made = client.responses.create(model="fake", input="a", tools=[TOOL])
    assert running.requests[-1].sampling.grammar is not None
    bad = {"type": "object", "properties": {"bad": {"type": "string"}}}  # for the fake engine
    tools: Any = [TOOL, {"type": "function", "name": "f", "parameters": bad}]
    made = client.responses.create(model="fake", input="a", tools=tools)
    assert running.requests[-1].sampling.grammar is None
    assert [tool.strict for tool in made.tools] == [False, False]  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="is bad") as refused:
        client.responses.create(model="fake", input="a", tools=[TOOL, {**tools[1], "strict": True}])
    assert refused.value.param == "tools.1.parameters"


@pytest.fixture
def thinking(engine: FakeEngine) -> Iterator[openai.OpenAI]:
    """A client of a server whose model thinks, and reads what it thought."""
    template = ChatTemplate(QWEN)
    settings = dataclasses.replace(SETTINGS, template=template)
    with Server(engine.run(), grace_s=0.0, http=settings) as server:
        yield openai.OpenAI(base_url=f"http://{server.http_address}/v1", api_key="none")
    template.close()


@pytest.mark.parametrize("size", [1, 500])
def test_reasoning(thinking: openai.OpenAI, engine: FakeEngine, size: int) -> None:
    thinks(engine, f"<think>\nRome, Rome.\n</think>\n\nLet me see.{CALL}", size)
    asked_for: Any = {"model": "fake", "input": "a", "tools": [TOOL]}
    whole = thinking.responses.create(**asked_for)
    thought, said, call = whole.output
    assert thought.type == "reasoning" and thought.id.startswith("rs_")
    assert thought.summary == [] and thought.content is not None
    assert [part.text for part in thought.content] == ["Rome, Rome."]
    assert whole.output_text == "Let me see." and call.type == "function_call"
    assert said.type == "message" and whole.usage is not None
    counted = whole.usage.output_tokens_details.reasoning_tokens
    assert (0 < counted < whole.usage.output_tokens) == (whole.usage.output_tokens > 1)
    events = list(thinking.responses.create(**asked_for, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    first = kinds.index("output_item.added")
    deltas = kinds.count("reasoning_text.delta")
    assert kinds[first : first + 6 + deltas] == [
        *("output_item.added", "content_part.added"),
        *["reasoning_text.delta"] * deltas,
        *("reasoning_text.done", "content_part.done", "output_item.done", "output_item.added"),
    ]
    told = "".join(e.delta for e in events if e.type == "response.reasoning_text.delta")
    assert told == "Rome, Rome."
    assert events[-1].type == "response.completed"
    given: Any = [{"role": "user", "content": "a"}, *(each.to_dict() for each in whole.output)]
    given[1]["encrypted_content"] = "x" * 100_000  # another server's, which nobody reads here
    given[2]["phase"] = "commentary"
    given.append({"type": "function_call_output", "call_id": call.call_id, "output": "21"})
    thinks(engine, "Fine")
    thinking.responses.create(model="fake", input=given, include=["reasoning.encrypted_content"])
    turn = "<|im_start|>assistant\n<think>\nRome, Rome.\n</think>\n\nLet me see.\n<tool_call>"
    assert turn in prompt(engine)
    budget: Any = {"thinking_token_budget": 3}
    thinking.responses.create(model="fake", input="a", extra_body=budget)
    thought = engine.requests[-1].sampling.thinking
    assert thought is not None and thought.budget == 3
    thinking.responses.create(model="fake", input="a", reasoning={"effort": "none"})
    assert prompt(engine).endswith("<think>\n\n</think>\n\n")
    with pytest.raises(openai.BadRequestError, match="thinking_token_budget: must be"):
        thinking.responses.create(model="fake", input="a", extra_body={"thinking_token_budget": -2})


def test_logprobs(client: openai.OpenAI, running: FakeEngine) -> None:
    asked_for: Any = {"model": "fake", "input": "a", "include": LOGPROBS, "top_logprobs": 1}
    whole = client.responses.create(max_output_tokens=3, **asked_for)
    *events, last = client.responses.create(max_output_tokens=3, stream=True, **asked_for)
    assert last.type == "response.incomplete"
    for made in (whole, last.response, client.responses.retrieve(whole.id)):
        (item,) = made.output
        assert item.type == "message" and item.content[0].type == "output_text"
        logprobs = item.content[0].logprobs
        assert logprobs is not None
        assert [entry.token for entry in logprobs] == ["d", "e", "f"]
        assert [entry.top_logprobs[0].token for entry in logprobs] == ["d", "e", "f"]
    told = [e.logprobs for e in events if e.type == "response.output_text.delta"]
    assert [entry.token for some in told for entry in some] == ["d", "e", "f"]
    second = client.responses.create(
        model="fake", input="b", previous_response_id=whole.id, max_output_tokens=1
    )
    assert second.output_text == " w0"


def test_what_closes_a_thought_has_no_logprobs(thinking: openai.OpenAI, engine: FakeEngine) -> None:
    thinks(engine, "<think>\nRome.\n</think>Fine", size=1)
    made = thinking.responses.create(model="fake", input="a", include=LOGPROBS)
    message = made.output[-1]
    assert message.type == "message" and message.content[0].type == "output_text"
    assert message.content[0].text == "Fine"
    assert message.content[0].logprobs is not None
    assert len(message.content[0].logprobs) == len("Fine")


def test_our_own_fields(client: openai.OpenAI, running: FakeEngine) -> None:
    own: Any = {"slo": {"ttft_ms": 500}, "tier": "best_effort", "seed": 3, "top_k": 5}
    own |= {"cache_salt": "s", "request_id": "mine", "deterministic": True}
    made = client.responses.create(model="fake", input="a", max_output_tokens=1, extra_body=own)
    request = running.requests[-1]
    assert (request.slo.ttft, request.tier, request.id) == (0.5, Tier.BEST_EFFORT, "mine")
    assert (request.sampling.seed, request.sampling.top_k, request.cache_salt) == (3, 5, "s")
    assert request.sampling.deterministic
    assert made.service_tier == "flex"
    assert made.model_extra is not None and made.model_extra["slo"]["met"]
    made = client.responses.create(model="fake", input="a", service_tier="flex")
    assert running.requests[-1].tier is Tier.BEST_EFFORT
    assert running.requests[-1].id == made.id, "logs have the response's id"


def test_targets_that_are_given_up(client: openai.OpenAI, engine: FakeEngine) -> None:
    stream = client.responses.create(
        model="fake", input="a", max_output_tokens=3, stream=True, extra_body={"slo": "offline"}
    )
    engine.give_up()
    engine.step(3)
    told = [event.model_extra["slo"] for event in stream if "slo" in (event.model_extra or {})]
    assert told == [{"expected": "missed"}]


def test_kept_and_forgotten(client: openai.OpenAI, plain: Plain, running: FakeEngine) -> None:
    says(running, "Yes")
    made = client.responses.create(model="fake", input=[{"role": "user", "content": "a"}] * 5)
    assert client.responses.retrieve(made.id) == made
    page = client.responses.input_items.list(made.id, limit=2)
    assert len(page.data) == 2 and page.has_more
    assert len({item.id for item in page}) == 5, "the client asks for the pages"
    latest = [item.id for item in client.responses.input_items.list(made.id)]
    first = client.responses.input_items.list(made.id, order="asc", limit=1).data[0]
    assert first.type == "message" and first.id == latest[-1]
    assert first.content[0].text == "a"  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="no response runs in the background"):
        client.responses.cancel(made.id)
    for query in ("stream=true", "starting_after=3", "include=a", "%00=1", "x" * 300 + "=1"):
        status, found, _ = plain.call("GET", f"{PATH}/{made.id}?{query}")
        assert status == 400 and "no such parameter" in found["error"]["message"]
    for query in ("limit=0", "limit=101", "limit=a", "order=up"):
        status, found, _ = plain.call("GET", f"{PATH}/{made.id}/input_items?{query}")
        assert (status, found["error"]["param"]) == (400, query.partition("=")[0])
    client.responses.delete(made.id)
    calls: Any = (
        client.responses.retrieve,
        client.responses.delete,
        client.responses.input_items.list,
        client.responses.cancel,
    )
    for call in calls:
        with pytest.raises(openai.NotFoundError, match=f"there is no response '{made.id}'"):
            call(made.id)
    with pytest.raises(openai.NotFoundError) as unknown:
        client.responses.create(model="fake", input="b", previous_response_id=made.id)
    assert (unknown.value.param, unknown.value.code) == (
        "previous_response_id",
        "previous_response_not_found",
    )
    loose = client.responses.create(model="fake", input="a", store=False)
    assert loose.model_extra is not None and loose.model_extra["store"] is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(loose.id)


@pytest.mark.promise(15)
def test_tenants_see_their_own_only(engine: FakeEngine) -> None:
    access = Access(Keys(fixed=[key("ann"), key("bob")]))
    with Server(engine.run(), grace_s=0.0, http=SETTINGS, access=access) as server:

        def call(who: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
            status, text, _ = asked(server.http_address, method, path, who, body)
            return status, json.loads(text)

        status, made = call("ann", "POST", PATH, {"input": "a", "max_output_tokens": 1})
        assert status == 200
        mine, unknown = made["id"], "resp_" + "0" * len(made["id"][5:])
        for method, path in (
            ("GET", ""),
            ("DELETE", ""),
            ("GET", "/input_items"),
            ("POST", "/cancel"),
        ):
            theirs = call("bob", method, f"{PATH}/{mine}{path}")
            nobodys = call("bob", method, f"{PATH}/{unknown}{path}")
            assert theirs[0] == nobodys[0] == 404
            text = json.dumps(theirs[1]).replace(mine, unknown)
            assert json.loads(text) == nobodys[1]
        for name in (mine, unknown):
            body = {"input": "b", "previous_response_id": name}
            assert call("bob", "POST", PATH, body)[0] == 404
        assert call("ann", "GET", f"{PATH}/{mine}")[0] == 200


def test_a_store_that_is_off_or_full(engine: FakeEngine) -> None:
    off = ServerOptions(responses=ResponseLimits(bytes=0))
    with Server(engine.run(), grace_s=0.0, http=SETTINGS, options=off) as server:
        plain = Plain(server)
        status, made, _ = plain.call("POST", PATH, {"input": "a", "max_output_tokens": 1})
        assert (status, made["store"]) == (200, False)
        assert plain.call("GET", f"{PATH}/{made['id']}")[0] == 404


ASK: Any = [{"role": "user", "content": "a"}]
CALLED: Any = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "is required"),
    ({"input": []}, "input", "at least 1"),
    ({"input": 5}, "input", "must be a list"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0", "'item_reference' items are"),
    ({"input": [5]}, "input.0", "must be an object"),
    ({"input": [{"type": []}]}, "input.0", "items are not served"),
    ({"input": [*ASK, {"role": "tool", "content": "a"}]}, "input.1.role", "must be 'user'"),
    ({"input": [{"role": "user"}]}, "input.0.content", "is required"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input.0.content.0",
        "'input_image' parts are not served, only text",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        "input.0.content.0",
        "a part of the type input_text has text",
    ),
    (
        {"input": [{"type": "reasoning", "summary": [], "encrypted": "x"}]},
        "input.0.encrypted",
        "no such field",
    ),
    ({"input": [{**CALLED, "arguments": "1" * (1 << 20)}]}, "input", "tokens; at most"),
    ({"input": [{**CALLED, "call_id": "c" * 400}]}, "input.0.call_id", "256"),
    (
        {"input": [CALLED, {"type": "function_call_output", "call_id": "d", "output": ""}]},
        "input.1.call_id",
        "there is no function_call 'd'",
    ),
    ({"input": ASK * 10_001}, "input", "10000"),
    ({"input": [{"role": "user", "content": "\udfff"}]}, "input.0.content", "half a surrogate"),
    ({"input": "a" * 5000}, "input", "has 5017 tokens; at most"),
    ({"instructions": ["a"]}, "instructions", "must be a string"),
    ({"previous_response_id": "r" * 400}, "previous_response_id", "256 characters"),
    ({"background": True}, "background", "must be False"),
    ({"conversation": "conv_1"}, "conversation", "no such field"),
    ({"truncation": "auto"}, "truncation", "must be 'disabled'"),
    ({"stream_options": {"include_usage": True}}, "stream_options.include_usage", "no such"),
    ({"include": ["file_search_call.results"]}, "include.0", "must be"),
    ({"top_logprobs": 2}, "top_logprobs", "needs include"),
    ({"top_logprobs": 21, "include": LOGPROBS}, "top_logprobs", "at most 20"),
    ({"include": LOGPROBS, "tools": [TOOL]}, "include", "beside tools"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "must be 'auto'"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "must be"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.name", "is missing"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "missing"),
    ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema", "is not for"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "must be"),
    (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"bad": 1}}}},
        "text.format.schema",
        "is bad",
    ),
    ({"tools": [{"type": "web_search"}]}, "tools.0", "'web_search' tools are not served"),
    ({"tools": [TOOL, TOOL]}, "tools.1.name", "two tools are named 'weather'"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function", "no such field"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", "must be 'function'"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "fly"}},
        "tool_choice.name",
        "there is no tool 'fly'",
    ),
    ({"max_output_tokens": 0}, "max_output_tokens", "must be"),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED)
def test_what_is_refused(
    refusing: tuple[Plain, FakeEngine], fields: dict[str, Any], param: str, message: str
) -> None:
    (plain, engine), body = refusing, {"input": "a", **fields}
    status, found, _ = plain.call("POST", PATH, body)
    error = found["error"]
    assert (status, error["param"]) == (400, param), error
    assert message in error["message"], error
    assert not engine.requests


def test_ids_that_nobody_has(refusing: tuple[Plain, FakeEngine]) -> None:
    ways = (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel"))
    for name in ("x", "r" * 400, "%00", "%ED%A0%80", "..%2F..", "resp_" + "0" * 32):
        for method, path in ways:
            status, found, _ = refusing[0].call(method, f"{PATH}/{name}{path}")
            assert status == 404 and len(found["error"]["message"]) < 1000


def test_an_engine_that_fails_while_it_streams(client: openai.OpenAI, engine: FakeEngine) -> None:
    stream = client.responses.create(model="fake", input="a", stream=True)
    engine.step()
    engine.fail(ValueError("gone"))
    *_, error, failed = stream
    assert error.type == "error" and error.code == "engine_failed" and "gone" in error.message
    assert failed.type == "response.failed" and failed.response.status == "failed"
    assert failed.response.error is not None and failed.response.error.code == "server_error"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(failed.response.id)


def test_calls_that_are_cut_off_leave_nothing(
    server: Server, client: openai.OpenAI, plain: Plain, engine: FakeEngine
) -> None:
    """Neither in the engine nor in the store: their ids are of nobody."""
    streams = [client.responses.create(model="fake", input="a", stream=True) for _ in range(20)]
    ids = [next(iter(stream)).response.id for stream in streams]  # type: ignore[union-attr]
    engine.wait(lambda: len(engine.live) == 20)
    engine.step()
    for stream in streams:
        stream.close()
    engine.wait(lambda: not engine.live)
    assert sorted(engine.cancelled) == sorted(ids)
    for name in ids:
        assert plain.call("GET", f"{PATH}/{name}")[0] == 404
    says(engine.run(), "Fine")
    assert client.responses.create(model="fake", input="a").output_text == "Fine"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_count": 0}, "response_count: must be at least 1, got 0"),
        ({"response_mib": -1}, "response_mib: must be 0 to 1048576, got -1"),
        ({"response_mib": (1 << 20) + 1}, "response_mib: must be 0 to 1048576"),
        ({"response_keep_hours": 0.0}, "response_keep_hours: must be more than 0, got 0"),
        ({"response_keep_hours": float("inf")}, "response_keep_hours: must be more than 0"),
        ({"response_key_share": 0.0}, "response_key_share: must be more than 0 and at most 1"),
        ({"response_key_share": 1.5}, "response_key_share: must be more than 0 and at most 1"),
    ],
)
def test_settings_out_of_range(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=r"^server\." + words):
        ServerConfig(**fields)


def test_settings_are_what_the_server_gets() -> None:
    given = {"response_count": 7, "response_mib": 3, "response_keep_hours": 0.5}
    config = Config().with_fields(**{f"server__{name}": value for name, value in given.items()})
    found = server_options(config).responses
    assert found == ResponseLimits(count=7, bytes=3 << 20, keep_s=1800.0, key_share=0.25)
    assert server_options(Config()).responses == ResponseLimits()


def test_events_without_log_probabilities_do_not_take_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    some = JsonList()
    some.extend([{"token": "a"}] * 2)
    whole = some.put_into(b'{"logprobs":"%s"}' % some.mark.encode())
    assert json.loads(whole) == {"logprobs": [{"token": "a"}] * 2}
    monkeypatch.setattr(some, "_pieces", None)  # which could not be joined
    assert some.put_into(b'{"delta":"a"}') == b'{"delta":"a"}'


def test_developers_are_heard(thinking: openai.OpenAI, engine: FakeEngine) -> None:
    given: Any = [{"role": "developer", "content": "B"}, {"role": "user", "content": "a"}]
    for instructions, system in ((None, "B"), ("A", "A\n\nB")):
        thinking.responses.create(model="fake", input=given, instructions=instructions)
        told = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
        assert prompt(engine).startswith(told)
