"""The grammar of text with tool calls, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.engine.text.json_schemas import closed, relaxed
from jaxserve.sched.request import Grammar
from jaxserve.server.tools.calls import ANY_OBJECT, Tool, objects_only


class Rules:
    """Collects the rules of a grammar.

    Args:
        special: ids of the markers that are special tokens of the model.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._lines: list[str] = []
        self._schemas: dict[str, Mapping[str, Any]] = {}

    def marker(self, text: str) -> str:
        """A marker: its special token, if there is one, else its text."""
        token = self.token(text)
        return literal(text) if token is None else token

    def token(self, text: str) -> str | None:
        """The special token of a marker; None if it is plain text."""
        return f"<[{self._special[text]}]>" if text in self._special else None

    def schema(self, schema: Mapping[str, Any]) -> str:
        """JSON that matches the schema."""
        name = f"s{len(self._schemas)}"
        self._schemas[name] = schema
        return f"@{name}"

    def add(self, name: str, body: str) -> str:
        """Adds a rule. name: with [lazy], the rule ends as soon as it can. Returns the bare
        name."""
        self._lines.append(f"{name}: {body}")
        return name.partition("[")[0]

    def number(self) -> int:
        """A new number, for unique names of rules."""
        return len(self._lines)

    def grammar(self) -> Grammar:
        """The whole grammar. Raises InvalidRequest if it is too long."""
        return Grammar.lark("\n".join(["%llguidance {}", *self._lines]), self._schemas)


def literal(text: str) -> str:
    """Exactly this text."""
    return json.dumps(text, ensure_ascii=False)


def held_schema(tool: Tool, tools: Sequence[Tool], *, forced: bool) -> Mapping[str, Any]:
    """The schema that the grammar holds a tool's arguments to, if these tools may be called. As in
    OpenAI's API, it allows only named properties, unless the schema itself allows others."""
    if not (forced or tool.strict):
        return ANY_OBJECT
    held: Mapping[str, Any] = tool.parameters
    if len(tools) > 1 and not tool.strict:  # another tool may be the one that is called
        held = relaxed(held)[0]
    return closed(held)


def unenforced(tools: Sequence[Tool], *, forced: bool) -> list[tuple[int, str]]:
    """The keywords that forced calls are not held to: the tool's index, and the place in its
    schema."""
    if not forced or len(tools) == 1:
        return []
    return [
        (place, where)
        for place, tool in enumerate(tools)
        if not tool.strict
        for where in relaxed(tool.parameters)[1]
    ]


def schema_of(tool: Tool) -> Mapping[str, Any]:
    """The schema that a tool's arguments must match."""
    return objects_only(tool.parameters)
