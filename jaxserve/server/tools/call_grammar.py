"""The grammar of a text with tool calls, in the model's format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.sched.request import Grammar, GrammarKind, InvalidRequest
from jaxserve.server.tools.calls import ANY_OBJECT, Tool
from jaxserve.server.tools.registry import ToolFormat
from jaxserve.server.tools.rules import Rules, held_schema, literal


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
        forced: whether the text is calls and nothing else. If not, it may also be any text without
            a call, and only the arguments of strict tools are held to their schemas.
        parallel: whether there may be several calls.
        special: ids of the format's markers that are special tokens.
        otherwise: grammar of a text without calls; None for any text. With it, a text with calls
            has no other content.

    Raises:
        InvalidRequest: If the grammar gets too long, the format cannot hold a schema, or
            `otherwise` cannot be part of a grammar.
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


def _part(rules: Rules, grammar: Grammar) -> str:
    """The grammar as a part of another grammar. Raises InvalidRequest."""
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
    """The grammar's schema. Raises InvalidRequest."""
    try:
        schema: Any = json.loads(grammar.text)
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(grammar.field_name, "must be a JSON Schema")
    return schema if isinstance(schema, dict) else {} if schema else {"not": {}}
