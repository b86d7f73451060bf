"""What a tool is, and what a text with calls of tools is made of."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_CALLS = 16
"""Calls that a grammar has room for in one text."""
NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a tool that takes nothing."""
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True)
class Tool:
    """A function that the model may ask for.

    Attributes:
        name: letters, digits, _ and -.
        description: what it does; may be empty.
        parameters: JSON Schema of its arguments, which are an object.
        strict: whether its arguments have to be valid, even if nobody forces a call.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    strict: bool = False


@dataclass(frozen=True)
class Content:
    """Text that is no call."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """The next call, of this tool."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """More of the arguments of the last call, JSON."""

    text: str


Piece = Content | CallBegin | Arguments


@dataclass
class Call:
    """A whole call; arguments: JSON."""

    name: str
    arguments: str = ""


def whole(pieces: Iterable[Piece]) -> tuple[str, list[Call]]:
    """The content and the calls that pieces make."""
    content: list[str] = []
    calls: list[Call] = []
    for piece in pieces:
        if isinstance(piece, Content):
            content.append(piece.text)
        elif isinstance(piece, CallBegin):
            calls.append(Call(piece.name))
        else:
            calls[-1].arguments += piece.text
    return "".join(content), calls


def objects_only(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of arguments, which are an object even where it does not say so."""
    return {"type": "object", **schema}


def as_openai(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The tools as OpenAI has them, which is what chat templates read."""
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


def compact(value: Any) -> str:
    """The value as JSON, as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)
