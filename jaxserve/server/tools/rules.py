"""The grammar that text with calls of tools is held to, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.engine.text.json_schemas import closed, relaxed
from jaxserve.sched.request import Grammar
from jaxserve.server.tools.calls import ANY_OBJECT, Tool, objects_only


class Rules:
    """Rules while they are written.

    Args:
        special: ids of the markers that are special tokens of the model.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._lines: list[str] = []
        self._schemas: dict[str, Mapping[str, Any]] = {}

    def marker(self, text: str) -> str:
        """A marker: the token, where it is one."""
        token = self.token(text)
        return literal(text) if token is None else token

    def token(self, text: str) -> str | None:
        """The special token that a marker is; None where it is text."""
        return f"<[{self._special[text]}]>" if text in self._special else None

    def schema(self, schema: Mapping[str, Any]) -> str:
        """JSON that is valid for the schema."""
        name = f"s{len(self._schemas)}"
        self._schemas[name] = schema
        return f"@{name}"

    def add(self, name: str, body: str) -> str:
        """A rule. name: with [lazy] it ends as soon as it can. Returns the name alone."""
        self._lines.append(f"{name}: {body}")
        return name.partition("[")[0]

    def number(self) -> int:
        """For names of rules that differ."""
        return len(self._lines)

    def grammar(self) -> Grammar:
        """All of it. Raises InvalidRequest if it is too long."""
        return Grammar.lark("\n".join(["%llguidance {}", *self._lines]), self._schemas)


def literal(text: str) -> str:
    """Exactly this text."""
    return json.dumps(text, ensure_ascii=False)


def held_schema(tool: Tool, tools: Sequence[Tool], *, forced: bool) -> Mapping[str, Any]:
    """What its arguments are held to, where these tools may be called: as OpenAI has it, they have
    no properties that are not named, unless the schema itself says so."""
    if not (forced or tool.strict):
        return ANY_OBJECT
    held: Mapping[str, Any] = tool.parameters
    if len(tools) > 1 and not tool.strict:  # it need not be the one that is called
        held = relaxed(held)[0]
    return closed(held)


def unenforced(tools: Sequence[Tool], *, forced: bool) -> list[tuple[int, str]]:
    """What those that are forced say, and are not held to: the tool's place, and that in its
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
    """What a tool's arguments have to be valid for."""
    return objects_only(tool.parameters)
