"""Checks that a tool's parameters are a JSON Schema of an object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MAX_DEPTH = 32
"""Most levels of nested schemas."""
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_ONE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_SEVERAL = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def schema_problem(schema: Mapping[str, Any]) -> tuple[str, str] | None:
    """Where and why the value is not a valid schema; None if it is valid. Unknown keywords may have
    any value: only a grammar has to know them."""
    kind = schema.get("type", "object")
    if kind != "object":
        return "type", f"must be 'object', as arguments have names; got {kind!r:.80}"
    level: list[tuple[str, Any]] = [("", schema)]
    for _ in range(MAX_DEPTH):
        inner: list[tuple[str, Any]] = []
        for where, part in level:
            problem = _own_problem(part)
            if problem is not None:
                return _joined(where, problem[0]), problem[1]
            if isinstance(part, dict):
                inner += ((_joined(where, name), inner_part) for name, inner_part in _inner(part))
        level = inner
        if not level:
            return None
    return "", f"is nested more than {MAX_DEPTH} schemas deep"


def _own_problem(schema: Any) -> tuple[str, str] | None:
    """As `schema_problem`, for the schema itself without the schemas in it."""
    if isinstance(schema, bool):
        return None
    if not isinstance(schema, dict):
        return "", f"must be a JSON Schema, an object; got {schema!r:.80}"
    kind = schema.get("type", "object")
    for type_name in kind if isinstance(kind, list) else [kind]:
        if type_name not in _TYPES:
            return "type", f"must be one of {', '.join(_TYPES)}; got {type_name!r:.80}"
    for names, wanted, what in (
        (_NAMED, dict, "an object"),
        ((*_SEVERAL, "enum", "required"), list, "a list"),
        (("$ref", "pattern", "description"), str, "a string"),
    ):
        for name in names:
            if name in schema and not isinstance(schema[name], wanted):
                return name, f"must be {what}; got {schema[name]!r:.80}"
    if not all(isinstance(name, str) for name in schema.get("required", ())):
        return "required", "must be a list of strings"
    return None


def _inner(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in _ONE:
        if name in schema and not isinstance(schema[name], list):  # older drafts allow lists
            yield name, schema[name]
    for name in _SEVERAL:
        for place, part in enumerate(schema.get(name, ())):
            yield f"{name}.{place}", part
    for name in _NAMED:
        for key, part in schema.get(name, {}).items():
            yield f"{name}.{key[:64]}", part


def _joined(where: str, name: str) -> str:
    return ".".join(filter(None, (where, name)))
