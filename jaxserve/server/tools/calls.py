"""Tools, and the parts of a text with tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxserve.sched.request import InvalidRequest
from jaxserve.server.tools.schema_check import schema_problem

MAX_CALLS = 16
"""Most calls that a grammar allows in one text."""
NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a tool without arguments."""
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True)
class Tool:
    """A function that the model may ask for.

    Attributes:
        name: letters, digits, _ and -.
        description: what it does; may be empty.
        parameters: JSON Schema of its arguments, which are an object.
        strict: whether its arguments must match the schema, even if calls are not forced.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    strict: bool = False


@dataclass(frozen=True)
class Content:
    """Text that is not a call."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text that the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """The beginning of a call of this tool."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """More of the JSON arguments of the last call."""

    text: str


Piece = Content | Reasoning | CallBegin | Arguments


@dataclass
class Call:
    """A whole call; arguments: JSON."""

    name: str
    arguments: str = ""


@dataclass
class Said:
    """All parts of a text.

    Attributes:
        content: text that is neither a thought nor a call.
        reasoning: thoughts.
        calls: calls, in order.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


def whole(pieces: Iterable[Piece]) -> Said:
    """The pieces put together."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[Call] = []
    for piece in pieces:
        if isinstance(piece, Content):
            content.append(piece.text)
        elif isinstance(piece, Reasoning):
            reasoning.append(piece.text)
        elif isinstance(piece, CallBegin):
            calls.append(Call(piece.name))
        else:
            calls[-1].arguments += piece.text
    return Said("".join(content), "".join(reasoning), calls)


def objects_only(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of arguments, which are an object even if the schema does not say so."""
    return {"type": "object", **schema}


def flat(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same schema without `$ref` and `allOf` around its properties, if those lead to objects
    with different properties; else the schema as it is."""
    if not schema.keys() & _AROUND:
        return schema
    properties: dict[str, Any] = {}
    required: list[str] = []
    open_ended: list[Any] = []  # of each schema with properties
    left: list[Any] = [schema]
    for _ in range(_MOST_AROUND):
        if not left:
            break
        part = left.pop()
        if not isinstance(part, Mapping) or part.keys() - _OF_OBJECTS - _AROUND:
            return schema
        own = part.get("properties", {})
        if own.keys() & properties.keys():
            return schema
        if own or "additionalProperties" in part:
            open_ended.append(part.get("additionalProperties", True))
        properties |= own
        required += part.get("required", ())
        left += part.get("allOf", ())
        if "$ref" in part:
            left.append(_named(schema, part["$ref"]))
    if left or (len(open_ended) > 1 and not all(value is True for value in open_ended)):
        return schema
    merged = {name: value for name, value in schema.items() if name not in _AROUND}
    if open_ended:
        merged |= {"properties": properties, "additionalProperties": open_ended[0]}
    return {**merged, "required": required}


_AROUND = {"$ref", "allOf"}
_OF_OBJECTS = {
    *("type", "properties", "required", "additionalProperties"),
    *("title", "description", "$defs", "definitions"),
}
_MOST_AROUND = 64  # schemas; references may be circular


def _named(schema: Mapping[str, Any], ref: str) -> Any:
    """The schema at `#/$defs/NAME`; None if there is none, or the reference has another form."""
    begin, where, name = [*ref.split("/", 2), "", ""][:3]
    known = begin == "#" and where in ("$defs", "definitions")
    return schema.get(where, {}).get(name) if known else None


def as_openai(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The tools in OpenAI's form, which chat templates read."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": dict(tool.parameters),
            },
        }
        for tool in tools
    ]


_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def from_openai(tools: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """The inverse of `as_openai`. Raises InvalidRequest, which names the first invalid tool."""
    return [_tool(f"tools.{place}", tool) for place, tool in enumerate(tools)]


def _tool(where: str, tool: Mapping[str, Any]) -> Tool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type") != "function":
        raise InvalidRequest(where, 'must be {"type": "function", "function": {...}}')
    name, about = function.get("name"), function.get("description") or ""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(f"{where}.function.name", f"must match {_NAME.pattern}")
    parameters_given = function.get("parameters")
    parameters = NOTHING if parameters_given is None else parameters_given
    problem = (
        schema_problem(parameters) if isinstance(parameters, Mapping) else ("", "is not a schema")
    )
    if problem is not None:
        raise InvalidRequest(f"{where}.function.parameters", ": ".join(filter(None, problem)))
    return Tool(name, str(about), parameters, bool(function.get("strict")))


_HALF = re.compile("[\ud800-\udfff]")


def compact(value: Any, *, finite: bool = False) -> str:
    """The value as JSON in the style of chat templates: characters are not escaped, except half a
    surrogate pair. finite: whether to raise ValueError for numbers that are not finite."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=not finite)
    return _HALF.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def special_tokens(
    markers: Iterable[str],
    encode: Callable[..., Sequence[int]],
    decode: Callable[[Sequence[int]], str],
) -> dict[str, int]:
    """Ids of the markers that are special tokens of the model. By default, such tokens have no
    text.

    Args:
        markers: texts around calls or thoughts.
        encode: the tokenizer's.
        decode: the tokenizer's.
    """
    encoded = {marker: encode(marker, special=False) for marker in markers}
    return {marker: ids[0] for marker, ids in encoded.items() if len(ids) == 1 and not decode(ids)}
