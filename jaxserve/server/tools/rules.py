"""The grammar that text with calls of tools is held to, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxserve.engine.text.json_schemas import closed, relaxed
from jaxserve.sched.request import Grammar, GrammarKind, InvalidRequest
from jaxserve.server.tools.calls import ANY_OBJECT, Tool, objects_only

if TYPE_CHECKING:
    from jaxserve.server.tools.registry import ToolFormat


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


def call_grammar(
    form: ToolFormat,
    tools: Sequence[Tool],
    *,
    forced: bool,
    parallel: bool,
    special: Mapping[str, int],
    otherwise: Grammar | None = None,
) -> Grammar:
    """The grammar of a text with calls.

    Args:
        form: how calls are written.
        tools: those that may be called.
        forced: whether the text is calls and nothing else. If not, it may be any text without a
            call, too, and only the arguments of strict tools are held to their schemas.
        parallel: whether there may be several calls.
        special: ids of the format's markers that are special tokens.
        otherwise: what a text without calls is; None for any. Then one with calls is nothing else.

    Raises:
        InvalidRequest: the grammar gets too long, the format cannot hold a schema, or `otherwise`
            cannot be a part of a grammar.
    """
    if not (forced or form.holds_some):
        problem = f"in the model's format, {form.name}, only calls that are required can be held"
        for place in (place for place, tool in enumerate(tools) if tool.strict):
            raise InvalidRequest(f"tools.{place}.function.strict", problem)
        assert otherwise is not None
        raise InvalidRequest(otherwise.field_name, f"cannot stand beside tools: {problem}")
    rules = Rules(special)
    calls = [
        rules.add(f"call_{place}", form.call(rules, tool, place))
        for place, tool in enumerate(
            Tool(tool.name, tool.description, held_schema(tool, tools, forced=forced))
            for tool in tools
        )
    ]
    rules.add("call", " | ".join(calls))
    if otherwise is not None and not forced:
        if form.plain_json and otherwise.kind in (GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA):
            problem = f"cannot stand beside tools: in the model's format, {form.name}"
            raise InvalidRequest(otherwise.field_name, f"{problem}, calls are plain JSON, too")
        rules.add("start", f"{form.held(rules, parallel)} | {_part(rules, otherwise)}")
    else:
        rules.add("start", (form.held if forced else form.free)(rules, parallel))
    return rules.grammar()


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


def _part(rules: Rules, grammar: Grammar) -> str:
    """A grammar as a part of another one. Raises InvalidRequest."""
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return rules.schema(ANY_OBJECT)
        case GrammarKind.JSON_SCHEMA:
            return rules.schema(_read(grammar))
        case GrammarKind.CHOICE:
            return " | ".join(map(literal, json.loads(grammar.text)))
        case _:
            problem = "cannot stand beside tools; send one of them, or tool_choice: none"
            raise InvalidRequest(grammar.field_name, problem)


def _read(grammar: Grammar) -> Mapping[str, Any]:
    """Its schema. Raises InvalidRequest."""
    try:
        schema: Any = json.loads(grammar.text)
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(grammar.field_name, "must be a JSON Schema")
    return schema if isinstance(schema, dict) else {} if schema else {"not": {}}


def schema_of(tool: Tool) -> Mapping[str, Any]:
    """What a tool's arguments have to be valid for."""
    return objects_only(tool.parameters)
