"""Turns that templates lose or refuse."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.server.requests.templates.chat_template import ChatTemplate
from jaxserve.server.tools.calls import Tool

EACH = "{% for m in messages %}"
ALL = f"{EACH}<{{{{ m.role }}}}>{{{{ m.content }}}}{{% endfor %}}"
"""Of any role, as it is given: ChatML, as SmolLM2 has it."""
LATER = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}{% endif %}" + EACH + ""
    "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "<{{ m.role }}>{{ m.content }}{% elif m.role == 'assistant' %}<assistant>{{ m.content }}"
    "{% elif m.role == 'tool' %}<tool>{{ m.content }}{% endif %}{% endfor %}"
)
"""What it does not know is lost: Qwen 3."""
FIRST = (
    EACH + "{% if m.role == 'system' %}{% if not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{% elif m.role not in ['user', 'assistant'] %}{{ raise_exception('Unexpected role') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
"""One system message, and no other role: Qwen 3.5."""
OWN = (
    "{% if messages[0].role in ['developer', 'system'] %}<developer>{{ messages[0].content }}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role in ['user', 'assistant'] %}<{{ m.role }}>{{ m.content }}"
    "{% endif %}{% endfor %}"
)
"""It has the role, at the beginning: gpt-oss."""
ANY = f"{{# 'developer' #}}{ALL}"
"""It has the role, anywhere."""


def chat(turns: str) -> list[dict[str, str]]:
    roles = {"S": "system", "D": "developer", "U": "user", "A": "assistant"}
    return [{"role": roles[turn[0]], "content": turn} for turn in turns.split()]


PLACES = [
    (LATER, "S1 U1", "<system>S1<user>U1"),
    (LATER, "D1 U1", "<system>D1<user>U1"),
    (LATER, "S1 D1 U1", "<system>S1\n\nD1<user>U1"),
    (LATER, "D1 D2 U1", "<system>D1\n\nD2<user>U1"),
    (LATER, "S1 S2 U1", "<system>S1<system>S2<user>U1"),
    (LATER, "S1 U1 A1 D1 U2", "<system>S1<user>U1<assistant>A1<system>D1<user>U2"),
    (LATER, "U1 D1", "<user>U1<system>D1"),
    (FIRST, "D1 U1", "<system>D1<user>U1"),
    (FIRST, "S1 D1 U1", "<system>S1\n\nD1<user>U1"),
    (FIRST, "S1 S2 U1", "<system>S1\n\nS2<user>U1"),
    (FIRST, "D1 U1 A1 D2 U2", "<system>D1\n\nD2<user>U1<assistant>A1<user>U2"),
    (FIRST, "U1 D1", "<system>D1<user>U1"),
    (ALL, "D1 U1", "<system>D1<user>U1"),
    (ALL, "S1 D1 U1", "<system>S1\n\nD1<user>U1"),
    (OWN, "D1 U1", "<developer>D1<user>U1"),
    (OWN, "S1 D1 U1", "<developer>S1\n\nD1<user>U1"),
    (OWN, "D1 U1 D2", "<developer>D1\n\nD2<user>U1"),
    (ANY, "S1 D1 U1 D2", "<system>S1<developer>D1<user>U1<developer>D2"),
]


@pytest.fixture(scope="module")
def templates() -> Any:
    made = {source: ChatTemplate(source) for source in (LATER, FIRST, ALL, OWN, ANY)}
    yield made
    for each in made.values():
        each.close()


@pytest.mark.promise(41)
@pytest.mark.parametrize(("source", "turns", "text"), PLACES)
def test_developers_are_heard(
    templates: dict[str, ChatTemplate], source: str, turns: str, text: str
) -> None:
    assert templates[source].render(chat(turns)) == text


CALLS = (
    EACH + "{% for c in m.tool_calls or [] %}[{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}]{% endfor %}"
    "{% if m.role != 'tool' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
"""It has calls, but not what came of them."""
REFUSES = (
    EACH + "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
STRICT = EACH + "{% if m.tool_calls %}{{ raise_exception('no calls') }}{% endif %}{% endfor %}"


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}


WRITTEN = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


@pytest.mark.promise(41)
@pytest.mark.parametrize(
    ("source", "text"),
    [
        (ALL, f"<user>U1<assistant>{WRITTEN}<user>The function f returned:\n2<user>U2"),
        (LATER, f"<user>U1<assistant>{WRITTEN}<user>The function f returned:\n2<user>U2"),
        (CALLS, '<user>U1[f {"x": 1}]<assistant><user>The function f returned:\n2<user>U2'),
    ],
)
def test_calls_without_tools_are_told(source: str, text: str) -> None:
    turns = [
        *chat("U1"),
        {"role": "assistant", "content": "", "tool_calls": [call("f", '{"x": 1}')]},
        {"role": "tool", "tool_call_id": "f", "content": "2"},
        *chat("U2"),
    ]
    assert ChatTemplate(source).render(turns) == text


def test_results_of_several_calls_are_one_turn() -> None:
    """Roles alternate, as some templates demand."""
    calls = [call("f", ""), call("g", '{"a": ')]
    turns = [
        *chat("U1"),
        {"role": "assistant", "content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "f", "content": "2"},
        {"role": "tool", "tool_call_id": "g", "content": "3"},
    ]
    for tools in (None, [Tool("f")]):
        text = ChatTemplate(REFUSES if tools is None else ALL).render(turns, tools=tools)
        assert '{"name": "f", "arguments": {}}' in text
        assert '{"name": "g", "arguments": {"": "{\\"a\\": "}}' in text
        assert text.endswith("<user>The function f returned:\n2\nThe function g returned:\n3")


def test_a_template_that_refuses_calls_says_so() -> None:
    turns = [{"role": "assistant", "content": "", "tool_calls": [call("f", "")]}]
    with pytest.raises(ValueError, match="no calls"):
        ChatTemplate(STRICT).render(turns)
