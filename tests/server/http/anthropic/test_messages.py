"""/v1/messages, with Anthropic's client and without."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from jaxserve.sched.request import SLO, Program, Thinking
from jaxserve.server.requests.templates.chat_template import ChatTemplate
from jaxserve.server.server import Server
from tests.server.fake_engine import FakeEngine
from tests.server.http.conftest import SETTINGS, Plain
from tests.server.http.openai.test_reasoning import QWEN
from tests.server.http.openai.test_reasoning import says as thinks
from tests.server.http.openai.test_tools import CALL, CITY, pieces, says

PATH = "/v1/messages"
ASK: Any = [{"role": "user", "content": "How is it in Rome?"}]
ASKED: dict[str, Any] = {"model": "fake", "max_tokens": 64, "messages": ASK}
TOOLS: Any = [
    {"name": "weather", "description": "The weather.", "input_schema": CITY},
    {"name": "now", "input_schema": {"type": "object", "properties": {}}},
]
USE = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Rome"}}
RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": "Sunny."}


@pytest.fixture
def thinking(engine: FakeEngine) -> Iterator[Plain]:
    """A server whose model thinks."""
    template = ChatTemplate(QWEN)
    with Server(engine.run(), http=dataclasses.replace(SETTINGS, template=template)) as server:
        yield Plain(server)
    template.close()


def answered(plain: Plain, **fields: Any) -> dict[str, Any]:
    status, message, _ = plain.call("POST", PATH, {**ASKED, **fields})
    assert status == 200, message
    return message


def prompt_of(engine: FakeEngine) -> str:
    return "".join(map(chr, engine.requests[-1].prompt))


def events(plain: Plain, **fields: Any) -> list[dict[str, Any]]:
    connection = plain.connect()
    body = json.dumps({**ASKED, "stream": True, **fields})
    connection.request("POST", PATH, body, {"Content-Type": "application/json"})
    found = []
    for event in connection.getresponse().read().decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    connection.close()
    return found


def test_five_turns_with_tools(client: anthropic.Anthropic, running: FakeEngine) -> None:
    messages = list(ASK)
    for turn in range(5):
        says(running, *pieces(CALL if turn % 2 == 0 else "It is fine."))
        with client.messages.stream(**{**ASKED, "messages": messages}, tools=TOOLS) as stream:
            text = "".join(stream.text_stream)
            streamed = stream.get_final_message()
        whole = client.messages.create(**{**ASKED, "messages": messages}, tools=TOOLS)
        assert [b.type for b in whole.content] == [b.type for b in streamed.content]
        assert (whole.stop_reason, whole.usage) == (streamed.stop_reason, streamed.usage)
        assert text == "".join(b.text for b in whole.content if b.type == "text")
        messages.append({"role": "assistant", "content": streamed.content})
        if turn % 2 == 0:
            (use,) = streamed.content
            assert use.type == "tool_use" and use.input == {"city": "Rome"}
            assert streamed.stop_reason == "tool_use"
            result = {"type": "tool_result", "tool_use_id": use.id, "content": f"Sun {turn}"}
            messages.append({"role": "user", "content": [result]})
            assert running.requests[-1].continues == ()
        else:
            assert (streamed.stop_reason, text) == ("end_turn", "It is fine.")
            messages.append({"role": "user", "content": "And now?"})
    prompt = prompt_of(running)
    assert '"arguments": {"city": "Rome"}' in prompt and "Sun 2" in prompt
    counted = client.messages.count_tokens(model="fake", messages=messages, tools=TOOLS)
    says(running, "Bye.")
    last = client.messages.create(**{**ASKED, "messages": messages}, tools=TOOLS)
    assert counted.input_tokens == last.usage.input_tokens == len(running.requests[-1].prompt)
    assert running.requests[-1].continues == (("tool", messages[-1]["content"][0]["tool_use_id"]),)


def test_errors_are_anthropics(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    with pytest.raises(anthropic.NotFoundError, match="no model 'claude'") as unknown:
        client.messages.create(**{**ASKED, "model": "claude"})
    error = {"type": "not_found_error", "message": unknown.value.body["error"]["message"]}
    assert unknown.value.body == {"type": "error", "error": error}
    engine.max_requests = 0
    with pytest.raises(anthropic.InternalServerError) as full:
        client.messages.create(**ASKED)
    assert full.value.status_code == 529
    assert full.value.body["error"]["type"] == "overloaded_error"
    assert int(full.value.response.headers["retry-after"]) >= 1


def test_the_order_of_events(plain: Plain, running: FakeEngine) -> None:
    says(running, *pieces(f"Let me see. {CALL}{CALL}", 9))
    found = events(plain, tools=TOOLS, slo={"ttft_ms": 900})
    kinds = [event["type"] for event in found]
    assert kinds[:4] == ["message_start", "content_block_start", "ping", "content_block_delta"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    message = found[0]["message"]
    assert message["id"].startswith("msg_") and message["role"] == "assistant"
    assert message["content"] == [] and message["stop_reason"] is None
    starts = [e for e in found if e["type"] == "content_block_start"]
    assert [e["content_block"]["type"] for e in starts] == ["text", "tool_use", "tool_use"]
    assert [e["index"] for e in starts] == [0, 1, 2]
    assert [e["index"] for e in found if e["type"] == "content_block_stop"] == [0, 1, 2]
    for index in (1, 2):
        deltas = [e["delta"] for e in found if e["type"] == "content_block_delta"
                  and e["index"] == index]  # fmt: skip
        assert {delta["type"] for delta in deltas} == {"input_json_delta"}
        assert json.loads("".join(d["partial_json"] for d in deltas)) == {"city": "Rome"}
    last = found[-2]
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert last["usage"]["output_tokens"] == len(running.text.__closure__[0].cell_contents)
    assert last["slo"]["met"] is True and last["timings"]["ttft_ms"] > 0


def test_why_it_ended(plain: Plain, running: FakeEngine) -> None:
    assert answered(plain, max_tokens=2)["stop_reason"] == "max_tokens"
    running.stop_string = "END"
    says(running, "So.")
    message = answered(plain, stop_sequences=["END", "x"])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")
    assert running.requests[-1].sampling.stop == ("END", "x")
    running.stop_string, running.ends_at, running.text = "", None, lambda k: f" w{k}"
    message = answered(plain, max_tokens=1_000_000)
    assert message["stop_reason"] == "model_context_window_exceeded"
    prompt = len(running.requests[-1].prompt)
    assert running.requests[-1].sampling.max_tokens == 4096 - prompt
    usage = message["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (prompt, 4096 - prompt)


def test_what_the_model_wrote_wrong_is_kept(plain: Plain, running: FakeEngine) -> None:
    says(running, '<tool_call>\n{"name": "weather", "arguments": {"city": "Ro')
    running.ends_at = None
    (use,) = answered(plain, tools=TOOLS, max_tokens=1)["content"]
    assert use["input"] == {"": '{"city": "Ro'}


def test_the_conversation(plain: Plain, running: FakeEngine) -> None:
    ephemeral = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    text = {"type": "text", "text": "Hi", "citations": None, **ephemeral}
    failed = {**RESULT, "is_error": True, "content": [{"type": "text", "text": "No net."}]}
    answered(
        plain,
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=77;"},
            {"type": "text", "text": "Be kind.", **ephemeral},
            {"type": "text", "text": "Be brief."},
        ],
        messages=[
            {"role": "user", "content": [text, {"type": "text", "text": "there"}]},
            {"role": "user", "content": "How is it in Rome?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "abc"},
                    {"type": "redacted_thinking", "data": "xyz"},
                    {"type": "text", "text": "Let me see."},
                    {**USE, **ephemeral},
                ],
            },
            {"role": "user", "content": [failed, {"type": "text", "text": "Well?"}]},
        ],
        tools=[{**TOOLS[0], **ephemeral, "eager_input_streaming": True, "type": "custom"}],
        metadata={"user_id": "user_1_account__session_2"},
        cache_control={"type": "ephemeral"},
    )
    prompt = prompt_of(running)
    assert "cc_version" not in prompt and "Be kind.\n\nBe brief." in prompt
    assert "user: Hi\n\nthere\n\nHow is it in Rome?\n" in prompt
    assert "assistant: Let me see." in prompt and "Error: No net." in prompt
    assert prompt.endswith("user: Well?\nassistant:")
    assert running.requests[-1].continues == (("tool", "call_1"),)


CHOICES = [
    ({"type": "auto"}, None, ""),
    ({"type": "auto", "disable_parallel_tool_use": True}, None, ""),
    ({"type": "any"}, "tag ", "0,15"),
    ({"type": "any", "disable_parallel_tool_use": True}, "tag", "weather"),
    ({"type": "tool", "name": "now"}, "tag", "now"),
    ({"type": "none"}, None, ""),
]


@pytest.mark.parametrize(("choice", "begins", "has"), CHOICES)
def test_tool_choice(
    plain: Plain, running: FakeEngine, choice: dict[str, Any], begins: str | None, has: str
) -> None:
    says(running, CALL, CALL)
    message = answered(plain, tools=TOOLS, tool_choice=choice)
    grammar = running.requests[-1].sampling.grammar
    assert (grammar is None) == (begins is None)
    if grammar is not None and begins is not None:
        text = json.loads(grammar.text)["lark"]
        assert f"start: {begins}" in text and has in text
    calls = [block for block in message["content"] if block["type"] == "tool_use"]
    one = choice.get("disable_parallel_tool_use") or choice["type"] == "tool"
    assert len(calls) <= 1 if one else len(calls) == 2 * (choice["type"] != "none")
    assert ("<tool_call>" in prompt_of(running)) == (choice["type"] != "none")


def test_thoughts(thinking: Plain, engine: FakeEngine) -> None:
    thinks(engine, "<think>\nHm. So.\n</think>\n\nFine.")
    budget = {"type": "enabled", "budget_tokens": 2000}
    message = answered(thinking, thinking=budget)
    thought, text = message["content"]
    assert thought == {"type": "thinking", "thinking": "Hm. So.", "signature": "unsigned"}
    assert text == {"type": "text", "text": "Fine."}
    limited = engine.requests[-1].sampling.thinking
    assert isinstance(limited, Thinking) and limited.budget == 2000
    assert 0 < message["usage"]["output_tokens_details"]["thinking_tokens"] < 20
    found = events(thinking, thinking=budget)
    deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    kinds = list(dict.fromkeys(delta["type"] for delta in deltas))
    assert kinds == ["thinking_delta", "signature_delta", "text_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "Hm. So."
    answered(thinking, messages=[*ASK, {"role": "assistant", "content": [thought, text]}, *ASK])
    assert "<think>\nHm. So.\n</think>" in prompt_of(engine)
    hidden = answered(thinking, thinking={**budget, "display": "omitted"})["content"]
    assert hidden == [{**thought, "thinking": ""}, text]
    answered(thinking, thinking={"type": "disabled"}, output_config={"effort": "high"})
    assert prompt_of(engine).endswith("<think>\n\n</think>\n\n")


def test_a_model_that_does_not_think_keeps_any_budget(plain: Plain, running: FakeEngine) -> None:
    assert answered(plain, thinking={"type": "enabled", "budget_tokens": 31999})["content"]
    assert answered(plain, thinking={"type": "adaptive"}, output_config={"effort": "high"})


def test_structured_output(plain: Plain, running: FakeEngine) -> None:
    answered(plain, output_config={"format": {"type": "json_schema", "schema": CITY}})
    grammar = running.requests[-1].sampling.grammar
    assert grammar is not None and json.loads(grammar.text)["required"] == ["city"]


def test_what_agents_send_is_taken(plain: Plain, running: FakeEngine) -> None:
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"text": {"type": "string", "maxLength": 65536, "minLength": 1}},
        "required": ["text"],
        "additionalProperties": False,
    }
    nothing = {"type": "object", "properties": {}}
    tools = [
        {"name": f"mcp__server__tool_{n}", "description": "x" * 9000, "input_schema": s}
        for n, s in enumerate([schema, nothing] * 10)
    ]
    body = {
        **ASKED,
        "max_tokens": 32000,
        "system": [
            {"type": "text", "text": "x" * 40_000, "cache_control": {"type": "ephemeral"}}
        ] * 3,
        "tools": tools,
        "metadata": {"user_id": "user_" + "0" * 64 + "_account__session_" + "1" * 36},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "stream": True,
        "temperature": 1,
    }  # fmt: skip
    headers = {
        "Content-Type": "application/json",
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
        "x-api-key": "none",
    }
    connection = plain.connect()
    connection.request("POST", f"{PATH}?beta=true", json.dumps(body), headers)
    answer = connection.getresponse()
    told = json.loads(answer.read())  # all is well but its length
    assert answer.status == 400
    assert told["error"]["message"].startswith("messages: has")
    assert "tokens; at most 4095 can be served" in told["error"]["message"]
    del body["context_management"], body["max_tokens"], body["metadata"], body["stream"]
    del body["temperature"]
    connection.request("POST", f"{PATH}/count_tokens?beta=true", json.dumps(body), headers)
    answer = connection.getresponse()
    assert answer.status == 200 and json.loads(answer.read())["input_tokens"] > 300_000
    connection.close()


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages: has 0 entries; at least 1 is needed"),
    ({"messages": [{"role": "tool", "content": ""}]}, "messages.0.role: must be 'user'"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]},
     "messages.0.content.0: 'image' blocks are not served, only text, tool_use, tool_result"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document' blocks"),
    ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "content.0: has no type"),
    ({"messages": [{"role": "user", "content": [3]}]}, "messages.0.content.0: must be an object"),
    ({"messages": [{"role": "user", "content": [USE]}]},
     "messages.0.content.0: a turn of the user has no tool_use, only text, tool_result"),
    ({"messages": [{"role": "user", "content": [RESULT]}]},
     "messages.0.content.0.tool_use_id: there is no tool_use 'call_1' before it"),
    ({"messages": [*ASK, {"role": "assistant", "content": [USE]},
                   {"role": "user", "content": [{**RESULT, "content": [IMAGE]}]}]},
     "messages.2.content.0.content.0: 'image' blocks are not served, only text"),
    ({"messages": [*ASK, {"role": "assistant", "content": [{**USE, "input": "a"}]}]},
     "messages.1.content.0.input: must be an object"),
    ({"messages": [*ASK, {"role": "assistant", "content": "Well,"}]},
     "messages.1.role: is assistant in the last turn"),
    ({"system": [IMAGE]}, "system.0: 'image' blocks are not served, only text"),
    ({"max_tokens": None}, "max_tokens: is required"),
    ({"max_tokens": 0}, "max_tokens: must be at least 1"),
    ({"max_tokens": 10**400}, "max_tokens: "),
    ({"stop": ["a"]}, "stop: this server has no such field"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences: has 17 entries; at most 16"),
    ({"stop_sequences": [""]}, "stop_sequences: a stop string has 0 characters"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
     "tools.0: 'web_search_20250305' tools are not served"),
    ({"tools": [{"name": "f"}]}, "tools.0.input_schema: is required"),
    ({"tools": [{"name": "f", "input_schema": {"type": 7}}]}, "tools.0.input_schema: type: "),
    ({"tools": [{"name": "f g", "input_schema": {}}]}, "tools.0.name: "),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools.1.name: two tools are named 'weather'"),
    ({"tools": [{**TOOLS[0], "defer_loading": True}]}, "tools.0.defer_loading: must be False"),
    ({"tool_choice": {"type": "any"}}, "tool_choice: needs tools"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice: a name is for type tool"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}},
     "tool_choice.name: there is no tool 'x' among the tools"),
    ({"tool_choice": "auto"}, "tool_choice: must be an object"),
    ({"thinking": {"type": "enabled"}}, "thinking: budget_tokens is for type enabled"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "bad"}}}},
     "output_config.format.schema: is bad"),
    ({"metadata": {"user_id": 5}}, "metadata.user_id: must be a string"),
    ({"metadata": {"user_id": "x" * 513}}, "metadata.user_id: has more than 512 characters"),
    ({"service_tier": "flex"}, "service_tier: must be 'auto' or 'standard_only'"),
    ({"container": "c"}, "container: this server has no such field"),
    ({"mcp_servers": []}, "mcp_servers: this server has no such field"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
     "context_management.edits.0.type: must be 'clear_thinking_20251015'"),
]  # fmt: skip


@pytest.mark.promise(16)
@pytest.mark.parametrize(("fields", "says_so"), WRONG, ids=range(len(WRONG)))
def test_a_field_that_is_wrong_is_named(
    refusing: tuple[Plain, FakeEngine], fields: dict[str, Any], says_so: str
) -> None:
    plain, engine = refusing
    status, answer, _ = plain.call("POST", PATH, {**ASKED, **fields})
    assert (status, answer["type"]) == (400, "error")
    assert answer["error"]["type"] == "invalid_request_error"
    assert says_so in answer["error"]["message"]
    assert not engine.requests and not engine.live


def test_other_refusals_have_the_same_form(shared: Plain) -> None:
    for method, path, body, status, kind in (
        ("POST", PATH, b"{", 400, "invalid_request_error"),
        ("POST", PATH, b'{"messages": "\\ud800"}', 400, "invalid_request_error"),
        ("GET", PATH, None, 405, "invalid_request_error"),
        ("POST", f"{PATH}/batches", {}, 404, "not_found_error"),
        ("POST", f"{PATH}/count_tokens", {"messages": ASK, "model": "x"}, 404, "not_found_error"),
        ("POST", PATH, b" " * (64 << 20), 413, "request_too_large"),
    ):
        got, answer, _ = shared.call(method, path, body)
        assert (got, answer["type"], answer["error"]["type"]) == (status, "error", kind), path


def test_another_version_is_refused(client: anthropic.Anthropic) -> None:
    other = {"anthropic-version": "2023-01-01"}
    with pytest.raises(
        anthropic.BadRequestError, match="anthropic-version: must be 2023-06-01 or 2026"
    ):
        client.messages.create(**ASKED, extra_headers=other)


def test_targets_and_programs_come_in_headers(
    client: anthropic.Anthropic, running: FakeEngine
) -> None:
    headers = {"x-slo-ttft-ms": "500", "x-slo-tpot-ms": "100", "x-program-id": "run"}
    made = client.messages.with_raw_response.create(**ASKED, extra_headers=headers)
    assert made.headers["x-slo-ttft-ms"] == "500" and "ttft;dur=" in made.headers["server-timing"]
    assert (running.requests[-1].slo, running.requests[-1].program) == (
        SLO(ttft=0.5, tbt=0.1),
        Program("run"),
    )


def test_targets_that_are_given_up_are_told_with_the_ping(plain: Plain, engine: FakeEngine) -> None:
    engine.gives_up = True
    engine.run()
    found = events(plain, slo={"ttft_ms": 1})
    (ping,) = [event for event in found if event["type"] == "ping"]
    assert ping == {"type": "ping", "slo": {"expected": "missed"}}


def test_a_failure_ends_a_stream_with_an_error(plain: Plain, engine: FakeEngine) -> None:
    connection = plain.connect()
    body = json.dumps({**ASKED, "stream": True})
    connection.request("POST", PATH, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    engine.wait(lambda: engine.live)
    engine.step()
    engine.fail(RuntimeError("broken"))
    last = answer.read().decode().split("\n\n")[-2]
    name, data = last.split("\n")
    assert name == "event: error"
    error = json.loads(data.removeprefix("data: "))
    assert (error["type"], error["error"]["type"]) == ("error", "api_error")
    connection.close()


def test_hanging_up_cancels(plain: Plain, engine: FakeEngine) -> None:
    for stream in (False, True):
        connection = plain.connect()
        body = json.dumps({**ASKED, "stream": stream, "tools": TOOLS})
        connection.request("POST", PATH, body, {"Content-Type": "application/json"})
        engine.wait(lambda: engine.live)
        connection.close()
        engine.wait(lambda: not engine.live)
