"""Chats with a model that thinks, over HTTP."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve.server.requests.templates.chat_template import ChatTemplate
from jaxserve.server.server import Server
from tests.server.fake_engine import FakeEngine
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
