"""Chats with a model that thinks, over HTTP."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from jaxserve.sched.request import Thinking
from jaxserve.server.requests.templates.chat_template import ChatTemplate
from jaxserve.server.server import Server
from tests.server.fake_engine import FIRST, FakeEngine
from tests.server.http.conftest import SETTINGS, Plain

ASK = [{"role": "user", "content": "How is it in Rome?"}]
TOOLS = [{"type": "function", "function": {"name": "now"}}]
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
CHATS = "/v1/chat/completions"
QWEN = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if tools %}{{- tools | tojson + ' as <tool_call>' }}{%- endif %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[Server]:
    template = ChatTemplate(QWEN)
    with Server(engine, http=dataclasses.replace(SETTINGS, template=template)) as server:
        yield server
    template.close()


def says(engine: FakeEngine, text: str, size: int = 3) -> None:
    """From now on, in pieces, and that is all."""
    texts = [text[at : at + size] for at in range(0, len(text), size)]
    engine.text, engine.ends_at = lambda k: texts[k], len(texts)
    engine.token_bytes = lambda token: texts[token - FIRST].encode()  # type: ignore[method-assign]


def chat(plain: Plain, **fields: Any) -> dict[str, Any]:
    status, body, _ = plain.call("POST", CHATS, {"messages": ASK, **fields})
    assert status == 200, body
    choice: dict[str, Any] = body["choices"][0]
    return choice


def test_whole(plain: Plain, running: FakeEngine) -> None:
    says(running, "<think>\nHm. So.\n</think>\n\nFine.")
    choice = chat(plain)
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["reasoning_content"] == "Hm. So."
    assert choice["message"]["content"] == "Fine."
    choice = chat(plain, chat_template_kwargs={"enable_thinking": False})
    assert "reasoning_content" not in choice["message"]
    assert choice["message"]["content"].startswith("<think>")
    says(running, "Fine.")
    assert chat(plain)["message"]["content"] == "Fine."


def test_with_tools(plain: Plain, running: FakeEngine) -> None:
    says(running, f"<think>Not {CALL}</think>Now: {CALL}")
    choice = chat(plain, tools=TOOLS)
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["reasoning_content"] == f"Not {CALL}" and message["content"] == "Now:"
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["now"]


def test_streamed(plain: Plain, running: FakeEngine) -> None:
    says(running, "<think>\nHm. So.\n</think>\n\nFine. ")
    deltas = streamed(plain, n=2)
    assert len(deltas) == 2
    for found in deltas.values():
        assert found[0] == {"role": "assistant", "content": None}
        assert "".join(each.get("reasoning_content", "") for each in found) == "Hm. So."
        assert "".join(each.get("content") or "" for each in found) == "Fine. "
        assert not any("<" in str(each) for each in found)
        first_content = next(n for n, each in enumerate(found) if each.get("content"))
        assert not any("reasoning_content" in each for each in found[first_content + 1 :])


def streamed(plain: Plain, **fields: Any) -> dict[int, list[dict[str, Any]]]:
    connection = plain.connect()
    body = json.dumps({"messages": ASK, "stream": True, **fields})
    connection.request("POST", CHATS, body, {"Content-Type": "application/json"})
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    found: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                found.setdefault(choice["index"], []).append(choice["delta"])
    return found


def test_usage_counts_thoughts(plain: Plain, running: FakeEngine) -> None:
    says(running, "<think>Hm.</think>Fine.", 1)
    body = {"messages": ASK, "n": 2}
    usage = plain.call("POST", CHATS, body)[1]["usage"]
    assert usage["completion_tokens"] == 2 * len("<think>Hm.</think>Fine.")
    details = usage["completion_tokens_details"]
    assert details["reasoning_tokens"] == 2 * len("<think>Hm.</think>")
    says(running, "Fine.", 1)
    usage = plain.call("POST", CHATS, body)[1]["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0


def test_what_the_engine_gets(plain: Plain, running: FakeEngine) -> None:
    says(running, "Fine.")
    chat(plain)
    assert running.requests[-1].sampling.thinking is None, "it would cost, and change nothing"
    close = tuple(map(ord, "\n</think>\n\n"))
    for fields, budget in (
        ({"thinking_token_budget": 7}, 7),
        ({"thinking_token_budget": 0, "reasoning_effort": "high"}, 0),
        ({"response_format": {"type": "json_object"}}, None),
        ({"tools": TOOLS, "tool_choice": "required", "thinking_token_budget": 9}, 9),
    ):
        chat(plain, **fields)
        asked = running.requests[-1].sampling
        ends = close if budget is not None else ()
        assert asked.thinking == Thinking(("</think>",), ("<think>",), ends, budget)
    chat(plain, thinking_token_budget=-1)
    assert running.requests[-1].sampling.thinking is None
    off = {"enable_thinking": False}
    chat(plain, thinking_token_budget=3, chat_template_kwargs=off)
    assert running.requests[-1].sampling.thinking is None
    chat(plain, response_format={"type": "json_object"}, chat_template_kwargs=off)
    assert running.requests[-1].sampling.thinking is None


def prompt_of(engine: FakeEngine) -> str:
    return "".join(map(chr, engine.requests[-1].prompt))


def test_efforts_reach_a_switch(plain: Plain, running: FakeEngine) -> None:
    says(running, "Fine.")
    for fields, thinks in (
        ({}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "low"}, True),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, True),
    ):
        chat(plain, **fields)
        assert prompt_of(running).endswith("</think>\n\n") is not thinks
        assert running.requests[-1].sampling.thinking is None


OTHERS = [
    ("{{ reasoning_effort or 'medium' }}<think>", {"high": "high<think>", "": "medium<think>"}),
    ("{{ thinking }}", {"high": "True", "none": "False"}),
    ("plain", {"high": "plain", "none": "plain"}),
]


@pytest.mark.parametrize(("source", "prompts"), OTHERS)
def test_efforts_of_other_templates(
    engine: FakeEngine, source: str, prompts: dict[str, str]
) -> None:
    with over(engine, source) as plain:
        says(engine.run(), "Fine.")
        for effort, prompt in prompts.items():
            chat(plain, **({"reasoning_effort": effort} if effort else {}))
            assert prompt_of(engine) == prompt
            assert engine.requests[-1].sampling.thinking is None


@contextmanager
def over(engine: FakeEngine, source: str | None, name: str = "") -> Iterator[Plain]:
    """A server with another template."""
    template = ChatTemplate(source, reasoning_format=name)
    with Server(engine, http=dataclasses.replace(SETTINGS, template=template)) as server:
        yield Plain(server)
    template.close()


def test_no_effort_is_no_budget_where_no_prompt_says_it(engine: FakeEngine) -> None:
    with over(engine, "assistant<think>\n") as plain:
        says(engine.run(), "Hm.\n</think>\n\nFine.")
        message = chat(plain, reasoning_effort="none")["message"]
        assert message["reasoning_content"] == "Hm." and message["content"] == "Fine."
        close = tuple(map(ord, "\n</think>\n\n"))
        assert engine.requests[-1].sampling.thinking == Thinking(("</think>",), (), close, 0)
        chat(plain, reasoning_effort="none", thinking_token_budget=5)
        thinking = engine.requests[-1].sampling.thinking
        assert thinking is not None and thinking.budget == 5


def test_gpt_oss(engine: FakeEngine) -> None:
    source = "Reasoning: {{ reasoning_effort }}<|channel|>analysis{{ messages[0].thinking }}"
    with over(engine, source + "<|start|>assistant") as plain:
        text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final"
        says(engine.run(), text + "<|message|>Fine.")
        before = {"role": "assistant", "content": "A", "reasoning_content": "B"}
        choice = chat(plain, messages=[before], reasoning_effort="low")
        assert choice["message"]["reasoning_content"] == "Hm."
        assert choice["message"]["content"] == "Fine."
        assert "Reasoning: low<|channel|>analysisB" in prompt_of(engine)
        chat(plain, response_format={"type": "json_object"})
        thinking = engine.requests[-1].sampling.thinking
        assert thinking is not None and thinking.ends[0] == "<|channel|>final<|message|>"


def test_gpt_oss_calls(engine: FakeEngine) -> None:
    analysis, role = "<|channel|>analysis<|message|>", "<|start|>assistant"
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    with over(engine, "{{ tools }}<|channel|>analysis" + role) as plain:
        says(engine.run(), f"{analysis}Hm.<|end|>{role}{call}")
        for fields in ({}, {"tool_choice": "required"}):
            choice = chat(plain, tools=TOOLS, thinking_token_budget=9, **fields)
            assert choice["finish_reason"] == "tool_calls"
            message = choice["message"]
            assert (message["reasoning_content"], message["content"]) == ("Hm.", None)
            assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
            thinking = engine.requests[-1].sampling.thinking
            assert thinking is not None
            assert thinking.ends == ((role,) if fields else (*ANSWERS, "to=functions."))


ANSWERS = (
    "<|channel|>final<|message|>",
    "<|channel|>final <|constrain|>json<|message|>",
)


def test_history(plain: Plain, running: FakeEngine) -> None:
    says(running, "Fine.")
    said = {"role": "assistant", "content": "Yes."}
    for name in ("reasoning_content", "reasoning"):
        chat(plain, messages=[*ASK, {**said, name: "Hm."}, *ASK])
        assert "<think>\nHm.\n</think>\n\nYes.<|im_end|>" in prompt_of(running)
    chat(plain, messages=[*ASK, {"role": "assistant", "reasoning_content": "Hm."}, *ASK])
    assert "Hm." in prompt_of(running)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"thinking_token_budget": -2}, "thinking_token_budget", "at least 0, or -1"),
    ({"thinking_token_budget": 2**40}, "thinking_token_budget", "2147483647"),
    ({"thinking_token_budget": "9"}, "thinking_token_budget", "whole number"),
    ({"reasoning_effort": "lots"}, "reasoning_effort", "'high'"),
    ({"messages": [{**ASK[0], "reasoning_content": "b"}]}, "messages.0", "only an assistant has"),
    ({"messages": [{"role": "assistant", "reasoning": 3}]}, "messages.0.reasoning", "string"),
]


def test_what_is_wrong_is_refused(plain: Plain, engine: FakeEngine) -> None:
    for fields, where, problem in REFUSED:
        status, body, _ = plain.call("POST", CHATS, {"messages": ASK, **fields})
        assert status == 400 and problem in body["error"]["message"], body
        assert where in (body["error"]["param"] or ""), body
    assert not engine.requests


@pytest.mark.parametrize(("source", "name"), [("plain", ""), ("<think>", "none"), (None, "")])
def test_a_budget_of_nothing_is_refused(engine: FakeEngine, source: str | None, name: str) -> None:
    with over(engine, source, name) as plain:
        body = {"messages": ASK, "thinking_token_budget": 5}
        status, answer, _ = plain.call("POST", CHATS, body)
        assert status == 400 and answer["error"]["param"] == "thinking_token_budget"
        says(engine.run(), "<think>Hm.</think>Fine.")
        message = chat(plain)["message"]
        assert message["content"] == "<think>Hm.</think>Fine." and len(message) == 3
        assert engine.requests[-1].sampling.shown_token_ids == ()


def test_a_format_of_ones_own(engine: FakeEngine) -> None:
    with over(engine, None, "mistral") as plain:
        says(engine.run(), "[THINK]Hm.[/THINK]Fine.")
        message = chat(plain)["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Fine.")
